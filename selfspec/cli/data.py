"""`selfspec data`: the conversations that heads are trained on, from raw logs to the target's own answers."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.options import DraftOptions, TargetOptions, command, quiet_libraries
from selfspec.config import SamplingParams
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.prompt_files import OutputWriter
from selfspec.traffic.sources import read_conversations

if TYPE_CHECKING:
    from selfspec.drafters import Drafter
    from selfspec.model.target import Target
    from selfspec.traffic.redact import Redactor

app = typer.Typer(no_args_is_help=True, help="Prepare conversations for the training of heads.")

# What `selfspec bench` measures on is never trained on.
BENCHMARK_FILES = tuple(Path(__file__).parents[1] / "data" / f"{name}.jsonl" for name in ("spec_bench", "humaneval"))

SourcesArgument = Annotated[
    list[str], typer.Argument(help=".jsonl, .json, .txt, .parquet or .arrow files, directories of them, Hub dataset ids")
]
OutputOption = Annotated[Path, typer.Option("--output", help="JSON lines to write, each as soon as it is finished")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="replace the output if it exists")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="keep the output, and do what is not in it")]


@dataclass(frozen=True, kw_only=True)
class CleanOptions:
    """What is left out, redacted and held out."""

    exclude: Sequence[str] = field(
        default=(), metadata={"help": "prompts never to train on, beside selfspec's benchmarks; repeatable"}
    )
    held_out: float = field(default=0.02, metadata={"help": "share to hold out, 0 to 1"})
    similarity: float = field(
        default=0.8, metadata={"help": "least Jaccard similarity of near-duplicates, over runs of five words"}
    )
    redact: bool = field(default=False, metadata={"help": "put placeholders in the place of personal data"})
    redact_model: str | None = field(
        default=None, metadata={"help": "spaCy model that finds names of people and places to redact, too"}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.held_out <= 1:
            raise ValueError(f"held_out={self.held_out} is not allowed: use a share from 0 to 1")

    def redactor(self) -> "Redactor | None":
        if not self.redact and self.redact_model is None:
            return None
        try:
            from selfspec.traffic.redact import Redactor
        except ImportError as error:
            raise ValueError("redacting personal data needs Presidio: pip install 'selfspec[redact]'") from error
        return Redactor(self.redact_model)

    def split(
        self, conversations: Iterable[Conversation], report: Report, redactor: "Redactor | None"
    ) -> Iterator[tuple[str, Conversation]]:
        """Every conversation to keep with the part it belongs to, `train` or `heldout`."""
        from selfspec.traffic.clean import clean, is_held_out

        excluded = read_excluded(self.exclude)
        kept = clean(conversations, report, excluded=excluded, similarity=self.similarity, redact=redactor)
        return (("heldout" if is_held_out(c, self.held_out) else "train", c) for c in kept)


@dataclass(frozen=True, kw_only=True)
class WritingOptions:
    """How the target writes many texts."""

    drafter: str = field(
        default="ngram", metadata={"help": "what speeds the target up, as in generate; its words stay the same"}
    )
    batch_size: int = field(default=16, metadata={"help": "conversations decoded together"})
    chat_template: Path | None = field(
        default=None, metadata={"help": "file to use in place of the target's own chat template"}
    )

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} is not allowed: use at least 1")

    def load(self, target: TargetOptions, draft: DraftOptions) -> "tuple[Target, Drafter | None]":
        from selfspec.cli import display
        from selfspec.traffic.masking import use_chat_template

        quiet_libraries()
        with display.stage(f"loading {target.source}"):
            model = target.load()
            use_chat_template(model.tokenizer, self.chat_template)
            return model, draft.load(self.drafter, model)


@command(app)
def inspect(*, sources: SourcesArgument) -> None:
    """Show what is in data files: forms, counts, and the rows that cannot be used."""
    report = Report()
    roles: Counter[str] = Counter()
    for conversation in read_conversations(sources, report):
        roles.update(message["role"] for message in conversation.messages)

    from selfspec.cli import display

    forms = ", ".join(f"{count} as {form}" for form, count in report.forms.most_common())
    typer.echo(f"{report.num_kept} conversations" + (f" ({forms})" if forms else ""))
    if roles:
        typer.echo("turns: " + ", ".join(f"{count} {role}" for role, count in roles.most_common()))
    display.show_skipped(report)


@command(app, cleaning=CleanOptions)
def clean(
    *,
    sources: SourcesArgument,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="directory for train.jsonl, heldout.jsonl, report.json")],
    cleaning: CleanOptions,
    overwrite: OverwriteOption = False,
) -> None:
    """Leave out near-duplicates and evaluation prompts, and split into a training and a held-out part."""
    output_dir.mkdir(parents=True, exist_ok=True)
    writers = {name: OutputWriter(output_dir / f"{name}.jsonl", {}, overwrite=overwrite) for name in ("train", "heldout")}
    reports, num_written = {"reading": Report(), "cleaning": Report()}, Counter[str]()
    redactor = cleaning.redactor()
    kept = cleaning.split(read_conversations(sources, reports["reading"]), reports["cleaning"], redactor)
    with writers["train"], writers["heldout"]:
        for part, conversation in kept:
            writers[part].write([conversation.record()])
            num_written[part] += 1
    typer.echo(f"{output_dir}: {num_written['train']} conversations to train on, {num_written['heldout']} held out")
    show_and_save(reports, output_dir, redactor)


@command(app, target=TargetOptions, draft=DraftOptions, sampling=SamplingParams, writing=WritingOptions)
def regenerate(
    *,
    sources: SourcesArgument,
    output: OutputOption,
    target: TargetOptions,
    writing: WritingOptions,
    draft: DraftOptions,
    sampling: SamplingParams,
    last_turn_only: Annotated[
        bool, typer.Option("--last-turn-only", help="keep the earlier answers; they will not be trained on")
    ] = False,
    overwrite: OverwriteOption = False,
    resume: ResumeOption = False,
) -> None:
    """Have the target write every answer anew, turn by turn."""
    from selfspec.cli import display
    from selfspec.traffic.regenerate import check_sampling
    from selfspec.traffic.regenerate import regenerate as regenerate_conversations

    check_sampling(sampling)
    reading, report = Report(), Report()
    conversations = list(read_conversations(sources, reading))
    writer = OutputWriter(output, dict.fromkeys((c.id for c in conversations), 1), overwrite=overwrite, resume=resume)
    pending = [conversation for conversation in conversations if conversation.id not in writer.finished]
    if pending:
        model, drafter = writing.load(target, draft)
        answered = regenerate_conversations(
            model,
            pending,
            report,
            sampling=sampling,
            drafter=drafter,
            batch_size=writing.batch_size,
            last_turn_only=last_turn_only,
        )
        write(writer, answered, "answering", len(pending))
    typer.echo(f"{output}: {report.num_kept} conversations answered, {len(writer.finished)} were there before")
    display.show_skipped(reading)
    display.show_skipped(report)


@command(app, target=TargetOptions, draft=DraftOptions, sampling=SamplingParams, writing=WritingOptions)
def prompts(
    *,
    number: Annotated[int, typer.Option("--number", help="prompts to draw; unusable ones are left out", min=1)],
    output: OutputOption,
    target: TargetOptions,
    writing: WritingOptions,
    draft: DraftOptions,
    sampling: SamplingParams,
    overwrite: OverwriteOption = False,
    resume: ResumeOption = False,
) -> None:
    """Have the target itself write prompts, for more data than there are logs; needs a --temperature above 0."""
    from selfspec.cli import display

    writer, report = prompt_writer(output, number, overwrite=overwrite, resume=resume), Report()
    model, drafter = writing.load(target, draft)
    draw_prompts(model, drafter, writer, number, report, sampling=sampling, batch_size=writing.batch_size)
    typer.echo(f"{output}: {report.num_kept} prompts written, {len(writer.finished)} were there before")
    display.show_skipped(report)


def prompt_writer(output: Path, number: int, *, overwrite: bool = False, resume: bool = False) -> OutputWriter:
    return OutputWriter(output, {f"self-{i}": 1 for i in range(number)}, overwrite=overwrite, resume=resume)


def draw_prompts(
    target: "Target",
    drafter: "Drafter | None",
    writer: OutputWriter,
    number: int,
    report: Report,
    *,
    sampling: SamplingParams,
    batch_size: int,
) -> None:
    """Those of the target's own prompts that the file does not have yet, unlike those that it has."""
    from selfspec.traffic.self_prompts import self_prompts

    known = [turn for c in read_conversations([writer.path], Report()) for turn in c.user_turns] if writer.finished else []
    numbers = [i for i in range(number) if f"self-{i}" not in writer.finished]
    drawn = self_prompts(target, numbers, report, sampling=sampling, drafter=drafter, batch_size=batch_size, known=known)
    write(writer, drawn if numbers else (), "drawing prompts", len(numbers))


