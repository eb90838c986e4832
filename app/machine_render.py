"""This machine as HTML: what it is, the ceiling of plain decoding, where a race stands against it, and what a pass costs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from selfspec.app import charts
from selfspec.app.charts import Axes, Series
from selfspec.app.race import Column
from selfspec.app.render import facts, note
from selfspec.app.settings import TRANSFORMERS
from selfspec.bench.machine import Ceiling, Machine, Measured, cheap_nodes, levers, verdict


def about(machine: Machine, device: str, dtype: str) -> str:
    """What is known before anything is measured."""
    return facts(
        {
            "processor": machine.cpu,
            "instruction set": machine.instruction_set,
            "threads": f"{machine.num_threads} for {machine.num_cores} cores",
            "target runs on": f"{device}, {dtype}",
        }
    )


def decode_speed(column: Column) -> float | None:
    """Tokens per second after the first step, which holds the prefill; None for fewer than two steps."""
    if len(column.steps) < 2:
        return None
    first, last = column.steps[0], column.steps[-1]
    num_tokens = sum(len(step.token_ids) for step in column.steps[1:])
    return num_tokens / (last.at - first.at) if last.at > first.at else None


def standing(machine: Machine, measured: Measured, columns: Sequence[Column], *, dtype: str, is_cuda: bool) -> str:
    """The verdict, the levers and the pictures.

    Args:
        columns: of the last race, plain decoding first; none before a race.
    """
    ceiling, times = measured.ceiling, measured.times
    speeds = {column.label: speed for column in columns if (speed := decode_speed(column)) is not None}
    plain_label = columns[0].label if columns else None
    plain = speeds.get(plain_label or "", 1 / times[1])
    others = {label: speed for label, speed in speeds.items() if label != plain_label}
    best = max(others.items(), key=lambda item: item[1]) if others else None
    words = "".join(f"<li>{escape(each)}</li>" for each in levers(machine, ceiling, times, dtype=dtype, is_cuda=is_cuda))
    figures = facts(
        {
            "memory reads": f"{ceiling.bandwidth / 1e9:.1f} GB/s",
            "weights a token reads": f"{ceiling.bytes_per_token / 1e6:,.0f} MB",
            "ceiling of plain decoding": f"{ceiling.tokens_per_second:.1f} tokens/s",
            "a plain pass": f"{1000 * times[1]:.1f} ms, {times[1] / ceiling.seconds:.1f} × its floor",
        }
    )
    drawn = _speeds(ceiling, speeds or {"a plain pass": plain}) + _curve(measured)
    return f'{figures}{note(verdict(ceiling, plain, best))}<ul class="levers">{words}</ul><div class="plots">{drawn}</div>'


def _speeds(ceiling: Ceiling, speeds: dict[str, float]) -> str:
    top = ceiling.tokens_per_second
    most = max(top, *speeds.values())
    rows = [(label, speed / most, f"{speed:.1f}, {speed / top:.0%}") for label, speed in speeds.items()]
    rows.append(("ceiling", top / most, f"{top:.1f}"))
    hint = "tokens/s of the last race without its prefill, and their share of plain decoding’s ceiling"
    return charts.bars("Against the ceiling", hint, rows, "draft")


def _curve(measured: Measured) -> str:
    points = [(nodes, 1000 * seconds) for nodes, seconds in measured.times.items()]
    at = [nodes for nodes, _ in points].index(cheap_nodes(measured.times))
    series = [Series("verify pass", points, best=at)]
    floor = (1000 * measured.ceiling.seconds, "floor")
    axes = Axes("nodes of the tree", "ms", is_log=True, floor=floor, best="largest cheap tree")
    hint = "milliseconds; the floor is the time of reading the weights, and cheap is a quarter more than one node"
    return charts.curves("What a pass costs", hint, series, axes)
