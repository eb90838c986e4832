"""Anthropic's Messages API: what clients may ask for, and the chat that it is."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from selfspec.serve.fields import (
    FIRST_ERROR,
    MAX_TOP_K,
    NO_TOOLS,
    TEMPLATE_DECIDES,
    Number,
    Object,
    ProtocolObject,
    StopString,
    TextOrObjects,
    at_most,
)
from selfspec.serve.limits import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS
from selfspec.serve.turns import Turns, string, text_of_parts, tool

TEXT = {"text": "text"}
ROLES = ("user", "assistant", "system")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# The model thinks as its chat template says, which is what `adaptive` leaves to it.
THINKING = ("adaptive", "disabled")


class CountRequest(ProtocolObject):
    """POST /v1/messages/count_tokens. `chat_template_kwargs` is this server's own."""

    # What this API calls the fields of a chat.
    NAMES: ClassVar[dict[str, str]] = {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    }
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "container": ((), "the server runs no code: leave it out"),
        "mcp_servers": (([],), NO_TOOLS),
        "context_management": ((), "messages are used as they come: leave it out"),
        "speed": (("standard",), "there is one speed: leave it out"),
    }

    model: str
    messages: Annotated[list[Object], Field(min_length=1), FIRST_ERROR, at_most(MAX_MESSAGES)]
    system: TextOrObjects | None = None
    tools: Annotated[list[Object], FIRST_ERROR, at_most(MAX_TOOLS)] | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: Object | None = None
    chat_template_kwargs: Object | None = None
    # Every prompt's beginning is looked up in the cache, so what should be kept need not be marked.
    cache_control: Object | None = None

    @model_validator(mode="after")
    def _check(self) -> CountRequest:
        if self.thinking is not None and self.thinking.get("type") not in THINKING:
            kind = self.thinking.get("type")
            raise ValueError(f"thinking of type {kind!r} is not served here, because {TEMPLATE_DECIDES}")
        for name, value in (self.output_config or {}).items():
            if name != "format" and value is not None:
                raise ValueError(f"output_config has {name}, which is not served here: leave it out")
        return self

    @property
    def forbids_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.get("type") == "disabled"

    def chat(self) -> dict[str, Any]:
        """The chat, in the fields of OpenAI's API.

        Raises:
            ValueError: something in it is not served; the sentence begins with the field.
        """
        turns = Turns()
        if self.system:
            turns.say("system", text_of_parts(self.system, "system", TEXT))
        for number, message in enumerate(self.messages):
            _take(message, f"messages.{number}", turns)
        if self.messages[-1].get("role") == "assistant":
            raise ValueError(
                "messages ends with one of the assistant, which is not continued here: end with one of the user"
            )
        choice = self.tool_choice or {}
        return {
            "model": self.model,
            "messages": turns.messages(),
            "tools": [_tool(each, f"tools.{number}") for number, each in enumerate(self.tools or [])] or None,
            "tool_choice": _tool_choice(choice) if choice else None,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "response_format": _form((self.output_config or {}).get("format")),
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class MessagesRequest(CountRequest):
    """POST /v1/messages. `drafter`, `seed` and `chat_template_kwargs` are this server's own."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS), FIRST_ERROR] | None = None
    stream: bool | None = False
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = 0
    drafter: Annotated[str, Field(min_length=1)] | None = None
    seed: int | None = None
    # These change no answer.
    metadata: Object | None = None
    service_tier: str | None = None

    def chat(self) -> dict[str, Any]:
        return {
            **super().chat(),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "drafter": self.drafter,
            "seed": self.seed,
        }


def _take(message: dict[str, Any], place: str, turns: Turns) -> None:
    """Add one message to a conversation: its blocks are texts, calls and their results, in any order."""
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"{place}.role: {role!r} is not known: use one of {', '.join(ROLES)}")
    if not isinstance(content, list):
        turns.say(role, text_of_parts(content, f"{place}.content", TEXT))
        return
    if not content:
        raise ValueError(f"{place}.content: the list of blocks is empty: give at least one")
    texts: list[str] = []
    for number, block in enumerate(content):
        at = f"{place}.content.{number}"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(string(block, "text", at))
            continue
        _say(turns, role, texts)
        if (kind, role) == ("tool_use", "assistant"):
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise ValueError(f"{at}.input: a call's arguments are an object: give one")
            turns.call(string(block, "id", at), string(block, "name", at), json.dumps(arguments, ensure_ascii=False))
        elif (kind, role) == ("tool_result", "user"):
            result = block.get("content")
            turns.result(string(block, "tool_use_id", at), text_of_parts(result or "", f"{at}.content", TEXT))
        elif (kind, role) == ("thinking", "assistant"):
            turns.think(string(block, "thinking", at))
        else:
            raise ValueError(
                f"{at}: a block of type {kind!r} is not served in a message of the {role}: send text, tool_use and "
                "tool_result"
            )
    _say(turns, role, texts)


def _say(turns: Turns, role: str, texts: list[str]) -> None:
    """Add the texts that came in a row as one."""
    if texts:
        turns.say(role, "".join(texts))
        texts.clear()


def _tool(given: dict[str, Any], place: str) -> dict[str, Any]:
    if given.get("type", "custom") not in ("custom", None):
        raise ValueError(
            f"{place}: a tool of type {given['type']!r} is not served, because the server runs no tools itself: send custom "
            "tools"
        )
    schema = given.get("input_schema")
    if not isinstance(schema, dict):
        raise ValueError(f"{place}.input_schema: a tool needs the schema of its arguments: add an object")
    return tool(string(given, "name", place), given.get("description"), schema)


def _tool_choice(given: dict[str, Any]) -> Any:
    kind = given.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": string(given, "name", "tool_choice")}}
    if not isinstance(kind, str) or kind not in CHOICES:
        raise ValueError(f"tool_choice.type: {kind!r} is not known: use auto, any, tool or none")
    return CHOICES[kind]


def _form(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
