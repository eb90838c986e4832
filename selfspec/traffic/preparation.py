"""From raw logs to the data that heads are trained on, in one run, which may be interrupted and continued.

The steps are those of `selfspec.traffic.prepare`. The folder then has `train.jsonl`, `heldout.jsonl`, and `report.json`,
which says what was left out. The same run again answers what the logs have gained; rows that have left the logs stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec.config import SamplingParams, TargetOptions
from selfspec.model.default_target import source_of
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.prepare import (
    CleanOptions,
    WritingOptions,
    check_sampling,
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
from selfspec.traffic.sources import check_sources, read_conversations

if TYPE_CHECKING:
    from selfspec.loop.drafter import Drafter
    from selfspec.model.target import Target
    from selfspec.traffic.redact import Redactor

PARTS = ("train", "heldout")
STAGES = ("drawing", "reading", "cleaning", "answering", "masking")
CONFIG_NAME = "config.json"


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What to begin with, and how many prompts to add."""

    overwrite: bool = field(default=False, metadata={"help": "begin anew, and replace what the directory has"})
    self_prompts: int = field(default=0, metadata={"help": "prompts for the target to write"})
    keep_answers: bool = field(
        default=False,
        metadata={"help": "train on the answers in the logs; right only if this very target wrote them, as its server logs"},
    )

    def __post_init__(self) -> None:
        if self.self_prompts < 0:
            raise ValueError(f"self_prompts={self.self_prompts} is not allowed: use 0 (none) or more")
        if self.self_prompts and self.keep_answers:
            raise ValueError(
                "prompts that the target writes have no answers to keep: leave out self_prompts or keep_answers"
            )


