"""From an engine's events to a connection: they come on the engine's thread and leave on the event loop.

Invariant: whoever is behind gets what has gathered at once, so a slow loop or a slow reader makes fewer sends.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from selfspec.api import Completion
from selfspec.engine import Event, Intake
from selfspec.loop.sequence import Request
from selfspec.serve.answers import Answer
from selfspec.serve.errors import api_error


class Doorbell:
    """Has an event loop run functions for other threads. It wakes the loop once for all that come while the loop is busy."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_ringing = False

    def ring(self, function: Callable[[], None]) -> None:
        self._waiting.append(function)
        if not self._is_ringing:
            self._is_ringing = True
            self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        # First, because what comes from now on may have to ring again.
        self._is_ringing = False
        while self._waiting:
            self._waiting.popleft()()


class Doorbells:
    """One for each event loop."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[asyncio.AbstractEventLoop, Doorbell] = WeakKeyDictionary()

    def here(self) -> Doorbell:
        """The running loop's."""
        loop = asyncio.get_running_loop()
        if loop not in self._of:
            self._of[loop] = Doorbell()
        return self._of[loop]


class Events:
    """The events of one call's requests, on the event loop. Closing it early cancels the requests that are left.

    Raises:
        ValueError, EngineFull, EngineClosed: the engine does not take the requests (see `Intake.submit`).
    """

    def __init__(self, engine: Intake, requests: Sequence[Request], drafter: str | None, doorbell: Doorbell) -> None:
        self._news: deque[Event] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._num_left = len(requests)
        # When the first of them came.
        self.first_at: float | None = None

        def put(event: Event) -> None:
            self._news.append(event)
            doorbell.ring(self._arrive)

        self._handle = engine.submit(requests, put, drafter=drafter)

    async def batches(self) -> AsyncIterator[list[Event]]:
        """What has come since the last time."""
        while self._num_left:
            if not self._news:
                self._arrival = asyncio.get_running_loop().create_future()
                await self._arrival
            batch: list[Event] = []
            error = None
            while self._news and error is None:
                event = self._news.popleft().with_text()
                self.first_at = self.first_at or time.perf_counter()
                self._num_left -= event.is_last
                error = event.error
                if error is None:
                    batch.append(event)
            if batch:
                yield batch
            if error is not None:
                # A call has one answer, so its other samples are of no use now.
                self.close()
                raise error

    def close(self) -> None:
        if self._num_left:
            self._num_left = 0
            self._handle.cancel()

    def _arrive(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


async def collect(events: Events, on_completion: Callable[[Completion], None]) -> list[Completion]:
    """All completions of a call; `on_completion` is called with each as soon as it is there."""
    completions = []
    async for batch in events.batches():
        for event in batch:
            if event.completion is not None:
                on_completion(event.completion)
                completions.append(event.completion)
    return completions


async def lines(answer: Answer, events: Events, on_completion: Callable[[Completion], None]) -> AsyncIterator[bytes]:
    """A stream's server-sent events, those of a batch at once. An error in the middle is an event of its own, the last."""
    try:
        if opening := answer.begin():
            yield opening
        async for batch in events.batches():
            for event in batch:
                if event.completion is not None:
                    on_completion(event.completion)
            if added := b"".join(map(answer.add, batch)):
                yield added
        yield answer.end()
    except Exception as error:
        yield answer.fail(api_error(error))


class EventStream(Response):
    """Sends lines as they come. When the client goes, it stops at once, even while there is nothing to send.

    It closes the events itself, because a client may go before the first line is asked for, and a generator that never
    started runs no `finally`.
    """

    media_type = "text/event-stream"

    def __init__(self, lines: AsyncIterator[bytes], events: Events) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._lines = lines
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        finally:
            self._events.close()
            await self._lines.aclose()  # type: ignore[attr-defined]

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for line in self._lines:
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Callable[[], Awaitable[Message]], work: Any) -> Any:
    """The result of `work`. If the client goes first, the work is cancelled and the result is None."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(until_gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        # A cancelled task runs on until its next await.
        await asyncio.gather(*tasks, return_exceptions=True)
