"""What the commands show: results on stdout; progress on stderr, and without a terminal only that of slow commands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from selfspec.cli.doctor import Finding
    from selfspec.traffic.conversations import Report

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)

STATE_STYLES = {"ok": "green", "note": "yellow", "missing": "red"}


@contextlib.contextmanager
def stage(message: str, *, is_slow: bool = False) -> Iterator[Callable[[str], None]]:
    """A spinner and one line of text, which the yielded function replaces. Without a terminal, a line each if it is slow."""
    if not stderr.is_terminal:
        yield (lambda line: stderr.print(line, markup=False, soft_wrap=True)) if is_slow else lambda _: None
        return
    with stderr.status(message) as status:
        yield status.update


@contextlib.contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar that moves by one at every call of the yielded function."""
    counts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    columns = (*counts, TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


def about(seconds: float) -> str:
    """An expected time in words."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"about {minutes} minutes" if minutes < 90 else f"about {minutes / 60:.1f} hours"


def show_findings(findings: Sequence[Finding]) -> None:
    """The doctor's report."""
    table = Table(box=None, show_header=False)
    for finding in findings:
        table.add_row(
            Text(finding.state, style=STATE_STYLES[finding.state]), finding.subject, Text(finding.detail, overflow="fold")
        )
    stdout.print(table)


def show_skipped(report: Report) -> None:
    """Every reason for skipping rows, most frequent first, with the first rows that it concerned."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("skipped", justify="right", no_wrap=True)
    table.add_column("reason")
    table.add_column("such as")
    for reason, count in report.skipped.most_common():
        table.add_row(str(count), Text(reason), Text("\n".join(report.examples[reason])))
    if report.skipped:
        stdout.print(table)