@dataclass(frozen=True)
class Prepared:
    """What a folder of data holds, and what of the logs it does not.

    Attributes:
        num_trained: tokens of answers, which are trained on.
        longest: tokens of the longest sample.
    """

    directory: Path
    num_samples: int
    num_tokens: int
    num_trained: int
    longest: int
    reports: dict[str, Report]
    redactor: Redactor | None

    def __str__(self) -> str:
        return (
            f"{self.directory}: {self.num_samples} samples, {self.num_tokens} tokens, {self.num_trained} of them to train on"
        )

    @property
    def redacted(self) -> str | None:
        """What was redacted; None if nothing was to be."""
        if self.redactor is None:
            return None
        counts = ", ".join(f"{count} {entity}" for entity, count in self.redactor.counts.most_common())
        return f"redacted: {counts or 'nothing'}"


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Where conversations come from, where they go, and what happens to them on the way."""

    sources: Sequence[str]
    output_dir: Path
    target: TargetOptions
    writing: WritingOptions
    sampling: SamplingParams
    cleaning: CleanOptions
    options: PrepareOptions

    def run(self, load: Callable[[], tuple[Target, Drafter | None]], say: Callable[[str], None]) -> Prepared:
        """Make the data, or what it still lacks.

        Whatever can be refused is refused before the target is loaded and before anything is written.

        Args:
            load: gives the target and its drafter, when they are needed.
            say: takes a line for people.

        Raises:
            ValueError: a setting or a source cannot be used, no conversation is left, or the folder was begun otherwise.
        """
        options, cleaning, output_dir = self.options, self.cleaning, self.output_dir
        check_sampling(self.sampling)
        check_sources(self.sources)
        settings = self.settings()
        files = {name: output_dir / f"{name}.jsonl" for name in ("self_prompts", *PARTS)}
        if not options.overwrite:
            check_settings(output_dir / CONFIG_NAME, settings)
        reports = {name: Report() for name in STAGES}
        redactor = cleaning.redactor()
        raw = list(read_conversations(self.sources, reports["reading"]))
        if not options.self_prompts:
            check_some_left(raw, reports["reading"])
        # The target's own prompts are read when they are reached, and they are written by then.
        own = read_conversations([files["self_prompts"]] if options.self_prompts else [], reports["reading"])
        shown = tracked(chain(raw, own), "cleaning", len(raw) + options.self_prompts, say)
        cleaned = cleaning.split(shown, reports["cleaning"], redactor)
        target, drafter = load()

        output_dir.mkdir(parents=True, exist_ok=True)
        if options.overwrite:
            for file in (*files.values(), output_dir / CONFIG_NAME, output_dir / "report.json"):
                file.unlink(missing_ok=True)
        (output_dir / CONFIG_NAME).write_text(_json(settings) + "\n", encoding="utf-8")
        if options.self_prompts:
            self._draw(files["self_prompts"], target, drafter, reports["drawing"], say)

        parts: dict[str, list[Conversation]] = {name: [] for name in PARTS}
        for part, conversation in cleaned:
            parts[part].append(conversation)
        check_some_left(parts["train"], reports["reading"], reports["cleaning"])
        self._answer(parts, files, target, drafter, reports["answering"], say)

        from selfspec.traffic.masking import tokenize_all

        trained = read_answered(files["train"])
        samples = tokenize_all(tracked(trained, "masking", len(trained), say), target.tokenizer, reports["masking"])
        save_reports(reports, output_dir, redactor)
        num_tokens = sum(len(sample.input_ids) for sample in samples)
        num_trained = sum(sum(sample.loss_mask) for sample in samples)
        longest = max(len(sample.input_ids) for sample in samples)
        return Prepared(output_dir, len(samples), num_tokens, num_trained, longest, reports, redactor)

    def settings(self) -> dict[str, object]:
        """What must be the same for a folder to be continued. Logs alone come and go."""
        from selfspec.model.chat import parse_arguments
        from selfspec.traffic.masking import read_template

        return {
            "sources": list(self.sources),
            "target": source_of(self.target),
            "adapter": self.target.adapter,
            "chat_template": read_template(self.writing.chat_template),
            "chat_template_kwargs": parse_arguments(self.target.chat_template_kwargs or "{}"),
            "self_prompts": self.options.self_prompts,
            "keep_answers": self.options.keep_answers,
            **asdict(self.cleaning),
            "sampling": asdict(self.sampling),
        }

    def _draw(self, file: Path, target: Target, drafter: Drafter | None, report: Report, say: Callable[[str], None]) -> None:
        """Have the target write prompts of its own, at its own temperature."""
        number = self.options.self_prompts
        writer = prompt_writer(file, number, resume=True)
        count_answered(read_answered(file), report)
        own_words = SamplingParams(temperature=1.0, seed=self.sampling.seed or 0)
        batch_size = self.writing.batch_size
        drawn = draw_prompts(target, drafter, writer, number, report, sampling=own_words, batch_size=batch_size)
        write_all(writer, tracked(drawn, "drawing prompts", number - len(writer.finished), say, at_once=batch_size))

    def _answer(
        self,
        parts: dict[str, list[Conversation]],
        files: dict[str, Path],
        target: Target,
        drafter: Drafter | None,
        report: Report,
        say: Callable[[str], None],
    ) -> None:
        """Write the conversations of each part to its file: with the target's answers, or with those that they have."""
        from selfspec.traffic.expectation import expected
        from selfspec.traffic.regenerate import regenerate

        pending = {}
        for name, conversations in parts.items():
            answered = read_answered(files[name])
            count_answered(answered, report)
            pending[name] = unanswered(conversations, answered)
            todo = "keep" if self.options.keep_answers else "answer"
            say(f"{files[name]}: {len(pending[name])} to {todo}, {len(answered)} are there already")
        batch_size = self.writing.batch_size
        waiting = [conversation for conversations in pending.values() for conversation in conversations]
        if waiting and not self.options.keep_answers:
            say(expected(target, drafter, waiting, self.sampling, batch_size, self.output_dir))
        for name, conversations in pending.items():
            writer = OutputWriter(files[name], {}, resume=True, keeps_others=True)
            fresh: Iterable[Conversation] = conversations
            if self.options.keep_answers:
                count_answered(conversations, report)
            else:
                fresh = regenerate(
                    target, conversations, report, sampling=self.sampling, drafter=drafter, batch_size=batch_size
                )
            write_all(writer, tracked(fresh, f"answering {name}", len(conversations), say, at_once=batch_size))


def read_answered(file: Path) -> list[Conversation]:
    """The rows that this file has. A line that a crash has cut is none of them."""
    return list(read_conversations([file], Report())) if file.exists() else []


def check_settings(file: Path, settings: dict[str, object]) -> None:
    """Refuse a directory that was begun with other settings: one file must not mix the rows of two. Logs come and go."""
    if not file.exists():
        return
    # Folders from before there was a choice have the target's own answers.
    before = {"keep_answers": False} | json.loads(file.read_text(encoding="utf-8"))
    now = json.loads(_json(settings))
    if changed := ", ".join(name for name in now if name != "sources" and before.get(name) != now[name]):
        raise ValueError(f"{file.parent} was begun with another {changed}: choose another --output-dir, or pass --overwrite")


def _json(settings: dict[str, object]) -> str:
    return json.dumps(settings, ensure_ascii=False, indent=2)
