"""Load over HTTP on any OpenAI-compatible server: the same requests for each of several, one after the other.

Every load has prompts of its own, and before it others, fewer of them, are sent to warm the server up. Servers take turns
in an order that alternates from load to load, because a slow spell of a shared machine then meets them alike.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from selfspec import __version__
from selfspec.bench.serve_client import Answer, Ask, Prompt, Server, acceptance_length
from selfspec.bench.serve_figures import Figures, summarise
from selfspec.bench.serve_work import Load, Prompts, arrivals

# Of a core; above this the generator may be what limits a run.
BUSY_GENERATOR = 0.8
LEAST_WARM_UP, MOST_WARM_UP = 4, 128
STREAMS_TO_WARM_ARRIVALS = 4
WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class Run:
    """One load on one server.

    Attributes:
        acceptance_length: tokens per target pass by the server's counters, bonus token included; None if it has none.
        generator_load: the share of a core that sending and reading took here.
        is_interrupted: it was ended before all requests were answered; what is open then is left out.
    """

    server: str
    load: Load
    answers: list[Answer]
    figures: Figures
    acceptance_length: float | None
    generator_load: float
    is_interrupted: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        is_cold: send nothing before, so that the first request after a server's start is measured.
    """

    loads: Sequence[Load]
    ask: Ask
    is_cold: bool = False
    seed: int = 0


async def measure(
    servers: Sequence[Server],
    prompts: Prompts,
    plan: Plan,
    *,
    on_run: Callable[[Run], None],
    on_answer: Callable[[], None] = lambda: None,
) -> None:
    """Measure every load on every server. `on_run` gets each run when it ends, also the one that a cancellation ends.

    Raises:
        ValueError: a server answers none of the requests that warm it up.
    """
    for number, load in enumerate(plan.loads):
        warm_up = [] if plan.is_cold else prompts.take(_num_warm_up(load), is_warm_up=True)
        asked = prompts.take(load.num_requests)
        for server in servers[:: -1 if number % 2 else 1]:
            if warm_up:
                await _warm_up(server, warm_up, load, plan.ask)
            await _measure_load(server, asked, load, plan, on_run, on_answer)


def _num_warm_up(load: Load) -> int:
    num_streams = load.num_streams or STREAMS_TO_WARM_ARRIVALS
    return max(LEAST_WARM_UP, min(2 * num_streams, MOST_WARM_UP))


async def _warm_up(server: Server, prompts: Sequence[Prompt], load: Load, ask: Ask) -> None:
    answers: list[Answer] = []
    brief = replace(ask, max_tokens=min(ask.max_tokens, WARM_UP_TOKENS))
    num_streams = load.num_streams or STREAMS_TO_WARM_ARRIVALS
    await _keep_busy(server, prompts, num_streams, brief, answers.append)
    if all(answer.failure is not None for answer in answers):
        raise ValueError(f"{server.url} {answers[0].failure}")


async def _measure_load(
    server: Server,
    prompts: Sequence[Prompt],
    load: Load,
    plan: Plan,
    on_run: Callable[[Run], None],
    on_answer: Callable[[], None],
) -> None:
    answers: list[Answer] = []

    def take(answer: Answer) -> None:
        answers.append(answer)
        on_answer()

    before = await server.counters()
    started, busy = time.perf_counter(), time.process_time()
    interruption = None
    try:
        if load.num_streams is not None:
            await _keep_busy(server, prompts, load.num_streams, plan.ask, take)
        else:
            await _let_arrive(server, prompts, arrivals(load, plan.seed), plan.ask, take)
    except asyncio.CancelledError as error:
        interruption = error
    generator_load = (time.process_time() - busy) / (time.perf_counter() - started)
    if answers:
        # What was open when it was interrupted is not there to show how long all streams were busy.
        num_streams = None if interruption else load.num_streams
        length = acceptance_length(before, await server.counters())
        figures = summarise(answers, num_streams)
        on_run(Run(server.name, load, answers, figures, length, generator_load, interruption is not None))
    if interruption is not None:
        raise interruption


async def _keep_busy(
    server: Server, prompts: Sequence[Prompt], num_streams: int, ask: Ask, take: Callable[[Answer], None]
) -> None:
    """Streams that each send a request when their last is answered, until there are no more prompts."""
    left = iter(prompts)

    async def stream() -> None:
        for prompt in left:
            take(await server.answer(prompt, ask, time.perf_counter()))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(num_streams, len(prompts))):
            group.create_task(stream())


async def _let_arrive(
    server: Server, prompts: Sequence[Prompt], times: Sequence[float], ask: Ask, take: Callable[[Answer], None]
) -> None:
    """Requests that are sent at their times, however many are open."""
    started = time.perf_counter()

    async def send(prompt: Prompt, due: float) -> None:
        await asyncio.sleep(due - time.perf_counter())
        # The clock runs from when it was due, so a generator that is late cannot flatter the server.
        take(await server.answer(prompt, ask, due))

    async with asyncio.TaskGroup() as group:
        for prompt, at in zip(prompts, times, strict=True):
            group.create_task(send(prompt, started + at))


def warnings(runs: Sequence[Run], prompts: Prompts, servers: Sequence[Server]) -> Iterator[str]:
    """What a reader must know of these figures, one sentence each."""
    for run in runs:
        where = f"{run.server}, {run.load.name}"
        if run.is_interrupted:
            yield f"{where}: interrupted after {len(run.answers)} of {run.load.num_requests} requests."
        for reason, count in run.figures.failures.items():
            yield f"{where}: {count} of {len(run.answers)} requests failed: {reason}."
        if run.generator_load > BUSY_GENERATOR:
            yield (
                f"{where}: this program was busy for {run.generator_load:.0%} of a core, so the figures may be its own "
                "limit: send fewer requests at once, or run it on a faster or less busy machine."
            )
    if uncounted := sorted({run.server for run in runs if not run.figures.is_counted}):
        yield f"{', '.join(uncounted)} told no usage for some answers: their chunks were counted as tokens."
    if prompts.has_repeated:
        yield "There were fewer prompts than requests, so some were sent twice, and a server may have cached them."
    urls = [server.url for server in servers]
    if len(set(urls)) < len(urls):
        yield "One server was measured several times, and from the second time on it may have cached the prompts."


def save(path: Path, servers: Sequence[Server], plan: Plan, runs: Sequence[Run]) -> None:
    """Write everything but keys and texts as one JSON file."""
    record = {
        "environment": {"selfspec": __version__, "python": platform.python_version(), "cores": os.cpu_count()},
        "servers": [
            {"name": server.name, "url": server.url, "model": server.model, "extra_body": dict(server.more)}
            for server in servers
        ],
        "settings": {**asdict(plan.ask), "is_cold": plan.is_cold, "seed": plan.seed},
        "runs": [_record(run) for run in runs],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def _record(run: Run) -> dict[str, object]:
    start = min(answer.due for answer in run.answers)
    requests = [
        {
            "due": answer.due - start,
            "first_token": answer.first_seconds,
            "seconds": answer.seconds,
            "tokens": answer.num_tokens,
            "chunks": len(answer.chunk_times),
            "prompt_tokens": answer.num_prompt_tokens,
            "failure": answer.failure,
        }
        for answer in sorted(run.answers, key=lambda answer: answer.due)
    ]
    return {
        "server": run.server,
        "load": {"name": run.load.name, **asdict(run.load)},
        "figures": asdict(run.figures),
        "acceptance_length": run.acceptance_length,
        "generator_load": run.generator_load,
        "is_interrupted": run.is_interrupted,
        "requests": requests,
    }
