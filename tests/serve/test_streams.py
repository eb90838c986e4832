"""From the engine's thread to a connection: a loop that is behind is woken once, and sends at once what has gathered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from selfspec import SamplingParams, Target
from selfspec.engine import EngineClosed, Event
from selfspec.loop.sequence import Request
from selfspec.serve.answers import CompletionAnswer
from selfspec.serve.streams import Doorbell, Events, lines


class Engine:
    """Takes requests, and leaves it to the test what comes of them."""

    is_cancelled = False

    def submit(self, requests: Sequence[Request], on_event: Callable[[Event], None], *, drafter: str | None) -> Engine:
        self.tell = on_event
        return self

    def cancel(self) -> None:
        self.is_cancelled = True


REQUEST = Request([5, 6], SamplingParams())


def stream(engine: Any, target: Target) -> Any:
    answer = CompletionAnswer("cmpl-1", "tiny", target.tokenizer, 1, "none", [REQUEST])
    answer._opening = answer._opening.replace(str(answer.head["created"]).encode(), b"0")
    events = Events(engine, [REQUEST], None, Doorbell())
    return lines(answer, events, lambda completion: None)


def test_a_busy_loop_is_woken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    async def run() -> int:
        loop, wakes = asyncio.get_running_loop(), []
        real = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: (wakes.append(args), real(*args)))
        bell = Doorbell()

        def ring(start: int) -> None:
            for number in range(start, start + 500):
                bell.ring(lambda number=number: done.append(number))

        for start in (0, 500):
            thread = threading.Thread(target=ring, args=(start,))
            thread.start()
            # The loop does nothing else meanwhile.
            thread.join()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert done == list(range(1000))
        bell.ring(lambda: done.append(1000))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return len(wakes)

    assert asyncio.run(run()) == 2
    assert done[-1] == 1000


@pytest.mark.parametrize("is_behind", [False, True])
def test_what_has_gathered_is_sent_at_once_and_nothing_is_changed(target: Target, is_behind: bool) -> None:
    async def run() -> list[bytes]:
        engine, sent = Engine(), []
        pieces = stream(engine, target)
        for start in (0, 4):
            for number in range(start, start + 4):
                engine.tell(Event(REQUEST, f"“{number}” ", [number]))
                if not is_behind:
                    sent.append(await anext(pieces))
            if is_behind:
                sent.append(await anext(pieces))
        await pieces.aclose()
        return sent

    sent = asyncio.run(run())
    assert len(sent) == (2 if is_behind else 8)
    expected = [
        'data: {"id":"cmpl-1","created":0,"model":"tiny","object":"text_completion",'
        f'"choices":[{{"index":0,"text":"“{number}” ","logprobs":null,"finish_reason":null,"stop_reason":null}}]}}\n\n'
        for number in range(8)
    ]
    assert b"".join(sent).decode() == "".join(expected)


def test_what_came_before_an_error_is_sent_before_it(target: Target) -> None:
    async def run() -> list[bytes]:
        engine = Engine()
        pieces = stream(engine, target)
        engine.tell(Event(REQUEST, "the cat", [7]))
        engine.tell(Event(REQUEST, error=EngineClosed("the server is shutting down")))
        return [piece async for piece in pieces]

    before, error = asyncio.run(run())
    assert b'"text":"the cat"' in before and b'"error":{"message":"the server is shutting down"' in error
