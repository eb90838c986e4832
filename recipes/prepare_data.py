"""From raw logs to the data that heads are trained on, in one run:

    python recipes/prepare_data.py logs/ --output-dir data/chat --target PATH_OR_ID --max-new-tokens 512 --batch-size 32

It reads the logs (in any form that `selfspec data inspect` shows), lets the target write more prompts if asked to
(`--self-prompts 5000`), leaves out near-duplicates and evaluation prompts, redacts personal data if asked to (`--redact`),
holds out a part, and has the target write every answer anew. The output directory then has `train.jsonl`, `heldout.jsonl`,
and `report.json`, which says what was left out. The same command continues a run that was interrupted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.progress import track
from transformers import HfArgumentParser

from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.failures import reported_failures
from selfspec.model.default_target import source_of
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.masking import tokenize_all
from selfspec.traffic.prepare import (
    CleanOptions,
    WritingOptions,
    check_some_left,
    draw_prompts,
    prompt_writer,
    save_reports,
    write_all,
)
from selfspec.traffic.prompt_files import OutputWriter
from selfspec.traffic.regenerate import check_sampling, regenerate
from selfspec.traffic.sources import check_sources, read_conversations
from selfspec.train.settings import parse

logger = logging.getLogger("selfspec.recipes")

STAGES = ("drawing", "reading", "cleaning", "answering", "masking")


@dataclass(frozen=True, kw_only=True)
class PrepareArgs:
    """Where the data goes, and how many prompts to add."""

    output_dir: Path = field(metadata={"help": "directory to make, or to continue in"})
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
        "self_prompts": args.self_prompts,
        **asdict(cleaning),
        "sampling": asdict(sampling),
    }
    check_settings(args.output_dir / "config.json", settings)
    reports = {name: Report() for name in STAGES}
    redactor = cleaning.redactor()
    raw = list(read_conversations(given.sources, reports["reading"]))
    if not args.self_prompts:
        check_some_left(raw, reports["reading"])
    own_prompts_file = args.output_dir / "self_prompts.jsonl"
    # The target's own prompts are read when they are reached, and they are written by then.
    everything = chain(raw, read_conversations([own_prompts_file], reports["reading"]))
    cleaned = cleaning.split(everything, reports["cleaning"], redactor)
    model, drafter = writing.load(target, draft)

    args.output_dir.mkdir(parents=True, exist_ok=True)
    save_settings(args.output_dir / "config.json", settings)
    writer = prompt_writer(own_prompts_file, args.self_prompts, resume=True)
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
    write_all(writer, tracked(drawn, "drawing prompts", args.self_prompts - len(writer.finished)))

    parts: dict[str, list[Conversation]] = {"train": [], "heldout": []}
    for part, conversation in cleaned:
        parts[part].append(conversation)
    check_some_left(parts["train"], reports["reading"], reports["cleaning"])

    for name, conversations in parts.items():
        writer = OutputWriter(
            args.output_dir / f"{name}.jsonl", dict.fromkeys((c.id for c in conversations), 1), resume=True
        )
        pending = [conversation for conversation in conversations if conversation.id not in writer.finished]
        answered = regenerate(
            model, pending, reports["answering"], sampling=sampling, drafter=drafter, batch_size=writing.batch_size
        )
        write_all(writer, tracked(answered, f"answering {name}", len(pending)))

    trained = read_conversations([args.output_dir / "train.jsonl"], Report())
    samples = tokenize_all(trained, model.tokenizer, reports["masking"])
    num_trained = sum(sum(sample.loss_mask) for sample in samples)
    num_tokens = sum(len(sample.input_ids) for sample in samples)
    save_reports(reports, args.output_dir, redactor)
    logger.info("%s: %d samples, %d tokens, %d of them to train on", args.output_dir, len(samples), num_tokens, num_trained)
    if redactor is not None:
        logger.info("redacted: %s", dict(redactor.counts) or "nothing")
    for name, report in reports.items():
        for reason, count in report.skipped.most_common():
            logger.info("%s: %d skipped, %s, such as %s", name, count, reason, report.examples[reason][0])


def tracked(conversations: Iterable[Conversation], description: str, total: int) -> Iterable[Conversation]:
    """The conversations, with a bar that moves as they come where a person watches."""
    console = Console(stderr=True)
    return track(conversations, description, total, console=console, transient=True, disable=not console.is_terminal)


def check_settings(file: Path, settings: dict[str, object]) -> None:
    """Refuse a directory that was begun with other settings: one file must not mix the rows of two."""
    if file.exists() and (before := json.loads(file.read_text(encoding="utf-8"))) != (now := json.loads(_json(settings))):
        changed = ", ".join(name for name in now if before.get(name) != now[name])
        raise ValueError(f"{file.parent} was begun with another {changed}: choose another --output-dir, or remove it")


def save_settings(file: Path, settings: dict[str, object]) -> None:
    """Record what the directory was begun with."""
    file.write_text(_json(settings) + "\n", encoding="utf-8")


def _json(settings: dict[str, object]) -> str:
    return json.dumps(settings, ensure_ascii=False, indent=2)


if __name__ == "__main__":
    with reported_failures():
        main()
