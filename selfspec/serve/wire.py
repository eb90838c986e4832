"""What the server's two processes say to each other: the one with HTTP, and the one with the engine.

A step of the engine is one message, whatever number of answers it concerns, because each message wakes a thread.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from selfspec.api import Completion
from selfspec.drafters import Drafter
from selfspec.engine.health import Health
from selfspec.loop.sequence import Request
from selfspec.model.target import Target
from selfspec.model.text_side import TextSide

# To the engine.


@dataclass(frozen=True)
class Submit:
    """New requests. `call` is the number that their events will have."""

    call: int
    requests: list[Request]
    drafter: str


@dataclass(frozen=True)
class Cancel:
    call: int


@dataclass(frozen=True)
class Load:
    number: int
    prepare: Callable[[Target], Callable[[], Drafter]]
    name: str | None


@dataclass(frozen=True)
class Unload:
    number: int
    name: str


@dataclass(frozen=True)
class Close:
    """End, and send those who wait an error."""


# From the engine.


@dataclass(frozen=True)
class Ready:
    """The engine takes requests."""

    target: TextSide
    drafters: list[str]
    default_drafter: str
    max_batch: int
    max_waiting: int
    max_cached_tokens: int


@dataclass(frozen=True)
class Failed:
    """The engine could not be made."""

    error: Exception


@dataclass(frozen=True)
class Reply:
    """What came of a `Load` or an `Unload`."""

    number: int
    value: str | None
    error: Exception | None
    drafters: list[str]


@dataclass(frozen=True)
class State:
    """What an engine shows of itself."""

    num_running: int = 0
    num_used_blocks: int = 0
    cache_use: float = 0.0


# What few events have besides token ids: text, where the engine makes it, log-probabilities, likely tokens, and the end.
Rest = tuple[str, list[float], list[list[tuple[int, float]]], Completion | None, Exception | None]


@dataclass
class News:
    """What happened in one round of the engine.

    Attributes:
        told: calls of the listener's methods, with their arguments.
        events: call, number of the request in it, token ids, and the rest.
        dropped: cancelled calls that are over.
        state, health: the engine's; None where nothing is said of them.
    """

    told: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    events: list[tuple[int, int, list[int], Rest | None]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    state: State | None = None
    health: Health | None = None


class Wire:
    """A connection whose messages are any of the above. Any thread may send; one reads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message. Nothing happens if nobody is there any more, because the reading thread learns of that.

        Raises:
            Exception: the message cannot be pickled; nothing was sent.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            try:
                self._connection.send_bytes(data)
            except OSError:
                return

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: there is none, because the other side has ended.
        """
        try:
            return pickle.loads(self._connection.recv_bytes())
        except OSError as error:
            raise EOFError from error

    def close(self) -> None:
        self._connection.close()


def portable(error: Exception) -> Exception:
    """The error, or where it cannot be pickled one with the same message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
