"""What passes and drafts cost in seconds: measured at start-up, kept in a file, and corrected while serving.

A pass over F nodes (prompt tokens included) of B rows with T tokens of context each is modelled as

    seconds(F, B, T) = (size(F) + context * B * T) * drift

`size` joins the calibrated sizes by straight lines, never falls, and goes on with the last slope. `context` is what one
token of one row's prefix adds. `drift` is the running median of measured over modelled seconds, taken near the size and
the number of rows in question. Without a calibration the model is a guess, 1 + 0.01 * (F - 1), and `drift` turns it into
seconds: a size that was not tried is guessed cheap, so it is tried, and its first timing corrects the guess.

Invariant: the same notes and corrections give the same seconds, because processes that share a model must agree.
"""

from __future__ import annotations

import json
import logging
import math
import os
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median, median_low
from typing import Literal

logger = logging.getLogger(__name__)

Kind = Literal["pass", "draft"]
# (nodes, rows, mean context length) of a pass; (rows, depth, width) of a draft.
Key = tuple[int, int, int]
Points = Sequence[tuple[float, float]]


class Costs:
    """Seconds of target passes and of drafts."""

    # Guess for what a node adds to a pass, relative to a pass over one node.
    NODE_COST = 0.01

    def __init__(self) -> None:
        self._notes: dict[Kind, dict[Key, float]] = {"pass": {}, "draft": {}}
        self._drifts: dict[Kind, Drift] = {"pass": Drift(), "draft": Drift()}
        self._sizes: list[tuple[float, float]] = []
        self._context = 0.0
        # By log2 of rows and of width: (depth, seconds) in ascending order.
        self._drafts: dict[tuple[int, ...], list[tuple[float, float]]] = {}

    @property
    def is_calibrated(self) -> bool:
        """Passes were timed at start-up, so no step need be spent on it."""
        return bool(self._sizes)

    def note(self, kind: Kind, key: Key, seconds: float) -> None:
        """Record one calibrated time, in the place of an earlier one.

        Args:
            key: (nodes, rows, mean context length) of a pass; (rows, depth, width) of a draft.
        """
        self._notes[kind][key] = seconds
        self._fit()

    def correct(self, kind: Kind, key: Key, seconds: float) -> None:
        """Learn from a time measured while serving, prompts in the pass or not. A single outlier changes no known size."""
        modelled = self._modelled_pass(*key) if kind == "pass" else self._modelled_draft(*key)
        if seconds > 0 and modelled > 0:
            self._drifts[kind].add(*_place(kind, key), seconds / modelled, is_calibrated=bool(self._notes[kind]))

    def pass_seconds(self, num_nodes: int, num_rows: int, mean_length: float = 0) -> float:
        """Seconds of a target pass over `num_nodes`, roots, drafts and prompt tokens together."""
        drift = self._drifts["pass"].near(*_place("pass", (num_nodes, num_rows, 0)), is_level=self.is_calibrated)
        return self._modelled_pass(num_nodes, num_rows, mean_length) * (1.0 if drift is None else drift)

    def draft_seconds(self, num_rows: int, depth: int, width: int) -> float:
        """Seconds of a draft for `num_rows`, which cost as much as the next power of two; 0 while no draft was timed."""
        drift = self._drifts["draft"].near(*_place("draft", (num_rows, depth, width)), is_level=True)
        if drift is None and not self._drafts:
            return 0.0
        return self._modelled_draft(num_rows, depth, width) * (1.0 if drift is None else drift)

    @property
    def reach(self) -> float:
        """The most nodes that a pass should have: without a calibration, twice as many as any that was timed."""
        return math.inf if self.is_calibrated else 2 * max(self._drifts["pass"].largest, 1)

    @property
    def most_rows(self) -> int:
        """The most rows of a calibrated pass; 0 without a calibration."""
        return max((num_rows for _, num_rows, _ in self._notes["pass"]), default=0)

    def num_timings(self, num_nodes: int, num_rows: int) -> int:
        """How often a pass of about this size was timed while serving about as many rows."""
        return self._drifts["pass"].count(*_place("pass", (num_nodes, num_rows, 0)))

    def save(self, path: Path, *, card: str, target: str, version: str) -> None:
        """Write the calibration, without what serving corrected, because that belongs to one load."""
        notes = {kind: [[*key, seconds] for key, seconds in times.items()] for kind, times in self._notes.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside it and moved, so that a reader never finds half a file.
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(json.dumps({"card": card, "target": target, "version": version, **notes}, indent=1) + "\n")
        draft.replace(path)

    @classmethod
    def load(cls, path: Path, *, card: str, target: str, version: str) -> Costs:
        """The calibration in a file; without one where the file is absent, damaged, or made for something else."""
        costs = cls()
        try:
            content = json.loads(path.read_text())
            if [content[name] for name in ("card", "target", "version")] != [card, target, version]:
                raise ValueError("it was made for another card, target or version")
            notes: dict[Kind, dict[Key, float]] = {"pass": {}, "draft": {}}
            for kind, times in notes.items():
                for first, second, third, seconds in content[kind]:
                    if not (math.isfinite(seconds) and seconds > 0 and min(first, second) > 0 and third >= 0):
                        raise ValueError(f"{seconds!r} seconds at {(first, second, third)} cannot be")
                    times[int(first), int(second), int(third)] = float(seconds)
        except FileNotFoundError:
            return costs
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.debug("The costs in %s are not used: %s", path, error)
            return costs
        costs._notes = notes
        costs._fit()
        return costs

    def _fit(self) -> None:
        """Bring the model up to date with the notes."""
        by_size: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for (num_nodes, num_rows, mean_length), seconds in self._notes["pass"].items():
            by_size[num_nodes].append((num_rows * mean_length, seconds))
        # Only passes over as many nodes tell what the context adds.
        spans = [(min(points), max(points)) for points in by_size.values()]
        longer = sum(high[0] - low[0] for low, high in spans)
        slower = sum(high[1] - low[1] for low, high in spans)
        self._context = max(slower / longer, 0.0) if longer > 0 else 0.0
        plain = [median(time - self._context * tokens for tokens, time in by_size[size]) for size in sorted(by_size)]
        self._sizes = list(zip(sorted(by_size), accumulate(plain, max), strict=True))
        drafts: dict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)
        for key, time in sorted(self._notes["draft"].items()):
            group, depth = _place("draft", key)
            drafts[group].append((depth, time))
        self._drafts = dict(drafts)

    def _modelled_pass(self, num_nodes: int, num_rows: int, mean_length: float) -> float:
        if not self._sizes:
            return 1 + self.NODE_COST * (num_nodes - 1)
        return _joined(self._sizes, num_nodes) + self._context * num_rows * mean_length

    def _modelled_draft(self, num_rows: int, depth: int, width: int) -> float:
        """Without a calibration, each depth costs as much as what comes before the first one."""
        if not self._drafts:
            return depth + 1.0
        group, _ = _place("draft", (num_rows, depth, width))
        points = self._drafts.get(group) or self._drafts[min(self._drafts, key=lambda other: _distance(group, other))]
        first_depth, first = points[0]
        if depth <= first_depth or len(points) == 1:
            return first * (depth + 1) / (first_depth + 1)
        return _joined(points, depth)


