"""OpenAI's Responses API: what clients may ask for, and the chat that it is."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from selfspec.serve.fields import (
    FIRST_ERROR,
    NO_TOOLS,
    TEMPLATE_DECIDES,
    Number,
    Object,
    ProtocolObject,
    Text,
    TextOrObjects,
    at_most,
)
from selfspec.serve.limits import MAX_TOOLS
from selfspec.serve.turns import Turns, string, text_of_parts, tool

NOTHING_IS_KEPT = "no response is kept: send the whole conversation as input"
PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
ROLES = ("user", "assistant", "system", "developer")
MAX_METADATA = 16


class TextConfig(ProtocolObject):
    format: Object | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(ProtocolObject):
    """POST /v1/responses. `drafter`, `seed` and `chat_template_kwargs` are this server's own."""

    # What this API calls the fields of a chat.
    NAMES: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "previous_response_id": ((), NOTHING_IS_KEPT),
        "conversation": ((), NOTHING_IS_KEPT),
        "store": ((False,), "no response is kept: send false, or leave it out"),
        "prompt": ((), "no prompt is kept: send its text as instructions or input"),
        "background": ((False,), "a response is written while its client waits: leave it out"),
        "truncation": (("disabled",), "an input that is too long is refused and never cut: leave it out"),
        "context_management": (([],), "the input is used as it comes: leave it out"),
        "max_tool_calls": ((), NO_TOOLS),
        "top_logprobs": ((0,), "only /v1/chat/completions gives log-probabilities: leave it out"),
        "moderation": ((), "there is no moderation: leave it out"),
    }

    model: str
    input: TextOrObjects
    instructions: Text | None = None
    tools: Annotated[list[Object], FIRST_ERROR, at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Object | None = None
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = 1.0
    stream: bool | None = False
    stream_options: Object | None = None
    metadata: (
        Annotated[dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], at_most(MAX_METADATA)]
        | None
    ) = None
    drafter: Annotated[str, Field(min_length=1)] | None = None
    seed: int | None = None
    chat_template_kwargs: Object | None = None
    # These change no answer.
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Object | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponsesRequest:
        if any(value is not None for value in (self.reasoning or {}).values()):
            raise ValueError(f"reasoning is not served here, because {TEMPLATE_DECIDES}")
        # There is no encrypted reasoning, because the reasoning itself is in the answer.
        unknown = [name for name in self.include or [] if name != "reasoning.encrypted_content"]
        if unknown:
            raise ValueError(f"include has {unknown[0]!r}, which is not served here: leave it out")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with a stream: leave it out, or set stream to true")
        return self

    def chat(self) -> dict[str, Any]:
        """The chat, in the fields of its own API.

        Raises:
            ValueError: something in it is not served; the sentence begins with the field.
        """
        return {
            "model": self.model,
            "messages": self._messages(),
            "tools": [_tool(each, f"tools.{number}") for number, each in enumerate(self.tools or [])] or None,
            "tool_choice": _tool_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _form(self.text.format if self.text else None),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "drafter": self.drafter,
            "seed": self.seed,
            "chat_template_kwargs": self.chat_template_kwargs,
        }

    def _messages(self) -> list[dict[str, Any]]:
        turns = Turns()
        if self.instructions:
            turns.say("system", self.instructions)
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for number, item in enumerate(items):
            _take(item, f"input.{number}", turns)
        return turns.messages()


def _take(item: dict[str, Any], place: str, turns: Turns) -> None:
    """Add one item of the input to a conversation."""
    kind = item.get("type", "message")
    if kind == "message":
        if item.get("role") not in ROLES:
            raise ValueError(f"{place}.role: {item.get('role')!r} is not known: use one of {', '.join(ROLES)}")
        turns.say(item["role"], text_of_parts(item.get("content"), f"{place}.content", PARTS))
    elif kind == "function_call":
        name, arguments, call_id = (string(item, field, place) for field in ("name", "arguments", "call_id"))
        turns.call(call_id, name, arguments)
    elif kind == "function_call_output":
        turns.result(string(item, "call_id", place), text_of_parts(item.get("output"), f"{place}.output", PARTS))
    elif kind == "reasoning":
        turns.think(text_of_parts(item.get("content") or "", f"{place}.content", {"reasoning_text": "text"}))
    else:
        raise ValueError(
            f"{place}: an item of type {kind!r} is not served: send messages, function calls, their outputs and reasoning"
        )


def _tool(given: dict[str, Any], place: str) -> dict[str, Any]:
    if given.get("type") != "function":
        raise ValueError(
            f"{place}: a tool of type {given.get('type')!r} is not served, because the server runs no tools itself: send "
            "functions"
        )
    schema = given.get("parameters")
    return tool(string(given, "name", place), given.get("description"), {"type": "object"} if schema is None else schema)


def _tool_choice(given: str | dict[str, Any] | None) -> Any:
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function":
        raise ValueError(f"tool_choice of type {given.get('type')!r} is not served: use none, auto, required or a function")
    return {"type": "function", "function": {"name": string(given, "name", "tool_choice")}}


def _form(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
