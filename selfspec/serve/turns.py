"""The messages of a chat, built up from what other APIs send: a message, a stretch of reasoning or a call at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What an assistant's message holds, in the order in which a model writes it.
ORDER = ("reasoning_content", "content", "tool_calls")


class Turns:
    """A conversation. What the assistant says in a row is one message, as far as it comes in the order of a message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []

    def messages(self) -> list[dict[str, Any]]:
        for message in self._messages:
            if message["role"] == "assistant" and "tool_calls" not in message:
                # An answer that was cut in its reasoning.
                message.setdefault("content", "")
        return self._messages

    def say(self, role: str, text: str) -> None:
        if role == "assistant":
            self._assistant("content")["content"] = text
        else:
            self._messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        self._assistant("reasoning_content")["reasoning_content"] = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        record = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant("tool_calls").setdefault("tool_calls", []).append(record)

    def result(self, call_id: str, text: str) -> None:
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _assistant(self, field: str) -> dict[str, Any]:
        """The assistant's last message if the field may still come in it, else a new one."""
        last = self._messages[-1] if self._messages else {"role": None}
        later = ORDER[ORDER.index(field) + (field == "tool_calls") :]
        if last["role"] != "assistant" or any(name in last for name in later):
            last = {"role": "assistant"}
            self._messages.append(last)
        return last


def text_of_parts(content: Any, place: str, kinds: Mapping[str, str]) -> str:
    """The text of a content that is text, or a list of parts.

    Args:
        place: where the content is, for the error's sentence.
        kinds: the types that a part may have, and the field that holds each one's text.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{place}: give text, or a list of parts of type {_one_of(kinds)}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise ValueError(f"{place}.{number}: a part of type {kind!r} is not served: send {_one_of(kinds)}")
        texts.append(string(part, kinds[kind], f"{place}.{number}"))
    return "".join(texts)


def string(item: Mapping[str, Any], field: str, place: str) -> str:
    """A field that holds text.

    Raises:
        ValueError: it holds something else, or is missing.
    """
    value = item.get(field)
    if not isinstance(value, str):
        raise ValueError(f"{place}.{field}: this {item.get('type', 'message')} needs it as text: add it")
    return value


def tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """A function as a chat has it."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def _one_of(kinds: Mapping[str, str]) -> str:
    *others, last = kinds
    return f"{', '.join(others)} or {last}" if others else last
