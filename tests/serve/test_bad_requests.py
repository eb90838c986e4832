"""Bad requests: each is refused with 4xx and one sentence that names the field, and costs nobody else anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from selfspec import SamplingParams, Target, generate
from selfspec.drafters import DraftModelDrafter, NgramDrafter
from selfspec.loop.sampling import Grammar
from selfspec.serve.errors import api_error
from selfspec.traffic.capture import Capture

# A live server of tests/serve/conftest.py, and what starts one.
Server = Any
Start = Callable[..., Server]
Case = tuple[dict[str, Any], str | None, str]

CHAT, COMPLETION, HEADS = "/v1/chat/completions", "/v1/completions", "/v1/heads"
JSON_TYPE = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "one two the cat"}
INNOCENT = {"model": "tiny", "prompt": "the dog sat on", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
SECRET = "the dog sat on"
HALF = "\ud800"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


# Changes to a good request, the field that is to be named, and a part of the sentence. These are the same for both routes.
SHARED: dict[str, Case] = {
    "unknown field": ({"temprature": 1}, "temprature", "is not a field of this request: check its spelling"),
    "model of another type": ({"model": 5}, "model", "valid string"),
    "no model": ({"model": None}, "model", "valid string"),
    "drafter unknown": ({"drafter": "oracle"}, "drafter", "'oracle' is not loaded: use one of ngram, draft, none"),
    "drafter empty": ({"drafter": ""}, "drafter", "at least 1 character"),
    "drafter of another type": ({"drafter": 5}, "drafter", "valid string"),
    "drafter far too long": ({"drafter": "x" * 100_000}, "drafter", "use one of ngram, draft, none"),
    "stream of another type": ({"stream": "yes"}, "stream", "valid boolean"),
    "stream options without a stream": (
        {"stream": False, "stream_options": {"include_usage": True}},
        "stream_options",
        "goes with a stream",
    ),
    "stream options of another type": ({"stream": True, "stream_options": 5}, "stream_options", "valid dictionary"),
    "running counts without usage": (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options",
        "goes with include_usage",
    ),
    "n is 0": ({"n": 0}, "n", "greater than or equal to 1"),
    "n above the maximum": ({"n": 129}, "n", "less than or equal to 128"),
    "n above the places": ({"n": 100}, "n", "100 answers are more than the 40 that may run or wait"),
    "n is a bool": ({"n": True}, "n", "valid integer"),
    "max_tokens is 0": ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    "max_tokens negative": ({"max_tokens": -1}, "max_tokens", "greater than or equal to 1"),
    "max_tokens above the context": ({"max_tokens": 4097}, "max_tokens", "share a context of 4096 tokens"),
    "max_tokens huge": ({"max_tokens": 10**30}, "max_tokens", "share a context of 4096 tokens"),
    "max_tokens is text": ({"max_tokens": "8"}, "max_tokens", "valid integer"),
    "max_tokens is a float": ({"max_tokens": 8.0}, "max_tokens", "valid integer"),
    "max_completion_tokens is 0": ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
    "two lengths": ({"max_completion_tokens": 3}, "max_tokens", "differ: give one of them"),
    "min_tokens above max_tokens": ({"min_tokens": 30}, "min_tokens", "use 0 to max_tokens (8)"),
    "min_tokens negative": ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
    "temperature negative": ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    "temperature too high": ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
    "temperature is NaN": ({"temperature": float("nan")}, "temperature", "finite number"),
    "temperature infinite": ({"temperature": float("inf")}, "temperature", "finite number"),
    "temperature is text": ({"temperature": "hot"}, "temperature", "valid number"),
    "top_p is 0": ({"top_p": 0}, "top_p", "greater than 0"),
    "top_p above 1": ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
    "top_p is NaN": ({"top_p": float("nan")}, "top_p", "finite number"),
    "top_k below -1": ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    "top_k huge": ({"top_k": 2**70}, "top_k", "less than or equal to 2147483647"),
    "top_k is a float": ({"top_k": 1.5}, "top_k", "valid integer"),
    "min_p above 1": ({"min_p": 2}, "min_p", "less than or equal to 1"),
    "presence_penalty too high": ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    "frequency_penalty infinite": ({"frequency_penalty": float("-inf")}, "frequency_penalty", "finite number"),
    "repetition_penalty is 0": ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    "bias of an unknown token": ({"logit_bias": {"9999": 1}}, "logit_bias", "has token id 9999"),
    "bias of a negative token": ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids of at least 0"),
    "bias of a word": ({"logit_bias": {"cat": 1}}, "logit_bias", "token ids of at least 0"),
    "every token an end before the minimum": (
        {"stop_token_ids": list(range(297)), "min_tokens": 2},
        "stop_token_ids",
        "leaves no token for the first 2 of the answer",
    ),
    "special tokens of another type": ({"skip_special_tokens": "no"}, "skip_special_tokens", "valid boolean"),
    "repetition_penalty beyond float32": ({"repetition_penalty": 1e300}, "repetition_penalty", "use 1e-10 to 1e+10"),
    "bias is NaN": ({"logit_bias": {"1": float("nan")}}, "logit_bias", "finite number"),
    "bias too high": ({"logit_bias": {"1": 101}}, "logit_bias", "less than or equal to 100"),
    "bias is a list": ({"logit_bias": [1, 2]}, "logit_bias", "valid dictionary"),
    "seed out of range": ({"seed": 2**63}, "seed", "use a 64-bit whole number"),
    "seed is a float": ({"seed": 1.5}, "seed", "valid integer"),
    "stop empty": ({"stop": ""}, "stop", "strings that are not empty"),
    "stop empty in a list": ({"stop": ["a", ""]}, "stop", "strings that are not empty"),
    "too many stops": ({"stop": ["a"] * 17}, "stop", "a list of at most 16 strings"),
    "stop is a number": ({"stop": 5}, "stop", "give a string"),
    "stops are numbers": ({"stop": [5]}, "stop", "give a string"),
    "half a character in stop": ({"stop": HALF}, "stop", "stop: this text cannot be encoded: send valid Unicode"),
    "stop id unknown": ({"stop_token_ids": [9999]}, "stop_token_ids", "has token id 9999"),
    "stop id negative": ({"stop_token_ids": [-1]}, "stop_token_ids", "token ids of at least 0"),
    "stop id is a float": ({"stop_token_ids": [1.5]}, "stop_token_ids", "valid integer"),
    "stop id is a bool": ({"stop_token_ids": [True]}, "stop_token_ids", "valid integer"),
    "metadata nested deeply": ({"metadata": nested(500)}, "metadata", "nested too deeply: use at most 64 levels"),
    "user of another type": ({"user": 5}, "user", "valid string"),
    "form of another type": ({"response_format": 5}, "response_format", "valid dictionary"),
    "form unknown": ({"response_format": {"type": "xml"}}, "response_format", "'json_schema'"),
    "form without its schema": ({"response_format": {"type": "json_schema"}}, "response_format", "takes json_schema"),
    "schema nested deeply": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": nested(500)}}},
        "response_format",
        "nested too deeply",
    ),
    "half a character in a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": HALF}}}},
        "response_format",
        "send valid Unicode",
    ),
    "pattern wrong": ({"response_format": {"type": "regex", "pattern": "(" * 5000}}, "response_format", "invalid regex"),
    "pattern too complex": (
        {"response_format": {"type": "regex", "pattern": "(a{1000}){1000}"}},
        "response_format",
        "became too complex to follow",
    ),
    "form and minimum": (
        {"response_format": {"type": "json_object"}, "min_tokens": 2},
        "response_format",
        "leave out ignore_eos and min_tokens",
    ),
}
OF_CHATS: dict[str, Case] = {
    "no messages": ({"messages": []}, "messages", "at least 1 item"),
    "messages are missing": ({"messages": None}, "messages", "valid list"),
    "messages of another type": ({"messages": USER}, "messages", "valid list"),
    "message is text": ({"messages": ["a"]}, "messages", "valid dictionary"),
    "message without a role": (
        {"messages": [{"content": "a"}]},
        "messages",
        "messages.0.role: this field is missing: add it",
    ),
    "role unknown": ({"messages": [{"role": "wizard", "content": "a"}]}, "messages", "'assistant' or 'tool'"),
    "message without content": ({"messages": [{"role": "user"}]}, "messages", "this user message has no content"),
    "content is null": (said(None), "messages", "this user message has no content"),
    "content is a number": (said(5), "messages", "messages.0.content: give text, or a list of parts"),
    "no parts": (said([]), "messages", "the list of parts is empty"),
    "part is a number": (said([5]), "messages", "give text, or a list of parts"),
    "part without its text": (said([{"type": "text"}]), "messages", "parts other than text"),
    "image": (said([{"type": "image_url"}]), "messages", "other than text"),
    "half a character": (said(HALF), "messages", "send valid Unicode"),
    "message nested deeply": (said("a", extra=nested(500)), "messages", "nested too deeply"),
    "as long as the context": (said("xyz" * 2000), "messages", "shorten the prompt"),
    "both prompt forms": ({"prompt": "a"}, "prompt", "is not a field of this request"),
    "top_logprobs without logprobs": ({"top_logprobs": 3}, "top_logprobs", "set logprobs to true"),
    "top_logprobs above 20": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    "logprobs of another type": ({"logprobs": 5}, "logprobs", "valid boolean"),
    "tools of another type": ({"tools": 5}, "tools", "valid list"),
    "tool is a number": ({"tools": [5]}, "tools", "valid dictionary"),
    "half a character in a tool": ({"tools": [{"a": {HALF: 1}}]}, "tools", "send valid Unicode"),
    "half a character beside a message": (said("a", name=HALF), "messages", "send valid Unicode"),
    "tool nested deeply": ({"tools": [nested(500)]}, "tools", "nested too deeply"),
    "forced tool": ({"tool_choice": "required"}, "tool_choice", "'none' or 'auto'"),
    "forced tool that there is not": (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "time"}}},
        "tool_choice",
        "tools lacks the tool: add it",
    ),
    "tool choice of another type": (
        {"tool_choice": {"type": "any"}},
        "tool_choice",
        "give 'none' or 'auto', 'required', or",
    ),
    "forced tool and form": (
        {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
        "leave one of them out",
    ),
    "forced tool and minimum": (
        {"tools": [WEATHER], "tool_choice": "required", "min_tokens": 2},
        "tool_choice",
        "leave out ignore_eos and min_tokens",
    ),
    "tools that the template does not read": ({"tools": [WEATHER]}, "tools", "leave them out, or serve another model"),
    "template arguments of another type": ({"chat_template_kwargs": 5}, "chat_template_kwargs", "valid dictionary"),
    "template argument that nobody reads": (
        {"chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs",
        "enable_thinking, which the model's chat template does not read: leave it out",
    ),
    "template argument that the server sets": (
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        "chat_template_kwargs",
        "add_generation_prompt, which is set for every prompt: leave it out",
    ),
    "effort": ({"reasoning_effort": "low"}, "reasoning_effort", "the model's chat template decides how it thinks"),
    "functions": (
        {"functions": [{"name": "a"}]},
        "functions",
        "is not served here, because tools have their place",
    ),
    "sound": ({"modalities": ["text", "audio"]}, "modalities", "an answer is text: leave it out"),
    "another server's form": ({"guided_json": {}}, "guided_json", "response_format has its place: send the form there"),
    "begun answer": ({"continue_final_message": True}, "continue_final_message", "is not continued: leave it out"),
    "template arguments nested deeply": ({"chat_template_kwargs": nested(500)}, "chat_template_kwargs", "nested too deeply"),
}
A_PROMPT = "give text, a list of texts, a list of token ids, or a list of lists of token ids"
OF_COMPLETIONS: dict[str, Case] = {
    "prompt is missing": ({"prompt": None}, "prompt", A_PROMPT),
    "prompt of another type": ({"prompt": {"a": 1}}, "prompt", A_PROMPT),
    "no prompts": ({"prompt": []}, "prompt", "prompt is an empty list"),
    "prompt empty": ({"prompt": ""}, "prompt", "prompt 0 is empty"),
    "one prompt empty": ({"prompt": ["a", ""]}, "prompt", "prompt 1 is empty"),
    "no token ids": ({"prompt": [[]]}, "prompt", "prompt 0 is empty"),
    "id outside the vocabulary": ({"prompt": [1, 9999]}, "prompt", "has token id 9999"),
    "id huge": ({"prompt": [10**30]}, "prompt", f"has token id {10**30}"),
    "id negative": ({"prompt": [1, -1]}, "prompt", "has token id -1"),
    "id is a float": ({"prompt": [1.0]}, "prompt", A_PROMPT),
    "id is NaN": ({"prompt": [float("nan")]}, "prompt", A_PROMPT),
    "id is a bool": ({"prompt": [True]}, "prompt", A_PROMPT),
    "ids and words": ({"prompt": [1, "b"]}, "prompt", A_PROMPT),
    "prompts nested deeply": ({"prompt": [[[1]]]}, "prompt", A_PROMPT),
    "half a character": ({"prompt": HALF}, "prompt", "send valid Unicode"),
    "as long as the context": ({"prompt": [5] * 4096}, "prompt", "has 4096 tokens"),
    "text longer than the context": ({"prompt": "xyz" * 2000}, "prompt", "shorten the prompt"),
    "more prompts than places": ({"prompt": ["a"] * 200}, "n", "200 answers are more than the 40"),
    "both prompt forms": ({"messages": [USER]}, "messages", "is not a field of this request"),
    "echo": ({"echo": True}, "echo", "should be False"),
    "suffix": ({"suffix": "x"}, "suffix", "should be ''"),
    "best_of": ({"best_of": 3}, "best_of", "leave it out"),
    "logprobs is a bool": ({"logprobs": True}, "logprobs", "valid integer"),
    "logprobs above 20": ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
}
GOOD = {
    CHAT: {"model": "tiny", "messages": [USER], "max_tokens": 8},
    COMPLETION: {"model": "tiny", "prompt": "one two", "max_tokens": 8},
}
# What both routes share is one model of the request: once as a stream is enough.
TABLE = [
    *((CHAT, name, False) for name in (*SHARED, *OF_CHATS)),
    *((COMPLETION, name, False) for name in (*SHARED, *OF_COMPLETIONS)),
    *((CHAT, name, True) for name in (*SHARED, *OF_CHATS)),
    *((COMPLETION, name, True) for name in OF_COMPLETIONS),
]
CASES = {CHAT: {**SHARED, **OF_CHATS}, COMPLETION: {**SHARED, **OF_COMPLETIONS}}


@pytest.fixture(scope="module")
def expected(target: Target) -> str:
    """The innocent request's answer."""
    sampling = SamplingParams(max_new_tokens=INNOCENT["max_tokens"], ignore_eos=True)
    return generate(target, [INNOCENT["prompt"]], sampling=sampling)[0].text


