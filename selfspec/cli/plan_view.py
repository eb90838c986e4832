"""How `selfspec plan` shows a prediction: memory, then speed by draft size, within 60 columns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from selfspec.cli.display import stdout

if TYPE_CHECKING:
    from selfspec.plan.predict import Plan

HEADINGS = ("draft\ndepth", "nodes", "tokens\n/pass", "draft\ncost", "verify\ncost", "speed-\nup", "tokens/s\nat most")


def show_plan(plan: Plan) -> None:
    """Memory part by part, whether it fits, and the prediction for each draft size, if there can be one."""
    _show_memory(plan)
    if plan.host_decides:
        _show_refusal(plan)
    else:
        _show_speed(plan)
    stdout.print(f"{plan.target}, {plan.dtype}, weights from its {plan.weights_from}; {plan.card.name}: {_rates(plan)}.")


def _show_memory(plan: Plan) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("memory", no_wrap=True)
    table.add_column("GB", justify="right", no_wrap=True)
    for name, num_bytes in plan.memory.items():
        if num_bytes:
            table.add_row(name, f"{num_bytes / 1e9:.2f}")
    table.add_section()
    table.add_row("total", f"{plan.total_bytes / 1e9:.2f}")
    table.add_row(plan.card.name, f"{plan.card.memory / 1e9:.2f}")
    stdout.print(table)
    stdout.print(
        Text("It fits." if plan.fits else "It does not fit.", style="green" if plan.fits else "red"),
        f"Largest batch at {plan.context} tokens: {plan.largest_batch}. "
        f"Largest context at batch {plan.batch_size}: {plan.largest_context}.",
    )


def _show_refusal(plan: Plan) -> None:
    stdout.print(
        Text("Too small to predict: host time decides.", style="yellow"),
        f"A plain pass would read and compute for {1000 * plan.roofline_seconds:.2f} ms, and launching it takes about "
        f"{1000 * plan.launch_seconds:.2f} ms. Measure with `selfspec bench`.",
    )
    if plan.drafter is not None:
        most = max(choice.expected_tokens for choice in plan.choices)
        stdout.print(f"Tokens per target pass: at most {most:.2f} ({plan.acceptance}).")


def _show_speed(plan: Plan) -> None:
    # Without padding it fits into 60 columns.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for choice in plan.shown_choices():
        table.add_row(
            str(choice.depth),
            str(choice.num_nodes),
            f"{choice.expected_tokens:.2f}",
            f"{choice.draft_cost:.3f}",
            f"{choice.verify_cost:.3f}",
            f"{choice.speedup:.2f}x",
            f"{choice.tokens_per_second:.0f}",
            style="bold" if choice == plan.best else None,
        )
    stdout.print(table)
    best = plan.best
    if best.depth:
        size = f"{_count(best.depth, 'draft token')} deep, {_count(best.num_nodes, 'node')}"
        stdout.print(f"Best: {size}, {best.speedup:.2f}x plain decoding ({plan.acceptance}).")
    else:
        stdout.print(f"Best: plain decoding ({plan.acceptance}).")
    stdout.print("Costs are relative to a plain pass. A pass takes the time of its roofline and of its launches.")


def _rates(plan: Plan) -> str:
    peak = f", {plan.card.peak / 1e12:.0f} TFLOP/s" if math.isfinite(plan.card.peak) else ""
    return f"{plan.card.bandwidth / 1e9:.0f} GB/s{peak}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
