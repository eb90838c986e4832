"""What a request may cost is checked before the work: nothing is tokenised, built or parsed that the limits refuse."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from serve import attacks

from selfspec import SamplingParams, Target
from selfspec.engine import EngineFull, SpecEngine
from selfspec.loop.sequence import Request
from selfspec.serve import bodies, limits
from selfspec.serve.app import create_app
from selfspec.serve.errors import ApiError
from selfspec.serve.grammar import GrammarCompiler
from selfspec.serve.lanes import Lanes
from selfspec.serve.protocol import ChatRequest, CompletionRequest, ResponseFormat

# A live server of tests/serve/conftest.py, and what starts one.
Server = Any
Start = Callable[..., Server]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
JSON_TYPE = {"Content-Type": "application/json"}
GOOD = {"model": "tiny", "prompt": "the cat", "max_tokens": 4, "temperature": 0}
ENDLESS = {"model": "tiny", "prompt": "the cat", "max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(module_start: Start) -> Server:
    return module_start(max_batch=2, max_waiting=6, allow_heads=True)


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch, target: Target) -> list[Any]:
    """What the target was asked to encode."""
    asked: list[Any] = []
    real = target.encode

    def encode(prompt: Any, **options: Any) -> list[int]:
        asked.append(prompt)
        return real(prompt, **options)

    monkeypatch.setattr(target, "encode", encode)
    return asked


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


# Counted before anything is built.


def test_more_answers_than_places_are_refused_before_a_prompt_is_tokenised(
    http: httpx.Client, encoded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfspec.serve.service.requests_of", None)
    for prompts, n in ((["a"] * 20_000, 128), (["a"] * 9, 1), ("a", 9), ([[5]] * 9, 1)):
        error = error_of(http.post(COMPLETION, json={**GOOD, "prompt": prompts, "n": n}))
        assert error["param"] == "n" and "more than the 8 that may run or wait: ask for fewer" in error["message"]
    assert encoded == []


def test_a_full_queue_tokenises_nothing(start: Start, encoded: list[Any]) -> None:
    server = start(max_batch=1, max_waiting=0)
    with httpx.stream("POST", server.url + COMPLETION, json=ENDLESS, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        encoded.clear()
        assert error_of(httpx.post(server.url + COMPLETION, json=GOOD, timeout=30), 429)["code"] == "queue_full"
    assert encoded == []


def test_an_engine_counts_before_it_checks_and_checks_a_prompt_once(
    make_engine: Callable[..., SpecEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_batch=2, max_waiting=2)
    checked: list[Request] = []
    monkeypatch.setattr(engine, "check", checked.append)
    sampling = SamplingParams(max_new_tokens=1)
    samples = [Request([5, 6], sampling, 0, sample) for sample in range(5)]
    with pytest.raises(ValueError, match="5 answers are more than the 4 that may run or wait"):
        engine.submit(samples, lambda event: None)
    assert checked == []
    prompt = samples[0].prompt_ids
    shared = [Request(prompt, sampling, 0, sample) for sample in range(3)]
    assert len(list(engine.stream([*shared, Request([7], sampling, 1)]))) == 4
    assert len(checked) == 2
    engine._num_open += 4
    with pytest.raises(EngineFull):
        engine.submit([Request([7], sampling)], lambda event: None)
    engine._num_open -= 4
    assert len(checked) == 2


# Looked at from outside before anything inside.


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_text_that_cannot_fit_is_not_tokenised(server: Server, http: httpx.Client, encoded: list[Any], path: str) -> None:
    most = server.service.limits.max_characters
    assert most == 4096 * max(map(len, server.engine.target.tokenizer.get_vocab()))
    text = "a" * (most + 1)
    body = {"prompt": text} if path == COMPLETION else {"messages": [{"role": "user", "content": text}]}
    error = error_of(http.post(path, json={"model": "tiny", **body}))
    assert error["code"] == "context_length_exceeded" and "shorten the prompt" in error["message"]
    assert error["param"] in body and encoded == []


@pytest.mark.parametrize("prompt", ["xyz" * 2000, [5] * 5000, [[5] * 5000]])
def test_clients_are_told_that_the_context_is_exceeded(http: httpx.Client, prompt: Any) -> None:
    error = error_of(http.post(COMPLETION, json={**GOOD, "prompt": prompt}))
    assert error["code"] == "context_length_exceeded" and "tokens, and tiny-target" in error["message"]


LISTS = {
    "messages": (ChatRequest, [7] * (limits.MAX_MESSAGES + 1)),
    "content": (ChatRequest, [7] * (limits.MAX_PARTS + 1)),
    "tools": (ChatRequest, [7] * (limits.MAX_TOOLS + 1)),
    "stop_token_ids": (CompletionRequest, ["no id"] * (limits.MAX_STOP_TOKENS + 1)),
    "logit_bias": (CompletionRequest, dict.fromkeys(map(str, range(limits.MAX_BIASES + 1)), "no number")),
}


@pytest.mark.parametrize("field", LISTS)
def test_a_list_too_long_is_refused_unread(server: Server, field: str) -> None:
    form, value = LISTS[field]
    fields = {"messages": [{"role": "user", "content": value if field == "content" else "a"}]} if form is ChatRequest else {}
    fields |= {field: value} if field != "content" else {}
    with pytest.raises(ApiError, match=f"{field}: this has {len(value)} entries: give at most {len(value) - 1}"):
        bodies.parse(json.dumps({**GOOD, **fields}).encode(), form, server.service.limits)


def test_a_long_stop_string_and_an_object_of_many_fields_are_refused(http: httpx.Client) -> None:
    stop = error_of(http.post(COMPLETION, json={**GOOD, "stop": "a" * 257}))
    assert stop["message"] == "stop: this string has 257 characters: use at most 256"
    many = error_of(http.post(COMPLETION, json={f"field {i}": 1 for i in range(5000)}))
    assert many["message"] == "this object has 5000 fields: send at most 64"
    deep = error_of(http.post(COMPLETION, json={**GOOD, "response_format": {f"field {i}": 1 for i in range(5000)}}))
    assert deep["param"] == "response_format" and "at most 64" in deep["message"]


def test_a_body_of_too_many_values_is_not_parsed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", None)
    most = server.service.limits.max_values
    with pytest.raises(ApiError, match=f"more than {most} values"):
        bodies.parse(b'{"metadata": {"a": [' + b"[]," * most + b"1]}}", CompletionRequest, server.service.limits)


@pytest.mark.parametrize(
    ("raw", "limit", "expected"),
    [
        (b"[1, 2, 3]", 3, False),
        (b"[1, 2, 3]", 2, True),
        (b'{"a": {"b": []}}', 2, True),
        (b'["' + b"[,{" * 1000 + b'"]', 1, False),
        (b'["' + b'\\",' * 1000 + b'"]', 1, False),
        (b'["\\\\", 1, 2]', 2, True),
        (b'["\\\\", 1, 2]', 3, False),
        # A string without end: each quote in it could begin another one, which must not be tried in turn.
        (b'["' + b'\\"' * 200_000 + b"[" * 100, 1, False),
        (b'"' * 100_001 + b",,", 1, False),
    ],
)
def test_values_are_counted_outside_of_strings(raw: bytes, limit: int, expected: bool) -> None:
    assert bodies.has_more_values(raw, limit) is expected


def test_limits_follow_from_the_context_and_the_options(start: Start) -> None:
    small = start().service.limits
    assert (small.max_body_bytes, small.max_values) == (1 << 20, 4096 + limits.MAX_OTHER_VALUES)
    assert start(max_body_megabytes=3, max_batch=5, max_waiting=2).service.limits.max_body_bytes == 3 << 20
    assert start(max_batch=5, max_waiting=2, cache_tokens=160).service.limits.max_answers == 7


# Bodies on their way.


def talk(server: Server, *parts: bytes) -> bytes:
    """What a server answers to these bytes, without the end of a body."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        for part in parts:
            connection.sendall(part)
        return connection.recv(65536)


