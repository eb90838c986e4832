"""Pictures of `bench` and `bench-engine`: speed and acceptance by task, and speed by the number of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from selfspec.bench.compare import BASELINE, PLAIN
from selfspec.bench.pictures import COLOURS, GREY, MARKERS, environment_line, picture, reference_line
from selfspec.bench.tasks import Measurement, by_prompt
from selfspec.bench.throughput import ThroughputRun, summarise_throughput

Prompts = Sequence[Mapping[str, Measurement]]


def plot_tasks(measurements: Sequence[Measurement], environment: Mapping[str, object], path: Path) -> None:
    """Each mode's speed over the baseline's, and its acceptance length: a mark for each task, bars over half the prompts."""
    prompts = list(by_prompt(measurements).values())
    tasks = list(dict.fromkeys(m.task for m in measurements))
    has_baseline = any(m.mode == BASELINE for m in measurements)
    over, over_label = (BASELINE, "transformers") if has_baseline else (PLAIN, "plain decoding")
    modes = [mode for mode in dict.fromkeys(m.mode for m in measurements) if mode not in (PLAIN, over)]
    of_task = [[of for of in prompts if task in (next(iter(of.values())).task, "overall")] for task in (*tasks, "overall")]
    labels = [f"{name} ({len(of)})" for name, of in zip((*tasks, "overall"), of_task, strict=True)]
    places = range(len(labels), 0, -1)

    def ratio(of: Mapping[str, Measurement], mode: str) -> float:
        return (of[over].seconds / of[over].num_tokens) / (of[mode].seconds / of[mode].num_tokens)

    size = (9.0, 1.9 + 0.42 * len(labels))
    note = f"Medians over prompts (their number in brackets); bars: the middle half.\n{environment_line(environment)}"
    with picture(path, size=size, num_panels=2, note=note) as (speeds, lengths):
        shown = [*modes, *([PLAIN] if has_baseline else [])]
        for number, mode in enumerate(shown):
            look = {"color": GREY, "marker": "|"} if mode == PLAIN else {"color": COLOURS[number], "marker": MARKERS[number]}
            heights = [place + 0.22 * ((len(shown) - 1) / 2 - number) for place in places]
            _marks(speeds, [[ratio(of, mode) for of in prompts] for prompts in of_task], heights, mode, look)
            if mode != PLAIN:
                counts = [[of[mode].num_tokens / of[mode].num_target_passes for of in prompts] for prompts in of_task]
                _marks(lengths, counts, heights, mode, look)
        for axes in (speeds, lengths):
            axes.set_yticks(list(places), labels)
            axes.set_ylim(0.5, len(labels) + 0.5)
            axes.grid(axis="y", visible=False)
            axes.axhline(1.5, color=GREY, linewidth=0.6)
        lengths.tick_params(labelleft=False)
        speeds.set_title(f"Speed, {over_label} = 1")
        speeds.set_xlabel("times as fast, reading the prompt included")
        reference_line(speeds, 1.0, "", is_vertical=True)
        lengths.set_title("Acceptance length")
        lengths.set_xlabel("tokens per target pass")
        reference_line(lengths, 1.0, "", is_vertical=True)
        handles, names = speeds.get_legend_handles_labels()
        named = ["plain decoding" if name == PLAIN else name for name in names]
        speeds.figure.legend(handles, named, loc="outside upper right", ncols=len(named))


def _marks(
    axes: Any, values: Sequence[Sequence[float]], heights: Sequence[float], label: str, look: Mapping[str, str]
) -> None:
    """A median for each task with the middle half of its prompts, and the number of the last one, which is overall."""
    middles = [median(of) for of in values]
    spans = [_middle_half(of) for of in values]
    errors = [
        [middle - low for middle, (low, _) in zip(middles, spans, strict=True)],
        [high - middle for middle, (_, high) in zip(middles, spans, strict=True)],
    ]
    axes.errorbar(middles, heights, xerr=errors, linestyle="none", elinewidth=1.5, label=label, **look)
    beside = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
    axes.annotate(f"{middles[-1]:.2f}", (max(spans[-1][1], middles[-1]), heights[-1]), **beside)


def _middle_half(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = quantiles(values, n=4, method="inclusive")
    return first, third


def plot_throughput(runs: Sequence[ThroughputRun], environment: Mapping[str, object], path: Path) -> None:
    """The speed with drafting over the speed without, by streams, with the span of the pairs; and both speeds."""
    entries = sorted(summarise_throughput(runs), key=lambda entry: entry.num_streams)
    streams = [entry.num_streams for entry in entries]
    [drafter] = {run.mode for run in runs} - {PLAIN}
    note = f"Medians of pairs of runs; bars: from the worst to the best pair.\n{environment_line(environment)}"
    with picture(path, size=(9.0, 3.6), num_panels=2, note=note) as (ratios, speeds):
        below = [entry.ratio - entry.worst_ratio for entry in entries]
        above = [entry.best_ratio - entry.ratio for entry in entries]
        middles = [entry.ratio for entry in entries]
        ratios.errorbar(streams, middles, yerr=[below, above], color=COLOURS[0], marker=MARKERS[0], elinewidth=1.5)
        for x, y in zip(streams, middles, strict=True):
            ratios.annotate(f"{y:.2f}", (x, y), (8, 6), textcoords="offset points", fontsize=9)
        reference_line(ratios, 1.0, "plain")
        ratios.set_title(f"Speed of {drafter}, plain decoding = 1")
        ratios.set_ylim(bottom=min(0.8, *(entry.worst_ratio for entry in entries)))
        for number, (name, rates) in enumerate(
            {
                drafter: [entry.tokens_per_second for entry in entries],
                "plain decoding": [entry.plain_tokens_per_second for entry in entries],
            }.items()
        ):
            look = {"color": GREY, "marker": "|"} if number else {"color": COLOURS[0], "marker": MARKERS[0]}
            speeds.plot(streams, rates, label=name, **look)
        speeds.set_title("Tokens per second, all streams")
        speeds.set_ylim(bottom=0)
        speeds.legend()
        for axes in (ratios, speeds):
            axes.set_xscale("log", base=2)
            axes.set_xticks(streams, list(map(str, streams)))
            axes.set_xlabel("streams at once")
