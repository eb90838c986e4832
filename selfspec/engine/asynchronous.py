"""The engine for asyncio: answers as they come, many at once, in passes that they share.

An event loop never waits for the engine, nor the engine for a loop: events go from the engine's thread into a queue of the
caller's loop. Invariant: a request whose task is cancelled, or whose stream is closed, takes no further step.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

from selfspec.api.arguments import (
    DrafterLike,
    SamplingLike,
    check_target,
    resolve_drafter,
    samplings_of,
)
from selfspec.api.calls import request_of, requests_of
from selfspec.api.prompts import Prompt, listed
from selfspec.engine.engine import SpecEngine
from selfspec.engine.events import EngineClosed, Event
from selfspec.loop.answer import Completion, StreamEvent
from selfspec.loop.sequence import Request
from selfspec.model.target import Target

CLOSED = "the AsyncEngine was closed: make another, or keep the block open until all is answered"


class AsyncEngine:
    """Answers many prompts at once for asyncio, until it is closed. Tasks, loops and threads may share one.

        async with AsyncEngine(target, drafter="ngram") as engine:
            async for event in engine.stream("Once upon a time", max_new_tokens=64):
                print(event.text, end="")

    Args:
        drafter: what proposes tokens, or its name; None for plain decoding.
        max_batch: the most answers that are decoded together.
        max_waiting: the most further answers that may wait; more are refused with `EngineFull`. None for no limit.
        cache_tokens: the most tokens of all answers together that the KV cache holds; it grows up to that.
        use_cost_guard: draft only as much as measurements say pays; False always drafts all it can.
    """

    def __init__(
        self,
        target: Target,
        *,
        drafter: DrafterLike = None,
        max_batch: int = 16,
        max_waiting: int | None = None,
        cache_tokens: int = 32768,
        use_cost_guard: bool = True,
    ) -> None:
        check_target(target)
        resolved = resolve_drafter(drafter, target)
        self.target = target
        self._engine = SpecEngine(
            target,
            [] if resolved is None else [resolved],
            max_batch=max_batch,
            max_waiting=sys.maxsize if max_waiting is None else max_waiting,
            cache_tokens=cache_tokens,
            use_cost_guard=use_cost_guard,
        )

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def num_running(self) -> int:
        """Answers that are decoded at present."""
        return self._engine.num_running

    @property
    def num_waiting(self) -> int:
        """Answers that wait for a place."""
        return self._engine.num_waiting

    async def aclose(self) -> None:
        """End the engine. Answers that are under way end with `EngineClosed`."""
        # In a thread, because it waits for the step that runs.
        await asyncio.to_thread(self._engine.close)

    async def generate(
        self,
        prompts: Iterable[Prompt] | Prompt,
        *,
        sampling: SamplingLike | Sequence[SamplingLike] | None = None,
        top_logprobs: int = 0,
        **settings: Any,
    ) -> list[Completion]:
        """Answer prompts, or a single one, as `selfspec.generate` does; the completions come in the order of the prompts.

        Raises:
            EngineFull: too many requests wait already.
            EngineClosed: the engine was closed before all was answered.
        """
        params = samplings_of(sampling, settings, top_logprobs=top_logprobs)
        order: list[tuple[int, int]] = []
        requests = list(requests_of(self.target, listed(prompts), params, order, top_logprobs))
        done: dict[tuple[int, int], Completion] = {}
        async with aclosing(self._events(requests)) as events:
            async for event in events:
                if event.completion is not None:
                    done[event.completion.prompt_index, event.completion.sample_index] = event.completion
        return [done[place] for place in order]

    def stream(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingLike | None = None,
        top_logprobs: int = 0,
        **settings: Any,
    ) -> AsyncGenerator[StreamEvent]:
        """Answer one prompt with an event for each step, as `selfspec.stream` does.

        Leaving the loop ends the request. Where the iterator has a name, use `contextlib.aclosing` with it.
        """
        return self._stream(request_of(self.target, prompt, sampling, settings, top_logprobs))

    async def _stream(self, request: Request) -> AsyncGenerator[StreamEvent]:
        async with aclosing(self._events([request])) as events:
            async for event in events:
                yield event.news

    async def _events(self, requests: list[Request]) -> AsyncGenerator[Event]:
        """The events of all requests; an error of one is raised, and ends the others."""
        if not requests:
            return
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def put(event: Event) -> None:
            try:
                loop.call_soon_threadsafe(events.put_nowait, event)
            except RuntimeError:
                # The loop is closed, and nobody is left who could cancel the requests.
                handle.cancel()

        try:
            handle = self._engine.submit(requests, put)
        except EngineClosed as error:
            raise EngineClosed(CLOSED) from error
        try:
            num_left = len(requests)
            while num_left:
                event = await events.get()
                if isinstance(event.error, EngineClosed):
                    raise EngineClosed(CLOSED) from event.error
                if event.error is not None:
                    raise event.error
                num_left -= event.is_last
                yield event
        finally:
            handle.cancel()
