"""`selfspec train` and `compare-runs`: from logs to a head that is served, and runs beside each other."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli.data import SourcesArgument, show_prepared
from selfspec.cli.options import command
from selfspec.config import SamplingParams, TargetOptions
from selfspec.model.default_target import source_of
from selfspec.traffic.preparation import PrepareOptions
from selfspec.traffic.prepare import CleanOptions, WritingOptions
from selfspec.traffic.sources import check_sources

if TYPE_CHECKING:
    from selfspec.train.runs import Run

HEADS = ("eagle", "medusa", "early_exit", "draft")
REQUEST_NAME = "request.json"
DTYPES = ("auto", "float32", "bfloat16", "float16")
PACKAGES = ("accelerate", "datasketch")


def register(cli: typer.Typer) -> None:
    """Add the two commands."""
    command(cli, target=TargetOptions, writing=WritingOptions, cleaning=CleanOptions)(train)
    command(cli)(compare_runs)


def train(
    *,
    sources: SourcesArgument,
    head: Annotated[str, typer.Option("--head", help="kind of head: " + ", ".join(HEADS))] = "eagle",
    output: Annotated[
        Path | None, typer.Option("--output", help="directory to make, or to continue in; runs/HEAD by default")
    ] = None,
    minutes: Annotated[
        float, typer.Option("--minutes", help="most time for the training itself; answers and comparison come on top")
    ] = 10.0,
    start_from: Annotated[
        str,
        typer.Option(
            "--start-from",
            help="head whose weights to start from: a folder or Hub id, none, or auto: a shipped head that fits the target",
        ),
    ] = "auto",
    keep_answers: Annotated[
        bool,
        typer.Option(
            "--keep-answers", help="train on the answers in the logs; right only if this very target wrote them greedily"
        ),
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="most tokens of each answer that the target writes", min=1)
    ] = 256,
    target: TargetOptions,
    writing: WritingOptions,
    cleaning: CleanOptions,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="remove the output, and begin anew")] = False,
) -> None:
    """Train a head on logs, compare it with plain decoding, and show the line that serves it. Run again, it goes on.

    The target writes every answer anew by default, because a head must predict what this target says.

    Example: selfspec train logs/ --head eagle --minutes 15

    Example: selfspec train logs/ --target PATH_OR_ID --head medusa --output runs/mine
    """
    check_request(head, minutes, start_from, target, sources)
    output = output or Path("runs") / head
    request = {
        "head": head,
        "minutes": minutes,
        "start_from": start_from,
        "keep_answers": keep_answers,
        "max_new_tokens": max_new_tokens,
        "target": asdict(target),
        "chat_template": None if writing.chat_template is None else str(writing.chat_template),
        "cleaning": asdict(cleaning),
    }
    open_output(output, request, overwrite=overwrite)
    # A process trains on one device, which must then be the only one it sees; several are for the recipes' launcher.
    kind, _, number = target.device.partition(":")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", number or "0")

    from selfspec.cli.train_stages import Training

    training = Training(head, output, minutes, start_from, replace(target, device=kind), writing)
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    data = training.prepare(sources, sampling, cleaning, PrepareOptions(keep_answers=keep_answers))
    if data is not None:
        typer.echo(data)
        show_prepared(data)
    training.train()
    training.compare()
    for line in training.next_lines():
        typer.echo(line)


def check_request(head: str, minutes: float, start_from: str, target: TargetOptions, sources: Sequence[str]) -> None:
    """Refuse in one sentence what cannot be trained, before anything is loaded.

    Raises:
        ValueError: a setting or a source cannot be used, or a package is missing.
    """
    if head not in HEADS:
        raise ValueError(f"--head {head!r} cannot be trained: use {', '.join(HEADS)}")
    if not 0 < minutes < float("inf"):
        raise ValueError(f"--minutes {minutes:g} is not allowed: use a number above 0")
    if target.revision is not None:
        raise ValueError("--revision cannot be trained with: download that revision, and name its folder as the target")
    if target.dtype not in DTYPES:
        raise ValueError(
            f"--dtype {target.dtype} cannot be trained with: use {', '.join(DTYPES)}, and serve in {target.dtype}"
        )
    is_id = start_from.count("/") == 1 and not start_from.startswith(("/", ".", "~"))
    if start_from not in ("auto", "none") and not is_id and not Path(start_from).is_dir():
        raise ValueError(f"--start-from {start_from}: no such folder: use auto, none, a head's folder or its Hub id")
    check_sources(sources)
    source_of(target)
    for package in PACKAGES:
        if find_spec(package) is None:
            raise ValueError(f"training needs {package}: pip install 'selfspec[train]'")


def open_output(output: Path, request: dict[str, Any], *, overwrite: bool) -> None:
    """Make the output folder this request's. One that was begun for another request is refused.

    Raises:
        ValueError: the folder is another's.
    """
    file = output / REQUEST_NAME
    if output.is_file():
        raise ValueError(f"{output} is a file: choose another --output")
    is_ours = file.is_file()
    if output.is_dir() and any(output.iterdir()) and not is_ours:
        raise ValueError(f"{output} is not empty, and no training of this command: choose another --output")
    if is_ours and overwrite:
        shutil.rmtree(output)
    elif is_ours:
        before, now = json.loads(file.read_text(encoding="utf-8")), json.loads(json.dumps(request))
        if changed := ", ".join(name for name in now if before.get(name) != now[name]):
            raise ValueError(f"{output} was begun with another {changed}: choose another --output, or pass --overwrite")
        return
    output.mkdir(parents=True, exist_ok=True)
    partial_file = file.with_suffix(".partial")
    partial_file.write_text(json.dumps(request, indent=1) + "\n", encoding="utf-8")
    partial_file.replace(file)


def compare_runs(
    *,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="output folders of trainings, or their run.json")],
    output: Annotated[Path, typer.Option("--output", help="SVG picture to write")] = Path("curves.svg"),
) -> None:
    """Show trainings beside each other: a table, and a picture of their loss and acceptance.

    Example: selfspec compare-runs runs/eagle runs/medusa --output curves.svg

    Example: selfspec compare-runs runs/one runs/two
    """
    from selfspec.train.runs import picture, read_runs

    found = read_runs(runs)
    if not output.absolute().parent.is_dir():
        raise ValueError(f"cannot write to {output}: {output.parent} is not a directory")
    show_runs(found)
    output.write_text(picture(found), encoding="utf-8")
    typer.echo(f"{output}: the curves")


def show_runs(runs: "Sequence[Run]") -> None:
    """One row for each run."""
    from rich import box
    from rich.table import Table

    from selfspec.cli.display import stdout

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", overflow="fold")
    for heading in ("steps", "last\nloss", "tokens\n/pass", "best on\nheld-out"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("accepted at each depth")
    for run in runs:
        best = max((length for _, length in run.lengths), default=None)
        figures = (run.losses[-1][1] if run.losses else None, run.length, best)
        cells = ["" if value is None else f"{value:.2f}" for value in figures]
        table.add_row(run.name, str(run.num_steps or ""), *cells, " ".join(f"{rate:.0%}" for _, rate in run.rates))
    stdout.print(table)
    stdout.print("Tokens per target pass: the last evaluation, bonus token included.")
