"""Throughput of the engine with many streams at once, with and without speculation, in one run.

For every number of streams and every repeat, both modes answer the same prompts one right after the other, in an order that
alternates. A slow spell of a shared machine then slows both, and ratios are taken within such a pair. Each mode has its own
engine and therefore its own prefix cache, and sees every prompt once. A first pair does not count: during it the planner
measures its costs, as it does in a server's first minute.

A run counts only while every stream is busy. The rest is the tail of a benchmark and tells nothing about a server: the
streams whose drafts were accepted have ended, and the slowest decode alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from selfspec.api import Completion
from selfspec.bench.compare import PLAIN
from selfspec.config import SamplingParams
from selfspec.drafters import Drafter
from selfspec.engine import SpecEngine
from selfspec.loop.sequence import Request
from selfspec.model.target import Target


@dataclass(frozen=True)
class ThroughputRun:
    """One mode's answers to the prompts of a repeat, `num_streams` at a time, prefill included.

    Attributes:
        seconds: wall clock until the first stream had nothing left to do.
        num_tokens: tokens emitted until then.
        acceptance_length: tokens per target pass over whole answers, bonus token included.
        is_identical: all tokens equal those of plain decoding.
    """

    num_streams: int
    repeat: int
    mode: str
    seconds: float
    num_tokens: int
    acceptance_length: float
    is_identical: bool

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Throughput:
    """The figures for one number of streams: medians over its repeats, and the extreme ratios. Above 1 is faster."""

    num_streams: int
    num_repeats: int
    plain_tokens_per_second: float
    tokens_per_second: float
    ratio: float
    worst_ratio: float
    best_ratio: float
    acceptance_length: float
    num_identical: int


@dataclass(frozen=True, kw_only=True)
class ThroughputSettings:
    """What to measure.

    Attributes:
        streams: numbers of streams, each measured by itself.
        num_repeats: how many pairs of runs count.
        rounds: answers per stream and repeat. A stream starts its next answer as soon as one ends.
    """

    streams: Sequence[int]
    num_repeats: int
    rounds: int
    sampling: SamplingParams
    use_cost_guard: bool = True


def measure_throughput(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    settings: ThroughputSettings,
    *,
    finished: Collection[tuple[int, int]] = (),
    on_pair: Callable[[list[ThroughputRun]], None] = lambda _: None,
) -> list[ThroughputRun]:
    """Measure every number of streams.

    Args:
        finished: numbers of streams and of repeats to leave out, because an earlier run has measured them.
        on_pair: gets both runs of a pair as soon as they are measured, and an empty list after a first pair.

    Raises:
        ValueError: there are too few prompts to use each only once.
    """
    num_parts, sampling = settings.num_repeats + 1, settings.sampling
    needed = max(settings.streams) * settings.rounds * num_parts
    if len(prompts) < needed:
        raise ValueError(
            f"{needed} prompts are needed, and there are {len(prompts)}: give more, or fewer streams or repeats"
        )
    runs = []
    for num_streams in settings.streams:
        repeats = [repeat for repeat in range(1, num_parts) if (num_streams, repeat) not in finished]
        if not repeats:
            continue
        size = num_streams * settings.rounds
        parts = [prompts[repeat * size : (repeat + 1) * size] for repeat in range(num_parts)]
        most = max(len(prompt) for part in parts for prompt in part) + sampling.max_new_tokens
        engines = {
            mode: SpecEngine(
                target,
                drafters,
                max_batch=num_streams,
                max_waiting=size,
                # Room for every stream's text and drafts, because preemption is not what is measured.
                cache_tokens=num_streams * (most + 64),
                use_cost_guard=settings.use_cost_guard,
            )
            for mode, drafters in {PLAIN: [], drafter.name: [drafter]}.items()
        }
        for engine in engines.values():
            engine.warm_up()
        for repeat in (0, *repeats):
            pair = _measure_pair(engines, parts[repeat], sampling, repeat)
            counted = pair if repeat > 0 else []
            on_pair(counted)
            runs += counted
        for engine in engines.values():
            engine.close()
        # Frees the memory of their caches for the next pair of engines.
        engines.clear()
    return runs


def _measure_pair(
    engines: Mapping[str, SpecEngine], prompts: Sequence[list[int]], sampling: SamplingParams, repeat: int
) -> list[ThroughputRun]:
    """Let every mode answer the prompts; odd repeats reverse the order of the modes."""
    order = list(engines)[:: -1 if repeat % 2 else 1]
    measured = {mode: _answer(engines[mode], prompts, sampling) for mode in order}
    expected = measured[PLAIN][2]
    runs = []
    for mode, (seconds, num_tokens, answers) in measured.items():
        num_passes = sum(answer.num_target_passes for answer in answers)
        length = sum(len(answer.token_ids) for answer in answers) / num_passes
        is_identical = all(a.token_ids == b.token_ids for a, b in zip(answers, expected, strict=True))
        num_streams = engines[mode].max_batch
        runs.append(ThroughputRun(num_streams, repeat, mode, seconds, num_tokens, length, is_identical))
    return runs


def _answer(
    engine: SpecEngine, prompts: Sequence[list[int]], sampling: SamplingParams
) -> tuple[float, int, list[Completion]]:
    """Seconds and tokens while every stream was busy, and all answers."""
    requests = [Request(prompt, sampling, index) for index, prompt in enumerate(prompts)]
    answers: dict[int, Completion] = {}
    num_tokens = 0
    seconds = 0.0
    started = time.perf_counter()
    for event in engine.stream(requests):
        if event.error is not None:
            raise event.error
        if len(prompts) - len(answers) >= engine.max_batch:
            num_tokens += len(event.token_ids)
            seconds = time.perf_counter() - started
        if event.completion is not None:
            answers[event.request.index] = event.completion
    return seconds, num_tokens, [answers[index] for index in range(len(prompts))]


def summarise_throughput(runs: Sequence[ThroughputRun]) -> list[Throughput]:
    """One entry for every number of streams."""
    out = []
    for num_streams in dict.fromkeys(run.num_streams for run in runs):
        own = [run for run in runs if run.num_streams == num_streams]
        plain = {run.repeat: run for run in own if run.mode == PLAIN}
        drafted = {run.repeat: run for run in own if run.mode != PLAIN}
        ratios = [drafted[repeat].tokens_per_second / plain[repeat].tokens_per_second for repeat in plain]
        out.append(
            Throughput(
                num_streams,
                len(plain),
                median(run.tokens_per_second for run in plain.values()),
                median(run.tokens_per_second for run in drafted.values()),
                median(ratios),
                min(ratios),
                max(ratios),
                median(run.acceptance_length for run in drafted.values()),
                sum(run.is_identical for run in drafted.values()),
            )
        )
    return out


def run_of(row: Mapping[str, Any]) -> ThroughputRun:
    """The run in a record's row."""
    return ThroughputRun(**{name: value for name, value in row.items() if name != "id"})
