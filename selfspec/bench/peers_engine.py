"""This project's engine, driven beside others."""

from __future__ import annotations

import queue

from selfspec.bench.peers import News, Settings
from selfspec.config import SamplingParams
from selfspec.drafters import Drafter
from selfspec.engine import Event, SpecEngine
from selfspec.loop.sequence import Request
from selfspec.model.target import Target

MOST_WAITING = 1 << 16


class EnginePeer:
    """A `SpecEngine` of as many places as there are streams.

    Args:
        longest: tokens of the longest request with its answer and drafts; the cache has room for one in every place,
            because preemption is not what is measured.
    """

    takes_all = True

    def __init__(self, target: Target, drafter: Drafter | None, *, places: int, longest: int) -> None:
        drafters = [] if drafter is None else [drafter]
        self._engine = SpecEngine(
            target, drafters, max_batch=places, max_waiting=MOST_WAITING, cache_tokens=places * longest
        )
        self._engine.warm_up()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.num_requests = self._num_tokens = self._num_passes = 0

    def submit(self, number: int, prompt_ids: list[int], settings: Settings) -> None:
        sampling = SamplingParams(
            max_new_tokens=settings.max_tokens,
            temperature=settings.temperature,
            seed=number,
            ignore_eos=settings.ignore_eos,
        )
        self.num_requests += 1
        self._engine.submit([Request(prompt_ids, sampling, number)], self._events.put)

    def news(self) -> list[News]:
        events = [self._events.get()]
        while not self._events.empty():
            events.append(self._events.get())
        for event in events:
            if event.error is not None:
                raise event.error
            if event.completion is not None:
                self._num_tokens += len(event.completion.token_ids)
                self._num_passes += event.completion.num_target_passes
        return [News(event.request.index, event.token_ids, event.is_last) for event in events]

    def counts(self) -> tuple[float, float]:
        return self._num_tokens, self._num_passes

    def close(self) -> None:
        self._engine.close()
