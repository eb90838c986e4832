"""Charts as plain HTML and SVG: bars, curves and a stacked bar. Pure functions that ask no other host for anything.

Series differ by colour and by dash, so readers need not see colours; every point says its values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

# The sizes of a drawn chart, in its own units; the page scales it to the room there is.
WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 12, 38
NUM_TICKS = 4


def bars(title: str, hint: str, rows: Iterable[tuple[str, float, str]], kind: str, *, empty: str = "") -> str:
    """Horizontal bars.

    Args:
        rows: name, share of the full width from 0 to 1, and the value in words.
        empty: the sentence in place of no rows.
    """
    drawn = "".join(
        f'<div class="bar"><span>{escape(name)}</span><i class="{kind}" style="--share:{share:.4f}"></i>'
        f"<b>{escape(value)}</b></div>"
        for name, share, value in rows
    )
    drawn = drawn or f'<p class="hint">{escape(empty)}</p>'
    return f"<figure><figcaption>{escape(title)}<small>{escape(hint)}</small></figcaption>{drawn}</figure>"


@dataclass(frozen=True)
class Series:
    """One curve. `best` and `chosen` are indices of points to mark."""

    name: str
    points: Sequence[tuple[float, float]]
    best: int | None = None
    chosen: int | None = None


@dataclass(frozen=True)
class Axes:
    """What the axes show.

    Attributes:
        unit: of y, written at its numbers.
        is_log: x doubles from step to step.
        floor: a horizontal line with its name, such as plain decoding's speed.
        best: what a point marked as best is called.
    """

    x: str
    y: str
    unit: str = ""
    is_log: bool = False
    floor: tuple[float, str] | None = None
    best: str = "best"


def curves(title: str, hint: str, series: Sequence[Series], axes: Axes) -> str:
    """Curves over a common x, from y = 0 on."""
    xs = [x for each in series for x, _ in each.points]
    highest = max([y for each in series for _, y in each.points] + ([axes.floor[0]] if axes.floor else []))
    tick = _nice(highest / NUM_TICKS or 1.0)
    top = tick * max(1, math.ceil(highest / tick - 1e-9))
    scale = _Scale(min(xs), max(xs), top, axes.is_log)
    parts = [*_grid(scale, tick, axes, _x_ticks(min(xs), max(xs), axes.is_log))]
    for number, each in enumerate(series):
        parts += _curve(scale, each, number, axes)
    label = escape(f"{title}: {', '.join(each.name for each in series)}")
    svg = f'<svg class="marks chart" role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg>'
    names = [(f"line s{i}", each.name) for i, each in enumerate(series)]
    names += [("floor", axes.floor[1])] if axes.floor is not None else []
    names += [("best", axes.best)] if any(each.best is not None for each in series) else []
    names += [("chosen", "chosen")] if any(each.chosen is not None for each in series) else []
    keys = " ".join(f'<span class="key {kind}">{escape(name)}</span>' for kind, name in names)
    caption = f"{escape(title)}<small>{escape(hint)}</small>"
    return f'<figure class="curve"><figcaption>{caption}</figcaption>{svg}<p class="keys">{keys}</p></figure>'


@dataclass(frozen=True)
class _Scale:
    """From values to places in the drawing."""

    low: float
    high: float
    top: float
    is_log: bool

    def x(self, value: float) -> float:
        low, high, at = (math.log2(each) if self.is_log else each for each in (self.low, self.high, value))
        share = (at - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM)


def _grid(scale: _Scale, tick: float, axes: Axes, x_ticks: Sequence[float]) -> Iterable[str]:
    for i in range(round(scale.top / tick) + 1):
        y = scale.y(i * tick)
        yield f'<path class="grid" d="M{LEFT},{y:.1f} H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{i * tick:g}{axes.unit}</text>'
    for value in x_ticks:
        yield f'<text x="{scale.x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>'
    yield f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(axes.x)}</text>'
    if axes.floor is not None:
        y = scale.y(axes.floor[0])
        yield f'<path class="floor" d="M{LEFT},{y:.1f} H{WIDTH - RIGHT}"/>'


def _curve(scale: _Scale, series: Series, number: int, axes: Axes) -> Iterable[str]:
    places = [(scale.x(x), scale.y(y)) for x, y in series.points]
    path = " ".join(f"{'L' if i else 'M'}{x:.1f},{y:.1f}" for i, (x, y) in enumerate(places))
    yield f'<path class="line s{number}" d="{path}"/>'
    for i, ((x, y), (value, height)) in enumerate(zip(places, series.points, strict=True)):
        words = escape(f"{series.name}: {axes.x} {value:g}, {axes.y} {height:.3g}{axes.unit}")
        kinds = "".join(f" {kind}" for kind, at in (("best", series.best), ("chosen", series.chosen)) if at == i)
        radius = 6 if kinds else 3
        yield f'<circle class="s{number}{kinds}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{words}</title></circle>'


def _nice(step: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below `step`."""
    power = 10 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))


def _x_ticks(low: float, high: float, is_log: bool) -> list[float]:
    if is_log:
        powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        marks = [2.0**power for power in powers if low <= 2**power <= high]
        return marks[:: max(1, math.ceil(len(marks) / 10))]
    step = max(1.0, _nice((high - low) / 8)) if high > low else 1.0
    return [low + i * step for i in range(int((high - low) / step + 1e-9) + 1)]


def stacked(title: str, hint: str, parts: Sequence[tuple[str, float]], capacity: float, unit: str) -> str:
    """What parts take of a capacity: one thin bar of all of it, and one as wide as the page of what is taken, enlarged.

    Args:
        parts: name and size, in the capacity's unit.
    """
    total = sum(size for _, size in parts)
    share = total / capacity
    cells = "".join(
        f'<i class="m{i}" style="flex:{size / total:.5f}" title="{escape(f"{name}: {size:.2f} {unit}")}"></i>'
        for i, (name, size) in enumerate(parts)
    )
    rows = "".join(
        f'<tr><td><span class="swatch m{i}"></span>{escape(name)}</td><td>{size:.2f} {unit}</td>'
        f"<td>{_share(size / capacity)}</td></tr>"
        for i, (name, size) in enumerate(parts)
    )
    rows += f'<tr class="total"><td>total</td><td>{total:.2f} {unit}</td><td>{_share(share)}</td></tr>'
    over = " over" if share > 1 else ""
    width = min(100, 100 * share)
    return (
        f'<figure class="stack"><figcaption>{escape(title)}<small>{escape(hint)}</small></figcaption>'
        f'<div class="whole{over}" role="img" aria-label="{share:.1%} taken"><i style="width:{width:.2f}%"></i></div>'
        f'<p class="zoom">what is taken, enlarged</p><div class="taken" aria-hidden="true">{cells}</div>'
        f'<table class="parts"><tbody>{rows}</tbody></table></figure>'
    )


def _share(share: float) -> str:
    return "&lt;0.1%" if share < 0.001 else f"{share:.1%}"