@pytest.fixture(scope="module")
def server(target: Target, module_start: Start) -> Server:
    """Drafts with two drafters, has places for 40 answers, and lets drafters come and go."""
    draft_model = DraftModelDrafter(target.truncated(1), target.vocab_size, num_draft_tokens=3, name="draft")
    return module_start(NgramDrafter(4), draft_model, max_batch=8, max_waiting=32, allow_heads=True)


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture
def bystander(server: Server, http: httpx.Client, expected: str) -> Iterator[None]:
    """A request that runs during the test has exactly its answer, another one after it too, and nothing is held."""
    with http.stream("POST", COMPLETION, json={**INNOCENT, "stream": True}) as answer:
        lines = answer.iter_lines()
        first = next(line for line in lines if line)
        yield
        rest = [line for line in lines if line and line != "data: [DONE]"]
    pieces = [json.loads(line.removeprefix("data: ")) for line in (first, *rest)]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected
    again = http.post(COMPLETION, json=INNOCENT)
    assert again.json()["choices"][0]["text"] == expected
    server.wait_until_idle()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """What is common to all refusals."""
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    message = error["message"]
    assert message and "\n" not in message and len(message) < 600 and SECRET not in message
    return error


@pytest.mark.parametrize(("path", "name", "is_stream"), TABLE)
def test_every_mistake_is_named(http: httpx.Client, bystander: None, path: str, name: str, is_stream: bool) -> None:
    changes, param, message = CASES[path][name]
    # As plain JSON text: httpx would write neither NaN nor half a character.
    content = json.dumps({"stream": is_stream, **GOOD[path], **changes})
    answer = http.post(path, content=content, headers=JSON_TYPE)
    if answer.status_code == 200:
        # Found only once the answer had begun: the stream's last event.
        *_, last = [line for line in answer.text.splitlines() if line]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert is_stream and error["type"] == "invalid_request_error"
    else:
        error = error_of(answer)
        assert answer.status_code == 400
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_a_missing_field_is_named(http: httpx.Client, path: str, missing: str) -> None:
    field = "messages" if (path, missing) == (CHAT, "prompt") else missing
    body = {name: value for name, value in GOOD[path].items() if name != field}
    error = error_of(http.post(path, json=body))
    assert error["param"] == field and error["message"] == f"{field}: this field is missing: add it"


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_an_unknown_model_is_404(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={**GOOD[path], "model": "gpt"})
    assert answer.status_code == 404 and error_of(answer)["code"] == "model_not_found"
    assert "model 'gpt' is not served here: ask for 'tiny'" in answer.text


