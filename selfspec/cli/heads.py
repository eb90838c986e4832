"""`selfspec import`, `export` and `verify-head`: take heads from other tools, write them for other engines, check them."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.loading import load_quietly
from selfspec.cli.options import command
from selfspec.config import EXPORT_FORMATS, TargetOptions, check_format
from selfspec.traffic.prompt_files import PromptRow, read_prompts

if TYPE_CHECKING:
    from selfspec.api import Prompt
    from selfspec.interop.verify import HeadReport, Reading
    from selfspec.model.target import Target

app = typer.Typer()

HeadArgument = Annotated[
    str,
    typer.Argument(metavar="HEAD", help="directory or Hub id of a selfspec head, or a shipped one's name, such as eagle"),
]
OutputOption = Annotated[Path, typer.Option("--output", help="directory to make")]


def import_head(
    *,
    source: Annotated[str, typer.Argument(metavar="PATH_OR_ID", help="directory or Hub id of the checkpoint")],
    output: OutputOption,
    target: TargetOptions,
    source_revision: Annotated[
        str | None, typer.Option("--source-revision", help="branch, tag or commit of the checkpoint, for a Hub id")
    ] = None,
    feature_layers: Annotated[
        str | None,
        typer.Option(
            "--feature-layers", help="hidden states that EAGLE-3 fuses, as 2,16,29; by default those of its config"
        ),
    ] = None,
    norm_before_residual: Annotated[
        bool | None,
        typer.Option("--norm-before-residual/--no-norm-before-residual", help="needed if an EAGLE-3 config does not say"),
    ] = None,
) -> None:
    """Convert a Medusa, EAGLE, EAGLE-3 or speculators checkpoint to a selfspec head.

    Example: selfspec import PATH_OR_ID --target PATH_OR_ID --output heads/imported

    Example: selfspec import PATH_OR_ID --target PATH_OR_ID --output heads/mine --feature-layers 2,16,29
    """
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty: name a new directory")
    if feature_layers is not None and not re.fullmatch(r"\d+(,\d+)*", feature_layers):
        raise ValueError(f"--feature-layers {feature_layers!r} is not a list of whole numbers such as 2,16,29")

    from selfspec.cli import display
    from selfspec.interop import Conventions, import_head
    from selfspec.interop.named import shipped_as

    if found := shipped_as(source):
        raise ValueError(f"{source} is a selfspec head already, in {found[0]}: name it as the drafter (--drafter {source})")
    layers = tuple(map(int, feature_layers.split(","))) if feature_layers else None
    with display.stage(f"importing {source}"):
        head = import_head(
            source,
            load_quietly(target, use_packing=False),
            Conventions(layers, norm_before_residual),
            revision=source_revision,
        )
    if head is None:
        typer.echo(f"{source} is a model with the target's tokenizer and needs no import: --drafter draft_model:{source}")
        return
    # Saved under another name first, so a folder named `output` is always complete.
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    head.save_pretrained(partial)
    partial.replace(output)
    typer.echo(f"{output}: {head.config.head_type} head of {head.num_parameters:,} parameters")
    typer.echo(f"check it: selfspec verify-head {output}" + (f" --target {target.target}" if target.target else ""))


# The command's name is a keyword, so no function can be called it.
import_head.__name__ = "import"
command(app, target=TargetOptions)(import_head)


@command(app, target=TargetOptions)
def export(
    *,
    head: HeadArgument,
    format: Annotated[str, typer.Option("--format", help=", ".join(EXPORT_FORMATS))],
    output: OutputOption,
    target: TargetOptions,
) -> None:
    """Write a head for another engine, and show the command that serves it there.

    Example: selfspec export heads/mine --format vllm --output exported

    Example: selfspec export eagle --format speculators --output exported
    """
    check_format(format)

    from selfspec.cli import display
    from selfspec.interop import FORMATS, export_head
    from selfspec.interop.named import check_name, named_head

    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not known: use {', '.join(FORMATS)}")
    check_name(head)
    with display.stage(f"exporting {head}"):
        model = load_quietly(target, use_packing=False)
        found = named_head(head, model)
        commands = export_head(found, model, format, output)
    if found != head:
        typer.echo(f"{head}: the shipped head in {found}")
    typer.echo(f"{output}: written for {format}")
    for line in commands:
        typer.echo(line)


@command(app, target=TargetOptions)
def verify_head(
    *,
    head: HeadArgument,
    target: TargetOptions,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="prompts to draft for; a dozen packaged prompts by default")
    ] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="how many of the prompts to use", min=1)] = 12,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="most tokens for each answer", min=2)] = 64,
) -> None:
    """Check a head against its target: shapes, vocabulary, fingerprints, and acceptance at every position.

    With --adapter, it also shows the acceptance without the adapter.

    Example: selfspec verify-head heads/mine --num-prompts 24

    Example: selfspec verify-head eagle
    """
    from selfspec.bench.prompts import DEMO_PROMPTS
    from selfspec.cli.stage_bar import stage_bar
    from selfspec.interop import load_as_stored
    from selfspec.interop.named import check_name, named_head, shipped_as
    from selfspec.interop.verify import verify_head

    check_name(head)
    rows = read_prompts(prompt_file or DEMO_PROMPTS)[:num_prompts]
    adapters: dict[str | None, str] = {None: "served"}
    if target.adapter is not None:
        adapters = {None: "served without the adapter", target.adapter: "served with it"}
    reports: dict[str | None, HeadReport] = {}
    with stage_bar(f"loading {head}") as show_stage:
        # What is no head is told before the target is loaded.
        stored = None if shipped_as(head) else load_as_stored(head)
        for adapter in adapters:
            model = load_quietly(replace(target, adapter=adapter))
            if stored is None:
                found = named_head(head, model)
                stored = load_as_stored(found)
                typer.echo(f"{head}: the shipped head in {found}")
            prompts = [_prompt(row, model) for row in rows]
            reports[adapter] = verify_head(stored, model, prompts, max_new_tokens=max_new_tokens, report=show_stage)
    for adapter, name in adapters.items():
        serving = reports[adapter].serving
        # No draft gets to a depth if none before it is accepted.
        rates = " ".join(
            f"{rate:.0%}" if count else "none" for rate, count in zip(serving.rates, serving.drafted, strict=True)
        )
        typer.echo(
            f"{name}: {serving.acceptance_length:.2f} tokens per target pass; accepted of the drafts at each depth: {rates}"
        )
    report = reports[target.adapter]
    serving = report.serving
    typer.echo(f"by chance, as the share of the answers' most frequent token: {serving.chance:.0%}")
    if report.readings:
        show_readings(report.readings)
    if report.problem:
        raise ValueError(report.problem)
    typer.echo("the head fits its target")


def show_readings(readings: "list[Reading]") -> None:
    """How well the head drafts as it is, and read with each convention the other way."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from selfspec.cli.display import stdout

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="drafts that are right at each depth", title_justify="left")
    for depth in range(1, 1 + readings[0].hits.shape[1]):
        table.add_column(f"depth\n{depth}", justify="right", no_wrap=True)
    table.add_column("tokens\n/pass", justify="right", no_wrap=True)
    table.add_column("the head, read")
    for reading in readings:
        rates = [f"{rate:.0%}" for rate in reading.hits.float().mean(0).tolist()]
        table.add_row(*rates, f"{1 + reading.lengths.mean():.2f}", Text(reading.name))
    stdout.print(table)
    stdout.print(
        "Served is what you get. The table compares ways to read the head: it drafts from every token of the answers. That "
        "gives more than served, where passes skip the tokens they accepted, which are the easy ones."
    )


def _prompt(row: PromptRow, target: "Target") -> "Prompt":
    """The row's prompt. For a target without a chat template, its first turn as plain text."""
    if row.turns and not getattr(target.tokenizer, "chat_template", None):
        return row.turns[0]
    return row.prompt
