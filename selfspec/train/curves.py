"""Line charts as SVG, for cards, pages and terminals' readers: no package is needed to draw them or to look at them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

# Okabe and Ito's colours, which people with any colour vision tell apart; their yellow is too faint for a line.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
WIDTH, HEIGHT = 340, 220
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 34, 40
LINE_HEIGHT = 18
# About this wide is a letter of the legend.
LETTER = 7
NUM_TICKS = 5

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #333; }
  .title { font-weight: 600; }
  .grid { stroke: #ccc; stroke-width: 1; }
  .line { fill: none; stroke-width: 2; }
  @media (prefers-color-scheme: dark) { text { fill: #ddd; } .grid { stroke: #555; } }
"""


@dataclass(frozen=True)
class Line:
    """A named series of points (x, y), from left to right."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Lines over one pair of axes.

    Attributes:
        x_label: what the horizontal axis counts; the title says what the vertical one does.
        names: names of the places 0, 1, … of the horizontal axis, where it counts nothing.
        from_zero: the vertical axis begins at 0.
    """

    title: str
    x_label: str
    lines: Sequence[Line]
    names: Sequence[str] = field(default=())
    from_zero: bool = False


def draw(charts: Sequence[Chart], *, columns: int = 3, width: int = WIDTH) -> str:
    """An SVG picture of the charts, row by row, with one legend for all lines of more than one name.

    A line has one colour in all charts. Charts without points are left out.

    Args:
        columns: most charts side by side.
        width: of each chart.
    """
    shown = [chart for chart in charts if any(line.points for line in chart.lines)]
    names = list(dict.fromkeys(line.name for chart in shown for line in chart.lines))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    num_columns = max(1, min(columns, len(shown)))
    num_rows = math.ceil(len(shown) / num_columns)
    legend, legend_height = _legend(colours, num_columns * width) if len(names) > 1 else ([], 0)
    whole, height = num_columns * width, num_rows * HEIGHT + legend_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {height}" width="{whole}" height="{height}">',
        f"<title>{escape('; '.join(chart.title for chart in shown))}</title>",
        f"<style>{STYLE}</style>",
        *legend,
    ]
    for i, chart in enumerate(shown):
        row, column = divmod(i, num_columns)
        parts.append(f'<g transform="translate({column * width} {legend_height + row * HEIGHT})">')
        parts += _chart(chart, colours, width)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _chart(chart: Chart, colours: dict[str, str], width: int) -> list[str]:
    points = [point for line in chart.lines for point in line.points]
    # Names have room on both sides.
    x_ticks = [place - 0.5 for place in (0, len(chart.names))] if chart.names else ticks(*_range(x for x, _ in points))
    y_least, y_most = _range(y for _, y in points)
    y_ticks = ticks(0.0 if chart.from_zero else y_least, y_most)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ticks[0]) / ((x_ticks[-1] - x_ticks[0]) or 1)
        up = (y - y_ticks[0]) / ((y_ticks[-1] - y_ticks[0]) or 1)
        return LEFT + across * (width - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text class="title" x="{LEFT}" y="18">{escape(chart.title)}</text>']
    for y in y_ticks:
        _, down = place(x_ticks[0], y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{_number(y)}</text>')
    labels: list[tuple[float, str]] = [(i, name) for i, name in enumerate(chart.names)]
    labels = labels or [(x, _number(x)) for x in x_ticks]
    for x, label in labels:
        across, _ = place(x, y_ticks[0])
        anchor = "end" if x == x_ticks[-1] else "middle"
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{anchor}">{escape(label)}</text>')
    middle = (LEFT + width - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>')
    for line in chart.lines:
        placed = [place(x, y) for x, y in line.points]
        colour = colours[line.name]
        # Between places that count nothing there is nothing.
        if not chart.names:
            path = " ".join(f"{across:.1f},{down:.1f}" for across, down in placed)
            parts.append(f'<polyline class="line" stroke="{colour}" points="{path}"/>')
        # Few points are measurements to point at; many are a curve.
        if len(placed) <= 12:
            parts += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>' for across, down in placed]
    return parts


def _legend(colours: dict[str, str], width: int) -> tuple[list[str], int]:
    """The names with their colours in as many lines as they need, and the height of these."""
    parts, across, down = [], LEFT, LINE_HEIGHT
    for name, colour in colours.items():
        needed = 30 + LETTER * len(name)
        if across + needed > width and across > LEFT:
            across, down = LEFT, down + LINE_HEIGHT
        parts.append(
            f'<line class="line" stroke="{colour}" x1="{across}" x2="{across + 16}" y1="{down - 4}" y2="{down - 4}"/>'
        )
        parts.append(f'<text x="{across + 22}" y="{down}">{escape(name)}</text>')
        across += needed
    return parts, down + LINE_HEIGHT // 2


def ticks(least: float, most: float) -> list[float]:
    """Round numbers from `least` or just below it to `most` or just above it, about `NUM_TICKS` of them."""
    if most <= least:
        least, most = least - 0.5, most + 0.5
    rough = (most - least) / (NUM_TICKS - 1)
    size = 10 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough * (1 - 1e-9))
    first, last = math.floor(least / step + 1e-9), math.ceil(most / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _range(values: Iterable[float]) -> tuple[float, float]:
    known = list(values)
    return min(known), max(known)


def _number(value: float) -> str:
    return f"{value:,.10g}" if abs(value) >= 1000 else f"{value:.4g}"