BODIES = {
    "cut off": b'{"model": "tiny", ',
    "empty": b"",
    "a list": b"[]",
    "a number": b"5",
    "null": b"null",
    "not text": b"\xff\xfe",
    "Latin-1": '{"model": "tiny", "prompt": "caf\u00e9"}'.encode("latin-1"),
    "a bomb of brackets": b"[" * 100_000,
    "nested deeply": b'{"metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    "a name that is half a character": b'{"model": "tiny", "prompt": "a", "\\ud800": 1}',
}


@pytest.mark.parametrize("path", [CHAT, COMPLETION, HEADS])
@pytest.mark.parametrize("name", BODIES)
def test_malformed_bodies_are_refused(http: httpx.Client, bystander: None, path: str, name: str) -> None:
    answer = http.post(path, content=BODIES[name], headers=JSON_TYPE)
    error = error_of(answer)
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert "body" in error["message"] or "Unicode" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION, HEADS])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_other_content_types_are_refused(http: httpx.Client, path: str, kind: str | None) -> None:
    content = json.dumps(GOOD.get(path, {"drafter": "ngram"}))
    answer = http.post(path, content=content, headers={"Content-Type": kind} if kind else {})
    assert "with `Content-Type: application/json`" in error_of(answer)["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION, HEADS])
def test_a_body_too_large_is_refused(
    server: Server, http: httpx.Client, bystander: None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server.service, "_limits", replace(server.service.limits, max_body_bytes=1000))
        for content in (b" " * 2000, iter([b" " * 600] * 2)):
            answer = http.post(path, content=content, headers=JSON_TYPE)
            assert answer.status_code == 413 and "send less" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v1/nothing", 404, "the routes are /v1/chat/completions"),
        ("GET", CHAT, 405, "use POST"),
        ("PUT", COMPLETION, 405, "use POST"),
        ("DELETE", HEADS, 405, "use "),
        ("PATCH", "/v1/models", 405, "use GET"),
        ("POST", "/v1/models/tiny", 405, "use GET"),
        ("POST", "/health", 405, "use GET"),
        ("POST", "/metrics", 405, "use GET"),
    ],
)
def test_wrong_routes_and_methods_say_what_is_right(
    http: httpx.Client, method: str, path: str, status: int, message: str
) -> None:
    answer = http.request(method, path)
    error = error_of(answer)
    assert answer.status_code == status and path in error["message"] and message in error["message"]


