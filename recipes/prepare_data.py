"""From raw logs to the data that heads are trained on, in one run:

    python recipes/prepare_data.py logs/ --output-dir data/chat --target PATH_OR_ID --max-new-tokens 512 --batch-size 32

It reads the logs (in any form that `selfspec data inspect` shows), lets the target write more prompts if asked to
(`--self-prompts 5000`), leaves out near-duplicates and evaluation prompts, redacts personal data if asked to (`--redact`),
holds out a part, and has the target write every answer anew. The output directory then has `train.jsonl`, `heldout.jsonl`,
and `report.json`, which says what was left out. The same command continues a run that was interrupted, and adds what the
logs have gained; rows that have left the logs stay. `--overwrite` begins anew.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeVar

from transformers import HfArgumentParser

from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.failures import reported_failures
from selfspec.model.chat import parse_arguments
from selfspec.model.default_target import source_of
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.masking import read_template, tokenize_all
from selfspec.traffic.prepare import (
    CleanOptions,
    WritingOptions,
    check_some_left,
    count_answered,
    draw_prompts,
    prompt_writer,
    save_reports,
    unanswered,
    write_all,
)
from selfspec.traffic.progress import tracked
from selfspec.traffic.prompt_files import OutputWriter
from selfspec.traffic.regenerate import check_sampling, regenerate
from selfspec.traffic.sources import check_sources, read_conversations
from selfspec.train.settings import parse

logger = logging.getLogger("selfspec.recipes")

T = TypeVar("T")

PARTS = ("train", "heldout")
STAGES = ("drawing", "reading", "cleaning", "answering", "masking")


@dataclass(frozen=True, kw_only=True)
class PrepareArgs:
    """Where the data goes, and how many prompts to add."""

    output_dir: Path = field(metadata={"help": "directory to make, or to continue in"})
    overwrite: bool = field(default=False, metadata={"help": "begin anew, and replace what the directory has"})
    self_prompts: int = field(default=0, metadata={"help": "prompts for the target to write"})

    def __post_init__(self) -> None:
        if self.self_prompts < 0:
            raise ValueError(f"self_prompts={self.self_prompts} is not allowed: use 0 (none) or more")


@dataclass(frozen=True, kw_only=True)
class CleanArgs(CleanOptions):
    """`exclude` as argparse has it: several files after one flag, or the flag several times."""

    exclude: list[str] = field(
        default_factory=list, metadata={"help": "prompts never to train on, besides the benchmarks", "action": "extend"}
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = HfArgumentParser((PrepareArgs, TargetOptions, WritingOptions, DraftOptions, SamplingParams, CleanArgs))
    parser.add_argument("sources", nargs="+", help="data files, directories of them, Hub dataset ids")
    args, target, writing, draft, sampling, cleaning, given = parse(parser, arguments)

    # Whatever can be refused is refused before the target is loaded and before anything is written.
    check_sampling(sampling)
    check_sources(given.sources)
    settings = {
        "sources": given.sources,
        "target": source_of(target),
        "adapter": target.adapter,
        "chat_template": read_template(writing.chat_template),
        "chat_template_kwargs": parse_arguments(target.chat_template_kwargs or "{}"),
        "self_prompts": args.self_prompts,
        **asdict(cleaning),
        "sampling": asdict(sampling),
    }
    files = {name: args.output_dir / f"{name}.jsonl" for name in ("self_prompts", *PARTS)}
    settings_file = args.output_dir / "config.json"
    if not args.overwrite:
        check_settings(settings_file, settings)
    reports = {name: Report() for name in STAGES}
    redactor = cleaning.redactor()
    raw = list(read_conversations(given.sources, reports["reading"]))
    if not args.self_prompts:
        check_some_left(raw, reports["reading"])
    # The target's own prompts are read when they are reached, and they are written by then.
    everything = chain(raw, read_conversations([files["self_prompts"]], reports["reading"]))
    cleaned = cleaning.split(shown(everything, "cleaning", len(raw) + args.self_prompts), reports["cleaning"], redactor)
    model, drafter = writing.load(target, draft)

    args.output_dir.mkdir(parents=True, exist_ok=True)
    if args.overwrite:
        for file in (*files.values(), settings_file, args.output_dir / "report.json"):
            file.unlink(missing_ok=True)
    settings_file.write_text(_json(settings) + "\n", encoding="utf-8")
    writer = prompt_writer(files["self_prompts"], args.self_prompts, resume=True)
    count_answered(read_answered(files["self_prompts"]), reports["drawing"])
    own_words = SamplingParams(temperature=1.0, seed=sampling.seed or 0)
    drawn = draw_prompts(
        model,
        drafter,
        writer,
        args.self_prompts,
        reports["drawing"],
        sampling=own_words,
        batch_size=writing.batch_size,
    )
    write_all(writer, shown(drawn, "drawing prompts", args.self_prompts - len(writer.finished)))

    parts: dict[str, list[Conversation]] = {name: [] for name in PARTS}
    for part, conversation in cleaned:
        parts[part].append(conversation)
    check_some_left(parts["train"], reports["reading"], reports["cleaning"])

    for name, conversations in parts.items():
        answered = read_answered(files[name])
        count_answered(answered, reports["answering"])
        pending = unanswered(conversations, answered)
        logger.info("%s: %d to answer, %d are answered already", files[name], len(pending), len(answered))
        writer = OutputWriter(files[name], {}, resume=True, keeps_others=True)
        fresh = regenerate(
            model, pending, reports["answering"], sampling=sampling, drafter=drafter, batch_size=writing.batch_size
        )
        write_all(writer, shown(fresh, f"answering {name}", len(pending)))

    trained = read_answered(files["train"])
    samples = tokenize_all(shown(trained, "masking", len(trained)), model.tokenizer, reports["masking"])
    num_trained = sum(sum(sample.loss_mask) for sample in samples)
    num_tokens = sum(len(sample.input_ids) for sample in samples)
    save_reports(reports, args.output_dir, redactor)
    logger.info("%s: %d samples, %d tokens, %d of them to train on", args.output_dir, len(samples), num_tokens, num_trained)
    if redactor is not None:
        logger.info("redacted: %s", dict(redactor.counts) or "nothing")
    for name, report in reports.items():
        for reason, count in report.skipped.most_common():
            logger.info("%s: %d skipped, %s, such as %s", name, count, reason, report.examples[reason][0])


def shown(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """The items, while the log or a bar shows how far they are."""
    return tracked(items, description, total, logger.info)


def read_answered(file: Path) -> list[Conversation]:
    """The rows that this file has. A line that a crash has cut is none of them."""
    return list(read_conversations([file], Report())) if file.exists() else []


def check_settings(file: Path, settings: dict[str, object]) -> None:
    """Refuse a directory that was begun with other settings: one file must not mix the rows of two. Logs come and go."""
    if not file.exists():
        return
    before, now = json.loads(file.read_text(encoding="utf-8")), json.loads(_json(settings))
    if changed := ", ".join(name for name in now if name != "sources" and before.get(name) != now[name]):
        raise ValueError(f"{file.parent} was begun with another {changed}: choose another --output-dir, or pass --overwrite")


def _json(settings: dict[str, object]) -> str:
    return json.dumps(settings, ensure_ascii=False, indent=2)


if __name__ == "__main__":
    with reported_failures():
        main()
