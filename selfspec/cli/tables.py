"""What the benchmarks print: each table fits into 80 columns, and the lines below it say what its columns mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from selfspec.bench.compare import BASELINE, PLAIN, Mode, first_difference
from selfspec.cli.display import stdout

if TYPE_CHECKING:
    from selfspec.bench.tasks import Summary
    from selfspec.bench.throughput import Throughput

ACCEPTANCE = "Acceptance length: tokens per target pass, bonus token included."
NOISE = "?: more than the acceptance length allows, so it is noise of a busy machine: measure it again."


def show_comparison(
    modes: Sequence[Mode], answer_ids: Sequence[str | int], *, note: str = "", console: Console = stdout
) -> None:
    """One row for each mode. Outputs are compared with plain decoding's, speeds with transformers', too, if it ran."""
    by_name = {mode.name: mode for mode in modes}
    plain, baseline = by_name[PLAIN], by_name.get(BASELINE)
    headings = ["passes\nsaved", "target\npasses", "acceptance\nlength", "tokens/s", "vs\nplain"]
    table = _table("drafter", *headings, *(["vs\ntransformers"] if baseline is not None else []))
    table.add_column("output")
    for mode in modes:
        row = [
            mode.name,
            f"{1 - mode.num_target_passes / mode.num_tokens:.0%}",
            str(mode.num_target_passes),
            f"{mode.acceptance_length:.2f}",
            f"{mode.tokens_per_second:.1f}",
            _over_plain(mode.name, mode.tokens_per_second / plain.tokens_per_second, mode.acceptance_length),
        ]
        if baseline is not None:
            row.append(_ratio(mode.tokens_per_second / baseline.tokens_per_second))
        table.add_row(*row, Text("reference") if mode is plain else _verdict(mode, plain, answer_ids))
    _show(
        table,
        f"Answers: {len(answer_ids)}, tokens: {plain.num_tokens}. Speeds include reading the prompts.",
        f"Passes saved: of one pass a token, which is what plain decoding ({PLAIN}) takes. {ACCEPTANCE}",
        note,
        console=console,
    )


def _verdict(mode: Mode, plain: Mode, answer_ids: Sequence[str | int]) -> Text:
    difference = first_difference(mode, plain)
    if difference is None:
        return Text("identical", style="green")
    place = f"{answer_ids[difference.answer_index]}, token {difference.position}"
    return Text(f"differs from {place}", style="red")


def show_benchmark(summaries: Mapping[str, Mapping[str, Summary]], environment: Mapping[str, object]) -> None:
    """A section for each task, with one row for each mode."""
    headings = ["tokens\nper\nsecond", "acceptance\nlength", "decoding\nvs plain", "predicted\nvs plain"]
    headings += ["whole\nanswer\nvs plain", "whole\nanswer vs\ntransformers", "same\ntokens"]
    table = _table("task and\ndrafter", *headings)
    for task, modes in summaries.items():
        num_prompts = max(summary.num_prompts for summary in modes.values())
        table.add_row(Text(task, style="bold"), *[""] * (len(headings) - 1), f"of {num_prompts}")
        for mode, summary in modes.items():
            table.add_row(
                f" {mode}",
                f"{summary.tokens_per_second:.1f}",
                f"{summary.acceptance_length:.2f}",
                _over_plain(mode, summary.decode_speedup, summary.acceptance_length),
                _ratio(summary.predicted_speedup),
                _over_plain(mode, summary.total_speedup, summary.acceptance_length),
                _ratio(summary.baseline_speedup),
                str(summary.num_identical),
            )
        table.add_section()
    costs = {mode: summary.costs for mode, summary in summaries["overall"].items() if summary.costs}
    costs_of_a_step = ", ".join(f"{mode} {c.draft:.3f} + {c.verify:.3f}" for mode, c in costs.items())
    _show(
        table,
        _environment(environment),
        "Speeds compared are medians over prompts. Decoding leaves out reading the prompt, a whole answer includes it. "
        f"{ACCEPTANCE} Same tokens: prompts with the tokens of plain decoding ({PLAIN}).",
        "Predicted: decoding by the cost model, acceptance length / (draft cost + verify cost), with this run's costs of a "
        f"step in plain passes: {costs_of_a_step}.",
    )


def show_throughput(entries: Sequence[Throughput], environment: Mapping[str, object]) -> None:
    """One row for each number of streams; ratios divide the speed with speculation by the speed without."""
    headings = ["plain\ntokens/s", "drafting\ntokens/s", "speed\nvs plain", "worst\npair"]
    table = _table("streams", *headings, "acceptance\nlength", "same\ntokens")
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
    _show(
        table,
        _environment(environment),
        "Medians over repeats while all streams are busy, reading the prompts included. Speed vs plain: with drafting and "
        "without, within a pair of runs.",
        f"{ACCEPTANCE} Same tokens: repeats with the tokens of plain decoding.",
    )


def _table(first: str, *headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _show(table: Table, *paragraphs: str, console: Console = stdout) -> None:
    """A table and what its columns mean, and what its marks mean if it has any."""
    has_marks = any(
        isinstance(cell, Text) and cell.plain.endswith(" ?") for column in table.columns for cell in column.cells
    )
    console.print()
    console.print(table)
    console.print()
    for paragraph in filter(None, (*paragraphs, NOISE if has_marks else "")):
        console.print(paragraph, markup=False)


def _environment(environment: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in environment.items())


def _over_plain(mode: str, speedup: float | None, acceptance_length: float) -> str | Text:
    """A speed-up over plain decoding, marked where it can only be noise: drafts do not make a pass shorter."""
    if speedup is None or mode == BASELINE or round(speedup, 2) <= round(acceptance_length, 2):
        return _ratio(speedup)
    return Text(f"{_ratio(speedup)} ?", style="yellow")


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