class Drift:
    """Running medians of measured over modelled seconds, by group (numbers of rows, widths) and by size within it."""

    # How many timings of one size are remembered, and how many of them the calibration counts for at first.
    MEMORY = 15
    TRUST = 4
    # Sizes must differ by this factor to tell how the ratio rises.
    APART = 1.5

    def __init__(self) -> None:
        self._windows: dict[tuple[int, ...], dict[int, deque[float]]] = defaultdict(dict)
        self._points: dict[tuple[int, ...], list[tuple[float, float]]] = {}
        # The groups that were timed, the nearest first.
        self._nearest: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def add(self, group: tuple[int, ...], size: int, ratio: float, *, is_calibrated: bool) -> None:
        if group not in self._points:
            self._nearest.clear()
        windows = self._windows[group]
        if size not in windows:
            windows[size] = deque([1.0] * self.TRUST if is_calibrated else [], maxlen=self.MEMORY)
        windows[size].append(ratio)
        # The lower of two: a pass is more often disturbed than too fast.
        self._points[group] = [(known, median_low(window)) for known, window in sorted(windows.items())]

    @property
    def largest(self) -> float:
        """The largest size that was timed in any group; 0 before the first timing."""
        return max((points[-1][0] for points in self._points.values()), default=0)

    def count(self, group: tuple[int, ...], size: int) -> int:
        """How many timings this group has of sizes that differ from `size` by no more than a quarter."""
        windows = self._windows.get(group, {})
        return sum(len(window) for known, window in windows.items() if abs(known - size) <= size / 4)

    def near(self, group: tuple[int, ...], size: int, *, is_level: bool) -> float | None:
        """The ratio at a size, from the nearest group that was timed; None before the first timing.

        Beyond the sizes that were timed in that group, the ratio moves as it does in the nearest group that knows both.
        Where there is none, it stays if `is_level`, and goes on rising as before if not.
        """
        if not self._points:
            return None
        if group not in self._nearest:
            self._nearest[group] = sorted(self._points, key=lambda other: _distance(group, other))
        groups = self._nearest[group]
        points = self._points[groups[0]]
        edge = min(max(size, points[0][0]), points[-1][0])
        ratio = _joined(points, edge)
        if edge == size:
            return ratio
        for other in groups[1:]:
            known = self._points[other]
            if known[0][0] <= size <= known[-1][0]:
                return ratio * _joined(known, size) / _joined(known, min(max(edge, known[0][0]), known[-1][0]))
        before = [point for point in points if point[0] <= edge / self.APART]
        if size < edge or is_level or not before:
            return ratio
        return ratio + max(ratio - before[-1][1], 0.0) * (size - edge) / (edge - before[-1][0])


def _place(kind: Kind, key: Key) -> tuple[tuple[int, ...], int]:
    """The group and the size within it that a key's timings belong to."""
    if kind == "pass":
        num_nodes, num_rows, _ = key
        # Above 64 nodes every eighth of an octave, because prompts come in any length.
        step = 1 << max(num_nodes.bit_length() - 4, 0) if num_nodes > 64 else 1
        return (_log2(num_rows),), -(-num_nodes // step) * step
    num_rows, depth, width = key
    return (_log2(num_rows), _log2(width)), depth


def _log2(number: int) -> int:
    """Of the least power of two that is not below `number`."""
    return max(number - 1, 0).bit_length()


def _distance(group: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return sum(abs(a - b) for a, b in zip(group, other, strict=True)), other


def _joined(points: Points, x: float) -> float:
    """The value at `x` of the line through the points: level before the first, with the last slope after the last."""
    place = bisect_left(points, (x,))
    if place == 0 or len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1) = points[min(place, len(points) - 1) - 1 : min(place, len(points) - 1) + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
