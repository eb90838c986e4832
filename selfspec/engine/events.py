"""What an engine tells its callers and its listener, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.api import Completion
from selfspec.loop.sequence import Request
from selfspec.loop.step import Step

CLOSED = "the server is shutting down: try again later, or elsewhere"


class EngineFull(Exception):
    """No further request may wait; a place may be free after `retry_seconds`."""

    def __init__(self, limit: int, retry_seconds: int) -> None:
        super().__init__(f"{limit} requests are running or waiting, which is the limit: try again later")
        self.retry_seconds = retry_seconds


class EngineClosed(Exception):
    """The engine takes no more requests."""


@dataclass(frozen=True)
class Event:
    """News of one request: what was added, and at the end the completion or an error."""

    request: Request
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    completion: Completion | None = None
    error: Exception | None = None

    @property
    def is_last(self) -> bool:
        return self.completion is not None or self.error is not None


class Listener:
    """What an engine reports about its work, on its own thread. This class ignores everything.

    An error in a listener is logged and stops nothing.
    """

    def stepped(self, step: Step) -> None:
        """One step of one drafter's sequences has ended."""

    def emitted(self, num_tokens: int, seconds: float, *, is_first: bool) -> None:
        """A request got tokens, this many seconds after the ones before, or after it was submitted."""

    def finished(self, completion: Completion, seconds: float) -> None:
        """A request was answered, this many seconds after it was submitted."""

    def failed(self, *, is_cancelled: bool) -> None:
        """A request ended without an answer."""

    def preempted(self) -> None:
        """A request gave up its place in the cache for a while."""

    def drafter_failed(self, name: str) -> None:
        """A drafter failed and drafts nothing for a while."""
