"""What is behind the page's Compare tab, whatever runs the races: visitors' stops, what is shown, and runs to download."""

from __future__ import annotations

import json
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from selfspec.app.settings import CHAT, TEXT, Settings

Messages = list[dict[str, str]]


class Outcome(Protocol):
    """A race that has ended, whole or not; the first column is plain decoding's."""

    settings: Settings

    @property
    def columns(self) -> Sequence[Any]: ...


@dataclass(frozen=True)
class View:
    """What the page shows now: a line of text, the columns (those before if empty), and at the end the race to look into."""

    message: str
    html: str = ""
    race: Outcome | None = None


class Races(ABC):
    """Runs races for visitors, who are told apart by their session.

    Attributes:
        drafters: those that can race, by name, with their labels: what the page offers.
    """

    drafters: dict[str, str]

    def __init__(self) -> None:
        self._stops: dict[str, threading.Event] = {}
        # Runs to download; removed with the process.
        self._folder = tempfile.TemporaryDirectory(prefix="selfspec-app-")

    def expect(self, session: str) -> None:
        """A race of this session is about to wait for its turn: from here on it can be stopped."""
        self._stops[session] = threading.Event()

    def stop(self, session: str) -> None:
        """End this session's race, or keep it from beginning."""
        if session in self._stops:
            self._stops[session].set()

    def race(self, settings: Settings, history: Messages, session: str) -> Iterator[View]:
        """Run all columns on the prompt and show them; closing the iterator ends the work too."""
        stop = self._stops.setdefault(session, threading.Event())
        try:
            yield from self._race(settings, prompt_of(settings, history), stop)
        finally:
            self._stops.pop(session, None)

    def refresh(self) -> None:  # noqa: B027  (what a target of one's own can do does not change by itself)
        """Learn anew which drafters there are."""

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


def prompt_of(settings: Settings, history: Messages) -> str | Messages:
    """Text to go on with, or a chat's messages."""
    if not settings.prompt.strip():
        raise ValueError("The prompt is empty: write something, or take one of the examples.")
    if settings.kind == TEXT:
        return settings.prompt
    opening = [{"role": "system", "content": settings.system}] if settings.system.strip() else []
    before = history if settings.kind == CHAT else []
    return [*opening, *before, {"role": "user", "content": settings.prompt}]
