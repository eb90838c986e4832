"""What a load generator sends, and when: loads, arrival times, and prompts of a wanted length with a shared beginning."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from selfspec.bench.serve_client import Prompt
from selfspec.traffic.prompt_files import PromptRow

# Of English text, where the server has not been asked.
CHARS_PER_TOKEN = 4.0
RANDOM = "random"
SAMPLE_CHARS = (200, 2000)
NUM_RANDOM_ROWS, WORDS_OF_RANDOM_ROW = 480, 64


@dataclass(frozen=True)
class Load:
    """So many streams at once, each of which sends its next request when an answer ends; or arrivals at random times.

    Attributes:
        num_streams: None for arrivals.
        rate: arrivals per second; None for streams.
        burstiness: the shape of the gamma distribution of the pauses: 1 for a Poisson process, less for bursts.
    """

    num_requests: int
    num_streams: int | None = None
    rate: float | None = None
    burstiness: float = 1.0

    @property
    def name(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g}/s"
        return f"{self.num_streams} stream" + "s" * (self.num_streams != 1)


def arrivals(load: Load, seed: int) -> list[float]:
    """Seconds from the beginning at which a load's requests arrive."""
    assert load.rate is not None
    draw = random.Random(seed)
    pauses = (draw.gammavariate(load.burstiness, 1 / (load.rate * load.burstiness)) for _ in range(load.num_requests - 1))
    return [0.0, *accumulate(pauses)]


def random_rows(rows: Sequence[PromptRow], seed: int) -> list[PromptRow]:
    """Rows of words drawn at random from those of `rows`: text that no drafter can guess."""
    words = sorted({word for row in rows for word in re.findall(r"[a-z]{2,}", text_of(row))})
    draw = random.Random(seed)
    return [PromptRow(i, " ".join(draw.choices(words, k=WORDS_OF_RANDOM_ROW))) for i in range(NUM_RANDOM_ROWS)]


def text_of(row: PromptRow) -> str:
    return row.prompt if isinstance(row.prompt, str) else "\n".join(message["content"] for message in row.prompt)


class Prompts:
    """Prompts, other ones for every load, and others again to warm up with.

    Args:
        rows: what is measured, in order, and from the beginning again when all are used.
        other_rows: what is sent before, and what shared beginnings are made of.
        num_tokens: the length of each prompt: a row's text and those after it, cut. None leaves rows as they are.
        num_shared: tokens that all prompts of a load begin with, before their own.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        other_rows: Sequence[PromptRow],
        *,
        num_tokens: int | None = None,
        num_shared: int = 0,
        chars_per_token: float = CHARS_PER_TOKEN,
    ) -> None:
        self._rows = {True: other_rows, False: rows}
        self._num_used = {True: 0, False: 0}
        self._num_loads = 0
        self._num_chars = None if num_tokens is None else max(1, round(num_tokens * chars_per_token))
        self._num_shared_chars = round(num_shared * chars_per_token)

    @property
    def has_repeated(self) -> bool:
        """Some measured prompts have been taken twice."""
        return self._num_used[False] > len(self._rows[False])

    def take(self, count: int, *, is_warm_up: bool = False) -> list[Prompt]:
        """The next prompts."""
        rows, first = self._rows[is_warm_up], self._num_used[is_warm_up]
        self._num_used[is_warm_up] += count
        # Beginnings are new to a server that has seen those of earlier loads.
        shared = text_from(self._rows[True], 7 * self._num_loads, self._num_shared_chars)
        self._num_loads += 1
        return [self._prompt(rows, (first + i) % len(rows), shared) for i in range(count)]

    def _prompt(self, rows: Sequence[PromptRow], index: int, shared: str) -> Prompt:
        row = rows[index]
        if self._num_chars is not None:
            messages = [{"role": "user", "content": text_from(rows, index, self._num_chars)}]
        elif isinstance(row.prompt, str):
            messages = [{"role": "user", "content": row.prompt}]
        else:
            messages = row.prompt
        if not shared:
            return Prompt(messages)
        first = {**messages[0], "content": f"{shared}\n\n{messages[0]['content']}"}
        return Prompt([first, *messages[1:]])


def text_from(rows: Sequence[PromptRow], index: int, num_chars: int) -> str:
    """That many characters of the rows' texts, from one row on and around."""
    texts, length = [], -1
    while length < num_chars:
        texts.append(text_of(rows[index % len(rows)]))
        length += len(texts[-1]) + 1
        index += 1
    return "\n".join(texts)[:num_chars]


def samples(rows: Sequence[PromptRow]) -> list[str]:
    """Two texts like the prompts, to count the tokens of. Their beginnings are no prompt's, lest a server caches one."""
    return [text_from(rows, len(rows) // 2, num_chars + 13)[13:] for num_chars in SAMPLE_CHARS]


def chars_per_token(short: tuple[int, int], long: tuple[int, int]) -> float:
    """From the characters and tokens of two prompts. What a chat template adds to both does not count."""
    num_chars, num_tokens = long[0] - short[0], long[1] - short[1]
    return num_chars / num_tokens if num_tokens > 0 else math.inf
