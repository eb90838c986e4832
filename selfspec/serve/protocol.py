"""What clients may ask for: OpenAI's fields, and the ones that vLLM's clients add.

A field that would change the answer and is not served is refused, never ignored. The fields in `Ignored` change no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from selfspec.config import SamplingParams
from selfspec.serve.fields import (
    FIRST_ERROR,
    FORM_GOES_ELSEWHERE,
    MAX_TOP_K,
    NO_TOOLS,
    STRICT,
    TEMPLATE_DECIDES,
    TEXT_ALONE,
    FormText,
    Name,
    Number,
    Object,
    Prompt,
    ProtocolObject,
    StopString,
    Text,
    at_most,
    check_object,
    check_text,
)
from selfspec.serve.limits import MAX_BIASES, MAX_MESSAGES, MAX_PARTS, MAX_STOP_TOKENS, MAX_STOPS, MAX_TOOLS


class StreamOptions(ProtocolObject):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = None

    @model_validator(mode="after")
    def _check_usage(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats goes with include_usage: set that to true, too")
        return self


class JsonSchema(ProtocolObject):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[Object, Field(alias="schema")]


class ResponseFormat(ProtocolObject):
    """The form of an answer: OpenAI's kinds, and a regular expression or a grammar in Lark's notation."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    pattern: FormText | None = None
    grammar: FormText | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        fields = {"json_schema": self.json_schema, "pattern": self.pattern, "grammar": self.grammar}
        needed = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}.get(self.type)
        given = [name for name, value in fields.items() if value is not None]
        if given != ([needed] if needed else []):
            raise ValueError(f"a response_format of type {self.type} takes {needed or 'no other field'}: give just that")
        return self


class Ignored(ProtocolObject):
    """Fields that other servers keep records by."""

    user: str | None = None
    store: bool | None = None
    metadata: Object | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class _Request(Ignored):
    """What chat and completions share. None, which is JSON's null, means that the field is left out."""

    model: str
    drafter: Annotated[str, Field(min_length=1)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = 0
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = 0
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = 0.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = 1.0
    logit_bias: Annotated[dict[str, Annotated[Number, Field(ge=-100, le=100)]], at_most(MAX_BIASES)] | None = None
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS), FIRST_ERROR] | None = None
    stop_token_ids: Annotated[list[int], FIRST_ERROR, at_most(MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    response_format: ResponseFormat | None = None

    @property
    def is_json(self) -> bool:
        """Whether the answer is JSON from its first character on."""
        return self.response_format is not None and self.response_format.type in ("json_object", "json_schema")

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with a stream: leave it out, or set stream to true")
        has_form = self.response_format is not None and self.response_format.type != "text"
        if has_form and (self.ignore_eos or self.min_tokens):
            raise ValueError("response_format decides where an answer ends: leave out ignore_eos and min_tokens")
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
            self.max_tokens = self.max_completion_tokens
        return self

    def sampling(self, default_max_tokens: int, context_length: int, *, use_logprobs: bool) -> SamplingParams:
        """The settings, checked.

        Raises:
            ValueError: one of them is not allowed; the sentence names it.
        """
        max_tokens = self.max_tokens or default_max_tokens
        if max_tokens > context_length:
            raise ValueError(
                f"max_tokens={max_tokens} is not allowed: prompt and answer share a context of {context_length} tokens"
            )
        if (self.min_tokens or 0) > max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is not allowed: use 0 to max_tokens ({max_tokens})")
        return SamplingParams(
            max_new_tokens=max_tokens,
            min_new_tokens=self.min_tokens or 0,
            temperature=_or(self.temperature, 1.0),
            top_k=max(_or(self.top_k, 0), 0),
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=self.logit_bias or {},  # type: ignore[arg-type]
            seed=self.seed,
            stop=_or(self.stop, ()),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=_or(self.skip_special_tokens, True),
            logprobs=use_logprobs,
            n=_or(self.n, 1),
        )


class Message(ProtocolObject):
    """One turn. Other fields are passed on as they are, because a chat template may read them."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Annotated[list[Object], FIRST_ERROR], at_most(MAX_PARTS)] | None = None

    @field_validator("content")
    @classmethod
    def _join_parts(cls, content: str | list[dict[str, Any]] | None) -> str | None:
        if not isinstance(content, list):
            return content if content is None else check_text(content)
        if not content:
            raise ValueError("the list of parts is empty: give at least one")
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
            raise ValueError("parts other than text are not served: leave images, sound and files out")
        return "".join(map(str, texts))

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        others = check_object(self.model_extra or {})
        is_call = self.role == "assistant" and (others.get("tool_calls") or others.get("function_call"))
        if self.content is None and not is_call:
            raise ValueError(f"this {self.role} message has no content: give it text")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content or "", **(self.model_extra or {})}


class NamedTool(BaseModel):
    """A tool that must be called."""

    class Function(BaseModel):
        model_config = STRICT

        name: Text

    model_config = STRICT

    type: Literal["function"]
    function: Function


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "reasoning_effort": ((), TEMPLATE_DECIDES),
        "verbosity": (("medium",), "the model decides how much it says: leave it out"),
        "modalities": ((["text"],), TEXT_ALONE),
        "audio": ((), TEXT_ALONE),
        "functions": (([],), "tools have their place: send those"),
        "function_call": ((), "tool_choice has its place: send that"),
        "web_search_options": ((), NO_TOOLS),
        "continue_final_message": ((False,), "a message of the assistant is not continued: leave it out"),
        **dict.fromkeys(
            ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
            ((), FORM_GOES_ELSEWHERE),
        ),
    }

    messages: Annotated[list[Message], Field(min_length=1), FIRST_ERROR, at_most(MAX_MESSAGES)]
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = 0
    tools: Annotated[list[Object], FIRST_ERROR, at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Object | None = None
    # What the answer may be like, which changes nothing of it.
    prediction: Object | None = None

    def for_template(self) -> list[dict[str, Any]]:
        """The messages as chat templates know them."""
        return [message.for_template() for message in self.messages]

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """What the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools of which the answer must call one; none where it need not."""
        if not isinstance(self.tool_choice, NamedTool):
            return self.offered_tools if self.tool_choice == "required" else []
        name = self.tool_choice.function.name
        named = [tool for tool in self.tools or [] if isinstance(tool.get("function"), dict)]
        return [tool for tool in named if tool["function"].get("name") == name]

    @model_validator(mode="after")
    def _check_tool_choice(self) -> Self:
        if self.tool_choice in (None, "none", "auto"):
            return self
        if not self.forced_tools:
            raise ValueError("tool_choice forces a call, and tools lacks the tool: add it, or use 'none' or 'auto'")
        if self.response_format is not None and self.response_format.type != "text":
            raise ValueError("tool_choice forces a call, and response_format another form: leave one of them out")
        if self.ignore_eos or self.min_tokens:
            raise ValueError("tool_choice decides where an answer ends: leave out ignore_eos and min_tokens")
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: set logprobs to true")
        return self


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = False
    suffix: Literal[""] | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of other than n is not served: leave it out")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One entry for each prompt."""
        prompt = self.prompt
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        return cast("Sequence[str | list[int]]", [prompt] if is_one else prompt)


class HeadRequest(ProtocolObject):
    """POST /v1/heads: a drafter as the command line names it, and the name that requests use."""

    drafter: str
    name: Name | None = None


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
