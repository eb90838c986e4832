"""The forms of rows that people store conversations in.

A row has one of: `messages` (OpenAI chat), `conversations` (ShareGPT: from and value), `turns` (what a user says, turn by
turn), `prompt` or `text` (one user turn), `instruction` (Alpaca, with `input` and `output`); or it is a request with its
response, as OpenAI's batch files (`body`) and proxies (`request`) keep them. A row that cannot be used is skipped, and the
report counts it under its reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from selfspec.traffic.conversations import BadRow, Conversation, Message

FORMS = ("messages", "conversations", "turns", "prompt", "text", "instruction")
REQUESTS = ("body", "request")
MESSAGE_KEYS = ("reasoning_content", "tool_calls", "tool_call_id", "name", "weight", "token_ids")
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


def parse(record: object, default_id: str) -> tuple[str, Conversation]:
    """A row's form and its conversation.

    Raises:
        BadRow: the row cannot be used.
    """
    if not isinstance(record, dict):
        raise BadRow("not an object")
    form = next((form for form in (*FORMS, *REQUESTS) if record.get(form) is not None), None)
    if form is None:
        raise BadRow(f"none of {', '.join((*FORMS, *REQUESTS))}")
    if form in REQUESTS:
        record = _exchange(record, form)
    messages = [_message(message) for message in _messages(record, form)]
    _check_order(messages)
    row_id = record.get("id")
    texts = {key: record.get(key) for key in ("category", "finish_reason", "tokenizer_hash", "left_out")}
    conversation = Conversation(
        default_id if row_id is None else str(row_id),
        messages,
        **{key: value for key, value in texts.items() if isinstance(value, str)},
        tools=_objects(record, "tools"),
        chat_template_kwargs=_object(record, "chat_template_kwargs"),
    )
    try:
        json.dumps(conversation.record(), ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        raise BadRow("cannot be written as UTF-8 JSON") from None
    return form, conversation


def _exchange(record: dict[str, Any], form: str) -> dict[str, Any]:
    """A logged request and its response as a row with messages."""
    request, response = _body(record[form]), _body(record.get("response"))
    if not isinstance(request.get("messages"), list):
        raise BadRow(f"{form} has no messages")
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    row_id = record.get("custom_id")
    return {
        **request,
        "id": record.get("id") if row_id is None else row_id,
        "messages": [*request["messages"], *filter(None, [choice.get("message")])],
        "finish_reason": choice.get("finish_reason"),
    }


def _body(value: object) -> dict[str, Any]:
    """The JSON object that a request or a response is about; some logs wrap it once more, or keep it as text."""
    value = _parsed(value)
    inner = _parsed(value.get("body")) if isinstance(value, dict) else None
    body = inner if isinstance(inner, dict) else value
    return body if isinstance(body, dict) else {}


def _parsed(value: object) -> object:
    """JSON that is kept as text; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _messages(record: dict[str, Any], form: str) -> list[object]:
    value = record["messages" if form in REQUESTS else form]
    if form in ("prompt", "text"):
        return [{"role": "user", "content": value}]
    if form == "instruction":
        asked = [part for part in (value, record.get("input")) if part]
        question = "\n\n".join(asked) if all(isinstance(part, str) for part in asked) else None
        answer = record.get("output")
        answers = [] if answer is None else [{"role": "assistant", "content": answer}]
        return [{"role": "user", "content": question}, *answers]
    if not isinstance(value, Iterable) or isinstance(value, str | dict):
        raise BadRow(f"{form} is not a list")
    return [{"role": "user", "content": turn} for turn in value] if form == "turns" else list(value)


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
    if not isinstance(content, str) or not isinstance(raw.get("reasoning_content") or "", str):
        raise BadRow("content that is not text")
    token_ids = raw.get("token_ids")
    if token_ids is not None and not _are_ids(token_ids):
        raise BadRow("token_ids that are not whole numbers from 0 on")
    return known_fields({**raw, "role": ROLES[role], "content": content})


def known_fields(message: Mapping[str, Any]) -> Message:
    """The message without fields that a data file does not keep."""
    kept = {key: message[key] for key in MESSAGE_KEYS if message.get(key) is not None}
    return {"role": message["role"], "content": message["content"], **kept}


def _are_ids(value: object) -> bool:
    # A bool is an int to Python.
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _objects(record: dict[str, Any], key: str) -> list[dict[str, Any]] | None:
    value = _parsed(record.get(key))
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise BadRow(f"{key} that are not a list of objects")
    return value


def _object(record: dict[str, Any], key: str) -> dict[str, Any] | None:
    value = _parsed(record.get(key))
    if not value:
        return None
    if not isinstance(value, dict):
        raise BadRow(f"{key} that are not an object")
    return value


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
