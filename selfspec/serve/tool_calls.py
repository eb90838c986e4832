"""The forms in which models write tool calls: what marks a call in an answer's text, and what it says.

A call that does not have its model's form is none: the text stays what the target wrote.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_DECODER = json.JSONDecoder(parse_constant=lambda name: _refuse(f"{name} is no JSON"))
# Between two calls.
_BETWEEN = re.compile(r"[\s;,]*")
_MISTRAL_NAME = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*")
_TAGGED_CALL = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_TAG, _TAG_END = re.compile(r"\s*<parameter=([^>\n]+)>"), "</parameter>"


@dataclass(frozen=True)
class Call:
    """A call of a tool: its name and its arguments as JSON text."""

    name: str
    arguments: str

    def record(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        # Nine letters and digits, because Mistral's templates take no other ids.
        return {
            "id": secrets.token_hex(5)[:9],
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True)
class ToolFormat:
    """How one family of models writes calls.

    Attributes:
        hints: texts in chat templates, one of which shows that a model has this form.
        opening: begins a call, or several.
        closing: ends them; None where they go on to the end of the answer.
        parse: the calls in the text between the two, given the tools.
        is_bare: an answer that begins with a brace is a call, too, without the opening.
    """

    hints: tuple[str, ...]
    opening: str
    closing: str | None
    parse: Callable[[str, Sequence[dict[str, Any]]], list[Call]]
    is_bare: bool = False

    def calls(self, text: str, tools: Sequence[dict[str, Any]]) -> list[Call] | None:
        """The calls in the text between opening and closing; None if it has another form."""
        try:
            return self.parse(text, tools) or None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None


def _refuse(message: str) -> Any:
    raise ValueError(message)


def call_of(name: Any, arguments: Any) -> Call:
    """A call, from a name and an object of arguments or its JSON text.

    Raises:
        ValueError: they are something else.
    """
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("no name, or no object of arguments")
    call = Call(name, json.dumps(arguments, ensure_ascii=False))
    # JSON can hold halves of characters, which nobody could send on.
    (call.name + call.arguments).encode()
    return call


def _of_object(value: Any) -> Call:
    return call_of(value["name"], value["arguments"] if "arguments" in value else value["parameters"])


def _json_calls(text: str, tools: Sequence[dict[str, Any]] = ()) -> list[Call]:
    """Objects one after the other, or lists of them."""
    calls: list[Call] = []
    at = _end(_BETWEEN, text, 0)
    while at < len(text):
        value, at = _DECODER.raw_decode(text, at)
        calls += [_of_object(each) for each in (value if isinstance(value, list) else [value])]
        at = _end(_BETWEEN, text, at)
    return calls


def _hermes_calls(text: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
    """One JSON object, or Qwen3-Coder's tags."""
    tagged = _TAGGED_CALL.fullmatch(text)
    return _json_calls(text) if tagged is None else [_tagged_call(tagged[1], tagged[2], tools)]


def _tagged_call(name: str, body: str, tools: Sequence[dict[str, Any]]) -> Call:
    properties = next((_properties(tool) for tool in tools if _function(tool).get("name") == name), {})
    arguments = {}
    at = 0
    while (tag := _TAG.match(body, at)) is not None:
        end = body.index(_TAG_END, tag.end())
        value = body[tag.end() : end].removeprefix("\n").removesuffix("\n")
        arguments[tag[1]] = _typed(value, properties.get(tag[1]))
        at = end + len(_TAG_END)
    if body[at:].strip():
        raise ValueError("text between the arguments")
    return call_of(name, arguments)


def _typed(text: str, schema: Any) -> Any:
    """An argument that has no quotes: text where the tool wants text or says nothing, otherwise JSON if it is."""
    kind = schema.get("type") if isinstance(schema, dict) else "string"
    try:
        return text if kind == "string" else _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text


def _mistral_calls(text: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
    """A list of objects; in newer models each call's name, then its arguments."""
    if text.lstrip().startswith("["):
        return _json_calls(text)
    calls: list[Call] = []
    at = _end(_BETWEEN, text, 0)
    while at < len(text):
        name = _MISTRAL_NAME.match(text, at) or _refuse("no name")
        arguments, at = _DECODER.raw_decode(text, name.end())
        calls.append(call_of(name[1], arguments))
        at = _end(_BETWEEN, text, at)
    return calls


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, dict) else {}


def _properties(tool: dict[str, Any]) -> dict[str, Any]:
    parameters = _function(tool).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


FORMATS = {
    "hermes": ToolFormat(("<tool_call>",), "<tool_call>", "</tool_call>", _hermes_calls),
    "mistral": ToolFormat(("[TOOL_CALLS]",), "[TOOL_CALLS]", None, _mistral_calls),
    "llama3": ToolFormat(
        ("<|python_tag|>", '"parameters": dictionary of argument name'), "<|python_tag|>", None, _json_calls, is_bare=True
    ),
}
