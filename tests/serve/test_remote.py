"""An engine in a process of its own gives the answers of one in this process, and its end is told to everyone."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer
from remote_engines import Odd, dying_engine, no_engine, prepare_ngram, tiny_engine

from selfspec import SamplingParams, Target, generate
from selfspec.api import Completion
from selfspec.engine import EngineClosed, EngineFull, Event, Listener, StepCounts
from selfspec.loop.sequence import Request
from selfspec.serve.options import ServeOptions
from selfspec.serve.remote import EngineDied, RemoteEngine
from selfspec.serve.service import Service
from selfspec.serve.wire import News, portable

PROMPTS = [[5 + (7 * i + 3 * j) % 250 for j in range(4 + 13 * i % 70)] for i in range(12)]
ENDLESS = SamplingParams(max_new_tokens=3000, ignore_eos=True)
SETTINGS = [
    {},
    {"temperature": 1.0},
    {"logprobs": True},
    {"ignore_eos": True, "temperature": 0.7, "skip_special_tokens": False},
]


class Told(Listener):
    """Counts what it hears."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.num_steps = self.num_emitted = self.num_first = self.num_finished = self.num_cancelled = 0

    def stepped(self, step: StepCounts) -> None:
        self.num_steps += 1

    def emitted(self, pieces: Sequence[tuple[int, float, bool]]) -> None:
        self.num_emitted += sum(count for count, _, _ in pieces)
        self.num_first += sum(is_first for _, _, is_first in pieces)

    def finished(self, completion: Completion, seconds: float) -> None:
        self.num_finished += 1

    def failed(self, *, is_cancelled: bool) -> None:
        self.num_cancelled += is_cancelled


