"""Conversations of other APIs as messages: what the assistant says in a row is one message, in the order of its parts."""

from __future__ import annotations

from typing import Any

import pytest

from selfspec.serve.messages import CountRequest
from selfspec.serve.responses import ResponsesRequest

ASKED = {"role": "user", "content": "the cat?"}
CALL = {"id": "1", "type": "function", "function": {"name": "a", "arguments": '{"b": "ü"}'}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "18 C"}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]}
CALLED = {"type": "function_call", "call_id": "1", "name": "a", "arguments": '{"b": "ü"}'}
GIVEN = {"type": "function_call_output", "call_id": "1", "output": "18 C"}
# Items, and the messages after the question.
ITEMS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "all parts": (
        [thought("Hm."), SAID, CALLED, CALLED, GIVEN],
        [
            {"role": "assistant", "reasoning_content": "Hm.", "content": "So.", "tool_calls": [CALL, CALL]},
            RESULT,
        ],
    ),
    "text after a call": (
        [CALLED, SAID],
        [{"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "content": "So."}],
    ),
    "two texts": ([SAID, SAID], [{"role": "assistant", "content": "So."}] * 2),
    "a thought after a text": (
        [SAID, thought("Hm.")],
        [{"role": "assistant", "content": "So."}, {"role": "assistant", "reasoning_content": "Hm.", "content": ""}],
    ),
    "a call after a result": (
        [CALLED, GIVEN, CALLED],
        [{"role": "assistant", "tool_calls": [CALL]}, RESULT, {"role": "assistant", "tool_calls": [CALL]}],
    ),
}


@pytest.mark.parametrize("name", ITEMS)
def test_items_are_messages(name: str) -> None:
    items, expected = ITEMS[name]
    body = ResponsesRequest.model_validate({"model": "m", "input": [ASKED, *items], "instructions": "sat"})
    assert body.chat()["messages"] == [{"role": "system", "content": "sat"}, ASKED, *expected]


BLOCKS = [
    {"type": "thinking", "thinking": "Hm.", "signature": ""},
    {"type": "text", "text": "S"},
    {"type": "text", "text": "o."},
    {"type": "tool_use", "id": "1", "name": "a", "input": {"b": "ü"}},
]


def test_blocks_are_messages() -> None:
    results = [{"type": "text", "text": "One."}, {"type": "tool_result", "tool_use_id": "1", "content": "18 C"}]
    asked = [ASKED, {"role": "assistant", "content": BLOCKS}, {"role": "user", "content": [*results, results[0]]}]
    body = CountRequest.model_validate({"model": "m", "messages": asked, "system": [{"type": "text", "text": "sat"}]})
    assert body.chat()["messages"] == [
        {"role": "system", "content": "sat"},
        ASKED,
        {"role": "assistant", "reasoning_content": "Hm.", "content": "So.", "tool_calls": [CALL]},
        {"role": "user", "content": "One."},
        RESULT,
        {"role": "user", "content": "One."},
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "auto"}, ("auto", None)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "none"}, ("none", None)),
        ({"type": "tool", "name": "a"}, ({"type": "function", "function": {"name": "a"}}, None)),
        (None, (None, None)),
    ],
)
def test_choices_of_a_tool_are_a_chats(given: Any, expected: tuple[Any, Any]) -> None:
    chat = CountRequest.model_validate({"model": "m", "messages": [ASKED], "tool_choice": given}).chat()
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == expected
