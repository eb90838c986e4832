"""The engine: one thread that runs the loop from prompt to text for many callers at once.

Callers submit requests from their own threads, and a callback tells them of every step. Three invariants:

* Only the engine's thread touches the target, the cache and the drafters. Tasks from other threads wait in its inbox.
* Every request that was taken gets one last event, either its completion or an error, whatever fails.
* An error ends only the request that caused it, unless the engine itself must start over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequence_
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from selfspec.engine.events import CLOSED, EngineClosed, Event, Listener, StepCounts
from selfspec.engine.health import Health
from selfspec.engine.intake import Intake
from selfspec.engine.warm_up import warm_up
from selfspec.loop.answer import Teller
from selfspec.loop.drafter import Drafter, NoDrafter
from selfspec.loop.group import Group
from selfspec.loop.planner import Planner
from selfspec.loop.scheduler import Scheduler
from selfspec.loop.sequence import Request, Sequence
from selfspec.loop.stages import Stage, StageError
from selfspec.loop.text import TextStream
from selfspec.model.target import Target

logger = logging.getLogger(__name__)

STARTED_ANEW = "the engine met a fault and has started anew: send the request again"


class Handle:
    """The requests of one call, for as long as the engine works on them."""

    def __init__(self, engine: SpecEngine, on_event: Callable[[Event], None]) -> None:
        self.created = time.perf_counter()
        self.on_event = on_event
        self.is_open = True
        self._engine = engine

    def cancel(self) -> None:
        """End the requests that have not ended; no event follows."""
        self._engine.post(lambda: self._engine.drop(self))


@dataclass(eq=False)
class _Stream:
    """What the caller of one sequence has been told so far."""

    handle: Handle
    teller: Teller
    last_time: float
    has_begun: bool = False


class SpecEngine(Intake):
    """Continuous batching over one target with several drafters. Any thread may call its public methods.

    Args:
        drafters: those that a request may ask for by `name`, besides `none`. The first serves requests that name none.
        max_batch: the most sequences that decode together.
        max_waiting: the most further sequences that may wait; more are refused with `EngineFull`.
        cache_tokens: the most tokens of all sequences together that the KV cache holds; it grows up to that.
        prefill_tokens: the most prompt tokens entered between two decoding steps.
        use_cost_guard: draft only as much as measurements say pays; False always drafts all it can.
        makes_text: False leaves text to the callers, who have the token ids. An answer with stop strings keeps its own,
            because it ends with its text.
    """

    target: Target

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
        makes_text: bool = True,
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
        super().__init__(max_batch=max_batch, max_waiting=max_waiting)
        self.target = target
        self.cache_tokens = cache_tokens
        self.prefill_tokens = prefill_tokens
        self.use_cost_guard = use_cost_guard
        self.makes_text = makes_text
        self.listener = listener or Listener()
        self.health = Health()
        self._drafters: dict[str, Drafter] = {drafter.name: drafter for drafter in drafters}
        self.default_drafter = next(iter(self._drafters), NoDrafter.name)
        self._drafters.setdefault(NoDrafter.name, NoDrafter())
        self._cache = target.new_cache(max_tokens=cache_tokens, use_sharing=True)
        self._scheduler: Scheduler
        self._groups: dict[str, Group]
        self._streams: dict[Sequence, _Stream] = {}
        self._set_up()
        # What a round has to say to callers, and what it tells the listener of their tokens.
        self._outbox: list[tuple[Handle, Event]] = []
        self._emitted: list[tuple[int, float, bool]] = []
        # Guarded by `_changed`, like all that the intake counts.
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    # For callers, on any thread.

    @property
    def drafters(self) -> list[str]:
        return list(self._drafters)

    @property
    def problems(self) -> dict[str, str]:
        """Why drafters that are loaded do not draft at present, by name."""
        return self.health.problems

    @property
    def max_cached_tokens(self) -> int:
        assert self._cache.max_tokens is not None
        return self._cache.max_tokens

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def cache_use(self) -> float:
        assert self._cache.max_blocks is not None
        return self._cache.num_used_blocks / self._cache.max_blocks

    @property
    def num_used_blocks(self) -> int:
        return self._cache.num_used_blocks

    def submit(
        self, requests: Sequence_[Request], on_event: Callable[[Event], None], *, drafter: str | None = None
    ) -> Handle:
        name = self._check(requests, drafter)
        handle = Handle(self, on_event)
        with self._changed:
            self.check_room(len(requests))
            self._num_open += len(requests)
            self.post(lambda: self._start(handle, requests, name))
        return handle

    def warm_up(self) -> None:
        """Answer made-up prompts, because requests then find CUDA graphs for prompts and batches of every size.

        What passes cost is remembered; everything counted or learnt about drafts is forgotten.
        """
        if self.target.passes.is_captured:
            self.call(self._warm_up)

    def load(self, prepare: Callable[[Target], Callable[[], Drafter]], name: str | None = None) -> str:
        make = prepare(self.target)

        def add() -> str:
            drafter = make()
            key = name or drafter.name
            if key in self._drafters:
                raise ValueError(f"drafter {key!r} is loaded already: unload it first, or choose another name")
            self._drafters[key] = drafter
            self._add_group(key, drafter)
            return key

        return self.call(add)

    def unload(self, name: str) -> None:
        def remove() -> None:
            if name not in self._drafters:
                raise KeyError(name)
            if name in (self.default_drafter, NoDrafter.name):
                raise ValueError(f"drafter {name!r} serves the requests that name none, so it stays")
            group = self._groups.pop(name)
            for sequence in reversed(self._scheduler.sequences_of(group)):
                self._scheduler.move(sequence, self._plain)
            self._scheduler.remove_group(group)
            del self._drafters[name]
            self.health.forget(name)

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

    def close(self) -> None:
        with self._changed:
            self._is_draining = self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def post(self, task: Callable[[], None]) -> bool:
        """Have the engine's thread run a task before its next step; false if the engine is closed."""
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
        for name, drafter in self._drafters.items():
            self._add_group(name, drafter)

    def _add_group(self, name: str, drafter: Drafter) -> None:
        planner = None if self.use_cost_guard else Planner(is_active=False)
        self._groups[name] = self._scheduler.add_group(drafter, planner, name=name)

    def _warm_up(self) -> None:
        sizes = {"max_batch": self.max_batch, "prefill_tokens": self.prefill_tokens}
        warm_up(self.target, self._cache, self._groups.values(), **sizes)

    def _run(self) -> None:
        error: Exception = RuntimeError(STARTED_ANEW)
        try:
            while self._wait():
                try:
                    self._round()
                except Exception:
                    logger.exception("a round failed; the engine starts over")
                    self._start_over(RuntimeError(STARTED_ANEW))
            error = EngineClosed(CLOSED)
            while self._inbox:
                self._inbox.popleft()()
        finally:
            # Also when an exit ends the thread, because no caller may wait in vain.
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
        with self.target.lock, torch.inference_mode():
            while self._inbox:
                self._inbox.popleft()()
            num_preemptions = self._scheduler.num_preemptions
            steps = self._scheduler.round()
        for _ in range(self._scheduler.num_preemptions - num_preemptions):
            self._tell(self.listener.preempted)
        for step in steps:
            self._tell(self.listener.stepped, StepCounts.of(step))
            if step.tree.num_nodes > 1:
                # It drafts again, so what went wrong before no longer counts.
                self.health.forget(step.name)
            now = time.perf_counter()
            for sequence in step.sequences:
                self._deliver(sequence, now)
        self._publish()

    def _tell(self, method: Callable[..., None], *args: Any, **options: Any) -> None:
        """Call one of the listener's methods; its errors are only logged."""
        try:
            method(*args, **options)
        except Exception:
            logger.exception("the engine's listener failed at %r", method.__name__)

    def _start(self, handle: Handle, requests: Sequence_[Request], name: str) -> None:
        for request in requests:
            # Without drafts where the drafter was unloaded since or is left out, because drafts change only the speed.
            group = self._plain if name in self.problems else self._groups.get(name, self._plain)
            try:
                sequence = self._scheduler.submit(request, group)
            except Exception as error:
                # For instance, its grammar cannot begin.
                self._note_ended(1)
                self._tell(self.listener.failed, is_cancelled=False)
                self._outbox.append((handle, Event(request, error=error)))
                continue
            if not self.makes_text and not request.sampling.stop:
                sequence.text_stream = TextStream(None)
            sequence.created = handle.created
            self._streams[sequence] = _Stream(handle, Teller(sequence), handle.created)

    def drop(self, handle: Handle) -> None:
        """End the open sequences of a cancelled call. Only for the engine's thread; others use `Handle.cancel`."""
        handle.is_open = False
        for sequence, stream in list(self._streams.items()):
            if stream.handle is handle:
                self._scheduler.cancel(sequence)
                self._forget(sequence)
                self._tell(self.listener.failed, is_cancelled=True)

    def _deliver(self, sequence: Sequence, now: float) -> None:
        """Put what is new for the caller into the outbox, and forget the sequence if it has ended."""
        stream = self._streams.get(sequence)
        if stream is None:
            return
        event = Event.of(sequence.request, stream.teller.news(), sequence.error)
        if num_new := len(event.token_ids):
            self._emitted.append((num_new, now - stream.last_time, not stream.has_begun))
            stream.last_time, stream.has_begun = now, True
        if event.is_last:
            self._forget(sequence)
            if event.completion is None:
                self._tell(self.listener.failed, is_cancelled=False)
            else:
                self._recent.append(event.completion.seconds)
                self._tell(self.listener.finished, event.completion, now - stream.handle.created)
        self._outbox.append((stream.handle, event))

    def _publish(self) -> None:
        """Tell the listener and the callers what the outbox holds."""
        if self._emitted:
            # The listener first, because a caller may look at the figures as soon as there is an answer.
            self._tell(self.listener.emitted, self._emitted)
            self._emitted = []
        for handle, event in self._outbox:
            try:
                if handle.is_open:
                    handle.on_event(event)
            except Exception:
                logger.exception("the caller of a request failed to take an event; its requests are cancelled")
                self.drop(handle)
        self._outbox.clear()
        self._tell(self.listener.published)
        if self._is_draining:
            with self._changed:
                self._changed.notify_all()

    @property
    def _is_idle(self) -> bool:
        return super()._is_idle and not self._outbox

    def _forget(self, sequence: Sequence) -> None:
        if self._streams.pop(sequence, None) is not None:
            self._note_ended(1)

    def _recover(self, failure: StageError, sequences: list[Sequence]) -> None:
        """Go on after a stage failed, with every sequence that can still be served.

        A drafter that failed is left out for a while. A failure of the target says nothing about the drafter: the rows go on
        without drafts; if a step fails again, each row goes on alone; and only a row that fails alone ends with the error.
        """
        group = self._scheduler.group_of(sequences[0])
        if failure.stage is Stage.DRAFT and group is not self._plain:
            seconds = self.health.note_failure(group.name, failure.error)
            logger.warning("drafter %s failed and is left out for %.0f seconds", group.name, seconds, exc_info=failure.error)
            self._tell(self.listener.drafter_failed, group.name)
            # All its sequences, waiting ones too, in the order of arrival.
            sequences = self._scheduler.sequences_of(group)
        else:
            logger.error("a pass of the target failed", exc_info=failure.error)
        is_alone = group is self._plain and len(sequences) == 1
        for sequence in reversed(sequences):
            if sequence.finish_reason is None and not is_alone:
                sequence.is_suspect = sequence.is_suspect or group is self._plain
                self._scheduler.move(sequence, self._plain)
                continue
            if sequence.finish_reason is None:
                sequence.fail(failure.error)
            self._scheduler.cancel(sequence)
            self._deliver(sequence, time.perf_counter())

    def _start_over(self, error: Exception) -> None:
        """Send every caller an error, and begin again with an empty cache."""
        for sequence in list(self._streams):
            # The failure may have left anything half done.
            try:
                self._scheduler.cancel(sequence)
            except Exception:
                logger.exception("a sequence could not be taken out")
            sequence.fail(error)
            self._deliver(sequence, time.perf_counter())
        self._publish()
        # Not a new cache, because the failure may still hold the memory of this one.
        self._cache.reset()
        self._set_up()
