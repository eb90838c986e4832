"""What races on a target and races on a server share: turns, stops, replays, and runs to keep and to download."""

from __future__ import annotations

import json
import secrets
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from selfspec.app.line import POLL_SECONDS, Line
from selfspec.app.race import SECONDS_PER_FRAME, frame_times
from selfspec.app.settings import CHAT, TEXT, Settings
from selfspec.model.default_target import default_target_path

Messages = list[dict[str, str]]

# How many visitors may wait for the target, and how many finished races are kept for those who load the page anew.
MAX_WAITING = 8
MAX_KEPT = 32


class Outcome(Protocol):
    """A race that has ended, complete or not. Its first column is plain decoding."""

    settings: Settings

    @property
    def columns(self) -> Sequence[Any]: ...

    def html(self, at: float | None = None, *, is_over: bool = True) -> str:
        """The columns at `at` seconds of the race, or as far as they got."""


@dataclass(frozen=True)
class View:
    """What the page shows: a line of text, the columns (empty keeps the ones before), and at the end the race itself."""

    message: str
    html: str = ""
    race: Outcome | None = None


class Races(ABC):
    """Runs races for visitors, whom it knows by their session.

    Attributes:
        drafters: labels of the contestants that the page offers, by name.
        default_drafters: the names of those that are chosen at first.
        line: everything that computes on the target takes its turn here.
    """

    drafters: dict[str, str]
    default_drafters: tuple[str, ...]

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.line = Line(max_waiting)
        self._stops: dict[str, threading.Event] = {}
        self._kept: dict[str, Outcome] = {}
        # Holds the runs to download, and is removed when the process ends.
        self._folder = tempfile.TemporaryDirectory(prefix="selfspec-app-")

    def expect(self, session: str) -> None:
        """A race of this session is about to begin. From now on it can be stopped."""
        self._stops[session] = threading.Event()

    def stop(self, session: str) -> None:
        """End this session's race, its wait, or its replay."""
        if session in self._stops:
            self._stops[session].set()

    def race(self, settings: Settings, history: Messages, session: str) -> Iterator[View]:
        """Wait for a turn, run all columns on the prompt, and yield what to show. Closing the iterator ends the work too."""
        stop = self._stops.setdefault(session, threading.Event())
        try:
            prompt = prompt_of(settings, history)
            with self.line.join() as num_before:
                while num := num_before():
                    if stop.wait(POLL_SECONDS):
                        yield View("Stopped.")
                        return
                    # Even where nothing changes, because a page that was closed is noticed only here.
                    yield View(f"Waiting for the target, which runs one race at a time: {place_in_line(num)} …")
                yield from self._race(settings, prompt, stop)
        finally:
            self._stops.pop(session, None)

    def replay(self, race: Outcome, session: str, *, speed: float = 1.0) -> Iterator[View]:
        """Play a finished race again from its recorded steps, `speed` times as fast as it was."""
        stop = self._stops.setdefault(session, threading.Event())
        try:
            start = time.perf_counter()
            pace = "at its true speed" if speed == 1 else f"at {speed:g}× its speed"
            for at in frame_times(race.columns, speed):
                if stop.wait(max(0.0, start + at / speed - time.perf_counter())):
                    break
                # A page that draws slowly drops frames, so it keeps the pace.
                if time.perf_counter() - start < at / speed + SECONDS_PER_FRAME:
                    yield View(f"Replaying the race {pace} …", race.html(at, is_over=False))
            yield View("Replayed from the recorded steps.", race.html())
        finally:
            self._stops.pop(session, None)

    def prepare(self) -> None:  # noqa: B027  (a server has loaded its drafters)
        """Load what races by default, so that the first race begins at once."""

    def refresh(self) -> None:  # noqa: B027  (a local target's drafters do not change by themselves)
        """Update the drafters."""

    @abstractmethod
    def about(self) -> tuple[str, ...]:
        """What the races run on: the model's name, then details."""

    @abstractmethod
    def _race(self, settings: Settings, prompt: str | Messages, stop: threading.Event) -> Iterator[View]: ...

    @abstractmethod
    def record(self, result: Any) -> dict[str, Any]:
        """All that was measured, for JSON."""

    def save(self, result: Any) -> Path:
        """The race as a JSON file, to be downloaded."""
        path = Path(tempfile.mkdtemp(dir=self._folder.name)) / "selfspec-run.json"
        path.write_text(json.dumps(self.record(result), ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    def keep(self, race: Outcome) -> str:
        """Keep a finished race for a while, and return the key to it, which nobody can guess."""
        key = secrets.token_urlsafe()
        self._kept[key] = race
        while len(self._kept) > MAX_KEPT:
            self._kept.pop(next(iter(self._kept)), None)
        return key

    def kept(self, key: str) -> Outcome | None:
        """A race that was kept, if it still is."""
        return self._kept.get(key)


def described(model: str, *details: str) -> tuple[str, ...]:
    """A model's name and details, and of the default target what to expect of it."""
    hint = ["a tiny model to show the speed"] if Path(model).name == default_target_path().name else []
    return (model, *hint, *details)


def place_in_line(num_before: int) -> str:
    """How many are before somebody, in words."""
    return "one visitor is before you" if num_before == 1 else f"{num_before} visitors are before you"


def prompt_of(settings: Settings, history: Messages) -> str | Messages:
    """The text to continue, or the messages of a chat."""
    if not settings.prompt.strip():
        raise ValueError("The prompt is empty: write something, or take one of the examples.")
    if settings.kind == TEXT:
        return settings.prompt
    opening = [{"role": "system", "content": settings.system}] if settings.system.strip() else []
    before = history if settings.kind == CHAT else []
    return [*opening, *before, {"role": "user", "content": settings.prompt}]
