"""Which requests an engine takes: the same rules wherever the engine itself runs.

Invariant: no more requests are open than may be, and a call is taken whole or not at all.
"""

from __future__ import annotations

import math
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequence_
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

from selfspec.engine.events import CLOSED, EngineClosed, EngineFull, Event
from selfspec.loop.drafter import Drafter
from selfspec.loop.sequence import Request, check_request
from selfspec.model.text_side import TextSide

if TYPE_CHECKING:
    from selfspec.model.target import Target


class Cancellable(Protocol):
    """The requests of one call, for as long as the engine works on them."""

    def cancel(self) -> None:
        """End the requests that have not ended; no event follows."""


class Intake(ABC):
    """What callers know of an engine. Any thread may call its public methods.

    Attributes:
        target: the text side of what is decoded, at least.
        default_drafter: serves requests that name none.
    """

    target: TextSide
    default_drafter: str

    def __init__(self, *, max_batch: int, max_waiting: int) -> None:
        self.max_batch = max_batch
        self.max_open = max_batch + max_waiting
        # How long the last requests took, in seconds.
        self._recent: deque[float] = deque(maxlen=64)
        # Guards the fields below, and is notified when they change. Re-entrant, because submitting takes it twice.
        self._changed = threading.Condition(threading.RLock())
        self._num_open = 0
        self._is_draining = False

    @property
    @abstractmethod
    def drafters(self) -> list[str]:
        """The names that requests may ask for."""

    @property
    @abstractmethod
    def problems(self) -> dict[str, str]:
        """Why drafters that are loaded do not draft at present, by name."""

    @property
    @abstractmethod
    def max_cached_tokens(self) -> int:
        """The most tokens that the KV cache holds."""

    @property
    @abstractmethod
    def num_running(self) -> int: ...

    @property
    @abstractmethod
    def num_used_blocks(self) -> int: ...

    @property
    @abstractmethod
    def cache_use(self) -> float:
        """Share of the cache that running sequences hold, 0 to 1."""

    @abstractmethod
    def submit(
        self, requests: Sequence_[Request], on_event: Callable[[Event], None], *, drafter: str | None = None
    ) -> Cancellable:
        """Take all of `requests`, or none. `on_event` is called on a thread of the engine's and must not block.

        An event has its text after `Event.with_text`.

        Raises:
            ValueError: a request can never be served, or the drafter is not loaded.
            EngineFull: too many requests are open at present.
            EngineClosed: the engine takes no more requests.
        """

    @abstractmethod
    def load(self, prepare: Callable[[Target], Callable[[], Drafter]], name: str | None = None) -> str:
        """Add a drafter.

        Args:
            prepare: does what is slow and touches nothing in use. The function that it returns runs between two steps,
                because it may use the target.
            name: the name that requests use; the drafter's own by default.

        Returns:
            That name.
        """

    @abstractmethod
    def unload(self, name: str) -> None:
        """Remove a drafter. The sequences that it serves go on without drafts."""

    @abstractmethod
    def close(self) -> None:
        """End the engine; requests that are open get `EngineClosed`."""

    @property
    def max_tokens(self) -> int:
        """The most tokens that one prompt has together with its answer."""
        return min(self.target.context_length, self.max_cached_tokens)

    @property
    def num_waiting(self) -> int:
        return max(self._num_open - self.num_running, 0)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def check(self, request: Request) -> None:
        """Refuse a request that could never be served.

        Raises:
            ValueError: one sentence that says what to do.
        """
        check_request(self.target, request, cache_tokens=self.max_cached_tokens)

    def check_drafter(self, drafter: str | None) -> str:
        """The name of the drafter that serves a request which asks for `drafter`.

        Raises:
            ValueError: it is not loaded.
        """
        name, known = drafter or self.default_drafter, self.drafters
        if name not in known:
            raise ValueError(f"drafter {name!r} is not loaded: use one of {', '.join(known)}")
        return name

    def check_room(self, num_requests: int) -> None:
        """Refuse more requests than may be open now, before anyone works on them.

        Raises:
            ValueError: there are never places for so many.
            EngineFull: too many requests are open at present.
            EngineClosed: the engine takes no more requests.
        """
        if num_requests > self.max_open:
            raise ValueError(f"{num_requests} answers are more than the {self.max_open} that may run or wait: ask for fewer")
        with self._changed:
            if self._is_draining:
                raise EngineClosed(CLOSED)
            if self._num_open + num_requests > self.max_open:
                raise EngineFull(self.max_open, self._retry_seconds())

    def stream(self, requests: Sequence_[Request], *, drafter: str | None = None) -> Iterator[Event]:
        """The events of `requests` as they come. Closing the iterator early cancels the requests."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        handle = self.submit(requests, events.put, drafter=drafter)
        try:
            num_left = len(requests)
            while num_left:
                event = events.get().with_text()
                num_left -= event.is_last
                yield event
        finally:
            handle.cancel()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait for those that are open; False if some are left after the timeout."""
        with self._changed:
            self._is_draining = True
            return self._changed.wait_for(lambda: self._is_idle, timeout)

    @property
    def _is_idle(self) -> bool:
        return self._num_open == 0

    def _check(self, requests: Sequence_[Request], drafter: str | None) -> str:
        """Refuse what `submit` must refuse; returns the drafter's name."""
        name = self.check_drafter(drafter)
        self.check_room(len(requests))
        # The samples of one prompt share all that is checked.
        for request in {(id(r.prompt_ids), id(r.sampling), r.num_top_logprobs): r for r in requests}.values():
            self.check(request)
        return name

    def _retry_seconds(self) -> int:
        """Seconds until a place is likely to be free: what requests took lately, divided by how many run together."""
        return max(1, min(60, math.ceil(fmean(self._recent) / self.max_batch))) if self._recent else 1

    def _note_ended(self, num_requests: int) -> None:
        """Note that requests have ended."""
        with self._changed:
            self._num_open -= num_requests
            self._changed.notify_all()
