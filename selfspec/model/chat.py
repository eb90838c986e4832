"""Chat messages on their way through a model's template to text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages in which the arguments of tool calls are objects.

    OpenAI's API has them as JSON text. Templates write them as JSON themselves or go through their items.
    """
    return [_with_objects(message) if message.get("tool_calls") else dict(message) for message in messages]


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message["tool_calls"]
    return {**message, "tool_calls": [_parsed(call) for call in calls] if isinstance(calls, list) else calls}


def _parsed(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    # Anything but an object is text that only looks like JSON.
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
