"""Whatever is sent: an answer, or a refusal in the API's own shape that names what is wrong. Never a failure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import LiveServer

from selfspec.serve.messages import MessagesRequest
from selfspec.serve.protocol import ChatRequest, CompletionRequest
from selfspec.serve.responses import ResponsesRequest

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2},
    "/v1/completions": {"model": "tiny", "prompt": "the cat", "max_tokens": 2},
    "/v1/responses": {
        "model": "tiny",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "the cat"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "name": "a", "arguments": "{}", "call_id": "1"},
            {"type": "function_call_output", "call_id": "1", "output": "dog"},
        ],
        "instructions": "sat",
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 2,
    },
    "/v1/messages": {
        "model": "tiny",
        "system": [{"type": "text", "text": "sat"}],
        "messages": [
            {"role": "user", "content": "the cat"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "dog"}]},
        ],
        "stop_sequences": ["on"],
        "max_tokens": 2,
    },
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "system": "sat"},
}
# Fields and values that mean something somewhere, so that some bodies come far.
FIELDS = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *ResponsesRequest.model_fields}
WORDS = sorted({*FIELDS, *MessagesRequest.model_fields, *ResponsesRequest.REFUSED, *MessagesRequest.REFUSED})
WORDS += ["type", "text", "input_text", "function", "name", "parameters", "input_schema", "role", "content", "id", "format"]
WORDS += [
    "user",
    "assistant",
    "auto",
    "required",
    "any",
    "json_schema",
    "schema",
    "tool_use",
    "tool_result",
    "function_call",
]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([2**63, 10**30, 1e300, float("nan"), -0.5, 0.5])
    | st.sampled_from(WORDS)
    | st.text(st.characters(), max_size=4)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)


def changed(draw: st.DrawFn, value: Any) -> Any:
    """The value with one place in it taken out or replaced."""
    if isinstance(value, dict | list) and value and draw(st.booleans()):
        keys = sorted(value) if isinstance(value, dict) else range(len(value))
        key = draw(st.sampled_from(keys))
        if draw(st.integers(0, 4)) == 0:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            rest = [(name, each) for name, each in pairs if name != key]
            return dict(rest) if isinstance(value, dict) else [each for _, each in rest]
        new = changed(draw, value[key])
        return {**value, key: new} if isinstance(value, dict) else [*value[:key], new, *value[key + 1 :]]
    return draw(VALUES)


@st.composite
def bodies(draw: st.DrawFn, good: dict[str, Any]) -> Any:
    if draw(st.integers(0, 9)) == 0:
        return draw(VALUES)
    body = good
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        body = changed(draw, body)
    if isinstance(body, dict) and draw(st.integers(0, 2)) == 0:
        body = {**body, draw(st.sampled_from(WORDS)): draw(VALUES)}
    return body


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("path", ROUTES)
def test_any_body_is_answered_or_refused(http: httpx.Client, path: str) -> None:
    counts = {"answered": 0, "refused": 0}

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies(ROUTES[path]))
    def law(body: Any) -> None:
        content = json.dumps(body).encode()
        answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
        if answer.status_code == 200:
            counts["answered"] += 1
            return
        assert 400 <= answer.status_code < 500, (content, answer.text)
        told = answer.json()
        assert told["error"]["message"] and "\n" not in told["error"]["message"]
        is_messages = path.startswith("/v1/messages")
        assert set(told) == ({"type", "error"} if is_messages else {"error"})
        assert set(told["error"]) == ({"type", "message"} if is_messages else {"message", "type", "param", "code"})
        counts["refused"] += 1

    law()
    assert min(counts.values()) >= 2, counts
