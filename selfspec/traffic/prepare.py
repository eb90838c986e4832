"""From raw conversations to training data: what is kept, the target's own prompts and answers, a report.

torch takes seconds to import, so what loads or runs a target is imported where it is needed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.model.default_target import source_of
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.prompt_files import OutputWriter
from selfspec.traffic.sources import read_conversations

if TYPE_CHECKING:
    from selfspec.loop.drafter import Drafter
    from selfspec.model.target import Target
    from selfspec.traffic.redact import Redactor

# The prompts that `selfspec bench` measures on are never trained on.
BENCHMARK_FILES = tuple(Path(__file__).parents[1] / "data" / f"{name}.jsonl" for name in ("spec_bench", "humaneval"))


@dataclass(frozen=True, kw_only=True)
class CleanOptions:
    """Which conversations are left out, redacted and held out."""

    exclude: Sequence[str] = field(
        default=(), metadata={"help": "prompts never to train on, besides selfspec's benchmarks; repeatable"}
    )
    held_out: float = field(default=0.02, metadata={"help": "share to hold out, 0 to 1"})
    similarity: float = field(
        default=0.8, metadata={"help": "least Jaccard similarity of near-duplicates, over runs of five words"}
    )
    redact: bool = field(default=False, metadata={"help": "replace personal data by placeholders"})
    redact_model: str | None = field(
        default=None, metadata={"help": "spaCy model that finds names of people and places, to redact them too"}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.held_out <= 1:
            raise ValueError(f"held_out={self.held_out} is not allowed: use a share from 0 to 1")
        if not 0 < self.similarity <= 1:
            raise ValueError(f"similarity={self.similarity} is not allowed: use a number above 0, at most 1")

    def redactor(self) -> Redactor | None:
        """What redacts a conversation; None where nothing is to be redacted."""
        if not self.redact and self.redact_model is None:
            return None
        try:
            from selfspec.traffic.redact import Redactor
        except ImportError as error:
            raise ValueError("redacting personal data needs Presidio: pip install 'selfspec[redact]'") from error
        return Redactor(self.redact_model)

    def split(
        self, conversations: Iterable[Conversation], report: Report, redactor: Redactor | None
    ) -> Iterator[tuple[str, Conversation]]:
        """Each conversation to keep and the part it belongs to, `train` or `heldout`."""
        from selfspec.traffic.clean import clean, is_held_out

        excluded = read_excluded(self.exclude)
        kept = clean(conversations, report, excluded=excluded, similarity=self.similarity, redact=redactor)
        return (("heldout" if is_held_out(c, self.held_out) else "train", c) for c in kept)


@dataclass(frozen=True, kw_only=True)
class WritingOptions:
    """How the target writes many texts."""

    drafter: str = field(
        default="auto", metadata={"help": "what speeds the target up, as in generate; the text stays the same"}
    )
    batch_size: int = field(default=16, metadata={"help": "conversations decoded together"})
    chat_template: Path | None = field(
        default=None, metadata={"help": "file with a chat template to use instead of the target's own"}
    )

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} is not allowed: use at least 1")

    def load(self, target: TargetOptions, draft: DraftOptions) -> tuple[Target, Drafter | None]:
        """The target, with the chat template asked for, and the drafter."""
        from selfspec.drafters.options import load_drafter_of, load_target
        from selfspec.model.chat import parse_arguments
        from selfspec.traffic.masking import check_chat_target, read_template, use_chat_template

        template, arguments = read_template(self.chat_template), parse_arguments(target.chat_template_kwargs or "{}")
        # Reading the weights may take minutes.
        check_chat_target(source_of(target), template)
        model = load_target(replace(target, chat_template_kwargs=None))
        use_chat_template(model.tokenizer, template)
        # The template that is used must read them, not the one that it replaces.
        model.set_chat_template_kwargs(arguments)
        return model, load_drafter_of(draft, self.drafter, model)


def read_excluded(sources: Iterable[str | Path]) -> list[Conversation]:
    """The prompts in these sources and in selfspec's own benchmarks.

    Raises:
        ValueError: one of them cannot be read.
    """
    report = Report()
    excluded = list(read_conversations([*BENCHMARK_FILES, *sources], report))
    if report.skipped:
        reason, [example, *_] = next(iter(report.examples.items()))
        raise ValueError(f"a prompt to exclude cannot be read ({reason}): mend or remove {example}")
    return excluded


def check_some_left(conversations: Sequence[Conversation], *reports: Report) -> None:
    """Raise a ValueError with what the reports skipped if no conversation is left."""
    if not conversations:
        skipped = [f"{count} {reason}" for report in reports for reason, count in report.skipped.most_common()]
        raise ValueError(
            f"no conversation is left to train on ({', '.join(skipped) or 'none was found'}): give other files, or look at "
            "them with `selfspec data inspect`"
        )


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse settings that end an answer where the target would not, or that give more than one answer."""
    if sampling != sampling.with_(n=1, stop=(), stop_token_ids=(), ignore_eos=False, logprobs=False):
        raise ValueError("training takes one whole answer a prompt: leave out n, stop, stop_token_ids, ignore_eos, logprobs")


