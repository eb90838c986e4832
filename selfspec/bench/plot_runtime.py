"""Pictures of `bench-runtime`: what a step costs against the floor, where its time goes, and how fast answers are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from selfspec.bench.compare import PLAIN
from selfspec.bench.pictures import COLOURS, GREY, MARKERS, environment_line, picture, reference_line
from selfspec.bench.report import RuntimeReport


def plot_runtime(report: RuntimeReport, directory: Path) -> list[Path]:
    """Draw what was measured as PNG files; returns their paths. matplotlib must be installed."""
    directory.mkdir(parents=True, exist_ok=True)
    drawings: list[tuple[str, bool, Callable[[RuntimeReport, Any], None]]] = [
        ("steps.png", bool(report.steps) and report.floor is not None, _draw_steps),
        ("stages.png", bool(report.stages), _draw_stages),
        ("end_to_end.png", bool(report.answers), _draw_end_to_end),
        ("promises.png", bool(report.promises), _draw_promises),
    ]
    files = []
    for file_name, is_measured, draw in drawings:
        if is_measured:
            with picture(directory / file_name, size=(6.4, 4.0), note=environment_line(report.environment)) as [axes]:
                draw(report, axes)
            files.append(directory / file_name)
    return files


def _draw_steps(report: RuntimeReport, axes: Any) -> None:
    assert report.floor is not None
    contexts = dict.fromkeys(step.context for step in report.steps)
    for number, context in enumerate(contexts):
        steps = [step for step in report.steps if step.context == context]
        nodes = [step.num_nodes for step in steps]
        # The device's time where it has a clock: that is what the floor is about.
        times = [1000 * (step.wall_seconds if step.device_seconds is None else step.device_seconds) for step in steps]
        look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        axes.plot(nodes, times, label=f"{context:,} tokens of context", **look)
        axes.annotate(f"{times[-1]:.1f}", (nodes[-1], times[-1]), (-4, 7), textcoords="offset points", fontsize=9)
    floor = report.floor.seconds * 1000
    reference_line(axes, floor, f"floor\n{floor:.1f}")
    axes.set(title="Time of a verify pass", xlabel="nodes of the candidate tree", ylabel="milliseconds")
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_stages(report: RuntimeReport, axes: Any) -> None:
    names = [each.mode for each in reversed(report.stages)]
    before = [0.0] * len(names)
    for number, stage in enumerate(("draft", "verify", "commit")):
        times = [getattr(each, stage) * 1000 for each in reversed(report.stages)]
        axes.barh(names, times, left=before, label=stage, color=COLOURS[number], height=0.6)
        before = [a + b for a, b in zip(before, times, strict=True)]
    for name, total in zip(names, before, strict=True):
        axes.annotate(f"{total:.1f} ms", (total, name), (6, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set(title="Where a step's time goes", xlabel="milliseconds per step")
    axes.margins(x=0.15)
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def _draw_end_to_end(report: RuntimeReport, axes: Any) -> None:
    modes = list(reversed(report.modes))
    rates = [mode.tokens_per_second for mode in modes]
    colours = [GREY if mode.mode == PLAIN or mode.mode.startswith("transformers") else COLOURS[0] for mode in modes]
    bars = axes.barh([mode.mode for mode in modes], rates, color=colours, height=0.6)
    axes.bar_label(bars, fmt="%.1f", padding=5, fontsize=9, color=GREY)
    for mode in modes:
        if mode.mode == PLAIN:
            reference_line(axes, mode.tokens_per_second, "plain", is_vertical=True)
    axes.set(xlabel="tokens per second, reading the prompt included")
    axes.set_title("Whole answers, one at a time", pad=18)
    axes.margins(x=0.12)
    axes.grid(axis="y", visible=False)


def _draw_promises(report: RuntimeReport, axes: Any) -> None:
    lengths = [each.acceptance_length for each in report.promises]
    for number, name in enumerate(("promised", "measured")):
        speedups = [getattr(each, name) for each in report.promises]
        label = "promised by the cost model" if name == "promised" else name
        axes.plot(lengths, speedups, label=label, color=COLOURS[number], marker=MARKERS[number])
        for x, y in zip(lengths, speedups, strict=True):
            place = (0, 8) if number == 0 else (0, -15)
            axes.annotate(f"{y:.1f}", (x, y), place, textcoords="offset points", ha="center", fontsize=9)
    reference_line(axes, 1.0, "plain")
    axes.set(title="Drafters of a set quality", xlabel="acceptance length", ylabel="times as fast as plain decoding")
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.legend()
