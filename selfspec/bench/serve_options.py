"""The settings of a load on servers, checked when they are made, and what they stand for."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfspec.bench.prompts import mixed, read_benchmark
from selfspec.bench.serve import Plan
from selfspec.bench.serve_client import ENDPOINTS, Ask, Server
from selfspec.bench.serve_work import RANDOM, Load, random_rows
from selfspec.traffic.prompt_files import PromptRow

DEFAULT_STREAMS = "1,8,32"
LEAST_REQUESTS, REQUESTS_PER_STREAM, REQUESTS_OF_A_RATE = 8, 4, 64


@dataclass(frozen=True, kw_only=True)
class BenchServeOptions:
    """What to send, and how much at once."""

    concurrency: str | None = field(
        default=None, metadata={"help": f"numbers of streams, each measured by itself; {DEFAULT_STREAMS} without --rate"}
    )
    rate: str | None = field(
        default=None, metadata={"help": "requests per second that arrive at random times; with commas for several rates"}
    )
    burstiness: float = field(
        default=1.0, metadata={"help": "of the arrivals: 1 is a Poisson process, less comes in bursts, more is regular"}
    )
    num_prompts: int | None = field(
        default=None,
        metadata={
            "help": f"requests of each load; by default {REQUESTS_PER_STREAM} a stream, at least {LEAST_REQUESTS}, and "
            f"{REQUESTS_OF_A_RATE} at a rate"
        },
    )
    prompts: str = field(
        default="spec_bench", metadata={"help": "spec_bench, humaneval, a prompt file, or random for words without sense"}
    )
    input_tokens: int | None = field(
        default=None,
        metadata={"help": "length of each prompt, made of the prompts' text; about, by the first server's count"},
    )
    shared_prefix: int = field(
        default=0, metadata={"help": "tokens that all prompts of a load begin with, before their own"}
    )
    max_tokens: int = field(default=128, metadata={"help": "most tokens for each answer"})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy"})
    ignore_eos: bool = field(
        default=False, metadata={"help": "answers end at --max-tokens only; not a field of OpenAI's own API"}
    )
    endpoint: str = field(default="chat", metadata={"help": "chat or completions"})
    cold: bool = field(
        default=False, metadata={"help": "no requests to warm up: the first one after a server's start is measured, too"}
    )
    wait: float = field(default=0.0, metadata={"help": "seconds to wait for a server that is not ready yet"})
    timeout: float = field(default=600.0, metadata={"help": "seconds after which an answer counts as failed"})
    seed: int = field(default=0, metadata={"help": "of arrival times and random words"})
    name: Sequence[str] = field(default=(), metadata={"help": "what to call a server in the tables; once for each"})
    model: Sequence[str] = field(
        default=(), metadata={"help": "the model to ask for, once or once for each server; by default its first"}
    )
    api_key: Sequence[str] = field(
        default=(), metadata={"help": "once or once for each server; $SELFSPEC_API_KEY by default"}
    )
    extra_body: Sequence[str] = field(
        default=(),
        metadata={"help": 'more fields for each request, such as {"drafter": "none"}; once or once for each server'},
    )
    output: Path | None = field(
        default=None, metadata={"help": "JSON file for every figure and request, rewritten after each load"}
    )

    def __post_init__(self) -> None:
        least = {"num_prompts": 1, "input_tokens": 1, "shared_prefix": 0, "max_tokens": 1}
        for name, limit in least.items():
            if (value := getattr(self, name)) is not None and value < limit:
                raise ValueError(f"--{name.replace('_', '-')} {value} is not allowed: use {limit} or more")
        for name in ("burstiness", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name} {getattr(self, name)} is not allowed: use a number above 0")
        for name in ("temperature", "wait"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"--{name} {getattr(self, name)} is not allowed: use 0 or more")
        if self.endpoint not in ENDPOINTS:
            raise ValueError(f"--endpoint {self.endpoint!r} is not known: use {' or '.join(ENDPOINTS)}")
        if self.output is not None and not self.output.parent.is_dir():
            raise ValueError(f"{self.output}: its folder does not exist, so the results could not be written: make it first")
        _ = self.loads

    @property
    def loads(self) -> list[Load]:
        """Streams first, then arrivals, in the order given."""
        streams = self.concurrency if self.concurrency or self.rate else DEFAULT_STREAMS
        loads = []
        for part in streams.split(",") if streams else ():
            if not re.fullmatch(r"[1-9]\d*", part.strip()):
                raise ValueError(f"--concurrency {streams!r} is not a list of whole numbers such as 1,8,32")
            count = int(part)
            num_requests = self.num_prompts or max(LEAST_REQUESTS, REQUESTS_PER_STREAM * count)
            loads.append(Load(num_requests, num_streams=count))
        for part in self.rate.split(",") if self.rate else ():
            if not re.fullmatch(r"\d+(\.\d+)?|\.\d+", part.strip()) or not float(part):
                raise ValueError(f"--rate {self.rate!r} is not a list of numbers above 0 such as 2,4.5")
            num_requests = self.num_prompts or REQUESTS_OF_A_RATE
            loads.append(Load(num_requests, rate=float(part), burstiness=self.burstiness))
        return loads

    @property
    def plan(self) -> Plan:
        ask = Ask(
            endpoint=self.endpoint,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            timeout=self.timeout,
        )
        return Plan(loads=self.loads, ask=ask, is_cold=self.cold, seed=self.seed)

    def rows(self) -> tuple[list[PromptRow], list[PromptRow]]:
        """The rows to measure, and others to warm up with, from a packaged benchmark that is not measured."""
        if self.prompts == RANDOM:
            words = read_benchmark("spec_bench")
            return random_rows(words, self.seed), random_rows(words, self.seed + 1)
        other = "humaneval" if self.prompts == "spec_bench" else "spec_bench"
        return mixed(read_benchmark(self.prompts)), read_benchmark(other)

    def servers(self, urls: Sequence[str]) -> list[Server]:
        """One for each address."""
        if self.name and len(self.name) != len(urls):
            raise ValueError(f"--name is given {_times(len(self.name))} for {_servers(urls)}: give one for each")
        keys = self.api_key or [key for key in [os.environ.get("SELFSPEC_API_KEY")] if key]
        names = list(self.name) or list(_names(urls))
        if len(set(names)) < len(names):
            raise ValueError(f"--name {names[0]} is given twice: the tables could not tell those servers apart")
        more = [None if text is None else _fields(text) for text in _for_each("--extra-body", self.extra_body, urls)]
        models, api_keys = _for_each("--model", self.model, urls), _for_each("--api-key", keys, urls)
        return [
            Server(name, url, api_key, model, fields or {})
            for name, url, api_key, model, fields in zip(names, urls, api_keys, models, more, strict=True)
        ]


def _for_each(option: str, values: Sequence[str], urls: Sequence[str]) -> list[str | None]:
    """A value for each server: its own, the one for all, or none."""
    if len(values) not in (0, 1, len(urls)):
        raise ValueError(f"{option} is given {_times(len(values))} for {_servers(urls)}: give it once, or once for each")
    if not values:
        return [None] * len(urls)
    return list(values) if len(values) == len(urls) else [values[0]] * len(urls)


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _servers(urls: Sequence[str]) -> str:
    return "1 server" if len(urls) == 1 else f"{len(urls)} servers"


def _names(urls: Sequence[str]) -> Iterator[str]:
    """Hosts and ports, with a number where one comes again."""
    for index, url in enumerate(urls):
        host = re.sub(r"^\w+://|/.*$", "", url.strip())
        before = sum(re.sub(r"^\w+://|/.*$", "", other.strip()) == host for other in urls[:index])
        yield f"{host} ({before + 1})" if before else host


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(f'--extra-body {text!r} is not JSON: write an object such as {{"drafter": "none"}}') from error
    if not isinstance(fields, dict):
        raise ValueError(f'--extra-body {text!r} is not an object: write one such as {{"drafter": "none"}}')
    return fields
