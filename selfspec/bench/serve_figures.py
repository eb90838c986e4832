"""From the answers to a load to its figures: pure functions of what was timed.

Tokens are dated by the chunks that brought them: a chunk counts as its answer's tokens divided by its chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from selfspec.bench.serve_client import Answer


@dataclass(frozen=True)
class Spread:
    """Of a time in seconds: what half of them, and 99 of 100, do not exceed."""

    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None if there are no values."""
        # Half of the time that every command would take to begin.
        import numpy as np

        return cls(*map(float, np.percentile(values, (50, 99)))) if values else None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One load on one server. Failed requests are counted, and are a part of no other figure than `failures`.

    Attributes:
        failures: how many requests failed, by reason.
        seconds: from the first request to the end of the last.
        tokens_per_second: of whole answers, over all that time.
        busy_seconds, busy_tokens_per_second: until the first stream had nothing left to do; None for arrivals, and for
            a load with fewer requests than streams.
        most_at_once: requests that were open at the same time.
        first_token: from sending a request to its first chunk with text.
        between_chunks: between two such chunks of an answer, however many tokens they bring.
        per_token: an answer's time after its first token, divided by its tokens but one.
        whole: from sending a request to its last byte.
        prompt_tokens: the mean over the requests, by the server's count.
        is_counted: the tokens are the server's count; otherwise chunks were counted.
    """

    num_done: int
    failures: dict[str, int]
    seconds: float
    num_tokens: int
    tokens_per_second: float
    requests_per_second: float
    busy_seconds: float | None
    busy_tokens_per_second: float | None
    most_at_once: int
    first_token: Spread | None
    between_chunks: Spread | None
    per_token: Spread | None
    whole: Spread | None
    prompt_tokens: float | None
    is_counted: bool

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())


def summarise(answers: Sequence[Answer], num_streams: int | None) -> Figures:
    """The figures of a load's answers, at least one. `num_streams` is None for arrivals."""
    done = [answer for answer in answers if answer.failure is None]
    start = min(answer.due for answer in answers)
    seconds = max(answer.ended for answer in answers) - start
    num_tokens = sum(answer.num_tokens for answer in done)
    busy_seconds = busy_rate = None
    if num_streams is not None and len(answers) >= num_streams:
        end = sorted(answer.ended for answer in answers)[len(answers) - num_streams]
        busy_seconds = end - start
        busy_rate = tokens_until(done, end) / busy_seconds
    gaps = [later - earlier for answer in done for earlier, later in pairwise(answer.chunk_times)]
    prompt_tokens = [answer.num_prompt_tokens for answer in done if answer.num_prompt_tokens is not None]
    return Figures(
        num_done=len(done),
        failures=dict(Counter(answer.failure for answer in answers if answer.failure is not None)),
        seconds=seconds,
        num_tokens=num_tokens,
        tokens_per_second=num_tokens / seconds,
        requests_per_second=len(done) / seconds,
        busy_seconds=busy_seconds,
        busy_tokens_per_second=busy_rate,
        most_at_once=most_at_once(answers),
        first_token=Spread.of([answer.first_seconds for answer in done]),
        between_chunks=Spread.of(gaps),
        per_token=Spread.of([answer.seconds_per_token for answer in done if answer.seconds_per_token is not None]),
        whole=Spread.of([answer.seconds for answer in done]),
        prompt_tokens=sum(prompt_tokens) / len(prompt_tokens) if prompt_tokens else None,
        is_counted=all(answer.is_counted for answer in done),
    )


def tokens_until(answers: Sequence[Answer], end: float) -> float:
    """Tokens that had come by then."""
    total = 0.0
    for answer in answers:
        if answer.ended <= end:
            total += answer.num_tokens
        elif answer.chunk_times:
            total += answer.num_tokens * sum(time <= end for time in answer.chunk_times) / len(answer.chunk_times)
    return total


def most_at_once(answers: Sequence[Answer]) -> int:
    """The most requests that were open at one time. Where one ends as another begins, they were not open together."""
    changes = sorted([(answer.due, 1) for answer in answers] + [(answer.ended, -1) for answer in answers])
    count = most = 0
    for _, change in changes:
        count += change
        most = max(most, count)
    return most