def head(**headers: Any) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in {"Host": "localhost", **headers}.items()]
    return "\r\n".join([f"POST {COMPLETION} HTTP/1.1", "Content-Type: application/json", *lines, "", ""]).encode()


def test_a_large_body_is_refused_before_it_comes(server: Server) -> None:
    assert b" 413 " in talk(server, head(Content_Length=1 << 30))


def test_a_body_that_is_too_slow_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.2)
    assert b" 408 " in talk(server, head(Content_Length=100), b'{"model"')


# Lanes.


def test_short_work_does_not_wait_for_long_work() -> None:
    lanes, may_end = Lanes(), threading.Event()

    async def both() -> int:
        long = asyncio.create_task(lanes.run(limits.SHORT + 1, may_end.wait))
        await asyncio.sleep(0)
        short = await lanes.run(limits.SHORT, len, "abc")
        may_end.set()
        await long
        return short

    assert asyncio.run(both()) == 3
    lanes.close()


def test_work_whose_client_has_gone_is_dropped_before_its_turn() -> None:
    lanes, may_end, done = Lanes(), threading.Event(), []

    async def leave() -> None:
        first = asyncio.create_task(lanes.run(limits.SHORT + 1, may_end.wait))
        second = asyncio.create_task(lanes.run(limits.SHORT + 1, done.append, "second"))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        may_end.set()
        await first
        await lanes.run(limits.SHORT + 1, done.append, "third")

    asyncio.run(leave())
    assert done == ["third"]
    lanes.close()