@pytest.mark.parametrize("name", ["gpt", "", "%ff", "tiny/more"])
def test_a_model_that_is_not_there_is_404(http: httpx.Client, name: str) -> None:
    answer = http.get(f"/v1/models/{name}")
    assert answer.status_code == 404 and "ask for 'tiny'" in error_of(answer)["message"]


HEAD_MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no drafter": ({}, "drafter", "this field is missing"),
    "another type": ({"drafter": 5}, "drafter", "valid string"),
    "empty": ({"drafter": ""}, "drafter", "drafter '' is not known: use none"),
    "unknown kind": ({"drafter": "oracle"}, "drafter", "drafter 'oracle' is not known"),
    "argument where none goes": ({"drafter": "none:x"}, "drafter", "takes no argument"),
    "no number": ({"drafter": "ngram:x"}, "drafter", "needs a whole number"),
    "number out of range": ({"drafter": "ngram:0"}, "drafter", "draft 1 to 64 tokens"),
    "too many layers": ({"drafter": "truncated:99"}, "drafter", "truncated:99 is out of range"),
    "layers below 0": ({"drafter": "truncated:-1"}, "drafter", "needs a whole number"),
    "no shipped head": ({"drafter": "eagle"}, "drafter", "no shipped eagle head fits"),
    "nowhere": ({"drafter": "medusa:nowhere/at-all"}, "drafter", "nowhere/at-all: no such folder"),
    "no model": ({"drafter": "draft_model:nowhere/at-all"}, "drafter", "nowhere/at-all: no such folder"),
    "no head in the folder": ({"drafter": "early_exit:/"}, "drafter", "holds no head"),
    "no path": ({"drafter": "medusa:\0"}, "drafter", "no such folder"),
    "a path far too long": ({"drafter": "medusa:" + "x" * 10_000}, "drafter", "name too long"),
    "name empty": ({"drafter": "ngram", "name": ""}, "name", "at least 1 character"),
    "name too long": ({"drafter": "ngram", "name": "x" * 65}, "name", "at most 64 characters"),
    "loaded already": ({"drafter": "ngram"}, "drafter", "loaded already"),
    "unknown field": ({"drafter": "ngram", "path": "x"}, "path", "is not a field of this request"),
}


