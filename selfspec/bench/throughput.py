"""Throughput of the engine with many streams at once, with speculation and without it, in one run.

For every number of streams and every repeat the two modes answer the same prompts, one right after the other and each time
in another order, so that a slow spell of a shared machine meets both; ratios are taken within such a pair. Each mode has an
engine, and so a prefix cache, of its own, and meets every prompt once. A first pair, which is not counted, lets the planner
measure its costs, as a server's does in its first minute.

A run counts as long as every stream is busy. What comes after is the tail of a benchmark, not of a server: streams whose
drafts were accepted have ended, and the slowest decode alone.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from selfspec.api import Completion
from selfspec.bench.tasks import PLAIN, choose_prompts, environment
from selfspec.config import SamplingParams
from selfspec.drafters import Drafter
from selfspec.engine import SpecEngine
from selfspec.loop.sequence import Request
from selfspec.model.target import Target
from selfspec.traffic.prompt_files import PromptRow


@dataclass(frozen=True)
class Run:
    """One mode's answers to the prompts of a repeat, `num_streams` at a time, prefill included.

    Attributes:
        seconds: wall clock until the first stream had nothing more to do.
        num_tokens: emitted until then.
        acceptance_length: tokens per target pass over whole answers, bonus token included.
        is_identical: all tokens are those of plain decoding.
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
    """A number of streams, over its repeats: medians, and of the pairs' ratios the worst as well; above 1 is faster."""

    num_streams: int
    num_repeats: int
    plain_tokens_per_second: float
    tokens_per_second: float
    ratio: float
    worst_ratio: float
    acceptance_length: float
    num_identical: int


def mixed(rows: Sequence[PromptRow]) -> list[PromptRow]:
    """Benchmark prompts in an order, always the same, that takes from every task its share in any stretch of it."""
    shuffled = random.Random(0).sample(rows, len(rows))
    places = {
        row.id: (number + 0.5) / len(task)
        for task in choose_prompts(shuffled, None).values()
        for number, row in enumerate(task)
    }
    return sorted(shuffled, key=lambda row: places[row.id])


def run(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    *,
    streams: Sequence[int],
    num_repeats: int,
    rounds: int,
    sampling: SamplingParams,
    use_cost_guard: bool = True,
    on_run: Callable[[], None] = lambda: None,
) -> list[Run]:
    """Measure every number of streams.

    Args:
        rounds: answers per stream and repeat; a stream begins the next as soon as one ends.

    Raises:
        ValueError: too few prompts for none to be met twice.
    """
    needed = max(streams) * rounds * (num_repeats + 1)
    if len(prompts) < needed:
        raise ValueError(
            f"{needed} prompts are needed, and there are {len(prompts)}: give more, or fewer streams or repeats"
        )
    runs = []
    for num_streams in streams:
        size = num_streams * rounds
        room = max(map(len, prompts[: size * (num_repeats + 1)])) + sampling.max_new_tokens
        modes = {PLAIN: [], drafter.name: [drafter]}
        engines = {
            mode: SpecEngine(
                target,
                drafters,
                max_batch=num_streams,
                max_waiting=size,
                # Room for every stream's text and the drafts behind it: giving way is not what is measured.
                cache_tokens=num_streams * (room + 64),
                use_cost_guard=use_cost_guard,
            )
            for mode, drafters in modes.items()
        }
        for engine in engines.values():
            engine.warm_up()
        for repeat in range(num_repeats + 1):
            part = prompts[repeat * size : (repeat + 1) * size]
            order = list(engines)[:: -1 if repeat % 2 else 1]
            measured = {mode: _answer(engines[mode], part, sampling) for mode in order}
            on_run()
            if repeat == 0:
                continue
            expected = measured[PLAIN][2]
            for mode, (seconds, num_tokens, answers) in measured.items():
                num_passes = sum(answer.num_target_passes for answer in answers)
                length = sum(len(answer.token_ids) for answer in answers) / num_passes
                is_identical = all(a.token_ids == b.token_ids for a, b in zip(answers, expected, strict=True))
                runs.append(Run(num_streams, repeat, mode, seconds, num_tokens, length, is_identical))
        for engine in engines.values():
            engine.close()
        # Their caches' memory is the next ones'.
        engines.clear()
    return runs


def _answer(
    engine: SpecEngine, prompts: Sequence[list[int]], sampling: SamplingParams
) -> tuple[float, int, list[Completion]]:
    """Seconds and tokens as long as every stream is busy, and all answers."""
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


def summarise(runs: Sequence[Run]) -> list[Throughput]:
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
                median(run.acceptance_length for run in drafted.values()),
                sum(run.is_identical for run in drafted.values()),
            )
        )
    return out


def save(path: Path, target: Target, sampling: SamplingParams, runs: Sequence[Run]) -> None:
    """Every run, and the summary, as one JSON file."""
    record = {
        "environment": environment(target),
        "sampling": asdict(sampling),
        "summary": [asdict(entry) for entry in summarise(runs)],
        "runs": [asdict(run) for run in runs],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
