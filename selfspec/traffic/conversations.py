"""Conversations, and the forms of rows that people store them in.

A row has one of: `messages` (OpenAI chat), `conversations` (ShareGPT: from and value), `turns` (what a user says, turn by
turn), `prompt` or `text` (one user turn). A row that cannot be used is skipped, and the report counts it under its reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

# `role` and `content`; the fields of a tool's call or result, if it is one; `weight` 0 for an answer not to train on.
Message = dict[str, Any]

FORMS = ("messages", "conversations", "turns", "prompt", "text")
MESSAGE_KEYS = ("tool_calls", "tool_call_id", "name", "weight")
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
# Examples kept for each reason to skip a row.
NUM_EXAMPLES = 3


class BadRow(ValueError):
    """A row that cannot be used. The message is the reason that it is counted under."""


@dataclass(frozen=True)
class Conversation:
    """Messages in the order they were said.

    Attributes:
        finish_reason: how the last answer ended if the target wrote it: `stop` or `length`.
    """

    id: str
    messages: list[Message]
    category: str | None = None
    finish_reason: str | None = None

    @property
    def user_turns(self) -> list[str]:
        """What the user says, turn by turn."""
        return [message["content"] for message in self.messages if message["role"] == "user"]

    def record(self) -> dict[str, Any]:
        """The conversation as a row of a data file."""
        record = {"id": self.id, "category": self.category, "messages": self.messages, "finish_reason": self.finish_reason}
        return {key: value for key, value in record.items() if value is not None}


@dataclass
class Report:
    """How many rows were kept and how many skipped for each reason, with the places of the first ones."""

    num_kept: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, reason: str, place: str) -> None:
        """Count a row that is skipped."""
        self.skipped[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < NUM_EXAMPLES:
            examples.append(place)

    def record(self) -> dict[str, Any]:
        """The report as an object for JSON."""
        return {"kept": self.num_kept, "forms": self.forms, "skipped": self.skipped, "examples": self.examples}


def parse(record: object, default_id: str) -> tuple[str, Conversation]:
    """A row's form and its conversation.

    Raises:
        BadRow: the row cannot be used.
    """
    if not isinstance(record, dict):
        raise BadRow("not an object")
    form = next((form for form in FORMS if record.get(form) is not None), None)
    if form is None:
        raise BadRow(f"none of {', '.join(FORMS)}")
    value = record[form]
    if form in ("prompt", "text"):
        messages = [_message({"role": "user", "content": value})]
    elif not isinstance(value, Iterable) or isinstance(value, str | dict):
        raise BadRow(f"{form} is not a list")
    elif form == "turns":
        messages = [_message({"role": "user", "content": turn}) for turn in value]
    else:
        messages = [_message(message) for message in value]
    _check_order(messages)
    row_id, category = record.get("id"), record.get("category")
    conversation = Conversation(
        default_id if row_id is None else str(row_id),
        messages,
        category if isinstance(category, str) else None,
        record.get("finish_reason"),
    )
    try:
        json.dumps(conversation.record(), ensure_ascii=False).encode()
    except (ValueError, TypeError):
        raise BadRow("cannot be written as UTF-8 JSON") from None
    return form, conversation


def _message(raw: object) -> Message:
    if not isinstance(raw, dict):
        raise BadRow("a message that is not an object")
    role, content = raw.get("role", raw.get("from")), raw.get("content", raw.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"unknown role {str(role)[:40]!r}")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    elif content is None and raw.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise BadRow("content that is not text")
    return {
        "role": ROLES[role],
        "content": content,
        **{key: raw[key] for key in MESSAGE_KEYS if raw.get(key) is not None},
    }


def _check_order(messages: list[Message]) -> None:
    roles = [message["role"] for message in messages]
    if roles[:1] == ["system"]:
        roles = roles[1:]
    if roles[:1] != ["user"]:
        raise BadRow("does not begin with a user turn")
    for before, role in pairwise(roles):
        if role == "system":
            raise BadRow("a system turn after the first message")
        if role == before == "assistant":
            raise BadRow("two assistant turns in a row")
        if role == "tool" and before == "user":
            raise BadRow("a tool's answer to no call")
    if not all(message["content"].strip() for message in messages if message["role"] == "user"):
        raise BadRow("an empty user turn")