@pytest.mark.parametrize("name", HEAD_MISTAKES)
def test_drafters_that_cannot_be_loaded_say_why(http: httpx.Client, bystander: None, name: str) -> None:
    body, param, message = HEAD_MISTAKES[name]
    answer = http.post(HEADS, json=body)
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, param) and message in error["message"]


@pytest.mark.parametrize("config", [b"", b"[]", b"{}", b'{"head_type": "oracle"}', b"\xff", b'{"head_type": "medusa"}'])
def test_a_folder_that_is_no_head_says_so(http: httpx.Client, bystander: None, tmp_path: Path, config: bytes) -> None:
    (tmp_path / "config.json").write_bytes(config)
    for drafter in (f"medusa:{tmp_path}", f"draft_model:{tmp_path}"):
        answer = http.post(HEADS, json={"drafter": drafter})
        assert answer.status_code == 400 and error_of(answer)["param"] == "drafter", answer.text


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("nope", 404, "drafter 'nope' is not loaded: use one of ngram, draft, none"),
        ("", 404, "drafter '' is not loaded"),
        ("%ff", 404, "is not loaded"),
        ("ngram", 400, "it stays"),
        ("none", 400, "it stays"),
    ],
)
def test_drafters_that_cannot_be_unloaded_say_why(
    http: httpx.Client, bystander: None, name: str, status: int, message: str
) -> None:
    answer = http.delete(f"{HEADS}/{name}")
    assert answer.status_code == status and message in error_of(answer)["message"]


