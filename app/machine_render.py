"""This machine as HTML: what it is, the ceiling of plain decoding, where a race stands against it, and what a pass costs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from selfspec.app import charts
from selfspec.app.charts import Axes, Series
from selfspec.app.records import Column
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


def standing(machine: Machine, measured: Measured, columns: Sequence[Column], *, dtype: str, is_cuda: bool) -> str:
    """The verdict, the levers and the pictures.

    Args:
        columns: of the last race, plain decoding first; none before a race.
    """
    ceiling, times = measured.ceiling, measured.times
    figures = {column.label: column.figures() for column in columns}
    speeds = {label: speed for label, each in figures.items() if each and (speed := each.decode_tokens_per_second)}
    plain_label = columns[0].label if columns else None
    plain = speeds.get(plain_label or "", 1 / times[1])
    drafters = {column.label for column in columns[1:] if column.name != TRANSFORMERS}
    others = {label: speed for label, speed in speeds.items() if label in drafters}
    best = max(others.items(), key=lambda item: item[1]) if others else None
    words = "".join(f"<li>{escape(each)}</li>" for each in levers(machine, ceiling, times, dtype=dtype, is_cuda=is_cuda))
    measures = facts(
        {
            "memory reads": f"{ceiling.bandwidth / 1e9:.1f} GB/s",
            "weights a token reads": f"{ceiling.bytes_per_token / 1e6:,.0f} MB",
            "ceiling of plain decoding": f"{ceiling.tokens_per_second:.1f} tokens/s",
            "a plain pass": f"{1000 * times[1]:.1f} ms, {times[1] / ceiling.seconds:.1f} × its floor",
        }
    )
    drawn = _speeds(ceiling, speeds or {"a plain pass": plain}) + _curve(measured)
    return f'{measures}{note(verdict(ceiling, plain, best))}<ul class="levers">{words}</ul><div class="plots">{drawn}</div>'


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
