"""The API as clients meet it: OpenAI's own package and plain HTTP, against a live server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from selfspec import SamplingParams, Target, generate
from selfspec.api import Completion
from selfspec.drafters import NgramDrafter
from selfspec.drafters.shipped import identity
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.serve.app import create_app
from selfspec.traffic.capture import Capture
from selfspec.traffic.conversations import Report
from selfspec.traffic.sources import read_conversations

Post = Callable[..., httpx.Response]
# A live server of tests/serve/conftest.py, and what starts one.
Server = Any
Start = Callable[..., Server]

MESSAGES = [{"role": "system", "content": "the dog sat on the mat"}, {"role": "user", "content": "one two the cat"}]
CHAT = {"messages": MESSAGES, "max_tokens": 24}
ENDLESS = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3000, "ignore_eos": True}
CHAT_PATH = "/v1/chat/completions"
# A request's settings, and what they are to `generate`.
FILTERED = {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 30, "min_p": 0.01}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {}),
    "sampled": ({"seed": 7}, {"temperature": 1.0, "seed": 7}),
    "filtered": (FILTERED, FILTERED),
    "penalised": ({"temperature": 0, "min_tokens": 20, **PENALTIES}, {"min_new_tokens": 20, **PENALTIES}),
    "biased": ({"temperature": 0, "logit_bias": {"70": 100}}, {"logit_bias": {70: 100.0}}),
    "stopped": ({"temperature": 0, "stop": ["C", "never"]}, {"stop": ["C", "never"]}),
}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def expect(target: Target, prompt: Any, **settings: Any) -> Completion:
    """What `generate` says alone, without drafts."""
    sampling = SamplingParams(**{"max_new_tokens": 24, "logprobs": True, **settings})
    return generate(target, [prompt], sampling=sampling)[0]


def arguments(body: dict[str, Any]) -> dict[str, Any]:
    """Settings as the package takes them: what OpenAI does not have goes along as it is."""
    known = {"temperature", "seed", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop"}
    rest = {key: value for key, value in body.items() if key not in known}
    return {**{key: value for key, value in body.items() if key in known}, "extra_body": rest}


@pytest.mark.parametrize("drafter", ["ngram", "draft", "none"])
@pytest.mark.parametrize("name", SETTINGS)
def test_streamed_and_whole_chats_equal_generate(client: openai.OpenAI, target: Target, name: str, drafter: str) -> None:
    body, settings = SETTINGS[name]
    expected = expect(target, MESSAGES, **settings)
    call = {"model": "tiny", **CHAT, "logprobs": True, "top_logprobs": 2, **arguments({**body, "drafter": drafter})}
    whole = client.chat.completions.create(**call)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert whole.usage.completion_tokens == len(expected.token_ids)
    assert whole.usage.prompt_tokens == len(target.encode(MESSAGES))
    logprobs = whole.choices[0].logprobs.content
    assert [entry.logprob for entry in logprobs] == pytest.approx(expected.logprobs, abs=1e-4)
    assert [entry.token for entry in logprobs] == [target.tokenizer.decode([token]) for token in expected.token_ids]
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    if name == "greedy":
        assert all(entry.top_logprobs[0].logprob == pytest.approx(entry.logprob) for entry in logprobs)

    chunks = list(client.chat.completions.create(**call, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(delta.delta.content or "" for delta in deltas) == expected.text
    streamed = [entry for delta in deltas if delta.logprobs for entry in delta.logprobs.content]
    assert [entry.logprob for entry in streamed] == pytest.approx(expected.logprobs, abs=1e-4)
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [expected.finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(expected.token_ids)


def test_streamed_and_whole_completions_equal_generate(client: openai.OpenAI, target: Target) -> None:
    prompts = ["the cat", "one two three"]
    expected = [expect(target, prompt) for prompt in prompts]
    call: dict[str, Any] = {"model": "tiny", "prompt": prompts, "max_tokens": 24, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**call)
    assert [choice.index for choice in whole.choices] == [0, 1]
    for choice, completion in zip(whole.choices, expected, strict=True):
        assert (choice.text, choice.finish_reason) == (completion.text, completion.finish_reason)
        assert choice.logprobs.token_logprobs == pytest.approx(completion.logprobs, abs=1e-4)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(completion.token_ids)
        assert max(choice.logprobs.top_logprobs[0].values()) == pytest.approx(completion.logprobs[0], abs=1e-4)
    texts: list[str] = ["", ""]
    offsets: list[list[int]] = [[], []]
    for chunk in client.completions.create(**call, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        offsets[chunk.choices[0].index] += chunk.choices[0].logprobs.text_offset
    assert texts == [completion.text for completion in expected]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    as_ids = client.completions.create(**{**call, "prompt": [target.encode(prompt) for prompt in prompts]})
    assert [choice.text for choice in as_ids.choices] == texts
    short = client.completions.create(model="tiny", prompt="the", temperature=0, extra_body={"ignore_eos": True})
    assert short.usage.completion_tokens == 16
    extra = {"ignore_eos": True, "max_completion_tokens": 5}
    assert client.completions.create(model="tiny", prompt="the", extra_body=extra).usage.completion_tokens == 5


def test_samples_of_one_prompt_are_those_of_generate(client: openai.OpenAI, target: Target) -> None:
    sampling = SamplingParams(max_new_tokens=16, temperature=1.0, seed=5, n=3)
    expected = [completion.text for completion in generate(target, [MESSAGES], sampling=sampling)]
    call: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 16, "seed": 5, "n": 3}
    whole = client.chat.completions.create(**call)
    assert [choice.message.content for choice in whole.choices] == expected
    assert whole.usage.prompt_tokens == len(target.encode(MESSAGES)), "a prompt counts once"
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**call, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(texts.values()) == expected


def test_many_clients_at_once_get_what_each_gets_alone(server: Server, target: Target) -> None:
    """32 of mixed settings and drafters, streamed and whole, over 8 places."""
    names = list(SETTINGS)
    prompts = [[MESSAGES[0], {"role": "user", "content": f"{'the cat ' * (i % 5)}{i}"}] for i in range(32)]
    expected = [expect(target, prompt, **SETTINGS[names[i % len(names)]][1]).text for i, prompt in enumerate(prompts)]

    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        body = {**SETTINGS[names[i % len(names)]][0], "drafter": ["ngram", "draft", "none"][i % 3]}
        call = {"model": "tiny", "messages": prompts[i], "max_tokens": 24, **arguments(body)}
        if i % 2:
            return (await client.chat.completions.create(**call)).choices[0].message.content
        stream = await client.chat.completions.create(**call, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(32)))

    assert asyncio.run(ask_all()) == expected


def test_counters_equal_what_was_emitted(server: Server, post: Post) -> None:
    """[E4] usage and metrics are one number."""
    server.wait_until_idle()
    before = server.metrics()
    usages = [
        post(**{**CHAT, "temperature": 0, "drafter": drafter, "n": n, "stop": ["C"]}).json()["usage"]
        for drafter in ("ngram", "draft", "none")
        for n in (1, 2)
    ]
    server.wait_until_idle()
    after = server.metrics()
    gained = {name.removeprefix("selfspec:"): value - before.get(name, 0) for name, value in after.items()}

    def total(key: str) -> int:
        return sum(usage[key] if key in usage else usage["speculation"][key] for usage in usages)

    assert gained["generation_tokens_total"] == total("completion_tokens")
    assert gained["spec_decode_num_draft_tokens_total"] == total("draft_tokens") > 0
    assert gained["spec_decode_num_accepted_tokens_total"] == total("accepted_tokens") > 0
    assert gained["spec_decode_num_accepted_tokens_per_pos_total"] == total("accepted_tokens")
    assert gained["verify_rows_total"] == total("verify_passes")
    assert gained["request_success_total"] == gained["time_to_first_token_seconds_count"] == 9
    assert gained["inter_token_latency_seconds_count"] <= total("completion_tokens") - 9
    assert gained["num_requests_running"] == gained["num_requests_waiting"] == after["selfspec:kv_cache_usage_perc"] == 0
    for usage in usages:
        spec = usage["speculation"]
        assert spec["acceptance_length"] == usage["completion_tokens"] / spec["verify_passes"]
        assert spec["accepted_tokens"] <= spec["draft_tokens"]
        assert spec["prefill_seconds"] > 0 and spec["decode_seconds"] > 0 and spec["queue_seconds"] >= 0


def test_a_shared_system_prompt_is_in_the_cache(post: Post) -> None:
    system = {"role": "system", "content": "the dog and the mat " * 20}
    usages = [
        post(messages=[system, {"role": "user", "content": text}], max_tokens=2).json()["usage"] for text in ("one", "two")
    ]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0 and 0.7 * usages[1]["prompt_tokens"] < cached[1] < usages[1]["prompt_tokens"]


def test_counts_may_come_with_every_piece(client: openai.OpenAI, target: Target) -> None:
    expected = expect(target, MESSAGES)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    call: dict[str, Any] = {"model": "tiny", **CHAT, "temperature": 0, "stream": True, "stream_options": options}
    opening, *pieces, end = client.chat.completions.create(**call, extra_body={"drafter": "ngram"})
    assert opening.usage is None and end.choices == []
    counts = [(piece.usage.completion_tokens, piece.usage.speculation["verify_passes"]) for piece in pieces]
    assert [passes for _, passes in counts] == list(range(1, end.usage.speculation["verify_passes"] + 1))
    assert counts == sorted(counts) and counts[-1][0] == len(expected.token_ids) == end.usage.completion_tokens
    assert {piece.usage.prompt_tokens for piece in pieces} == {end.usage.prompt_tokens}
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected.text


@pytest.mark.parametrize("is_stream", [False, True])
def test_special_tokens_are_shown_where_asked_for(post: Post, target: Target, is_stream: bool) -> None:
    """In both routes; a stop string that reaches over them ends the text that is shown."""
    name = "<|endoftext|>"
    forced = {"logit_bias": {str(target.tokenizer.convert_tokens_to_ids(name)): 100}, "max_tokens": 3, "temperature": 0}

    def text(**settings: Any) -> str:
        if not is_stream:
            whole = post("/v1/completions", prompt="the cat", **forced, **settings).json()["choices"][0]
            chat = post(messages=MESSAGES, **forced, **settings).json()["choices"][0]
            assert whole["text"] == chat["message"]["content"] and whole["finish_reason"] == chat["finish_reason"]
            return whole["text"]
        lines = post("/v1/completions", prompt="the cat", stream=True, **forced, **settings).text.splitlines()
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {"))

    assert text() == text(skip_special_tokens=True) == text(skip_special_tokens=None) == ""
    assert text(skip_special_tokens=False) == name * 3
    assert text(skip_special_tokens=False, stop="t|><|end") == name[:-3]
    assert text(stop="t|><|end") == ""


def test_what_ended_an_answer_is_named(post: Post, target: Target) -> None:
    """Also in the middle of a form, which a stop string or id may cut, and where `finish_reason` alone would not tell."""
    form = {"response_format": {"type": "regex", "pattern": "cat [0-9]{3}"}}
    digit = target.tokenizer.convert_tokens_to_ids("7")
    forced = {"logit_bias": {str(digit): 100}, "temperature": 0, "prompt": "the", "max_tokens": 12}

    def end(**settings: Any) -> tuple[str, str, Any]:
        choice = post("/v1/completions", **forced, **settings).json()["choices"][0]
        return choice["text"], choice["finish_reason"], choice["stop_reason"]

    assert end(**form) == ("cat 777", "stop", None)
    assert end(**form, stop=["77"]) == ("cat ", "stop", "77")
    assert end(**form, stop_token_ids=[digit]) == ("cat ", "stop", digit)
    assert end() == ("7" * 12, "length", None)
    lines = post("/v1/completions", stream=True, stop="77", **forced).text.splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert [choice["stop_reason"] for choice in choices if choice["finish_reason"]] == ["77"]


def test_models_and_health(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 4096
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "failed_drafters": []}


def test_request_ids_come_back(server: Server) -> None:
    health = f"{server.url}/health"
    assert httpx.get(health, headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = [httpx.get(health, headers={"X-Request-Id": given}).headers["x-request-id"] for given in ("", "a\tb", "x" * 999)]
    assert len(set(made)) == 3 and all(name.startswith("req-") for name in made)


def test_tools_reach_the_chat_template_and_answers_stay_as_they_are(
    client: openai.OpenAI, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = target.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    template = "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}" + target.tokenizer.chat_template
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    tools = [{"type": "function", "function": {"name": "seven", "parameters": {"type": "object"}}}]
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=tools, max_tokens=24, temperature=0)
    expected = expect(target, list(target.tokenizer("seven" + plain).input_ids))
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.tool_calls is None


def test_what_asks_for_nothing_changes_nothing(post: Post) -> None:
    nothing = {"functions": [], "modalities": ["text"], "verbosity": "medium", "reasoning_effort": None}
    hint = {"prediction": {"type": "content", "content": "the cat"}}
    answers = [post(**CHAT, temperature=0, **more).json()["choices"] for more in ({}, nothing, hint)]
    assert answers[0] == answers[1] == answers[2]


def test_parts_and_developers_read_as_texts_and_systems(post: Post) -> None:
    parts = [{"type": "text", "text": "the dog sat "}, {"type": "text", "text": "on the mat"}]
    messages = [{"role": "developer", "content": parts}, MESSAGES[1]]
    answers = [post(messages=each, max_tokens=8, temperature=0).json() for each in (messages, MESSAGES)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


# Clients that leave, and servers that end.


def test_a_stream_that_is_left_frees_its_blocks(server: Server) -> None:
    with httpx.stream("POST", server.url + CHAT_PATH, json={**ENDLESS, "stream": True, "n": 2}, timeout=30) as answer:
        lines = answer.iter_lines()
        while '"content":"' not in next(lines).replace('"content":""', ""):
            pass
        assert server.engine.num_used_blocks > 0
    server.wait_until_idle()


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_before_the_first_byte_leaves_nothing_behind(start: Start, is_stream: bool) -> None:
    """At the level of ASGI: the client is gone as soon as its request is read, and `send` has to wait."""
    server = start()
    content = json.dumps({**ENDLESS, "stream": is_stream}).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        if message.get("status") == 200:
            await asyncio.Event().wait()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT_PATH, "query_string": b"", "headers": headers}
    asyncio.run(create_app(server.service)(scope, receive, send))
    engine = server.engine
    # Tasks of the engine run in the order in which they came: this one after the cancellation, if there was one.
    assert engine.call(lambda: (engine.num_running, engine.num_waiting)) == (0, 0)
    assert server.metrics()["selfspec:request_failure_total"] == 1


def test_a_client_that_gives_up_waiting_frees_its_blocks(server: Server) -> None:
    before = server.metrics().get("selfspec:request_failure_total", 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + CHAT_PATH, json={**ENDLESS, "n": 3}, timeout=0.3)
    server.wait_until_idle()
    assert server.metrics()["selfspec:request_failure_total"] == before + 3


def test_a_client_that_does_not_read_holds_up_nobody(server: Server, target: Target, post: Post) -> None:
    with httpx.stream("POST", server.url + CHAT_PATH, json={**ENDLESS, "stream": True, "logprobs": True}, timeout=30):
        for _ in range(3):
            answer = post(**CHAT, temperature=0).json()
            assert answer["choices"][0]["message"]["content"] == expect(target, MESSAGES).text
    server.wait_until_idle()


def test_a_full_queue_is_429_with_a_time(start: Start) -> None:
    server = start(max_batch=1, max_waiting=1)
    with httpx.Client(base_url=server.url, timeout=30) as client:
        with client.stream("POST", CHAT_PATH, json={**ENDLESS, "stream": True, "n": 2}) as answer:
            lines = answer.iter_lines()
            next(lines)
            for is_stream in (True, False):
                refused = client.post(CHAT_PATH, json={**ENDLESS, "stream": is_stream})
                assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["code"] == "queue_full"
        server.wait_until_idle()
        assert client.post(CHAT_PATH, json={"model": "tiny", **CHAT}).status_code == 200
        too_many = client.post(CHAT_PATH, json={"model": "tiny", **CHAT, "n": 3})
        assert too_many.status_code == 400 and "more than the 2" in too_many.json()["error"]["message"]


def test_until_the_model_is_there_every_request_is_503(start: Start, target: Target) -> None:
    server = start(is_loaded=False)
    body = {"model": "tiny", **CHAT}
    refusals = [httpx.get(f"{server.url}/health"), httpx.get(f"{server.url}/v1/models")]
    for refused in [*refusals, httpx.post(server.url + CHAT_PATH, json=body)]:
        assert refused.status_code == 503 and "being loaded" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
    server.service.open(target, [NgramDrafter(4)], use_cost_guard=False)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.post(server.url + CHAT_PATH, json=body).status_code == 200


def test_draining_refuses_what_is_new_and_finishes_what_runs(start: Start, target: Target) -> None:
    server = start()
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", server.url + CHAT_PATH, json={**body, "stream": True}, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        draining = threading.Thread(target=server.service.drain)
        draining.start()
        while not server.service.is_draining:
            time.sleep(0.001)
        for refused in (httpx.post(server.url + CHAT_PATH, json=body), httpx.get(f"{server.url}/health")):
            assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
        draining.join(30)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == expect(target, MESSAGES, max_new_tokens=400, ignore_eos=True).text


def test_a_drain_that_takes_too_long_tells_the_clients(start: Start) -> None:
    server = start(drain_seconds=0.1)
    with httpx.stream("POST", server.url + CHAT_PATH, json={**ENDLESS, "stream": True}, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.service.drain()
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_failing_engine_is_an_error_and_not_a_hung_stream(
    server: Server, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    """Whole: 500. Streamed: an error event, which OpenAI's package raises. Then all is as before."""
    scheduler = server.engine._scheduler
    real_round, num_rounds = scheduler.round, 0

    def round_() -> object:
        nonlocal num_rounds
        num_rounds += 1
        if num_rounds == 4:
            raise RuntimeError("a bug")
        return real_round()

    monkeypatch.setattr(scheduler, "round", round_)
    with pytest.raises(openai.APIError, match=r"the server failed on this request \(RuntimeError\)"):
        list(
            client.chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=100, stream=is_stream, extra_body={"ignore_eos": True}
            )
        )
    again = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, extra_body={"ignore_eos": True})
    assert again.usage.completion_tokens == 4