def test_a_template_that_refuses_says_so(
    http: httpx.Client, bystander: None, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(target.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
        answer = http.post(CHAT, json=GOOD[CHAT])
    error = error_of(answer)
    assert answer.status_code == 400 and error["param"] == "messages" and "roles must alternate" in error["message"]


def test_what_is_logged_of_odd_requests_costs_no_answer(
    start: Start, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deepest tools that are allowed, and metadata of any kind."""
    template = "{{ tools | tojson if tools }}" + target.tokenizer.chat_template
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    server = start(capture=Capture(tmp_path))
    odd = {"tools": [nested(64)], "metadata": {"a": None}, "user": "x" * 10_000}
    answer = httpx.post(server.url + CHAT, json={**GOOD[CHAT], **odd}, timeout=30)
    assert answer.status_code == 200, answer.text


def test_a_grammar_that_becomes_too_complex_is_the_clients_affair() -> None:
    problem = Grammar.problem or "response_format became too complex to follow: too many states"
    error = api_error(ValueError(problem))
    assert (error.status, error.param, error.message) == (400, "response_format", problem)


def test_what_an_internal_error_says_stays_in_the_log() -> None:
    error = api_error(ValueError("row 3 holds [1, 2, 3] of somebody else"))
    assert (error.status, error.message) == (500, "the server failed on this request (ValueError)")
