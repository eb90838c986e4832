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

from selfspec.app import lanes, race
from selfspec.app.races import MAX_WAITING, Messages, Races, View, described
from selfspec.app.records import Column, Parting
from selfspec.app.render import spans
from selfspec.app.settings import ALONE, TRANSFORMERS, Settings, contestants_of, label_of
from selfspec.bench.baseline import load_baseline
from selfspec.bench.tasks import environment
from selfspec.drafters import load_drafter
from selfspec.drafters.names import KINDS, kind_of_head
from selfspec.drafters.shipped import load_head, shipped_head, shipped_heads
from selfspec.heads.base import find_head, read_config
from selfspec.loop.sequence import Request
from selfspec.model.target import Target
from selfspec.plan.sizes import ModelSize

# While a column is measured alone, progress is shown rarely, because drawing uses the same processor.
SECONDS_PER_PROGRESS = 0.5
# transformers' copy of the target needs its weights again, so it is not loaded unasked where they are large.
MAX_COPIED_BYTES = 2e9
WARM_UP_PROMPT = "Say hello."

LEVEL_NOTE = (
    "Level clocks: whoever is furthest behind takes the next step, so a slow spell of the machine meets all. “Measure "
    "alone” runs each by itself."
)
ALONE_NOTE = "Each column ran alone on this machine, after a warm-up."
SAMPLED_NOTE = " transformers is left out, because its samples cannot be compared."


@dataclass(eq=False)
class Race:
    """A race: its settings, the columns as far as they got, and where their outputs first differ."""

    settings: Settings
    columns: list[Column]
    partings: dict[str, Parting | None] = field(default_factory=dict)

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def html(self, at: float | None = None, *, is_over: bool = True) -> str:
        """The columns at `at` seconds of the race, or as far as they got. Verdicts are shown when it is over."""
        shown = self.columns if at is None else [column.until(at) for column in self.columns]
        badges = {name: lanes.parting_badge(parting) for name, parting in self.partings.items()} if is_over else {}
        return lanes.race(
            [lanes.Lane(column, spans(column.steps), badges.get(column.name, "")) for column in shown],
            max_new_tokens=self.settings.max_new_tokens,
            is_over=is_over,
            is_level=self.settings.timing != ALONE,
            has_steps=True,
        )


@dataclass(frozen=True)
class HeadReport:
    """A head's facts and card, the drafter that serves it here (None if it does not fit), and the verdict in words."""

    facts: dict[str, Any]
    card: str
    drafter: str | None
    verdict: str


class LocalRaces(Races):
    """Races on one target. At first they offer prompt lookup and the shipped heads that fit the target."""

    def __init__(self, target: Target, max_waiting: int = MAX_WAITING) -> None:
        super().__init__(max_waiting)
        self.target = target
        self.drafters = {name: label_of(name) for name in ("ngram", *_shipped_drafters(target), TRANSFORMERS)}
        known = [name for name in ("ngram", "eagle") if name in self.drafters]
        copied = [TRANSFORMERS] if ModelSize.of(target.name).weight_bytes <= MAX_COPIED_BYTES else []
        self.default_drafters = (*copied, *known)
        self._loaded: dict[str, race.Racer] = {}

    def about(self) -> tuple[str, ...]:
        return described(Path(self.target.name).name, str(self.target.dtype).removeprefix("torch."), str(self.target.device))

    def prepare(self) -> None:
        """Load what races by default, so that the first race begins at once."""
        for name in ("none", *self.default_drafters):
            self._contestant(name)

    def _contestant(self, name: str) -> race.Racer:
        if name not in self._loaded:
            loaded = load_baseline(self.target) if name == TRANSFORMERS else load_drafter(name, self.target)
            race.warm_up(self.target, self.target.encode(WARM_UP_PROMPT), loaded)
            self._loaded[name] = loaded
        return self._loaded[name]

    def _race(self, settings: Settings, prompt: str | Messages, stop: threading.Event) -> Iterator[View]:
        request = Request(self._prompt_ids(prompt), settings.sampling)
        contestants = []
        for name in contestants_of(settings):
            if name not in self._loaded:
                yield View(f"Loading {label_of(name)} …")
            contestants.append((Column(name, label_of(name)), self._contestant(name)))
        result = Race(settings, [column for column, _ in contestants])
        is_alone = settings.timing == ALONE
        run = race.run_alone if is_alone else race.run_level
        doing = "Measuring one after the other, each alone" if is_alone else "Racing with level clocks"
        yield View(f"{doing} …", result.html(is_over=False))
        last, interval = time.perf_counter(), SECONDS_PER_PROGRESS if is_alone else race.SECONDS_PER_FRAME
        guard = settings.use_cost_guard
        for column in run(self.target, request, contestants, use_cost_guard=guard, is_stopped=stop.is_set):
            if time.perf_counter() - last >= interval:
                about = f": {column.label} has {len(column.token_ids)} tokens" if is_alone else ""
                yield View(f"{doing}{about} …", result.html(is_over=False))
                last = time.perf_counter()
        self._compare(result, request)
        is_whole = all(column.finish_reason is not None for column in result.columns)
        message = (ALONE_NOTE if is_alone else LEVEL_NOTE) + ("" if settings.sampling.is_greedy else SAMPLED_NOTE)
        yield View(message if is_whole or not stop.is_set() else "Stopped.", result.html(), result)

    def _compare(self, result: Race, request: Request) -> None:
        """Find where complete answers differ from the reference."""
        reference, *others = result.columns
        for column in others:
            if reference.finish_reason is not None and column.finish_reason is not None:
                result.partings[column.name] = race.parting(self.target, request.prompt_ids, column, reference)

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
        with self.line.turn():
            return self._examine(source)

    def _examine(self, source: str) -> HeadReport:
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
        # A shipped head that is offered already has a name.
        is_offered = drafter in self.drafters and shipped_head(drafter, self.target).samefile(directory)
        name = drafter if is_offered else f"{drafter}:{source}"
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
