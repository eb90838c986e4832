"""Races on a local target: load drafters, run races and stop them, examine heads. The queue lets one race run at a time.

A mistake that a person can make is raised as a ValueError with one sentence; our own bugs are raised as they are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from selfspec.app import race, render
from selfspec.app.race import Column, Parting
from selfspec.app.races import Messages, Races, View
from selfspec.app.settings import LIVE, Settings, label_of
from selfspec.bench.tasks import environment
from selfspec.drafters import Drafter, load_drafter
from selfspec.drafters.names import KINDS, kind_of_head
from selfspec.drafters.shipped import load_head, shipped_head, shipped_heads
from selfspec.heads.base import find_head, read_config
from selfspec.loop.sequence import Request
from selfspec.model.target import Target

# While a column is measured, progress is shown rarely, because drawing uses the same processor.
SECONDS_PER_PROGRESS = 0.5


@dataclass(eq=False)
class Race:
    """A race: its settings, the columns as far as they got, and where their outputs first differ."""

    settings: Settings
    columns: list[Column]
    partings: dict[str, Parting | None] = field(default_factory=dict)

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def badges(self) -> dict[str, str]:
        """A badge for each column whose verdict is known."""
        badges = {}
        for column in self.columns:
            if column.name in self.partings:
                parting = self.partings[column.name]
                badges[column.name] = render.parting_badge(parting) if parting else render.identical_badge()
            elif column.finish_reason is None:
                badges[column.name] = render.stopped_badge()
        if self.columns[0].finish_reason is not None:
            badges[self.columns[0].name] = render.reference_badge()
        return badges

    def html(self, at: float | None = None) -> str:
        """The columns at `at` seconds of the race, or at its end. A column's badge appears when it ends."""
        shown = self.columns if at is None else [column.until(at) for column in self.columns]
        over = {
            column.name for column, whole in zip(shown, self.columns, strict=True) if len(column.steps) == len(whole.steps)
        }
        badges = {name: badge for name, badge in self.badges().items() if at is None or name in over}
        return render.columns(shown, badges, is_comparable=self.settings.timing != LIVE)


@dataclass(frozen=True)
class HeadReport:
    """A head's facts and card, the drafter that serves it here (None if it does not fit), and the verdict in words."""

    facts: dict[str, Any]
    card: str
    drafter: str | None
    verdict: str


