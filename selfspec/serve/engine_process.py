"""The engine's process: one thread reads messages and hands them on, and the engine's own sends what comes of them.

It ends when the other side does. Signals from a terminal or a supervisor are for the other side, which decides when to end.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from selfspec.engine import Event, Handle, Listener, SpecEngine
from selfspec.engine.events import StepCounts
from selfspec.loop.sampling import Grammar
from selfspec.loop.sequence import Request
from selfspec.serve.forms import grammar_compiler
from selfspec.serve.lanes import single_thread
from selfspec.serve.limits import FORM_STACK_BYTES
from selfspec.serve.wire import Cancel, Close, Failed, Load, News, Ready, Reply, Rest, State, Submit, Unload, Wire, portable

logger = logging.getLogger(__name__)

# Makes an engine that makes no text, and tells the listener what it does.
MakeEngine = Callable[[Listener], SpecEngine]


def run_engine(connection: Connection, make: MakeEngine) -> None:
    """Serve with the engine that `make` makes, until the other side ends."""
    wire = Wire(connection)
    reporter = Reporter(wire)
    try:
        engine = make(reporter)
        assert not engine.makes_text
        ready = Ready(
            engine.target.text_side(),
            engine.drafters,
            engine.default_drafter,
            engine.max_batch,
            engine.max_open - engine.max_batch,
            engine.max_cached_tokens,
        )
    except Exception as error:
        # Tracebacks stay in their process.
        error.add_note(traceback.format_exc())
        wire.send(Failed(portable(error)))
        return
    # As in `selfspec.serve.server`.
    gc.collect()
    gc.freeze()
    reporter.engine = engine
    try:
        host = Host(engine, wire, reporter)
        wire.send(ready)
        host.serve()
    finally:
        engine.close()
        gc.unfreeze()


class Reporter(Listener):
    """Gathers what a round of the engine has to say, and sends it. Only for the engine's thread.

    Attributes:
        engine: the engine, as soon as it is made.
    """

    def __init__(self, wire: Wire) -> None:
        self.news = News()
        self.engine: SpecEngine | None = None
        self._wire = wire

    def stepped(self, step: StepCounts) -> None:
        self._note("stepped", step)

    def emitted(self, *args: Any) -> None:
        self._note("emitted", *args)

    def finished(self, *args: Any) -> None:
        self._note("finished", *args)

    def failed(self, *, is_cancelled: bool) -> None:
        self._note("failed", is_cancelled=is_cancelled)

    def preempted(self) -> None:
        self._note("preempted")

    def drafter_failed(self, name: str) -> None:
        self._note("drafter_failed", name)

    def _note(self, method: str, *args: Any, **options: Any) -> None:
        self.news.told.append((method, args, options))

    def published(self) -> None:
        engine = self.engine
        if engine is None:
            return
        state = State(engine.num_running, engine.num_used_blocks, engine.cache_use)
        news, self.news = self.news, News(state=state, health=engine.health)
        if news.told or news.events or news.dropped or news.state != state:
            news.state, news.health = state, engine.health
            self._wire.send(news)


@dataclass
class _Call:
    """The requests of one message, until the last of them has ended."""

    requests: list[Request]
    drafter: str
    num_left: int
    handle: Handle | None = None
    is_cancelled: bool = False


class Host:
    """Does what the other side says."""

    def __init__(self, engine: SpecEngine, wire: Wire, reporter: Reporter) -> None:
        self._engine = engine
        self._wire = wire
        self._reporter = reporter
        self._calls: dict[int, _Call] = {}
        self._grammars = grammar_compiler(engine.target)
        # Drafters may take minutes to load, and forms seconds to compile.
        self._drafters = ThreadPoolExecutor(1, "selfspec-drafters")
        self._forms = single_thread("selfspec-forms", FORM_STACK_BYTES)

    def serve(self) -> None:
        """Until the other side ends."""
        try:
            while not isinstance(message := self._wire.receive(), Close):
                self._take(message)
        except EOFError:
            return
        finally:
            self._drafters.shutdown(wait=False, cancel_futures=True)
            self._forms.shutdown(wait=False, cancel_futures=True)

    def _take(self, message: Any) -> None:
        if isinstance(message, Submit):
            # Copies, because one object may stand for several requests, and each has a number of its own.
            requests = [replace(request) for request in message.requests]
            call = self._calls[message.call] = _Call(requests, message.drafter, len(requests))
            if requests[0].begin_grammar is None:
                self._submit(message.call, call)
            else:
                self._forms.submit(self._submit, message.call, call)
        elif isinstance(message, Cancel):
            self._cancel(message.call)
        elif isinstance(message, Load):
            self._drafters.submit(self._reply, message.number, lambda: self._engine.load(message.prepare, message.name))
        elif isinstance(message, Unload):
            self._drafters.submit(self._reply, message.number, lambda: self._engine.unload(message.name))
        else:
            raise TypeError(f"{message!r} is not for the engine")

    def _submit(self, number: int, call: _Call) -> None:
        """Hand requests to the engine; on the thread for forms if they have one."""
        try:
            if (form := call.requests[0].begin_grammar) is not None:
                begin = self._begin(form)
                call.requests = [replace(request, begin_grammar=begin) for request in call.requests]
            numbers = {id(request): i for i, request in enumerate(call.requests)}
            reporter = self._reporter

            def on_event(event: Event) -> None:
                if event.is_last:
                    self._end(number, call)
                reporter.news.events.append((number, numbers[id(event.request)], event.token_ids, _rest(event)))

            if not call.is_cancelled:
                call.handle = self._engine.submit(call.requests, on_event, drafter=call.drafter)
        except Exception as error:
            self._calls.pop(number, None)
            rest: Rest = ("", [], [], None, portable(error))
            self._wire.send(News(events=[(number, i, [], rest) for i in range(len(call.requests))]))
            return
        if call.is_cancelled:
            # It came while the form was being compiled.
            self._drop(number, call)

    def _begin(self, form: Any) -> Callable[[], Grammar]:
        if self._grammars is None:
            raise RuntimeError("the engine's process cannot read forms, because llguidance is missing there")
        return self._grammars.open(form.source)

    def _end(self, number: int, call: _Call) -> None:
        """Note that one request of a call has ended. On the engine's thread."""
        call.num_left -= 1
        if not call.num_left:
            self._calls.pop(number, None)

    def _cancel(self, number: int) -> None:
        call = self._calls.get(number)
        if call is None:
            # It has ended meanwhile.
            return
        call.is_cancelled = True
        if call.handle is not None:
            self._drop(number, call)

    def _drop(self, number: int, call: _Call) -> None:
        """End a call's requests, and say so, because their places are free from then on."""

        def drop() -> None:
            if call.handle is not None:
                self._engine.drop(call.handle)
            if self._calls.pop(number, None) is not None:
                self._reporter.news.dropped.append(number)

        self._engine.post(drop)

    def _reply(self, number: int, work: Callable[[], str | None]) -> None:
        value, problem = None, None
        try:
            value = work()
        except Exception as error:
            problem = portable(error)
        self._wire.send(Reply(number, value, problem, self._engine.drafters))


def _rest(event: Event) -> Rest | None:
    if event.completion is None and event.error is None and not event.text and not event.logprobs:
        return None
    error = None if event.error is None else portable(event.error)
    return event.text, event.logprobs, event.top_logprobs, event.completion, error
