"""Chat messages on their way through a model's template to text."""

from __future__ import annotations

import copy
import inspect
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

# transformers hands these to the template itself.
RENDERED = ("messages", "conversations")
# The argument of `apply_chat_template` that encodes control tokens in the messages as text.
LITERAL = "sanitize_control_tokens"


class TemplateFailure(TemplateError, ValueError):
    """A chat template refuses the messages, or fails on them: an error of jinja2's kind, and the user's, as a ValueError is.

    Attributes:
        reason: the template's own words.
    """

    def __init__(self, verb: str, reason: str) -> None:
        super().__init__(f"the model's chat template {verb} these messages: {reason}")
        self.reason = reason


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages in which the arguments of tool calls are objects.

    OpenAI's API has them as JSON text. Templates write them as JSON themselves or go through their items.
    """
    return [_with_objects(message) if message.get("tool_calls") else dict(message) for message in messages]


def apply_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> Any:
    """What the tokenizer's `apply_chat_template` makes of the messages.

    Raises:
        TemplateFailure: whatever goes wrong in the template, which is a program and may meet anything.
    """
    try:
        return tokenizer.apply_chat_template(for_template(messages), **arguments)
    except TemplateError as error:
        raise TemplateFailure("refuses", str(error)) from error
    except Exception as error:
        raise TemplateFailure("fails on", f"{type(error).__name__}: {error}") from error


def reads_tools(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]], **arguments: Any
) -> bool:
    """Whether the tools change what the template makes of the messages.

    Raises:
        TemplateFailure: the template fails.
    """
    arguments = {**arguments, "tokenize": False, "add_generation_prompt": True}
    with_tools, without = (apply_template(tokenizer, messages, tools=each, **arguments) for each in (tools, None))
    return with_tools != without


def template_text(tokenizer: Any) -> str:
    """The chat template as it is written, all of its variants; "" where there is none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else template


def parse_arguments(text: str) -> dict[str, Any]:
    """Arguments of a chat template, from JSON.

    Raises:
        ValueError: the text is not a JSON object.
    """
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"chat_template_kwargs={text!r} is not JSON ({error}): give an object") from error
    if not isinstance(arguments, dict):
        raise ValueError(f'chat_template_kwargs={text!r} is not an object: use one such as {{"enable_thinking": false}}')
    return arguments


def check_arguments(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that are not the template's own, and those that it does not read.

    Raises:
        ValueError: one sentence that names the argument.
    """
    if not arguments:
        return
    text = template_text(tokenizer)
    if not text:
        raise ValueError("chat_template_kwargs are for a chat template, and this target has none: leave them out")
    reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map, *RENDERED}
    for name in arguments:
        if name in reserved - {"documents"}:
            raise ValueError(f"chat_template_kwargs has {name}, which is set for every prompt: leave it out")
        if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text):
            raise ValueError(f"chat_template_kwargs has {name}, which the model's chat template does not read: leave it out")


class LiteralText:
    """Encodes messages so that control tokens in them are text, and only the template writes control tokens.

    Raises:
        ValueError: this version of transformers cannot do it.
    """

    def __init__(self, tokenizer: Any) -> None:
        if LITERAL not in inspect.signature(tokenizer.apply_chat_template).parameters:
            raise ValueError("literal text needs transformers 5.20 or newer: update it, or leave the option out")
        # A copy, because encoding without control tokens changes a setting of the tokenizer for a moment, in all threads.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._control_tokens = tuple(token for token in tokenizer.get_added_vocab() if not token.isspace())

    def concerns(self, *values: Any) -> bool:
        """Whether a text among the values, which may be nested, has a control token in it."""
        return any(token in text for text in _texts(values) for token in self._control_tokens)

    def apply_template(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> Any:
        """As the function of that name."""
        with self._lock:
            return apply_template(self._tokenizer, messages, **{LITERAL: True}, **arguments)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message["tool_calls"]
    return {**message, "tool_calls": [_parsed(call) for call in calls] if isinstance(calls, list) else calls}


def _parsed(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    # Anything but an object is text that only looks like JSON.
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