def check_drawing(sampling: SamplingParams) -> None:
    """Refuse settings that would not draw different, whole prompts."""
    check_sampling(sampling)
    if sampling.is_greedy:
        raise ValueError("greedy decoding would write the same prompt every time: pass a --temperature above 0")


def check_some_written(report: Report, what: str, remedy: str) -> None:
    """Raise a ValueError with what was skipped if nothing could be used of what the target wrote."""
    if not report.num_kept:
        skipped = ", ".join(f"{count} {reason}" for reason, count in report.skipped.most_common())
        raise ValueError(f"no {what} can be used ({skipped}): {remedy}")


def prompt_writer(output: Path, number: int, *, overwrite: bool = False, resume: bool = False) -> OutputWriter:
    """The writer of a file with `number` prompts that the target writes."""
    return OutputWriter(output, {f"self-{i}": 1 for i in range(number)}, overwrite=overwrite, resume=resume)


def draw_prompts(
    target: Target,
    drafter: Drafter | None,
    writer: OutputWriter,
    number: int,
    report: Report,
    *,
    sampling: SamplingParams,
    batch_size: int,
) -> Iterator[Conversation]:
    """The prompts of `number` that the writer's file lacks, written by the target and unlike those in the file."""
    from selfspec.traffic.self_prompts import self_prompts

    numbers = [i for i in range(number) if f"self-{i}" not in writer.finished]
    if not numbers:
        return iter(())
    known = [turn for c in read_conversations([writer.path], Report()) for turn in c.user_turns] if writer.finished else []
    return self_prompts(target, numbers, report, sampling=sampling, drafter=drafter, batch_size=batch_size, known=known)


def unanswered(conversations: Iterable[Conversation], answered: Sequence[Conversation]) -> list[Conversation]:
    """The conversations that are not among the answered ones, by what their users say.

    Rows without an id are named by their line, and lines move as a log rotates. So a conversation whose id belongs to
    another one among the answered gets an id of its own.
    """
    whole = {tuple(c.user_turns) for c in answered if c.left_out is None}
    # Of these the last turns may be missing.
    begun = {tuple(c.user_turns) for c in answered if c.left_out is not None}
    ids = {c.id for c in answered}
    pending = []
    for conversation in conversations:
        turns = tuple(conversation.user_turns)
        if turns in whole or any(turns[:length] in begun for length in range(1, len(turns) + 1)):
            continue
        if conversation.id in ids:
            digest = hashlib.blake2b("\n".join(turns).encode(), digest_size=4).hexdigest()
            conversation = replace(conversation, id=f"{conversation.id}#{digest}")
        pending.append(conversation)
    return pending


def count_answered(answered: Iterable[Conversation], report: Report) -> None:
    """Count what earlier runs have answered, so that a report's totals are those of the file."""
    for conversation in answered:
        report.num_kept += 1
        if conversation.left_out is not None:
            report.skip(conversation.left_out, conversation.id)


def write_all(writer: OutputWriter, conversations: Iterable[Conversation]) -> None:
    """Write each conversation as soon as it is there."""
    with writer:
        for conversation in conversations:
            writer.write([conversation.record()])


def save_reports(reports: Mapping[str, Report], directory: Path, redactor: Redactor | None) -> None:
    """Write report.json: what was left out and, with a redactor, what was redacted.

    With a redactor the reports lose their excerpts, because those quote the text before redaction.
    """
    record: dict[str, object] = {}
    if redactor is not None:
        record["redacted"] = redactor.counts
        for report in reports.values():
            report.examples = {why: [place.split(": ")[0] for place in places] for why, places in report.examples.items()}
    record |= {name: report.record() for name, report in reports.items()}
    text = json.dumps(record, ensure_ascii=False, indent=2)
    (directory / "report.json").write_text(text + "\n", encoding="utf-8")