@pytest.fixture(scope="module")
def engine(tiny_target_dir: Path) -> Iterator[RemoteEngine]:
    engine = RemoteEngine(partial(tiny_engine, source=tiny_target_dir, max_batch=8, max_waiting=16), listener=Told())
    yield engine
    engine.close()


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def requests(target: Target) -> list[Request]:
    made = []
    for i, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(max_new_tokens=40, seed=i, **SETTINGS[i % len(SETTINGS)])
        made.append(Request(prompt, sampling, i, num_top_logprobs=2 if sampling.logprobs else 0))
    # The same once more, up to a text that is in it.
    [whole] = generate(target, [PROMPTS[4]], sampling=made[4].sampling)
    middle = whole.text[len(whole.text) // 2 :][:3]
    made.append(Request(PROMPTS[4], SamplingParams(max_new_tokens=40, seed=4, stop=(middle,)), len(PROMPTS)))
    return made


def test_answers_are_those_of_an_engine_in_this_process(engine: RemoteEngine, target: Target) -> None:
    asked = requests(target)
    texts, done = [""] * len(asked), {}
    for event in engine.stream(asked):
        assert event.error is None and event.request is asked[event.request.index]
        texts[event.request.index] += event.text
        if event.completion is not None:
            done[event.request.index] = event.completion
    for request in asked:
        [expected] = generate(target, [request.prompt_ids], sampling=request.sampling)
        got = done[request.index]
        for name in ("text", "token_ids", "finish_reason", "stop_string"):
            assert getattr(got, name) == getattr(expected, name), (request.index, name)
        assert got.logprobs == (expected.logprobs and pytest.approx(expected.logprobs, abs=1e-3))
        assert texts[request.index] == expected.text
        assert (got.top_logprobs is None) == (request.num_top_logprobs == 0)
    assert done[len(PROMPTS)].stop_string is not None


def test_a_step_is_one_message_and_the_listener_hears_all(engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many answers there are, because each message wakes a thread that holds the interpreter's lock."""
    messages: list[News] = []
    hear = engine._hear
    monkeypatch.setattr(engine, "_hear", lambda news: (messages.append(news), hear(news)))
    told = engine.listener
    assert isinstance(told, Told)
    told.clear()
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    ends = [e.completion for e in engine.stream([Request(prompt, sampling) for prompt in PROMPTS[:8]]) if e.is_last]
    wait_until(lambda: told.num_finished == 8)
    assert told.num_emitted == sum(len(end.token_ids) for end in ends if end) == 240
    assert told.num_first == 8
    with_tokens = [news for news in messages if news.events]
    assert len(with_tokens) <= told.num_steps < 240
    # Messages without tokens say that prompts were entered, or that a place became free.
    assert len(messages) <= told.num_steps + 8 + 8


def test_cancelling_frees_all_and_nothing_follows(engine: RemoteEngine) -> None:
    told, events, has_begun = engine.listener, [], threading.Event()
    assert isinstance(told, Told)
    told.clear()
    handle = engine.submit([Request(PROMPTS[0], ENDLESS)] * 2, lambda event: (events.append(event), has_begun.set()))
    assert has_begun.wait(20)
    assert engine.num_running > 0
    handle.cancel()
    num_events = len(events)
    wait_until(lambda: not engine._num_open)
    assert told.num_cancelled == 2 and len(events) <= num_events + 2
    wait_until(lambda: engine.num_used_blocks == engine.num_running == 0)
    handle.cancel()
    [*_, last] = engine.stream([Request(PROMPTS[1], SamplingParams(max_new_tokens=3))])
    assert last.completion is not None


def test_more_than_may_wait_are_refused_whole(engine: RemoteEngine) -> None:
    handle = engine.submit([Request(PROMPTS[0], ENDLESS)] * 23, lambda event: None)
    with pytest.raises(EngineFull, match="24 requests are running or waiting"):
        engine.submit([Request(PROMPTS[0], ENDLESS)] * 2, lambda event: None)
    with pytest.raises(ValueError, match="25 answers are more than the 24"):
        engine.submit([Request(PROMPTS[0], ENDLESS)] * 25, lambda event: None)
    handle.cancel()
    with pytest.raises(ValueError, match="the prompt has 5000 tokens"):
        engine.submit([Request([5] * 5000, ENDLESS)], lambda event: None)
    wait_until(lambda: not engine._num_open)


def test_drafters_come_and_go(engine: RemoteEngine) -> None:
    request = Request(PROMPTS[3], SamplingParams(max_new_tokens=200, ignore_eos=True))
    with ThreadPoolExecutor(1) as pool:
        assert engine.load(partial(prepare_ngram, 3), "extra") == "extra"
        assert engine.drafters == ["ngram", "none", "extra"]
        run = pool.submit(lambda: list(engine.stream([request], drafter="extra")))
        with pytest.raises(ValueError, match="drafter 'extra' is loaded already"):
            engine.load(partial(prepare_ngram, 3), "extra")
        engine.unload("extra")
        assert run.result()[-1].completion is not None
    with pytest.raises(ValueError, match="the head is damaged: fetch it again"):
        engine.load(partial(prepare_ngram, 9), "extra")
    with pytest.raises(ValueError, match="drafter 'extra' is not loaded: use one of ngram, none"):
        engine.submit([request], lambda event: None, drafter="extra")
    with pytest.raises(ValueError, match="it stays"):
        engine.unload("ngram")
    with pytest.raises(KeyError):
        engine.unload("extra")


def test_a_caller_that_fails_is_dropped_alone(engine: RemoteEngine) -> None:
    def fail(event: Event) -> None:
        raise OSError("gone")

    engine.submit([Request(PROMPTS[0], ENDLESS)] * 2, fail)
    [*_, last] = engine.stream([Request(PROMPTS[1], SamplingParams(max_new_tokens=30, ignore_eos=True))])
    assert last.completion is not None and len(last.completion.token_ids) == 30
    wait_until(lambda: not engine._num_open)


def test_a_server_needs_no_engine_of_its_own(engine: RemoteEngine, target: Target) -> None:
    """Templates, forms, streams and figures, with nothing but the text side of the target in the server's process."""
    pytest.importorskip("llguidance")
    service = Service("models/tiny", ServeOptions(allow_heads=True))
    before, engine.listener = engine.listener, service.metrics
    service.attach(engine)
    server = LiveServer(service)
    http = httpx.Client(base_url=server.url, timeout=30)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "the cat sat"}], "temperature": 0, "max_tokens": 20}
    try:
        [expected] = generate(target, [chat["messages"]], sampling=SamplingParams(max_new_tokens=20))
        whole = http.post("/v1/chat/completions", json=chat).json()
        assert whole["choices"][0]["message"]["content"] == expected.text
        lines = http.post("/v1/chat/completions", json={**chat, "stream": True}).text.split("\n\n")
        assert len(lines) > 4 and lines[-2:] == ["data: [DONE]", ""]
        form = {"type": "regex", "pattern": "(yes|no), (yes|no)"}
        said = http.post("/v1/chat/completions", json={**chat, "response_format": form, "n": 2}).json()["choices"]
        assert all(re.fullmatch(form["pattern"], choice["message"]["content"]) for choice in said) and len(said) == 2
        assert http.post("/v1/heads", json={"drafter": "ngram:2", "name": "two"}).json()["status"] == "ready"
        assert http.post("/v1/heads", json={"drafter": "oracle"}).status_code == 400
        assert http.delete("/v1/heads/two").json()["deleted"]
        assert http.delete("/v1/heads/two").status_code == 404
        asked = {"model": "tiny", "input": "the cat sat", "temperature": 0, "max_output_tokens": 20}
        response = http.post("/v1/responses", json=asked).json()
        assert response["output"][0]["content"][0]["text"] == expected.text
        streamed = http.post("/v1/responses", json={**asked, "stream": True}).text.strip().split("\n\n")[-1]
        assert json.loads(streamed.partition("data: ")[2])["response"]["output"][0]["content"][0]["text"] == expected.text
        stop = expected.text[8:11]
        message = http.post("/v1/messages", json={**chat, "stop_sequences": [stop]}).json()
        assert (message["content"][0]["text"], message["stop_sequence"]) == (expected.text.partition(stop)[0], stop)
        metrics = server.metrics()
        assert metrics["selfspec:request_success_total"] == 7 and metrics["selfspec:num_requests_running"] == 0
    finally:
        # The engine serves other tests.
        engine.listener, service._engine = before, None
        server.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_its_process_is_killed_everyone_is_told(tiny_target_dir: Path) -> None:
    deaths: list[Exception] = []
    engine = RemoteEngine(partial(tiny_engine, source=tiny_target_dir), on_death=deaths.append)
    events: list[Event] = []
    has_begun = threading.Event()
    engine.submit([Request(PROMPTS[0], ENDLESS)] * 2, lambda event: (events.append(event), has_begun.set()))
    assert has_begun.wait(20)
    assert engine.process_id is not None
    os.kill(engine.process_id, signal.SIGKILL)
    assert engine.drain(20)
    assert [type(event.error) for event in events if event.is_last] == [EngineDied] * 2
    with pytest.raises(EngineClosed):
        engine.submit([Request(PROMPTS[0], ENDLESS)], lambda event: None)
    with pytest.raises(EngineClosed):
        engine.unload("ngram")
    engine.close()
    assert [str(death) for death in deaths] == ["the engine's process ended with SIGKILL"]


def test_what_went_wrong_while_it_was_made_is_told_here() -> None:
    with pytest.raises(ValueError, match="models/absent: no such folder"):
        RemoteEngine(no_engine)
    with pytest.raises(ChildProcessError, match="ended with exit code 3 before the model was loaded"):
        RemoteEngine(dying_engine)


def test_errors_keep_their_message_on_the_way() -> None:
    error = KeyError("extra")
    assert portable(error) is error
    assert str(portable(Odd(7, "a bug"))) == "Odd: a bug"


def test_closing_tells_everyone(engine: RemoteEngine) -> None:
    """The last test of this engine."""
    assert not engine._num_open and not engine._calls
    events: list[Event] = []
    engine.submit([Request(PROMPTS[0], ENDLESS)] * 9, events.append)
    assert not engine.drain(timeout=0)
    with pytest.raises(EngineClosed, match="shutting down"):
        engine.submit([Request(PROMPTS[0], ENDLESS)], lambda event: None)
    engine.close()
    assert [type(event.error) for event in events if event.is_last] == [EngineClosed] * 9
    engine.close()
