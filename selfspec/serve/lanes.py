"""Threads for what comes before the engine: reading bodies, rendering templates, tokenising, compiling forms.

The event loop only waits for them. Short work has a lane of its own, so it never waits for long work, and work whose client
has gone leaves its lane before its turn comes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from selfspec.serve.errors import ApiError
from selfspec.serve.limits import FORM_STACK_BYTES, MAX_WAITING_LONG, MAX_WAITING_SHORT, SHORT

P = ParamSpec("P")
R = TypeVar("R")


class Lanes:
    """One lane for short work, one for long work, and one for the compiler of forms."""

    def __init__(self) -> None:
        self._short = _Lane("short", MAX_WAITING_SHORT)
        self._long = _Lane("long", MAX_WAITING_LONG)
        self._forms = _Lane("forms", MAX_WAITING_LONG, stack_bytes=FORM_STACK_BYTES)

    async def run(self, size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What a function returns that handles `size` characters or bytes. Cancelled before its turn, it does not run."""
        return await (self._short if size <= SHORT else self._long).run(function, *args, **kwargs)

    async def run_form(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The same for the compiler of forms, which can take long over a short text, and needs a deep stack."""
        return await self._forms.run(function, *args, **kwargs)

    def close(self) -> None:
        for lane in (self._short, self._long, self._forms):
            lane.close()


def single_thread(name: str, stack_bytes: int = 0) -> ThreadPoolExecutor:
    """A thread for work of one kind; 0 bytes are the usual stack."""
    pool = ThreadPoolExecutor(1, name)
    # A thread gets the stack size that is set when it starts, and a pool starts its thread with its first work.
    usual = threading.stack_size(stack_bytes)
    try:
        pool.submit(int).result()
    finally:
        threading.stack_size(usual)
    return pool


class _Lane:
    """A thread and its queue. One thread, because most of the work holds the interpreter's lock.

    Args:
        stack_bytes: the thread's stack; 0 for the usual one.
    """

    def __init__(self, name: str, max_waiting: int, *, stack_bytes: int = 0) -> None:
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._pool = single_thread(f"selfspec-{name}", stack_bytes)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._num_waiting == self._max_waiting:
            message = f"{self._max_waiting} requests of this kind are being read, which is the limit: try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
        self._num_waiting += 1
        try:
            return await asyncio.wrap_future(self._pool.submit(function, *args, **kwargs))
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
