"""The engine: one thread that decodes for many callers at once.

Callers hand requests in from threads of their own, and learn of every step by a callback. Two invariants: only the engine's
thread touches the target, the cache and the drafters (what others want of them waits in its inbox), and every request that
was taken gets one last event, its completion or the error in its place, whatever fails.
"""

from __future__ import annotations

import logging
import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Sequence_
from concurrent.futures import Future
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from selfspec.api import Completion, completion_of
from selfspec.cache.kv import KVCache
from selfspec.config import SamplingParams
from selfspec.loop.decode import Group, Scheduler, Step
from selfspec.loop.drafter import Drafter, NoDrafter
from selfspec.loop.planner import Planner
from selfspec.loop.sequence import Request, Sequence
from selfspec.model.graphs import CHUNK_BUCKETS, ROW_BUCKETS
from selfspec.model.target import Target

logger = logging.getLogger(__name__)


CLOSED = "the server is shutting down: try again later, or elsewhere"


class EngineFull(Exception):
    """As many requests as may wait are waiting; `retry_seconds` is when a place may be free."""

    def __init__(self, limit: int, retry_seconds: int) -> None:
        super().__init__(f"{limit} requests are running or waiting, as many as are allowed: try again later")
        self.retry_seconds = retry_seconds


class EngineClosed(Exception):
    """The engine takes no more requests."""


@dataclass(frozen=True)
class Event:
    """News of one request: what was added, and at last the completion, or the error in its place."""

    request: Request
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    completion: Completion | None = None
    error: Exception | None = None

    @property
    def is_last(self) -> bool:
        return self.completion is not None or self.error is not None


class Listener:
    """What an engine tells of its work, on its own thread. Here: nobody listens."""

    def stepped(self, step: Step) -> None:
        """A pass of one drafter's sequences is over."""

    def emitted(self, num_tokens: int, seconds: float, *, is_first: bool) -> None:
        """A request got tokens, so long after the ones before, or after it came in."""

    def finished(self, completion: Completion, seconds: float) -> None:
        """A request was answered, so long after it came in."""

    def failed(self, *, is_cancelled: bool) -> None:
        """A request ended without an answer."""

    def preempted(self) -> None:
        """A request gave its place in the cache up for a while."""


class Handle:
    """The requests of one call, for as long as the engine works on them."""

    def __init__(self, engine: SpecEngine, on_event: Callable[[Event], None]) -> None:
        self.created = time.perf_counter()
        self.on_event = on_event
        self._engine = engine

    def cancel(self) -> None:
        """End what has not ended; no event follows. Does nothing once all has."""
        self._engine.post(lambda: self._engine.drop(self))


@dataclass(eq=False)
class _Stream:
    """What the caller of one sequence knows of it so far."""

    handle: Handle
    last_time: float
    num_sent: int = 0