class LocalRaces(Races):
    """Races on one target. At first they offer prompt lookup and the shipped heads that fit the target."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self.drafters = {name: label_of(name) for name in ("ngram", *_shipped_drafters(target))}
        self._loaded: dict[str, Drafter | None] = {"none": None}

    def _race(self, settings: Settings, prompt: str | Messages, stop: threading.Event) -> Iterator[View]:
        request = Request(self._prompt_ids(prompt), settings.sampling)
        contestants = []
        for name in ("none", *settings.drafters):
            if name not in self._loaded:
                yield View(f"Loading {label_of(name)} …")
                self._loaded[name] = load_drafter(name, self.target)
            contestants.append((Column(name, label_of(name)), self._loaded[name]))
        result = Race(settings, [column for column, _ in contestants])
        show = self._together if settings.timing == LIVE else self._alone_then_replay
        yield from show(result, request, contestants, stop)

    def _alone_then_replay(
        self,
        result: Race,
        request: Request,
        contestants: list[tuple[Column, Drafter | None]],
        stop: threading.Event,
    ) -> Iterator[View]:
        empty = result.html(at=0.0)
        yield View("Measuring each column alone, then racing them at their true speed …", empty)
        last = time.perf_counter()
        guard = result.settings.use_cost_guard
        for column in race.measure(self.target, request, contestants, use_cost_guard=guard, is_stopped=stop.is_set):
            if time.perf_counter() - last >= SECONDS_PER_PROGRESS:
                place = result.columns.index(column) + 1 if column in result.columns else 1
                message = f"Measuring {column.label} ({place} of {len(contestants)}): {len(column.token_ids)} tokens …"
                yield View(message, empty)
                last = time.perf_counter()
        self._compare(result, request)
        start = time.perf_counter()
        for at in race.frame_times(result.columns):
            if stop.wait(max(0.0, start + at - time.perf_counter())):
                break
            # A page that draws slowly drops frames, so it keeps the pace.
            if time.perf_counter() - start < at + race.SECONDS_PER_FRAME:
                yield View("Racing at true speed, each column as it ran alone …", result.html(at))
        yield self._end(result, stop, "Each column was measured alone on this machine and replayed at its true speed.")

    def _together(
        self,
        result: Race,
        request: Request,
        contestants: list[tuple[Column, Drafter | None]],
        stop: threading.Event,
    ) -> Iterator[View]:
        message = "Live: the columns take turns on one device, so their timings are not comparable"
        yield View(f"{message} …", result.html())
        last = time.perf_counter()
        guard = result.settings.use_cost_guard
        for _ in race.run_together(self.target, request, contestants, use_cost_guard=guard, is_stopped=stop.is_set):
            if time.perf_counter() - last >= race.SECONDS_PER_FRAME:
                yield View(f"{message} …", result.html())
                last = time.perf_counter()
        self._compare(result, request)
        yield self._end(result, stop, f"{message}.")

    def _compare(self, result: Race, request: Request) -> None:
        """Find where complete answers differ from the reference."""
        reference, *others = result.columns
        for column in others:
            if reference.finish_reason is not None and column.finish_reason is not None:
                result.partings[column.name] = race.parting(self.target, request.prompt_ids, column, reference)

    def _end(self, result: Race, stop: threading.Event, message: str) -> View:
        is_whole = all(column.finish_reason is not None for column in result.columns)
        return View(message if is_whole or not stop.is_set() else "Stopped.", result.html(), result)

    def _prompt_ids(self, prompt: str | Messages) -> list[int]:
        prompt_ids = self.target.encode(prompt)
        if len(prompt_ids) >= self.target.context_length:
            limit = self.target.context_length
            raise ValueError(
                f"The prompt has {len(prompt_ids)} tokens, and the target takes {limit} with its answer: shorten it."
            )
        return prompt_ids

    def record(self, result: Race) -> dict[str, Any]:
        return {
            "environment": environment(self.target),
            "settings": result.settings.to_dict(),
            "columns": [
                {
                    **asdict(column),
                    "text": column.text,
                    "is_identical": None if column.name not in result.partings else result.partings[column.name] is None,
                    "parting": asdict(parting) if (parting := result.partings.get(column.name)) else None,
                }
                for column in result.columns
            ],
        }

    def shipped_heads(self) -> list[tuple[str, str]]:
        """Label and folder of every head that comes with the package, for any target."""
        return [(f"{folder.parent.name} / {folder.name}", str(folder)) for folder in shipped_heads()]

    def examine(self, source: str) -> HeadReport:
        """The facts about a head, and whether it fits. A head that fits is offered as a drafter from then on."""
        source = source.strip()
        if not source:
            raise ValueError("No head is chosen: choose one, or type a folder or an id on the Hugging Face Hub.")
        directory = find_head(source)
        record = read_config(directory)
        head_type = record["head_type"]
        drafter = kind_of_head(head_type).name
        facts = {
            "kind": head_type,
            "trained for": record.get("target", {}).get("name"),
            **{name: value for name, value in record.items() if name not in ("head_type", "target")},
        }
        readme = directory / "README.md"
        card = without_front_matter(readme.read_text(encoding="utf-8")) if readme.is_file() else ""
        try:
            head = load_head(source, self.target, drafter=drafter)
        except ValueError as error:
            return HeadReport(facts, card, None, f"It does not fit: {error}.")
        name = f"{drafter}:{source}"
        label = self.drafters.setdefault(name, label_of(name))
        facts["parameters"] = f"{head.num_parameters / 1e6:.1f}M"
        return HeadReport(facts, card, name, f"It fits {Path(self.target.name).name}: race it as “{label}” under Compare.")


def without_front_matter(card: str) -> str:
    """A model card without its block of YAML, which is for the Hub."""
    if card.startswith("---\n") and (end := card.find("\n---\n", 3)) >= 0:
        return card[end + 5 :].lstrip("\n")
    return card


def _shipped_drafters(target: Target) -> Iterator[str]:
    for drafter, kind in KINDS.items():
        if not kind.heads:
            continue
        try:
            shipped_head(drafter, target)
        except ValueError:
            continue
        yield drafter
