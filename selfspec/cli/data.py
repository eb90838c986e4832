"""`selfspec data`: from raw logs to the conversations that heads are trained on, with the target's own answers."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.help import Group
from selfspec.cli.options import command, quiet_libraries
from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.model.default_target import source_of
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.preparation import Preparation, Prepared, PrepareOptions
from selfspec.traffic.prepare import (
    CleanOptions,
    WritingOptions,
    check_drawing,
    check_sampling,
    check_some_left,
    check_some_written,
    draw_prompts,
    prompt_writer,
    save_reports,
    write_all,
)
from selfspec.traffic.progress import tracked
from selfspec.traffic.prompt_files import OutputWriter
from selfspec.traffic.sources import check_sources, read_conversations

if TYPE_CHECKING:
    from selfspec.drafters import Drafter
    from selfspec.model.target import Target
    from selfspec.traffic.redact import Redactor

app = typer.Typer(cls=Group, no_args_is_help=True, help="Prepare conversations to train heads on.")

SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        help=".jsonl, .json or .txt files, also with .gz, .csv, .parquet or .arrow files, directories of them, "
        "ids of Hub datasets"
    ),
]
OutputOption = Annotated[Path, typer.Option("--output", help="JSON lines to write, each as soon as it is finished")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="replace the output if it exists")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="keep the output, and add what it lacks")]


def load(writing: WritingOptions, target: TargetOptions, draft: DraftOptions) -> "tuple[Target, Drafter | None]":
    """`WritingOptions.load`, with a spinner."""
    from selfspec.cli import display

    quiet_libraries()
    with display.stage(f"loading {source_of(target)}"):
        return writing.load(target, draft)


def shown(conversations: Iterable[Conversation], description: str, total: int, at_once: int) -> Iterator[Conversation]:
    """The conversations, while stderr shows how far they are."""
    return tracked(conversations, description, total, partial(typer.echo, err=True), at_once=at_once)


@command(app)
def inspect(*, sources: SourcesArgument) -> None:
    """Show what data files hold: forms, counts, and the rows that cannot be used.

    Example: selfspec data inspect logs/

    Example: selfspec data inspect chats.jsonl
    """
    check_sources(sources)
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


@command(
    app,
    target=TargetOptions,
    draft=DraftOptions,
    sampling=SamplingParams,
    writing=WritingOptions,
    cleaning=CleanOptions,
    options=PrepareOptions,
)
def prepare(
    *,
    sources: SourcesArgument,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="directory to make, or to continue in")],
    target: TargetOptions,
    writing: WritingOptions,
    draft: DraftOptions,
    sampling: SamplingParams,
    cleaning: CleanOptions,
    options: PrepareOptions,
) -> None:
    """Make training data of raw logs: clean and split them, and have the target write every answer. Run again, it goes on.

    Example: selfspec data prepare logs/ --output-dir data --max-new-tokens 512 --batch-size 32

    Example: selfspec data prepare logs/ --output-dir data --keep-answers
    """
    preparation = Preparation(
        sources=sources,
        output_dir=output_dir,
        target=target,
        writing=writing,
        sampling=sampling,
        cleaning=cleaning,
        options=options,
    )
    prepared = preparation.run(partial(load, writing, target, draft), partial(typer.echo, err=True))
    typer.echo(prepared)
    show_prepared(prepared)


@command(app, cleaning=CleanOptions)
def clean(
    *,
    sources: SourcesArgument,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="directory for train.jsonl, heldout.jsonl, report.json")],
    cleaning: CleanOptions,
    overwrite: OverwriteOption = False,
) -> None:
    """Leave out near-duplicates and evaluation prompts, and split the rest into a training and a held-out part.

    Example: selfspec data clean logs/ --output-dir data --redact

    Example: selfspec data clean logs/ --output-dir data --held-out 0.1
    """
    check_sources(sources)
    reports, num_written = {"reading": Report(), "cleaning": Report()}, Counter[str]()
    redactor = cleaning.redactor()
    kept = cleaning.split(read_conversations(sources, reports["reading"]), reports["cleaning"], redactor)
    # Nothing is written, and nothing overwritten, before there is something to write.
    first = list(islice(kept, 1))
    check_some_left([conversation for _, conversation in first], *reports.values())
    output_dir.mkdir(parents=True, exist_ok=True)
    writers = {name: OutputWriter(output_dir / f"{name}.jsonl", {}, overwrite=overwrite) for name in ("train", "heldout")}
    with writers["train"], writers["heldout"]:
        for part, conversation in chain(first, kept):
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
        bool, typer.Option("--last-turn-only", help="keep earlier answers, which are then not trained on")
    ] = False,
    overwrite: OverwriteOption = False,
    resume: ResumeOption = False,
) -> None:
    """Have the target write every answer anew, turn by turn.

    Example: selfspec data regenerate data/train.jsonl --output answered.jsonl --resume

    Example: selfspec data regenerate data/train.jsonl --output answered.jsonl --drafter eagle
    """
    check_sampling(sampling)
    check_sources(sources)
    reading, report = Report(), Report()
    conversations = list(read_conversations(sources, reading))
    check_some_left(conversations, reading)
    writer = OutputWriter(output, dict.fromkeys((c.id for c in conversations), 1), overwrite=overwrite, resume=resume)
    pending = [conversation for conversation in conversations if conversation.id not in writer.finished]
    if not pending:
        typer.echo(f"{output}: every conversation is answered already")
        return

    from selfspec.cli import display
    from selfspec.traffic.expectation import expected
    from selfspec.traffic.regenerate import regenerate as regenerate_conversations

    model, drafter = load(writing, target, draft)
    typer.echo(expected(model, drafter, pending, sampling, writing.batch_size, output.parent), err=True)
    answered = regenerate_conversations(
        model,
        pending,
        report,
        sampling=sampling,
        drafter=drafter,
        batch_size=writing.batch_size,
        last_turn_only=last_turn_only,
    )
    write_all(writer, shown(answered, "answering", len(pending), writing.batch_size))
    typer.echo(f"{output}: {report.num_kept} conversations answered, {len(writer.finished)} were there before")
    display.show_skipped(reading)
    display.show_skipped(report)
    check_some_written(report, "answer", "shorten the conversations, or look at the first reason above")


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
    """Have the target write prompts too, where logs are too few; needs a --temperature above 0.

    Example: selfspec data prompts --number 1000 --output prompts.jsonl --temperature 1

    Example: selfspec data prompts --number 320 --output prompts.jsonl --temperature 1 --max-new-tokens 48
    """
    check_drawing(sampling)
    writer, report = prompt_writer(output, number, overwrite=overwrite, resume=resume), Report()
    if len(writer.finished) == number:
        typer.echo(f"{output}: every prompt is written already")
        return

    from selfspec.cli import display

    model, drafter = load(writing, target, draft)
    drawn = draw_prompts(model, drafter, writer, number, report, sampling=sampling, batch_size=writing.batch_size)
    write_all(writer, shown(drawn, "drawing prompts", number - len(writer.finished), writing.batch_size))
    typer.echo(f"{output}: {report.num_kept} prompts written, {len(writer.finished)} were there before")
    display.show_skipped(report)
    if not writer.finished:
        check_some_written(report, "prompt", "raise --max-new-tokens, or draw with another --seed")


def show_prepared(prepared: Prepared) -> None:
    """What was left out of prepared data, and what was redacted."""
    from selfspec.cli import display

    if prepared.redacted is not None:
        typer.echo(prepared.redacted)
    for report in prepared.reports.values():
        display.show_skipped(report)


def show_and_save(reports: Mapping[str, Report], directory: Path, redactor: "Redactor | None") -> None:
    """What was left out and what was redacted, in report.json and on the terminal."""
    from selfspec.cli import display

    save_reports(reports, directory, redactor)
    if redactor is not None:
        counts = ", ".join(f"{count} {entity}" for entity, count in redactor.counts.most_common())
        typer.echo(f"redacted: {counts or 'nothing'}")
    for report in reports.values():
        display.show_skipped(report)
