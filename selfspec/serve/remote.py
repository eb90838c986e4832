"""An engine in a process of its own, used as one in this process is.

Why: whatever else runs in the engine's process holds the interpreter's lock while the GPU waits for its next pass. Here are
HTTP, JSON, templates, tokenising and text; there are only the passes and the token ids.

Invariant: every request that was taken gets one last event, also if the engine's process is killed.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker

from selfspec.drafters import Drafter
from selfspec.engine import EngineClosed, Event, Intake, Listener
from selfspec.engine.events import CLOSED
from selfspec.engine.health import Health
from selfspec.loop.sequence import Request
from selfspec.model.target import Target
from selfspec.serve.engine_process import MakeEngine
from selfspec.serve.late_text import UnreadAnswer
from selfspec.serve.start_engine import start_engine
from selfspec.serve.wire import Cancel, Close, Failed, Load, News, Ready, Reply, Rest, State, Submit, Unload, Wire

logger = logging.getLogger(__name__)

DIED = "the engine has ended unexpectedly, and the server with it: try again later, or elsewhere"
# How long the engine may take to end the step that it is in.
CLOSE_SECONDS = 30.0


class EngineDied(EngineClosed):
    """The engine's process has ended by itself."""


@dataclass(eq=False)
class RemoteHandle:
    """The requests of one call, for as long as the engine works on them."""

    number: int
    answers: list[UnreadAnswer]
    on_event: Callable[[Event], None]
    on_cancel: Callable[[RemoteHandle], None]
    num_left: int
    is_cancelled: bool = False

    def cancel(self) -> None:
        """End the requests that have not ended; no event follows."""
        self.on_cancel(self)


