"""How far long work is: a bar where a person watches, and a line now and then where a file does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import track

# Between two lines.
SECONDS = 30.0

T = TypeVar("T")


def tracked(
    items: Iterable[T], description: str, total: int, say: Callable[[str], None], *, at_once: int = 1
) -> Iterator[T]:
    """The items, while it is shown how many of `total` have come and how long the rest may take.

    Args:
        say: takes a line, where stderr is no terminal.
        at_once: how many are worked on together, and come in bursts.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(items, description, total, console=console, transient=True)
        return
    num_done = 0
    with _reporting(description, total, lambda: num_done, say, at_once):
        for item in items:
            yield item
            num_done += 1


@contextmanager
def _reporting(
    description: str, total: int, count: Callable[[], int], say: Callable[[str], None], at_once: int
) -> Iterator[None]:
    """Say how far it is every so many seconds. A thread of its own does, because an item may take minutes."""
    started, is_over = time.monotonic(), threading.Event()

    def report() -> None:
        while not is_over.wait(SECONDS):
            say(line(description, count(), total, time.monotonic() - started, at_once))

    thread = threading.Thread(target=report, name="selfspec-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def line(description: str, num_done: int, total: int, seconds: float, at_once: int = 1) -> str:
    """Such as "answering: 30 of 120 after 1:00, about 3:00 left"."""
    left = ""
    if 0 < num_done < total:
        # Those that are worked on are half done.
        done = min(num_done + (at_once - 1) / 2, (num_done + total) / 2)
        left = f", about {clock(seconds / done * (total - done))} left"
    return f"{description}: {num_done} of {total} after {clock(seconds)}{left}"


def clock(seconds: float) -> str:
    """Such as 1:05 or 2:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
