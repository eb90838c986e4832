"""What races on a target and races on a server share: stops by visitors, views for the page, and runs to download."""

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
    """A race that has ended, complete or not. Its first column is plain decoding."""

    settings: Settings

    @property
    def columns(self) -> Sequence[Any]: ...


@dataclass(frozen=True)
class View:
    """What the page shows: a line of text, the columns (empty keeps the ones before), and at the end the race itself."""

    message: str
    html: str = ""
    race: Outcome | None = None


class Races(ABC):
    """Runs races for visitors, whom it knows by their session.

    Attributes:
        drafters: labels of the drafters that the page offers, by name.
    """

    drafters: dict[str, str]

    def __init__(self) -> None:
        self._stops: dict[str, threading.Event] = {}
        # Holds the runs to download, and is removed when the process ends.
        self._folder = tempfile.TemporaryDirectory(prefix="selfspec-app-")

    def expect(self, session: str) -> None:
        """A race of this session is about to wait for its turn. From now on it can be stopped."""
        self._stops[session] = threading.Event()

    def stop(self, session: str) -> None:
        """End this session's race, or keep it from beginning."""
        if session in self._stops:
            self._stops[session].set()

    def race(self, settings: Settings, history: Messages, session: str) -> Iterator[View]:
        """Run all columns on the prompt, and yield what to show. Closing the iterator ends the work too."""
        stop = self._stops.setdefault(session, threading.Event())
        try:
            yield from self._race(settings, prompt_of(settings, history), stop)
        finally:
            self._stops.pop(session, None)

    def refresh(self) -> None:  # noqa: B027  (a local target's drafters do not change by themselves)
        """Update the drafters."""

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
    """The text to continue, or the messages of a chat."""
    if not settings.prompt.strip():
        raise ValueError("The prompt is empty: write something, or take one of the examples.")
    if settings.kind == TEXT:
        return settings.prompt
    opening = [{"role": "system", "content": settings.system}] if settings.system.strip() else []
    before = history if settings.kind == CHAT else []
    return [*opening, *before, {"role": "user", "content": settings.prompt}]