def read_excluded(sources: Iterable[str | Path]) -> list[Conversation]:
    """The prompts in these sources and in selfspec's own benchmarks; every one must be readable."""
    report = Report()
    excluded = list(read_conversations([*BENCHMARK_FILES, *sources], report))
    if report.skipped:
        reason, [example, *_] = next(iter(report.examples.items()))
        raise ValueError(f"a prompt to exclude cannot be read ({reason}): mend or remove {example}")
    return excluded


def write(writer: OutputWriter, conversations: Iterable[Conversation], description: str, total: int) -> None:
    """Each conversation to the file as soon as it is there."""
    from selfspec.cli import display

    with writer, display.progress(description, total) as advance:
        for conversation in conversations:
            writer.write([conversation.record()])
            advance()


def show_and_save(reports: Mapping[str, Report], directory: Path, redactor: "Redactor | None") -> None:
    """What was left out and what was redacted, on the terminal and in report.json."""
    from selfspec.cli import display

    record: dict[str, object] = {}
    if redactor is not None:
        record["redacted"] = redactor.counts
        counts = ", ".join(f"{count} {entity}" for entity, count in redactor.counts.most_common())
        typer.echo(f"redacted: {counts or 'nothing'}")
        for report in reports.values():
            # What follows a place is an excerpt of the text as it was.
            report.examples = {why: [place.split(": ")[0] for place in places] for why, places in report.examples.items()}
    for name, report in reports.items():
        record[name] = report.record()
        display.show_skipped(report)
    text = json.dumps(record, ensure_ascii=False, indent=2)
    (directory / "report.json").write_text(text + "\n", encoding="utf-8")
