"""What the commands show: results on stdout; progress on stderr, and without a terminal only that of slow commands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from selfspec.bench.compare import Mode, TimedAnswer
    from selfspec.bench.tasks import Summary
    from selfspec.bench.throughput import Throughput
    from selfspec.cli.doctor import Finding
    from selfspec.traffic.conversations import Report
    from selfspec.traffic.prompt_files import PromptRow

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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


def show_comparison(modes: Sequence[Mode], answer_ids: Sequence[str | int]) -> None:
    """One row for each mode, compared with the first."""
    baseline = modes[0]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("drafter", no_wrap=True)
    for heading in ("tokens/s", "speed-up", "acceptance\nlength", "target\npasses"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("output")
    for mode in modes:
        table.add_row(
            mode.name,
            f"{mode.tokens_per_second:.1f}",
            f"{mode.tokens_per_second / baseline.tokens_per_second:.2f}x",
            f"{mode.acceptance_length:.2f}",
            str(mode.num_target_passes),
            Text("reference") if mode is baseline else _verdict(mode, baseline, answer_ids),
        )
    stdout.print(table)
    stdout.print(f"{len(answer_ids)} answers, {baseline.num_tokens} tokens. Speeds include prefill.")
    stdout.print("Acceptance length: tokens per target pass, bonus token included.")


def _verdict(mode: Mode, baseline: Mode, answer_ids: Sequence[str | int]) -> Text:
    from selfspec.bench.compare import first_difference

    difference = first_difference(mode, baseline)
    if difference is None:
        return Text("identical", style="green")
    place = f"{answer_ids[difference.answer_index]}, token {difference.position}"
    return Text(f"differs from {place}", style="red")


def show_answer(row: PromptRow, answer: TimedAnswer) -> None:
    """A question and its answer, both shortened."""
    question = row.prompt if isinstance(row.prompt, str) else row.prompt[-1]["content"]
    title = Text(_excerpt(question, 70))
    stdout.print(Panel(Text(_excerpt(answer.text, 400)), title=title, title_align="left"))


def _excerpt(text: str, max_chars: int) -> str:
    text = text.strip()
    return text if len(text) <= max_chars else text[: max_chars - 1].rstrip() + "…"


def show_benchmark(summaries: Mapping[str, Mapping[str, Summary]], environment: Mapping[str, object]) -> None:
    """One row for each task and mode; speed-ups are against the first mode of the task."""
    # Without padding it fits into 80 columns.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("task", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    for heading in ("tokens\n/s", "accept\nlength", "decode\nspeed", "pre-\ndicted", "total\nspeed", "vs\ntransf.", "same"):
        table.add_column(heading, justify="right", no_wrap=True)
    for task, modes in summaries.items():
        for i, (mode, summary) in enumerate(modes.items()):
            table.add_row(
                "" if i else task,
                mode,
                f"{summary.tokens_per_second:.1f}",
                f"{summary.acceptance_length:.2f}",
                _ratio(summary.decode_speedup),
                _ratio(summary.predicted_speedup),
                _ratio(summary.total_speedup),
                _ratio(summary.baseline_speedup),
                f"{summary.num_identical}/{summary.num_prompts}",
            )
        table.add_section()
    stdout.print(table)
    stdout.print(", ".join(f"{name} {value}" for name, value in environment.items()))
    stdout.print("Speeds are medians over prompts, relative to none; total includes prefill, and so does vs transformers.")
    stdout.print("Accept length: tokens per target pass, bonus token included. Same: prompts with the tokens of none.")
    stdout.print(
        "Predicted: the decode speed by the cost model, accept length / (draft cost + verify cost), from this run's"
    )
    costs = {mode: summary.costs for mode, summary in summaries["overall"].items() if summary.costs}
    stdout.print(
        "costs of a step: " + ", ".join(f"{mode} {c.draft:.3f} + {c.verify:.3f}" for mode, c in costs.items()) + "."
    )


def show_throughput(entries: Sequence[Throughput], environment: Mapping[str, object]) -> None:
    """One row for each number of streams; ratios divide the speed with speculation by the speed without."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("streams", "off\ntokens/s", "on\ntokens/s", "ratio", "worst\nratio", "accept\nlength", "same"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        table.add_row(
            str(entry.num_streams),
            f"{entry.plain_tokens_per_second:.1f}",
            f"{entry.tokens_per_second:.1f}",
            _ratio(entry.ratio),
            _ratio(entry.worst_ratio),
            f"{entry.acceptance_length:.2f}",
            f"{entry.num_identical}/{entry.num_repeats}",
        )
    stdout.print(table)
    stdout.print(", ".join(f"{name} {value}" for name, value in environment.items()))
    stdout.print("Medians over repeats while all streams are busy, prefill included.")
    stdout.print("Ratio: speculation on to off, within a repeat; above 1 is faster.")
    stdout.print("Accept length: tokens per target pass, bonus token included. Same: repeats with the tokens of off.")


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


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
