"""What clients get over HTTP while a GPU is busy, measured without one: a stand-in for the GPU behind the real server.

    python tests/serve/stand_in.py --target PATH_OR_ID --streams 64 --step-ms 6

The stand-in is a real engine whose passes only take time: a step is launched, its tokens are there some milliseconds later,
and the engine's thread handles them while the next step runs. Only the tokenizer is the target's. This process is the client
and reads all streams; the server has processes of its own. All figures are of the time in which every stream is open.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from selfspec.drafters import NgramDrafter
from selfspec.engine import Listener, SpecEngine
from selfspec.loop.accept import Acceptance
from selfspec.loop.group import Group, Step, StepSeconds
from selfspec.loop.scheduler import Scheduler
from selfspec.loop.sequence import Emission, Request, Sequence
from selfspec.model.target import Target
from selfspec.serve.options import ServeOptions
from selfspec.serve.remote import RemoteEngine
from selfspec.serve.server import run
from selfspec.serve.service import Service
from selfspec.serve.sockets import listen
from selfspec.tree import chain

TEXT = (
    "The harbour lay still that morning, and the boats moved only when a gull landed on one of them. Nobody spoke: the old "
    "men mended their nets, the children counted crabs, and a dog slept in the shade of an upturned hull. At nine o'clock "
    "the ferry came round the headland, “half an hour early”, as Marta said, because the tide was with it. "
)


class TimedScheduler(Scheduler):
    """Gives each sequence the next token of a fixed text every so many seconds, without a model."""

    def __init__(self, scheduler: Scheduler, seconds: float, host_seconds: float) -> None:
        super().__init__(scheduler.target, scheduler.cache, max_batch=scheduler.max_batch)
        self._seconds = seconds
        self._host_seconds = host_seconds
        self._text = scheduler.target.tokenizer(TEXT).input_ids
        self._running: list[Sequence] = []
        self._done = self._launched = time.perf_counter()
        self._computed = 0.0
        self._acceptance = Acceptance(*torch.zeros(4, 1, dtype=torch.int64))
        self._forget()

    def _forget(self) -> None:
        self._num_full = 0
        self._full_seconds = self._busy_seconds = self._computing_seconds = 0.0

    def submit(self, request: Request, group: Group) -> Sequence:
        sequence = super().submit(request, group)
        sequence.started = time.perf_counter()
        return sequence

    def round(self) -> list[Step]:
        # Counted once a whole step has been full.
        was_full = len(self._running) == self.max_batch
        while self.waiting and len(self._running) < self.max_batch:
            self._running.append(self.waiting.popleft())
        if not self._running:
            return []
        before, handled, computing = self._launched, time.perf_counter(), time.thread_time()
        # The interpreter is free while the device works.
        time.sleep(max(self._done - handled, 0))
        # The next step is launched before this one's tokens are handled.
        self._launched = time.perf_counter()
        self._done = max(self._done, self._launched) + self._seconds
        while time.perf_counter() < self._launched + self._host_seconds:
            pass
        if was_full:
            self._num_full += 1
            self._full_seconds += self._launched - before
            self._busy_seconds += handled - before
            self._computing_seconds += computing - self._computed
        self._computed = time.thread_time()
        stepped, emissions = list(self._running), []
        for sequence in stepped:
            sequence.num_target_passes += 1
            token = self._text[len(sequence.token_ids) % len(self._text)]
            emissions.append(Emission(sequence.emit([token]), 0, 0))
        finished = [sequence for sequence in stepped if sequence.finish_reason is not None]
        for sequence in finished:
            self.cancel(sequence)
        tree = chain(torch.zeros(len(stepped), dtype=torch.int64))
        drafter = self._groups[0].drafter
        seconds = StepSeconds(0.0, self._seconds, 0.0)
        return [Step(drafter.name, drafter, stepped, tree, self._acceptance, emissions, finished, seconds)]

    def _vacate(self, sequence: Sequence) -> None:
        (self._running if sequence in self._running else self.waiting).remove(sequence)
        if not self._running and self._num_full:
            facts = {
                "engine_tokens_per_second": self._num_full * self.max_batch / self._full_seconds,
                "step_ms": 1000 * self._full_seconds / self._num_full,
                "host_ms": 1000 * self._busy_seconds / self._num_full,
                "host_cpu_ms": 1000 * self._computing_seconds / self._num_full,
            }
            print(json.dumps(facts), flush=True)  # noqa: T201
            self._forget()


def tiny_target(source: str) -> Target:
    """A random model of one layer, with the tokenizer of another."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, max_position_embeddings=8192, **size)
    return Target(LlamaForCausalLM(config).eval(), tokenizer, name=source)