# Keys, origins, heads, capture.


def test_keys_guard_the_api_and_nothing_else(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFSPEC_API_KEY", "from-environment")
    server = start(api_key=("first", "second"))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}, {"Authorization": "Basic first"}):
        # Not even a word about what is wrong with the body.
        answer = httpx.post(server.url + CHAT_PATH, content=b"{bad", headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert "x-request-id" in answer.headers and answer.headers["www-authenticate"] == "Bearer"
    for key in ("first", "second", "from-environment"):
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.post(server.url + CHAT_PATH, json={"model": "tiny", **CHAT}, headers=headers).status_code == 200
    assert httpx.get(f"{server.url}/health").status_code == httpx.get(f"{server.url}/metrics").status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_other_origins_get_in_only_by_name(server: Server, start: Start) -> None:
    preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in httpx.options(server.url + CHAT_PATH, headers=preflight).headers
    url = start(cors_origin=("https://page.example",), api_key=("key",)).url + CHAT_PATH
    assert httpx.options(url, headers=preflight).headers["access-control-allow-origin"] == "https://page.example"
    other = httpx.options(url, headers={**preflight, "Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_heads_come_and_go_while_others_are_served(start: Start, target: Target, tmp_path: Path) -> None:
    torch.manual_seed(0)
    head = tmp_path / "head"
    MedusaHead(MedusaConfig(target=identity(target), num_heads=2)).save_pretrained(head)
    server = start(allow_heads=True)
    heads = f"{server.url}/v1/heads"
    body = {"model": "tiny", **CHAT, "temperature": 0}
    with httpx.Client(timeout=30) as client:
        with client.stream("POST", server.url + CHAT_PATH, json={**ENDLESS, "stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            loaded = client.post(heads, json={"drafter": f"medusa:{head}", "name": "mine"}).json()
            assert loaded == {"id": "mine", "object": "head", "is_default": False, "status": "ready", "problem": None}
            answer = client.post(server.url + CHAT_PATH, json={**body, "drafter": "mine"}).json()
            assert answer["choices"][0]["message"]["content"] == expect(target, MESSAGES).text
            assert answer["usage"]["speculation"]["draft_tokens"] > 0
            assert [entry["id"] for entry in client.get(heads).json()["data"]] == ["ngram", "none", "mine"]
            again = client.post(heads, json={"drafter": "truncated:1", "name": "mine"})
            assert again.status_code == 400 and "loaded already" in again.json()["error"]["message"]
            assert client.delete(f"{heads}/mine").json() == {"id": "mine", "object": "head", "deleted": True}
        assert client.post(server.url + CHAT_PATH, json={**body, "drafter": "mine"}).status_code == 400
        assert client.delete(f"{heads}/mine").status_code == 404
        assert client.delete(f"{heads}/ngram").status_code == 400
        [weights] = head.glob("*.safetensors")
        weights.write_bytes(b"damaged")
        for spec in (f"medusa:{head}", "medusa:nowhere/at-all", "oracle", "truncated:99", "none"):
            refused = client.post(heads, json={"drafter": spec})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "drafter", refused.text
    server.wait_until_idle()


def test_heads_are_fixed_unless_allowed(server: Server) -> None:
    heads = f"{server.url}/v1/heads"
    assert [entry["id"] for entry in httpx.get(heads).json()["data"]] == ["ngram", "draft", "none"]
    assert httpx.post(heads, json={"drafter": "truncated:1"}).status_code == 403
    assert httpx.delete(f"{heads}/draft").status_code == 403


def test_what_was_served_is_what_training_reads(start: Start, target: Target, tmp_path: Path) -> None:
    server = start(capture=Capture(tmp_path))
    with httpx.Client(base_url=server.url, timeout=30) as client:
        whole = client.post(CHAT_PATH, json={"model": "tiny", **CHAT, "n": 2, "user": "somebody", "seed": 1}).json()
        client.post(CHAT_PATH, json={"model": "tiny", **CHAT, "stream": True, "temperature": 0})
        client.post("/v1/completions", json={"model": "tiny", "prompt": ["the cat", "one"], "temperature": 0})
        client.post(CHAT_PATH, json={"model": "tiny", **CHAT, "temperature": -1})
    server.close()
    report = Report()
    rows = list(read_conversations([tmp_path], report))
    assert not report.skipped and len(rows) == 4
    answers = [row.messages[-1]["content"] for row in rows]
    assert answers[:2] == [whole["choices"][0]["message"]["content"], expect(target, MESSAGES).text]
    assert [row.messages[:-1] for row in rows[:2]] == [MESSAGES] * 2
    assert rows[2].user_turns == ["the cat"]
    records = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert records[0]["settings"] == {"max_tokens": 24, "n": 2, "seed": 1}
    assert records[0]["token_counts"]["answer"] > 0 and "somebody" not in json.dumps(records)
