"""Engines beside each other on the same token ids: what any engine must do to be driven, and how all are driven and timed.

Nothing here knows an engine, and nothing needs torch. So all engines are counted by the same lines, each in the environment
that it needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from typing import Protocol

WINDOW_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How answers are written: greedily, or drawn with the request's number as the seed."""

    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False


@dataclass(frozen=True)
class News:
    """Tokens that a request has got; with the last ones `is_last` is true."""

    number: int
    token_ids: list[int]
    is_last: bool


class Peer(Protocol):
    """An engine, ready for requests.

    Attributes:
        takes_all: it decodes as many requests at once as it was made for, so all may be given to it together. Others get
            the next when one ends.
        num_requests: how many it has got so far.
    """

    takes_all: bool
    num_requests: int

    def submit(self, number: int, prompt_ids: list[int], settings: Settings) -> None:
        """Take a request."""

    def news(self) -> list[News]:
        """Wait for tokens of the open requests."""

    def counts(self) -> tuple[float, float]:
        """Tokens of decoding steps so far, and the rows of target passes that brought them."""

    def close(self) -> None:
        """End it."""


@dataclass
class Trace:
    """What came when: (seconds since the start, tokens, whether a request ended), and the answers by number.

    Attributes:
        acceptance_length: tokens per target pass, bonus token included; None if the engine does not count.
    """

    steps: list[tuple[float, int, bool]] = field(default_factory=list)
    answers: dict[int, list[int]] = field(default_factory=dict)
    acceptance_length: float | None = None

    @property
    def seconds(self) -> float:
        return self.steps[-1][0]

    @property
    def num_tokens(self) -> int:
        return sum(num for _, num, _ in self.steps)

    def busy(self, num_streams: int) -> tuple[float, int]:
        """Seconds and tokens until a stream had nothing left to do."""
        num_left = sum(is_last for *_, is_last in self.steps)
        seconds, num_tokens = 0.0, 0
        for at, num, is_last in self.steps:
            if num_left < num_streams:
                break
            seconds, num_tokens = at, num_tokens + num
            num_left -= is_last
        return seconds, num_tokens

    def windows(self) -> list[float]:
        """Tokens per second in windows of `WINDOW_SECONDS`, whole ones only."""
        rates = [0.0] * int(self.seconds / WINDOW_SECONDS)
        for at, num, _ in self.steps:
            if (place := int(at / WINDOW_SECONDS)) < len(rates):
                rates[place] += num / WINDOW_SECONDS
        return rates


def drive(peer: Peer, prompts: Sequence[list[int]], num_streams: int, settings: Settings) -> Trace:
    """Have all prompts answered, `num_streams` at a time."""
    most_open = len(prompts) if peer.takes_all else num_streams
    return _run(peer, iter(enumerate(prompts)), settings, lambda seconds: most_open)


def jump(peer: Peer, prompts: Sequence[list[int]], phases: Sequence[tuple[int, float]], settings: Settings) -> Trace:
    """Load that changes: so many streams for so many seconds, phase after phase. Prompts come again when all are used.

    When there are fewer streams than before, those that go end their answers first.
    """

    def most_open(seconds: float) -> int:
        for num_streams, length in phases:
            if seconds < length:
                return num_streams
            seconds -= length
        return 0

    return _run(peer, enumerate(cycle(prompts)), settings, most_open)


def _run(
    peer: Peer, requests: Iterator[tuple[int, list[int]]], settings: Settings, most_open: Callable[[float], int]
) -> Trace:
    trace, num_open = Trace(), 0
    counted = peer.counts()
    started = time.perf_counter()
    while True:
        wanted = most_open(time.perf_counter() - started) - num_open
        while wanted > 0 and (request := next(requests, None)) is not None:
            number, prompt_ids = request
            peer.submit(number, prompt_ids, settings)
            trace.answers[number] = []
            num_open, wanted = num_open + 1, wanted - 1
        if not num_open:
            break
        for news in peer.news():
            trace.answers[news.number] += news.token_ids
            trace.steps.append((time.perf_counter() - started, len(news.token_ids), news.is_last))
            num_open -= news.is_last
    num_tokens, num_passes = (after - before for before, after in zip(counted, peer.counts(), strict=True))
    trace.acceptance_length = num_tokens / num_passes if num_passes else None
    return trace


def first_token_seconds(peer: Peer, prompt_ids: list[int]) -> float:
    """From a request to its first token, on an engine that has nothing else to do."""
    [(seconds, *_), *_] = drive(peer, [prompt_ids], 1, Settings(max_tokens=1, ignore_eos=True)).steps
    return seconds


def phase_rates(windows: Sequence[float], phases: Sequence[tuple[int, float]]) -> list[float]:
    """The median rate of the windows that lie in the second half of each phase, when the answers of the one before ended."""
    rates, begin = [], 0.0
    for _, length in phases:
        first, last = (begin + length / 2) / WINDOW_SECONDS, (begin + length) / WINDOW_SECONDS
        inside = [rate for place, rate in enumerate(windows) if first <= place and place + 1 <= last]
        rates.append(median(inside) if inside else 0.0)
        begin += length
    return rates