def timed_engine(
    listener: Listener, *, source: str, streams: int, seconds: float, host_seconds: float, makes_text: bool = True
) -> SpecEngine:
    options = {"max_batch": streams, "cache_tokens": 1 << 20, "makes_text": makes_text, "listener": listener}
    engine = SpecEngine(tiny_target(source), [NgramDrafter(4)], **options)
    scheduler = TimedScheduler(engine._scheduler, seconds, host_seconds)
    engine._groups = {name: scheduler.add_group(group.drafter, name=name) for name, group in engine._groups.items()}
    engine._scheduler = scheduler
    return engine


def serve(source: str, streams: int, seconds: float, host_seconds: float, *, http_process: bool) -> None:
    """Run the server until it gets a signal."""
    service = Service("stand-in", ServeOptions(max_batch=streams, log_level="warning"))
    listener = listen("127.0.0.1", 0)
    make = partial(timed_engine, source=source, streams=streams, seconds=seconds, host_seconds=host_seconds)

    def load() -> None:
        if http_process:
            service.attach(RemoteEngine(partial(make, makes_text=False), listener=service.metrics, on_death=service.fail))
        else:
            service.attach(make(service.metrics))
        print(listener.getsockname()[1], flush=True)  # noqa: T201

    run(service, listener, load)


class Stream(asyncio.Protocol):
    """One streamed answer. It only notes when how many pieces come, because a client must not cost more than the server."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.arrivals: list[tuple[float, int]] = []
        self.end = b""
        self.is_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        transport.write(f"{head}Content-Length: {len(self._body)}\r\n\r\n".encode() + self._body)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.arrivals.append((time.perf_counter(), data.count(b'"delta":{"content":')))
        self.end = (self.end + data)[-2000:]
        if b"[DONE]" in self.end and not self.is_done.done():
            self.is_done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.is_done.done():
            self.is_done.set_exception(RuntimeError(f"the stream broke: {self.end!r}"))


async def read_all(port: int, streams: int, num_tokens: int) -> list[Stream]:
    """All streams at once, read to their end."""
    body = {
        "model": "stand-in",
        "messages": [{"role": "user", "content": "Tell me about the harbour."}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    loop = asyncio.get_running_loop()
    make = partial(Stream, json.dumps(body).encode())
    opened = [await loop.create_connection(make, "127.0.0.1", port) for _ in range(streams)]
    await asyncio.gather(*(stream.is_done for _, stream in opened))
    return [stream for _, stream in opened]


def figures(streams: list[Stream], num_tokens: int) -> dict[str, float]:
    """What arrived between the moment when the last stream had begun and the moment when the first one ended."""
    pieces = [[arrival for arrival in stream.arrivals if arrival[1]] for stream in streams]
    begin, end = max(each[0][0] for each in pieces), min(each[-1][0] for each in pieces)
    inside = [[arrival for arrival in each if begin <= arrival[0] <= end] for each in pieces]
    gaps = np.concatenate([np.diff([moment for moment, _ in each]) for each in inside]) * 1000
    # A piece may have several tokens.
    num_pieces = sum(count for each in pieces for _, count in each)
    per_piece = len(streams) * num_tokens / num_pieces
    arrived = sum(count for each in inside for _, count in each[1:]) * per_piece
    return {
        "tokens_per_second": arrived / (end - begin),
        "tokens_per_piece": per_piece,
        "gap_median_ms": float(np.median(gaps)),
        "gap_p99_ms": float(np.percentile(gaps, 99)),
        "gap_worst_ms": float(gaps.max()),
    }


def cpu_seconds(process_id: int) -> float:
    """What a process has computed so far, on Linux."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(
    target: Annotated[str, typer.Option(help="path or id, for its tokenizer")],
    streams: Annotated[int, typer.Option(help="answers at once")] = 64,
    step_ms: Annotated[float, typer.Option(help="time of a pass")] = 6.0,
    host_ms: Annotated[
        float, typer.Option(help="what the engine's thread computes in a pass besides handling tokens")
    ] = 0.0,
    tokens: Annotated[int, typer.Option(help="tokens of each answer")] = 1500,
    http_process: Annotated[bool, typer.Option(help="the engine in a process of its own")] = True,
    is_server: Annotated[bool, typer.Option("--is-server", hidden=True)] = False,
) -> None:
    """Start the server, read all streams, and print the figures as JSON."""
    if is_server:
        serve(target, streams, step_ms / 1000, host_ms / 1000, http_process=http_process)
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--is-server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            before = cpu_seconds(server.pid)
            read = asyncio.run(read_all(port, streams, tokens))
            facts = json.loads(server.stdout.readline())
            facts["http_cpu_us_per_token"] = 1e6 * (cpu_seconds(server.pid) - before) / (streams * tokens)
        finally:
            server.terminate()
    print(json.dumps({**facts, **figures(read, tokens)}, indent=2))  # noqa: T201


if __name__ == "__main__":
    typer.run(main)
