"""`selfspec plot`: the pictures of a benchmark's file, without measuring anything."""

from pathlib import Path
from typing import Annotated

import typer

from selfspec.bench.pictures import check_matplotlib, check_picture
from selfspec.bench.records import read_record
from selfspec.cli.options import command


def register(cli: typer.Typer) -> None:
    """Add the command."""
    command(cli)(plot)


def plot(
    *,
    record: Annotated[Path, typer.Argument(help="what --output of bench or bench-engine wrote, or --json of bench-runtime")],
    output: Annotated[Path, typer.Option("--output", help="PNG or SVG; for bench-runtime a folder of several PNGs")],
) -> None:
    """Draw what a benchmark measured before.

    Example: selfspec plot bench.jsonl --output bench.png

    Example: selfspec plot engine.jsonl --output engine.svg
    """
    check_matplotlib()

    from selfspec.bench.plot_runtime import plot_runtime
    from selfspec.bench.plot_tasks import plot_tasks, plot_throughput
    from selfspec.bench.report import RuntimeReport
    from selfspec.bench.tasks import measurement_of
    from selfspec.bench.throughput import run_of

    if (report := RuntimeReport.load(record)) is not None:
        for file in plot_runtime(report, output):
            typer.echo(file)
        return
    measured = read_record(record)
    if not measured.rows:
        raise ValueError(f"{record} holds no measurement yet: let its benchmark go on with --resume")
    check_picture(output)
    if measured.kind == "bench":
        plot_tasks([measurement_of(row) for row in measured.rows], measured.environment, output)
    else:
        plot_throughput([run_of(row) for row in measured.rows], measured.environment, output)
    typer.echo(output)