class SpecEngine:
    """Continuous batching over one target, several drafters at a time.

    Args:
        drafters: by `name` those that a request may ask for, beside `none`; the first is used where it does not ask.
        max_batch: sequences that decode together.
        max_waiting: further ones that may wait; more are refused with `EngineFull`.
        cache_tokens: the most tokens of all sequences together that the KV cache holds; it grows up to that.
        prefill_tokens: prompt tokens entered between two decoding steps.
        use_cost_guard: draft only as much as measurements say pays; False always drafts all it can.
    """

    def __init__(
        self,
        target: Target,
        drafters: Iterable[Drafter] = (),
        *,
        max_batch: int = 16,
        max_waiting: int = 128,
        cache_tokens: int = 32768,
        prefill_tokens: int = 512,
        use_cost_guard: bool = True,
        listener: Listener | None = None,
    ) -> None:
        for name, value, least in (
            ("max_batch", max_batch, 1),
            ("max_waiting", max_waiting, 0),
            ("cache_tokens", cache_tokens, 16),
            ("prefill_tokens", prefill_tokens, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value} is not allowed: use {least} or more")
        self.target = target
        self.max_batch = max_batch
        self.max_open = max_batch + max_waiting
        self.cache_tokens = cache_tokens
        self.prefill_tokens = prefill_tokens
        self.use_cost_guard = use_cost_guard
        self.listener = listener or Listener()
        # Why a drafter that is loaded does not draft.
        self.problems: dict[str, str] = {}
        self._drafters: dict[str, Drafter] = {drafter.name: drafter for drafter in drafters}
        self.default_drafter = next(iter(self._drafters), NoDrafter.name)
        self._drafters.setdefault(NoDrafter.name, NoDrafter())
        self._cache = KVCache(
            target.kv_shape, dtype=target.dtype, device=target.device, max_tokens=cache_tokens, use_sharing=True
        )
        self._scheduler: Scheduler
        self._groups: dict[str, Group]
        self._streams: dict[Sequence, _Stream] = {}
        self._set_up()
        self._recent: deque[float] = deque(maxlen=64)
        self._inbox: deque[Callable[[], None]] = deque()
        # Guards the inbox and what follows; told when one of them changes. Re-entrant, since submitting posts.
        self._changed = threading.Condition(threading.RLock())
        self._num_open = 0
        self._is_draining = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    # For callers, on any thread.

    @property
    def drafters(self) -> list[str]:
        return list(self._drafters)

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return max(self._num_open - self._scheduler.num_running, 0)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def cache_use(self) -> float:
        """Share of the cache that running sequences hold, 0 to 1."""
        cache = self._scheduler.cache
        assert cache.max_blocks is not None
        return cache.num_used_blocks / cache.max_blocks

    @property
    def num_used_blocks(self) -> int:
        return self._scheduler.cache.num_used_blocks

    def check(self, request: Request) -> None:
        """Refuse a request that could never be served, with a ValueError."""
        room = self._scheduler.cache.max_tokens
        assert room is not None
        if len(request.prompt_ids) >= room:
            raise ValueError(
                f"the prompt has {len(request.prompt_ids)} tokens, and the cache holds {room} with its answer: "
                "shorten the prompt"
            )

    def submit(
        self, requests: Sequence_[Request], on_event: Callable[[Event], None], *, drafter: str | None = None
    ) -> Handle:
        """Take all of `requests`, or none; `on_event` is called on the engine's thread, and must not block.

        Raises:
            ValueError: a request that can never be served, or a drafter that is not loaded.
            EngineFull: too many requests for now.
            EngineClosed: the engine is draining.
        """
        name = drafter or self.default_drafter
        if name not in self._drafters:
            raise ValueError(f"drafter {name!r} is not loaded: use one of {', '.join(self._drafters)}")
        if len(requests) > self.max_open:
            raise ValueError(
                f"{len(requests)} answers are more than the {self.max_open} that may run or wait: ask for fewer"
            )
        for request in requests:
            self.check(request)
        handle = Handle(self, on_event)
        with self._changed:
            if self._is_draining:
                raise EngineClosed(CLOSED)
            if self._num_open + len(requests) > self.max_open:
                raise EngineFull(self.max_open, self._retry_seconds())
            self._num_open += len(requests)
            self.post(lambda: self._start(handle, requests, name))
        return handle

    def stream(self, requests: Sequence_[Request], *, drafter: str | None = None) -> Iterator[Event]:
        """The events of `requests` as they come; closing the iterator early cancels."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        handle = self.submit(requests, events.put, drafter=drafter)
        try:
            num_left = len(requests)
            while num_left:
                event = events.get()
                num_left -= event.is_last
                yield event
        finally:
            handle.cancel()

    def warm_up(self) -> None:
        """Answer made-up prompts, so that CUDA graphs of prompts and batches of every size are there when requests come.

        Nothing that is counted or learnt of drafts remains; what passes cost does.
        """
        if self.target.graphs is None:
            return
        draw = random.Random(0)
        sampling = SamplingParams(max_new_tokens=16, ignore_eos=True)
        room = min(self._scheduler.cache.max_tokens or 0, self.target.context_length) - sampling.max_new_tokens
        # One prompt of every size, and batches of every size of short ones.
        batches = [[size] for size in CHUNK_BUCKETS if size < room]
        batches += [[1] * rows for rows in ROW_BUCKETS if rows <= self.max_batch]
        listener, self.listener = self.listener, Listener()
        for name in self.drafters:
            # A graph is captured when its shape comes for the second time.
            for sizes in batches * 2:
                prompts = [[draw.randrange(self.target.vocab_size) for _ in range(size + 1)] for size in sizes]
                for _ in self.stream([Request(ids, sampling, i) for i, ids in enumerate(prompts)], drafter=name):
                    pass
        self.listener = listener
        for group in self._groups.values():
            group.planner.forget()

    def load(self, make: Callable[[], Drafter], name: str | None = None) -> str:
        """Add a drafter; it is made on the engine's thread, since the target is in use there. Returns its name."""

        def add() -> str:
            drafter = make()
            drafter.name = name or drafter.name
            if drafter.name in self._drafters:
                raise ValueError(f"drafter {drafter.name!r} is loaded already: unload it first, or choose another name")
            self._drafters[drafter.name] = drafter
            self._add_group(drafter)
            return drafter.name

        return self.call(add)

    def unload(self, name: str) -> None:
        """Remove a drafter; sequences that it serves go on without drafts."""

        def remove() -> None:
            if name not in self._drafters:
                raise KeyError(name)
            if name in (self.default_drafter, NoDrafter.name):
                raise ValueError(f"drafter {name!r} serves the requests that name none: it stays")
            group = self._groups.pop(name)
            for sequence in reversed(self._scheduler.sequences_of(group)):
                self._scheduler.move(sequence, self._plain)
            self._scheduler.remove_group(group)
            del self._drafters[name]
            self.problems.pop(name, None)

        self.call(remove)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the engine's thread, between two steps, and return what it returns."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        if not self.post(run):
            raise EngineClosed(CLOSED)
        return future.result()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait for those under way; False when some are left."""
        with self._changed:
            self._is_draining = True
            return self._changed.wait_for(lambda: self._num_open == 0, timeout)

    def close(self) -> None:
        """End the thread; requests under way get `EngineClosed`."""
        with self._changed:
            self._is_draining = self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def post(self, task: Callable[[], None]) -> bool:
        """Have the engine's thread run a task before its next step; false when it is closed and will not."""
        with self._changed:
            if self._is_closed:
                return False
            self._inbox.append(task)
            self._changed.notify_all()
            self._keep_alive()
            return True

    def _keep_alive(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="selfspec-engine", daemon=True)
            self._thread.start()

    def _retry_seconds(self) -> int:
        """When a place is likely to be free: what a request took lately, over how many run together."""
        return max(1, min(60, math.ceil(fmean(self._recent) / self.max_batch))) if self._recent else 1

    # On the engine's thread.

    @property
    def _plain(self) -> Group:
        return self._groups[NoDrafter.name]

    def _set_up(self) -> None:
        self._scheduler = Scheduler(
            self.target,
            self._cache,
            max_batch=self.max_batch,
            prefill_tokens=self.prefill_tokens,
            on_error=self._recover,
        )
        self._groups = {}
        for drafter in self._drafters.values():
            self._add_group(drafter)

    def _add_group(self, drafter: Drafter) -> None:
        planner = None if self.use_cost_guard else Planner(is_active=False)
        self._groups[drafter.name] = self._scheduler.add_group(drafter, planner)

    def _run(self) -> None:
        error: Exception = RuntimeError("the engine was stopped by a fault and has started anew: send the request again")
        try:
            while self._wait():
                try:
                    self._round()
                except Exception as caught:
                    logger.exception("a round failed; the engine starts over")
                    self._start_over(caught)
            error = EngineClosed(CLOSED)
            while self._inbox:
                self._inbox.popleft()()
        finally:
            # Also when the thread is killed: nobody may wait for it in vain.
            self._start_over(error)
            with self._changed:
                self._thread = None
                if self._inbox:
                    self._keep_alive()

    def _wait(self) -> bool:
        """Wait until there is something to do; false when the engine is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or len(self._scheduler) or self._is_closed)
            return not self._is_closed

    def _round(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        num_preemptions = self._scheduler.num_preemptions
        with torch.inference_mode():
            steps = self._scheduler.round()
        for _ in range(self._scheduler.num_preemptions - num_preemptions):
            self.listener.preempted()
        for step in steps:
            self.listener.stepped(step)
            for sequence in step.sequences:
                self._deliver(sequence)

    def _start(self, handle: Handle, requests: Sequence_[Request], name: str) -> None:
        # A drafter may have been unloaded since, or be out of order: drafts are a matter of speed alone.
        group = self._plain if name in self.problems else self._groups.get(name, self._plain)
        for request in requests:
            sequence = self._scheduler.submit(request, group)
            sequence.created = handle.created
            self._streams[sequence] = _Stream(handle, handle.created)

    def drop(self, handle: Handle) -> None:
        """Free what is left of a cancelled call; on the engine's thread only (see `Handle.cancel`)."""
        for sequence, stream in list(self._streams.items()):
            if stream.handle is handle:
                self._scheduler.cancel(sequence)
                self._forget(sequence)
                self.listener.failed(is_cancelled=True)

    def _deliver(self, sequence: Sequence) -> None:
        """Tell the caller what is new, and forget the sequence if that was all."""
        stream = self._streams.get(sequence)
        if stream is None:
            # Its caller failed while this step was told.
            return
        tokens = sequence.token_ids[stream.num_sent :]
        now = time.perf_counter()
        if tokens:
            self.listener.emitted(len(tokens), now - stream.last_time, is_first=stream.num_sent == 0)
            stream.last_time = now
        is_last = sequence.finish_reason is not None
        completion = completion_of(sequence) if is_last and sequence.error is None else None
        event = Event(
            sequence.request,
            sequence.text_stream.take(is_last=is_last),
            tokens,
            sequence.logprobs[stream.num_sent :],
            sequence.top_logprobs[stream.num_sent :],
            completion,
            sequence.error,
        )
        stream.num_sent = len(sequence.token_ids)
        if is_last:
            self._forget(sequence)
            if completion is None:
                self.listener.failed(is_cancelled=False)
            else:
                self._recent.append(completion.seconds)
                self.listener.finished(completion, now - stream.handle.created)
        try:
            stream.handle.on_event(event)
        except Exception:
            logger.exception("the caller of a request failed to take an event; its requests are cancelled")
            self.drop(stream.handle)

    def _forget(self, sequence: Sequence) -> None:
        del self._streams[sequence]
        with self._changed:
            self._num_open -= 1
            self._changed.notify_all()

    def _recover(self, error: Exception, sequences: list[Sequence]) -> None:
        """A stage failed: go on without the drafter if it had one, and else tell the callers."""
        group = self._scheduler.group_of(sequences[0])
        name = group.drafter.name
        if group is not self._plain:
            logger.warning("drafter %s failed and is left out from now on", name, exc_info=error)
            self.problems[name] = f"{type(error).__name__}: {error}"
            # All that it serves, waiting ones too; the oldest comes to stand first.
            sequences = self._scheduler.sequences_of(group)
        else:
            logger.error("a step without drafts failed; its requests end", exc_info=error)
        for sequence in reversed(sequences):
            if sequence.finish_reason is None and group is not self._plain:
                self._scheduler.move(sequence, self._plain)
                continue
            if sequence.finish_reason is None:
                sequence.fail(error)
            self._scheduler.cancel(sequence)
            self._deliver(sequence)

    def _start_over(self, error: Exception) -> None:
        """Tell every caller of an error, and begin anew with an empty cache."""
        for sequence in list(self._streams):
            for drafter in self._drafters.values():
                drafter.retire(sequence)
            sequence.fail(error)
            self._deliver(sequence)
        # Not a new one: what failed may still hold the memory of this one.
        self._cache.reset()
        self._set_up()
