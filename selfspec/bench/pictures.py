"""How the benchmarks' pictures look: readable on light and dark pages, and by people who see few colours.

The background is transparent, and text is of a grey that stands out on white and on black. Colours are those of Okabe and
Ito (https://jfly.uni-koeln.de/color/); every series has a marker of its own as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENDINGS = (".png", ".svg")
GREY = "#7a7a7a"
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
MARKERS = ("o", "s", "D", "^", "v", "P")
STYLE: Any = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "lines.linewidth": 2,
    "lines.markersize": 7,
    "legend.frameon": False,
    "legend.labelcolor": GREY,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color", "grid.color"),
        GREY,
    ),
}


def has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def check_matplotlib() -> None:
    """Raise a ValueError where matplotlib is missing."""
    if not has_matplotlib():
        raise ValueError("pictures need matplotlib: pip install 'selfspec[plots]'")


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is measured for it.

    Raises:
        ValueError: matplotlib is missing, or the path cannot be written; the sentence says what to do.
    """
    check_matplotlib()
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path} is no picture's name: let it end in {' or '.join(ENDINGS)}")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write to {path}: {path.parent} is not a directory")


@contextmanager
def picture(path: Path, *, size: tuple[float, float], num_panels: int = 1, note: str = "") -> Iterator[Sequence[Any]]:
    """Axes side by side, written to the file at the end. matplotlib must be installed.

    Args:
        size: inches.
        note: a line below, such as what was measured where.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        figure, panels = pyplot.subplots(1, num_panels, figsize=size, squeeze=False, layout="constrained")
        yield list(panels[0])
        if note:
            figure.supxlabel(note, fontsize=8, x=0.01, ha="left")
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def reference_line(axes: Any, value: float, label: str, *, is_vertical: bool = False) -> None:
    """A dashed line with its name at its end."""
    draw, place = (axes.axvline, (value, 1.01)) if is_vertical else (axes.axhline, (1.01, value))
    draw(value, color=GREY, linestyle=(0, (4, 3)), linewidth=1.2, zorder=1)
    across = axes.get_xaxis_transform() if is_vertical else axes.get_yaxis_transform()
    horizontal, vertical = ("center", "bottom") if is_vertical else ("left", "center")
    axes.text(*place, label, transform=across, ha=horizontal, va=vertical, fontsize=8, color=GREY)


def environment_line(environment: Mapping[str, object]) -> str:
    """What a reader needs to judge the figures."""
    plain = ("target", "dtype", "device")
    return ", ".join(str(value) if name in plain else f"{name} {value}" for name, value in environment.items())
