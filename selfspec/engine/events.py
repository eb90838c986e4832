"""What an engine tells its callers and its listener, and how it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from selfspec.loop.answer import Completion, Piece, StreamEvent
from selfspec.loop.group import Step
from selfspec.loop.sequence import Request

CLOSED = "the server is shutting down: try again later, or elsewhere"


class EngineFull(Exception):
    """No further request may wait; a place may be free after `retry_seconds`."""

    def __init__(self, limit: int, retry_seconds: int) -> None:
        super().__init__(f"{limit} requests are running or waiting, which is the limit: try again later")
        self.retry_seconds = retry_seconds


class EngineClosed(Exception):
    """The engine takes no more requests."""


@dataclass(slots=True)
class Event:
    """News of one request: what was added, and at the end the completion or an error."""

    request: Request
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    completion: Completion | None = None
    error: Exception | None = None
    num_draft_tokens: int = field(default=0, kw_only=True)
    num_accepted_tokens: int = field(default=0, kw_only=True)
    pieces: list[Piece] = field(default_factory=list, kw_only=True)

    @classmethod
    def of(cls, request: Request, news: StreamEvent, error: Exception | None) -> Event:
        """The event that tells of a step."""
        return cls(request, error=error, **vars(news))

    @property
    def news(self) -> StreamEvent:
        """What a stream of one answer tells of it."""
        return StreamEvent(**{each.name: getattr(self, each.name) for each in fields(StreamEvent)})

    @property
    def is_last(self) -> bool:
        return self.completion is not None or self.error is not None

    def with_text(self) -> Event:
        """This event with its text, which an engine in another process leaves to the thread that reads its events.

        That thread calls this once for each event, in their order.
        """
        return self


@dataclass(frozen=True)
class StepCounts:
    """What one step of one drafter's sequences did.

    Attributes:
        num_nodes: of each candidate tree, the root included.
        num_drafted, num_accepted: for each sequence, the tokens that were drafted and those of them that were emitted.
    """

    name: str
    num_nodes: int
    num_drafted: list[int]
    num_accepted: list[int]

    @classmethod
    def of(cls, step: Step) -> StepCounts:
        emissions = step.emissions
        drafted, accepted = [each.num_drafted for each in emissions], [each.num_accepted for each in emissions]
        return cls(step.name, step.tree.num_nodes, drafted, accepted)


class Listener:
    """What an engine reports about its work, on its own thread. This class ignores everything.

    An error in a listener is logged and stops nothing.
    """

    def stepped(self, step: StepCounts) -> None:
        """One step of one drafter's sequences has ended."""

    def emitted(self, pieces: Sequence[tuple[int, float, bool]]) -> None:
        """Requests got tokens in a round.

        Args:
            pieces: for each request how many tokens, how many seconds after those before, and whether they are its first;
                the seconds are then since it was submitted.
        """

    def finished(self, completion: Completion, seconds: float) -> None:
        """A request was answered, this many seconds after it was submitted."""

    def failed(self, *, is_cancelled: bool) -> None:
        """A request ended without an answer."""

    def preempted(self) -> None:
        """A request gave up its place in the cache for a while."""

    def drafter_failed(self, name: str) -> None:
        """A drafter failed and drafts nothing for a while."""

    def published(self) -> None:
        """Everyone has been told what happened since this was called last."""
