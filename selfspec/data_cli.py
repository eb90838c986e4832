"""`selfspec data`: the conversations that heads are trained on, from raw logs to the target's own answers."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.config import SamplingParams
from selfspec.options import DraftOptions, TargetOptions, command, quiet_libraries
from selfspec.prompts import OutputWriter
from selfspec.train.conversations import Conversation, Report
from selfspec.train.sources import read_conversations

if TYPE_CHECKING:
    from selfspec.target import Target

app = typer.Typer(no_args_is_help=True, help="Prepare conversations for the training of heads.")

# What `selfspec bench` measures on is never trained on.
BENCHMARK_FILES = tuple(Path(__file__).parent / "data" / f"{name}.jsonl" for name in ("spec_bench", "humaneval"))

SourcesArgument = Annotated[
    list[str], typer.Argument(help=".jsonl, .json, .txt, .parquet or .arrow files, directories of them, Hub dataset ids")
]
OutputOption = Annotated[Path, typer.Option("--output", help="JSON lines to write, each as soon as it is finished")]
DrafterOption = Annotated[str, typer.Option("--drafter", help="what proposes tokens: none, ngram, ... as in generate")]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", help="conversations decoded together", min=1)]
TemplateOption = Annotated[
    Path | None, typer.Option("--chat-template", help="file to use in place of the target's own chat template")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="replace the output if it exists")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="keep the output, and do what is not in it")]


@command(app)
def inspect(*, sources: SourcesArgument) -> None:
    """Show what is in data files: forms, counts, and the rows that cannot be used."""
    report = Report()
    roles: Counter[str] = Counter()
    for conversation in read_conversations(sources, report):
        roles.update(message["role"] for message in conversation.messages)

    from selfspec import display

    forms = ", ".join(f"{count} as {form}" for form, count in report.forms.most_common())
    typer.echo(f"{report.num_kept} conversations" + (f" ({forms})" if forms else ""))
    if roles:
        typer.echo("turns: " + ", ".join(f"{count} {role}" for role, count in roles.most_common()))
    display.show_skipped(report)


@command(app)
def clean(
    *,
    sources: SourcesArgument,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="directory for train.jsonl, heldout.jsonl, report.json")],
    exclude: Annotated[
        list[str], typer.Option("--exclude", help="prompts never to train on, beside selfspec's benchmarks; repeatable")
    ] = [],  # noqa: B006
    held_out: Annotated[float, typer.Option("--held-out", help="share to hold out", min=0, max=1)] = 0.02,
    similarity: Annotated[
        float, typer.Option("--similarity", help="least Jaccard similarity of near-duplicates, over runs of five words")
    ] = 0.8,
    overwrite: OverwriteOption = False,
) -> None:
    """Leave out near-duplicates and evaluation prompts, and split into a training and a held-out part."""
    from selfspec import display
    from selfspec.train.clean import clean as clean_conversations
    from selfspec.train.clean import is_held_out

    output_dir.mkdir(parents=True, exist_ok=True)
    writers = {name: OutputWriter(output_dir / f"{name}.jsonl", {}, overwrite=overwrite) for name in ("train", "heldout")}
    reading, report, num_written = Report(), Report(), Counter[str]()
    conversations = read_conversations(sources, reading)
    cleaned = clean_conversations(conversations, report, excluded=read_excluded(exclude), similarity=similarity)
    with writers["train"], writers["heldout"]:
        for conversation in cleaned:
            part = "heldout" if is_held_out(conversation, held_out) else "train"
            writers[part].write([conversation.record()])
            num_written[part] += 1
    reports = {"reading": reading.record(), "cleaning": report.record()}
    (output_dir / "report.json").write_text(json.dumps(reports, ensure_ascii=False, indent=2), encoding="utf-8")
    typer.echo(f"{output_dir}: {num_written['train']} conversations to train on, {num_written['heldout']} held out")
    display.show_skipped(reading)
    display.show_skipped(report)


@command(app, target=TargetOptions, draft=DraftOptions, sampling=SamplingParams)
def regenerate(
    *,
    sources: SourcesArgument,
    output: OutputOption,
    target: TargetOptions,
    drafter: DrafterOption = "ngram",
    draft: DraftOptions,
    sampling: SamplingParams,
    batch_size: BatchSizeOption = 16,
    last_turn_only: Annotated[
        bool, typer.Option("--last-turn-only", help="keep the earlier answers; they will not be trained on")
    ] = False,
    chat_template: TemplateOption = None,
    overwrite: OverwriteOption = False,
    resume: ResumeOption = False,
) -> None:
    """Have the target write every answer anew, turn by turn."""
    from selfspec import display
    from selfspec.train.regenerate import check_sampling
    from selfspec.train.regenerate import regenerate as regenerate_conversations

    check_sampling(sampling)
    reading, report = Report(), Report()
    conversations = list(read_conversations(sources, reading))
    writer = OutputWriter(output, dict.fromkeys((c.id for c in conversations), 1), overwrite=overwrite, resume=resume)
    pending = [conversation for conversation in conversations if conversation.id not in writer.finished]
    if pending:
        with display.stage(f"loading {target.source}"):
            model = load_target(target, chat_template)
            loaded_drafter = draft.load(drafter, model)
        answered = regenerate_conversations(
            model,
            pending,
            report,
            sampling=sampling,
            drafter=loaded_drafter,
            batch_size=batch_size,
            last_turn_only=last_turn_only,
        )
        write(writer, answered, "answering", len(pending))
    typer.echo(f"{output}: {report.num_kept} conversations answered, {len(writer.finished)} were there before")
    display.show_skipped(reading)
    display.show_skipped(report)


@command(app, target=TargetOptions, draft=DraftOptions, sampling=SamplingParams)
def prompts(
    *,
    number: Annotated[int, typer.Option("--number", help="prompts to draw; unusable ones are left out", min=1)],
    output: OutputOption,
    target: TargetOptions,
    drafter: DrafterOption = "ngram",
    draft: DraftOptions,
    sampling: SamplingParams,
    batch_size: BatchSizeOption = 16,
    chat_template: TemplateOption = None,
    overwrite: OverwriteOption = False,
    resume: ResumeOption = False,
) -> None:
    """Have the target itself write prompts, for more data than there are logs; needs a --temperature above 0."""
    from selfspec import display
    from selfspec.train.self_prompts import self_prompts

    writer = OutputWriter(output, {f"self-{i}": 1 for i in range(number)}, overwrite=overwrite, resume=resume)
    report = Report()
    known = [turn for c in read_conversations([output], Report()) for turn in c.user_turns] if writer.finished else []
    numbers = [i for i in range(number) if f"self-{i}" not in writer.finished]
    with display.stage(f"loading {target.source}"):
        model = load_target(target, chat_template)
        loaded_drafter = draft.load(drafter, model)
    drawn = self_prompts(
        model, numbers, report, sampling=sampling, drafter=loaded_drafter, batch_size=batch_size, known=known
    )
    write(writer, drawn, "drawing", len(numbers))
    typer.echo(f"{output}: {report.num_kept} prompts written, {len(writer.finished)} were there before")
    display.show_skipped(report)


def read_excluded(sources: Iterable[str | Path]) -> list[Conversation]:
    """The prompts in these sources and in selfspec's own benchmarks; every one must be readable."""
    report = Report()
    excluded = list(read_conversations([*BENCHMARK_FILES, *sources], report))
    if report.skipped:
        reason, [example, *_] = next(iter(report.examples.items()))
        raise ValueError(f"a prompt to exclude cannot be read ({reason}): mend or remove {example}")
    return excluded


def load_target(options: TargetOptions, chat_template: Path | None) -> "Target":
    from selfspec.train.masking import use_chat_template

    quiet_libraries()
    target = options.load()
    use_chat_template(target.tokenizer, chat_template)
    return target


def write(writer: OutputWriter, conversations: Iterable[Conversation], description: str, total: int) -> None:
    """Each conversation to the file as soon as it is there."""
    from selfspec import display

    with writer, display.progress(description, total) as advance:
        for conversation in conversations:
            writer.write([conversation.record()])
            advance()