def test_a_lane_takes_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.serve.lanes.MAX_WAITING_LONG", 1)
    lanes, may_end = Lanes(), threading.Event()

    async def crowd() -> None:
        first = asyncio.create_task(lanes.run(limits.SHORT + 1, may_end.wait))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await lanes.run(limits.SHORT + 1, len, "")
        assert refused.value.status == 429 and refused.value.headers == {"Retry-After": "1"}
        may_end.set()
        await first
        assert await lanes.run(limits.SHORT + 1, len, "") == 0

    asyncio.run(crowd())
    lanes.close()


def test_a_prompt_that_was_left_is_not_tokenised_and_counts_as_cancelled(server: Server, encoded: list[Any]) -> None:
    before = server.metrics().get("selfspec:request_failure_total", 0)
    may_end = threading.Event()
    lane = server.service._lanes._long._pool
    blocking = lane.submit(may_end.wait)
    body = {**GOOD, "prompt": "the cat " * 3000}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + COMPLETION, json=body, timeout=0.3)
    deadline = time.monotonic() + 20
    while server.metrics().get("selfspec:request_failure_total", 0) == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    may_end.set()
    blocking.result()
    lane.submit(int).result()
    assert encoded == []


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_as_its_request_begins_leaves_nothing_behind(start: Start, is_stream: bool) -> None:
    """After its preparation and before the first byte: a stream's generator has not started then, and runs no `finally`."""
    server = start()
    messages = [{"type": "http.request", "body": json.dumps({**ENDLESS, "stream": is_stream}).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        while not server.engine._num_open:
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message.get("status") == 200:
            await asyncio.Event().wait()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": COMPLETION, "query_string": b"", "headers": headers}
    asyncio.run(create_app(server.service)(scope, receive, send))
    engine = server.engine
    assert engine.call(lambda: (engine.num_running, engine.num_waiting)) == (0, 0)
    assert server.metrics()["selfspec:request_failure_total"] == 1


# Forms.

FORMS = {
    "a regex that repeats a million times": ({"type": "regex", "pattern": "a{1000000}"}, "too complex to follow"),
    "rules that double": ({"type": "grammar", "grammar": attacks.doubling(30)}, "too complex to follow"),
    "a schema of 3,000 properties": (
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": attacks.PROPERTIES}}},
        "use a form of at most 65536 characters",
    ),
    "a long pattern": ({"type": "regex", "pattern": "a" * 65_537}, "at most 65536 characters"),
    "a long grammar": ({"type": "grammar", "grammar": attacks.rules(10_000)}, "at most 65536 characters"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_that_costs_too_much_is_the_clients_affair(http: httpx.Client, name: str) -> None:
    form, message = FORMS[name]
    error = error_of(http.post(COMPLETION, json={**GOOD, "response_format": form}))
    assert error["param"] == "response_format" and message in error["message"]


def test_a_form_may_refer_deeply(http: httpx.Client) -> None:
    """The compiler recurses from rule to rule: an ordinary stack would end here, and the process with it."""
    rules = ["start:a0", *(f'a{i}:"x"a{i + 1}' for i in range(4200)), 'a4200:"x"']
    form = {"type": "grammar", "grammar": "\n".join(rules)}
    assert len(form["grammar"]) < limits.MAX_FORM_LENGTH
    answer = http.post(COMPLETION, json={**GOOD, "response_format": form})
    assert answer.status_code == 200, answer.text
    assert set(answer.json()["choices"][0]["text"]) == {"x"}


def test_the_first_steps_of_a_form_are_tried_when_it_is_compiled(target: Target) -> None:
    compiler = GrammarCompiler(target)
    for pattern in ("[ab]{1,3}", "a", "(cat|dog)"):
        assert compiler.compile(ResponseFormat(type="regex", pattern=pattern)) is not None
    with pytest.raises(ValueError, match="^response_format became too complex to follow"):
        compiler.compile(ResponseFormat(type="regex", pattern="(a{1000}){1000}"))


def test_all_this_at_once_leaves_ordinary_requests_alone(start: Start) -> None:
    """Each is answered as it is alone, while others are refused."""
    server, good = start(served_name="attacked"), {**GOOD, "model": "attacked"}

    def ask() -> Any:
        return httpx.post(server.url + COMPLETION, json=good, timeout=30).json()["choices"]

    expected = ask()
    chosen = ("500 prompts, n=128", "100,000 brackets", "a message nested 900 deep", "80,000 unknown fields")
    address = urlsplit(server.url).netloc

    def hurt(name: str) -> str:
        plan = attacks.ATTACKS[name]
        return attacks.send(plan, address, plan.body())

    with ThreadPoolExecutor(8) as pool:
        hurting = [pool.submit(hurt, name) for name in chosen * 3]
        for _ in range(5):
            assert ask() == expected
        assert {attack.result() for attack in hurting} == {"400"}
    server.wait_until_idle()


# The gate.


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("mine.localhost", 200),
        ("127.0.0.1:8000", 200),
        ("10.1.2.3:8000", 200),
        ("[::1]:8000", 200),
        ("[fe80::1]", 200),
        ("api.example", 200),
        ("API.example:443", 200),
        ("evil.example:8000", 403),
        ("api.example.evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("[evil]", 403),
        (":8000", 403),
    ],
)
def test_a_server_answers_to_its_own_names_only(named: Server, host: str, status: int) -> None:
    for path in ("/health", "/v1/models", "/metrics"):
        answer = httpx.get(named.url + path, headers={"Host": host})
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["code"] == "host_not_allowed"


@pytest.fixture(scope="module")
def named(module_start: Start) -> Server:
    return module_start(allowed_host=("api.example",))


def test_a_key_or_a_star_lets_any_name_in(start: Start) -> None:
    evil = {"Host": "evil.example"}
    keyed, open_ = start(api_key=("key",)), start(allowed_host=("*",))
    assert httpx.get(f"{keyed.url}/v1/models", headers=evil).status_code == 401
    assert httpx.get(f"{keyed.url}/v1/models", headers={**evil, "x-api-key": "key"}).status_code == 200
    assert httpx.get(f"{keyed.url}/v1/models", headers={"x-api-key": "other"}).status_code == 401
    assert httpx.get(f"{open_.url}/v1/models", headers=evil).status_code == 200
    strict = start(api_key=("key",), allowed_host=("api.example",))
    assert httpx.get(f"{strict.url}/health", headers=evil).status_code == 403


def test_what_monitors_ask_for_is_logged_at_debug(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "selfspec.serve.gate")
    for path in ("/health", "/metrics", "/v1/models"):
        assert httpx.get(server.url + path, timeout=30).status_code == 200
    deadline = time.monotonic() + 10
    while len(caplog.records) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    levels = {record.getMessage().split()[1]: record.levelname for record in caplog.records}
    assert levels == {"/health": "DEBUG", "/metrics": "DEBUG", "/v1/models": "INFO"}


def test_each_request_is_one_line_that_holds_no_text_and_no_key(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "selfspec.serve.gate")
    headers = {"Authorization": "Bearer hidden-key", "X-Request-Id": "mine-7"}
    body = {**GOOD, "prompt": "one two three", "n": 2}
    usage = httpx.post(f"{server.url}{COMPLETION}?key=hidden", json=body, headers=headers, timeout=30).json()["usage"]
    with httpx.stream("POST", server.url + COMPLETION, json={**GOOD, "stream": True}, timeout=30) as answer:
        assert list(answer.iter_lines())
    httpx.get(f"{server.url}/v1/a%0aforged%20line")
    deadline = time.monotonic() + 10
    while len(caplog.records) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    whole, stream, forged = [record.getMessage() for record in caplog.records]
    counts = f"{usage['prompt_tokens']}+{usage['completion_tokens']} tokens, mine-7"
    assert whole.startswith(f"POST {COMPLETION} 200 in ") and whole.endswith(counts)
    assert stream.startswith(f"POST {COMPLETION} 200 in ") and "+4 tokens, req-" in stream
    assert forged.startswith("GET /v1/a%0aforged%20line 404 in ")
    assert not any(word in caplog.text for word in ("hidden", "one two"))


# Small things.


def test_health_answers_to_head(http: httpx.Client) -> None:
    answer = http.head("/health")
    assert answer.status_code == 200 and answer.content == b""


@pytest.mark.parametrize("name", ['a"b\n{x}', "a b", "/a", "a/", "a//b", "..\\x", "ä"])
def test_a_drafter_gets_only_a_name_by_which_it_can_be_unloaded(http: httpx.Client, name: str) -> None:
    error = error_of(http.post("/v1/heads", json={"drafter": "ngram:3", "name": name}))
    assert error["param"] == "name" and "use letters, digits" in error["message"]


@pytest.mark.parametrize("name", ["mine", "eagle:org/head@v1", "a.b_c-d+e"])
def test_a_drafter_with_such_a_name_can_be_unloaded(http: httpx.Client, name: str) -> None:
    assert http.post("/v1/heads", json={"drafter": "ngram:3", "name": name}).status_code == 200
    assert http.delete(f"/v1/heads/{name}").status_code == 200


def test_no_answer_shows_a_folder_of_the_server(server: Server, http: httpx.Client, target: Target) -> None:
    assert "/" in target.name
    answers = [
        http.get("/v1/models"),
        http.post(COMPLETION, json={**GOOD, "prompt": [5] * 4096}),
        http.post(COMPLETION, json={**GOOD, "prompt": [9999]}),
        http.post(COMPLETION, json={**GOOD, "stop_token_ids": [9999]}),
    ]
    assert target.label in answers[0].json()["data"][0]["root"]
    assert not any(str(target.name) in answer.text for answer in answers)