class RemoteEngine(Intake):
    """Starts a process for an engine, and returns when the engine takes requests.

    Args:
        make: makes the engine there. It is pickled, so it is a function of a module, or a `partial` of one.
        listener: is told what the engine does, on a thread of this process.
        on_death: called if the process ends by itself.
        log_level: of the lines that the process writes to stderr.

    Raises:
        ChildProcessError: the process ended before there was an engine.
        Exception: what `make` raised.
    """

    def __init__(
        self,
        make: MakeEngine,
        *,
        listener: Listener | None = None,
        on_death: Callable[[Exception], None] = lambda error: None,
        log_level: str = "info",
    ) -> None:
        context = multiprocessing.get_context("spawn")
        connection, other = context.Pipe()
        self._process = context.Process(
            target=start_engine, args=(other, make, log_level), name="selfspec-engine", daemon=True
        )
        # multiprocessing's own helper changes the blocked signals when it is started, so it is started before.
        resource_tracker.ensure_running()
        # A process inherits which signals are blocked. Ctrl-C, and what a supervisor sends to a group, are for this process,
        # which ends the other one in its own time.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other.close()
        # Where nobody closes the engine, for instance because the program ends while it is being loaded.
        atexit.register(self._process.kill)
        self._wire = Wire(connection)
        try:
            ready = self._wire.receive()
        except EOFError:
            self._process.join()
            reason = _reason(self._process.exitcode)
            raise ChildProcessError(f"the engine's process ended with {reason} before the model was loaded") from None
        if isinstance(ready, Failed):
            self._process.join()
            raise ready.error
        assert isinstance(ready, Ready)
        super().__init__(max_batch=ready.max_batch, max_waiting=ready.max_waiting)
        self.target = ready.target
        self.default_drafter = ready.default_drafter
        self.listener = listener or Listener()
        self._drafters = ready.drafters
        self._max_cached_tokens = ready.max_cached_tokens
        self._on_death = on_death
        self._state = State()
        self._health = Health()
        self._numbers = itertools.count()
        # Guarded by `_changed`, like all that the intake counts.
        self._calls: dict[int, RemoteHandle] = {}
        self._asked: dict[int, Future[str | None]] = {}
        self._is_closed = False
        self._is_telling = False
        self._thread = threading.Thread(target=self._read, name="selfspec-events", daemon=True)
        self._thread.start()

    @property
    def process_id(self) -> int | None:
        return self._process.pid

    @property
    def drafters(self) -> list[str]:
        return list(self._drafters)

    @property
    def problems(self) -> dict[str, str]:
        return self._health.problems

    @property
    def max_cached_tokens(self) -> int:
        return self._max_cached_tokens

    @property
    def num_running(self) -> int:
        return self._state.num_running

    @property
    def num_used_blocks(self) -> int:
        return self._state.num_used_blocks

    @property
    def cache_use(self) -> float:
        return self._state.cache_use

    def submit(
        self, requests: Sequence_[Request], on_event: Callable[[Event], None], *, drafter: str | None = None
    ) -> RemoteHandle:
        name = self._check(requests, drafter)
        answers = [UnreadAnswer(request, self.target.tokenizer) for request in requests]
        with self._changed:
            self.check_room(len(requests))
            handle = RemoteHandle(next(self._numbers), answers, on_event, self._cancel, len(answers))
            self._num_open += len(requests)
            self._calls[handle.number] = handle
        try:
            self._wire.send(Submit(handle.number, list(requests), name))
        except Exception:
            self._end(handle, len(answers))
            raise
        return handle

    def load(self, prepare: Callable[[Target], Callable[[], Drafter]], name: str | None = None) -> str:
        loaded = self._ask(lambda number: Load(number, prepare, name))
        assert loaded is not None
        return loaded

    def unload(self, name: str) -> None:
        self._ask(lambda number: Unload(number, name))

    def close(self) -> None:
        with self._changed:
            is_first = not self._is_closed
            self._is_draining = self._is_closed = True
        if is_first:
            self._wire.send(Close())
        self._thread.join(CLOSE_SECONDS)
        self._process.join(CLOSE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._thread.join()
        atexit.unregister(self._process.kill)

    def _ask(self, message: Callable[[int], Load | Unload]) -> str | None:
        future: Future[str | None] = Future()
        with self._changed:
            if self._is_closed:
                raise EngineClosed(CLOSED)
            number = next(self._numbers)
            self._asked[number] = future
        try:
            self._wire.send(message(number))
        except Exception:
            del self._asked[number]
            raise
        return future.result()

    def _cancel(self, handle: RemoteHandle) -> None:
        with self._changed:
            is_over = handle.is_cancelled or handle.number not in self._calls
            handle.is_cancelled = True
        if not is_over:
            self._wire.send(Cancel(handle.number))

    @property
    def _is_idle(self) -> bool:
        return super()._is_idle and not self._is_telling

    # On the thread that reads.

    def _read(self) -> None:
        try:
            while True:
                message = self._wire.receive()
                if isinstance(message, News):
                    self._hear(message)
                elif isinstance(message, Reply):
                    self._note_reply(message)
        except EOFError:
            pass
        except Exception:
            logger.exception("a message of the engine's process could not be understood")
        finally:
            self._finish()

    def _hear(self, news: News) -> None:
        self._is_telling = True
        # The listener first, because a caller may look at the figures as soon as there is an answer.
        for method, args, options in news.told:
            try:
                getattr(self.listener, method)(*args, **options)
            except Exception:
                logger.exception("the engine's listener failed at %r", method)
        self._state = news.state or self._state
        self._health = news.health or self._health
        for number, index, token_ids, rest in news.events:
            handle = self._calls.get(number)
            if handle is not None:
                self._tell(handle, handle.answers[index], token_ids, rest)
        for number in news.dropped:
            if (handle := self._calls.get(number)) is not None:
                self._end(handle, handle.num_left)
        self._note_told()

    def _note_told(self) -> None:
        self._is_telling = False
        if self._is_draining:
            with self._changed:
                self._changed.notify_all()

    def _tell(self, handle: RemoteHandle, answer: UnreadAnswer, token_ids: list[int], rest: Rest | None) -> None:
        event = answer.event(token_ids, rest)
        if event.is_last:
            answer.is_open = False
            if event.completion is not None:
                self._recent.append(event.completion.seconds)
            self._end(handle, 1)
        if handle.is_cancelled:
            return
        try:
            handle.on_event(event)
        except Exception:
            logger.exception("the caller of a request failed to take an event; its requests are cancelled")
            self._cancel(handle)

    def _end(self, handle: RemoteHandle, num_requests: int) -> None:
        """Note that some requests of a call have ended."""
        with self._changed:
            handle.num_left -= num_requests
            if not handle.num_left:
                del self._calls[handle.number]
            self._note_ended(num_requests)

    def _note_reply(self, reply: Reply) -> None:
        self._drafters = reply.drafters
        with self._changed:
            future = self._asked.pop(reply.number)
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(reply.error)

    def _finish(self) -> None:
        """The other process has ended: tell everyone who waits."""
        self._wire.close()
        with self._changed:
            was_closed = self._is_closed
            self._is_draining = self._is_closed = True
            calls, asked = list(self._calls.values()), list(self._asked.values())
            self._asked.clear()
        error = EngineClosed(CLOSED) if was_closed else EngineDied(DIED)
        self._state = State()
        self._is_telling = True
        for handle in calls:
            for answer in handle.answers:
                if answer.is_open:
                    self._tell(handle, answer, [], ("", [], [], None, error))
        self._note_told()
        for future in asked:
            future.set_exception(error)
        if not was_closed:
            self._process.join()
            problem = ChildProcessError(f"the engine's process ended with {_reason(self._process.exitcode)}")
            logger.error("%s", problem)
            self._on_death(problem)


def _reason(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            return signal.Signals(-exit_code).name
    return f"exit code {exit_code}"
