"""What is measured of one engine in one mode, part by part, and the record that is kept of it.

| part | what is measured |
| --- | --- |
| speed | tokens per second at each number of streams: the first run after the engine is ready, then the repeats |
| alone | the tokens of some of these requests when nothing else runs, which all other modes must give, too |
| prompts | the time to the first token of long prompts |
| hard | speed again, on prompts of random tokens and at a high temperature: text that nobody can draft |
| jump | the load goes from many streams to one and back |

No prompt is used twice in a part, and what warms an engine up is never measured. Between two parts the engine is opened
anew, so a cache of prompts holds none of those to come.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from selfspec.bench.peers import Peer, Settings, Trace, drive, first_token_seconds, jump, phase_rates

JSON = dict[str, Any]

PARTS = ("speed", "alone", "prompts", "hard", "jump")
WORK_FILE = "work.json"
PLAIN = "none"
# For some ten seconds at any number of streams, and enough for a run with all streams busy.
LEAST_REQUESTS, REQUESTS_PER_STREAM = 6, 3
WARM_UP_TOKENS, LEAST_WARM_UP, MOST_WARM_UP = 64, 4, 128
HARD_TEMPERATURE = 1.5
# What an engine may need for the drafts of a row, besides its text.
ROOM = 64


def num_requests(num_streams: int) -> int:
    return max(LEAST_REQUESTS, REQUESTS_PER_STREAM * num_streams)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What to measure."""

    streams: list[int] = field(
        default_factory=lambda: [1, 8, 32, 64, 128], metadata={"help": "numbers of simultaneous streams"}
    )
    repeats: int = field(
        default=3, metadata={"help": "runs that count for each number of streams, after the first one of an engine"}
    )
    lengths: list[int] = field(
        default_factory=lambda: [512, 2048, 8192, 16384], metadata={"help": "of the prompts whose first token is timed"}
    )
    parts: list[str] = field(
        default_factory=lambda: ["speed", "alone", "prompts"], metadata={"help": f"what to measure: {', '.join(PARTS)}"}
    )
    max_tokens: int = field(default=128, metadata={"help": "most tokens for each answer"})
    num_alone: int = field(default=8, metadata={"help": "requests of each number of streams that are answered alone, too"})
    jump_streams: int = field(default=64, metadata={"help": "the jump goes from so many streams to one and back"})
    jump_seconds: float = field(default=5.0, metadata={"help": "length of each of its three phases"})

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.parts) - set(PARTS)):
            raise ValueError(f"part {unknown[0]!r} is not known: use some of {', '.join(PARTS)}")
        for name in ("repeats", "max_tokens", "num_alone", "jump_streams", "jump_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: use a number above 0")
        for name in ("streams", "lengths"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: use numbers above 0")

    @property
    def phases(self) -> list[tuple[int, float]]:
        return [(streams, self.jump_seconds) for streams in (self.jump_streams, 1, self.jump_streams)]

    @property
    def most_streams(self) -> int:
        return max(*self.streams, self.jump_streams if "jump" in self.parts else 1)

    @property
    def num_requests(self) -> int:
        """Prompts that `speed` needs."""
        return sum((self.repeats + 1) * num_requests(streams) for streams in self.streams)


@dataclass(frozen=True)
class Work:
    """Token ids that every engine gets.

    Attributes:
        prompts: the measured ones.
        warm: others, of another kind of text.
        long: texts of every length.
    """

    prompts: list[list[int]]
    warm: list[list[int]]
    long: dict[int, list[list[int]]]

    @classmethod
    def read(cls, directory: Path, suite: Suite) -> Work:
        """The work in a folder.

        Raises:
            ValueError: it is not there, or too little for the suite.
        """
        file = directory / WORK_FILE
        try:
            record = json.loads(file.read_text())
        except FileNotFoundError as error:
            raise ValueError(f"{file} is not there: make the work first (recipes/bench_peers.py work)") from error
        work = cls(record["prompts"], record["warm"], {int(length): texts for length, texts in record["long"].items()})
        if len(work.prompts) < suite.num_requests:
            raise ValueError(
                f"{file} has {len(work.prompts)} prompts, and {suite.num_requests} are needed: make the work with these "
                "--streams and --repeats, or use fewer"
            )
        if missing := [length for length in suite.lengths if length not in work.long]:
            raise ValueError(f"{file} has no texts of {missing[0]} tokens: make the work with these --lengths")
        return work

    def save(self, directory: Path) -> None:
        (directory / WORK_FILE).write_text(json.dumps(asdict(self)))

    @property
    def longest(self) -> int:
        return max(map(len, [*self.prompts, *self.warm]))

    def hard(self, prompts: Iterable[list[int]]) -> list[list[int]]:
        """Prompts of the same lengths, of tokens of the texts in random order."""
        known = sorted({token for texts in self.long.values() for text in texts for token in text})
        draw = random.Random(0)
        return [draw.choices(known, k=len(prompt)) for prompt in prompts]


# Opens an engine: how many requests it decodes at once, and how many tokens the longest of them has with its answer.
Opener = Callable[[int, int], Peer]


def measure(
    open_peer: Opener, work: Work, suite: Suite, record: JSON, *, is_plain: bool, on_part: Callable[[str], None]
) -> None:
    """Measure the parts of a suite, and put each into `record` when it is done.

    Args:
        is_plain: this is decoding without drafts, whose answers alone are what all modes must give.
        on_part: called after each, with a line about it.
    """
    record["suite"] = asdict(suite)
    if "speed" in suite.parts:
        record["speed"] = []
        _speed(open_peer, work, suite, record["speed"], on_part, is_hard=False)
    if "alone" in suite.parts and is_plain:
        record["alone"] = _alone(open_peer, work, suite)
        on_part("alone")
    if "prompts" in suite.parts:
        record["prompts"] = {}
        _first_tokens(open_peer, work, suite, record["prompts"], on_part)
    if "hard" in suite.parts:
        record["hard"] = []
        _speed(open_peer, work, suite, record["hard"], on_part, is_hard=True)
    if "jump" in suite.parts:
        record["jump"] = _jump(open_peer, work, suite)
        on_part(f"jump: {record['jump']['rates']}")


def _parts(work: Work, suite: Suite) -> dict[tuple[int, int], list[list[int]]]:
    """The prompts of every number of streams and repeat, the first run being number 0."""
    parts, start = {}, 0
    for streams in suite.streams:
        for repeat in range(suite.repeats + 1):
            parts[streams, repeat] = work.prompts[start : start + num_requests(streams)]
            start += num_requests(streams)
    return parts


def _speed(
    open_peer: Opener, work: Work, suite: Suite, runs: list[JSON], on_part: Callable[[str], None], *, is_hard: bool
) -> None:
    parts = _parts(work, suite)
    for streams in suite.streams:
        own = {repeat: prompts for (of, repeat), prompts in parts.items() if of == streams}
        # In a function of its own, which lets go of the engine's memory before the next one is opened.
        _speed_of(open_peer, work, suite, streams, own, runs, on_part, is_hard=is_hard)


def _speed_of(
    open_peer: Opener,
    work: Work,
    suite: Suite,
    streams: int,
    parts: dict[int, list[list[int]]],
    runs: list[JSON],
    on_part: Callable[[str], None],
    *,
    is_hard: bool,
) -> None:
    settings = Settings(max_tokens=suite.max_tokens, temperature=HARD_TEMPERATURE if is_hard else 0.0, ignore_eos=is_hard)
    with closing(open_peer(streams, work.longest + suite.max_tokens + ROOM)) as peer:
        for repeat, prompts in parts.items():
            is_first = peer.num_requests == 0
            trace = drive(peer, work.hard(prompts) if is_hard else prompts, streams, settings)
            runs.append({"streams": streams, "repeat": repeat, "is_first": is_first, **_run_record(trace, streams)})
            on_part(
                f"{'hard' if is_hard else 'speed'}, {streams} at once, {f'repeat {repeat}' if repeat else 'first'}: "
                f"{runs[-1]['tokens_per_second']:.1f} tokens/s"
            )
            if repeat == 0:
                _warm_up(peer, work, suite, streams)


def _warm_up(peer: Peer, work: Work, suite: Suite, streams: int) -> None:
    prompts = work.warm[: max(LEAST_WARM_UP, min(2 * streams, MOST_WARM_UP))]
    drive(peer, prompts, streams, Settings(max_tokens=min(WARM_UP_TOKENS, suite.max_tokens)))


def _run_record(trace: Trace, streams: int) -> JSON:
    seconds, num_tokens = trace.busy(streams)
    return {
        "seconds": seconds,
        "tokens": num_tokens,
        "tokens_per_second": num_tokens / seconds,
        "total_seconds": trace.seconds,
        "total_tokens": trace.num_tokens,
        "acceptance_length": trace.acceptance_length,
        "answers": _in_order(trace),
    }


def _alone(open_peer: Opener, work: Work, suite: Suite) -> list[JSON]:
    """Answers to the first requests of each number of streams, one after the other on an engine of one place."""
    out = []
    with closing(open_peer(1, work.longest + suite.max_tokens + ROOM)) as peer:
        for (streams, repeat), prompts in _parts(work, suite).items():
            if repeat == 1:
                trace = drive(peer, prompts[: suite.num_alone], 1, Settings(max_tokens=suite.max_tokens))
                out.append({"streams": streams, "repeat": repeat, "answers": _in_order(trace)})
    return out


def _first_tokens(open_peer: Opener, work: Work, suite: Suite, record: JSON, on_part: Callable[[str], None]) -> None:
    with closing(open_peer(1, max(suite.lengths) + ROOM)) as peer:
        for length in suite.lengths:
            record[str(length)] = [first_token_seconds(peer, text) for text in work.long[length]]
            on_part(f"first token of {length}: {[round(1000 * seconds, 1) for seconds in record[str(length)]]} ms")


def _jump(open_peer: Opener, work: Work, suite: Suite) -> JSON:
    with closing(open_peer(suite.jump_streams, work.longest + suite.max_tokens + ROOM)) as peer:
        _warm_up(peer, work, suite, suite.jump_streams)
        windows = jump(peer, work.prompts, suite.phases, Settings(max_tokens=suite.max_tokens)).windows()
    return {"phases": suite.phases, "windows": windows, "rates": phase_rates(windows, suite.phases)}


def _in_order(trace: Trace) -> list[list[int]]:
    return [trace.answers[number] for number in sorted(trace.answers)]
