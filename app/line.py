"""The line of visitors before the target, which does one thing at a time so that nothing disturbs a measurement."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

POLL_SECONDS = 0.1


class Line:
    """First come, first served. Whoever waits sees its place, and can leave at any time.

    Args:
        max_waiting: how many may wait besides the one whose turn it is.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._tickets: list[object] = []
        self._lock = threading.Lock()

    @contextmanager
    def join(self) -> Iterator[Callable[[], int]]:
        """Stand in line until the end of the block. The yielded function says how many are before: at 0 it is one's turn.

        Raises:
            ValueError: the line is full.
        """
        ticket = object()
        with self._lock:
            if len(self._tickets) > self._max_waiting:
                raise ValueError(f"too many wait for this target, {self._max_waiting} at most: try again in a minute")
            self._tickets.append(ticket)
        try:
            yield lambda: self._tickets.index(ticket)
        finally:
            with self._lock:
                self._tickets.remove(ticket)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for one's turn, and have it until the end of the block."""
        with self.join() as num_before:
            while num_before():
                time.sleep(POLL_SECONDS)
            yield
