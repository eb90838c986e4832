"""What the fields of requests may hold, checked before anything is made of them: what every API of the server shares."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from selfspec.serve.limits import MAX_DEPTH, MAX_FIELDS, MAX_FORM_LENGTH, MAX_MESSAGES, MAX_STOP_LENGTH, MAX_STOPS

# Strict, because pydantic would otherwise read text as numbers and hide a client's mistake.
STRICT = ConfigDict(extra="forbid", strict=True)
# A larger number of tokens to choose from is the whole vocabulary of any model.
MAX_TOP_K = 2**31 - 1
# JSON can hold halves of surrogate pairs, and neither tokenizers nor files take them.
NOT_TEXT = "this text cannot be encoded: send valid Unicode, without halves of surrogate pairs"
# Why some fields of other servers are refused.
TEMPLATE_DECIDES = "the model's chat template decides how it thinks: leave it out, or set chat_template_kwargs"
NO_TOOLS = "the server runs no tools itself: leave it out"
TEXT_ALONE = "an answer is text: leave it out"
FORM_GOES_ELSEWHERE = "response_format has its place: send the form there"
# What fields of several forms take, in words: pydantic would name the first form alone.
FORMS = {
    "prompt": "give text, a list of texts, a list of token ids, or a list of lists of token ids",
    "stop": f"give a string, or a list of at most {MAX_STOPS} strings, each of at most {MAX_STOP_LENGTH} characters",
    "tool_choice": 'give \'none\' or \'auto\', \'required\', or {"type": "function", "function": {"name": ...}}',
    "content": 'give text, or a list of parts such as {"type": "text", "text": "..."}',
}


def check_text(text: str) -> str:
    """Refuse text that cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(NOT_TEXT) from None
    return text


def _check_stop(text: str) -> str:
    if len(text) > MAX_STOP_LENGTH:
        raise ValueError(f"this string has {len(text)} characters: use at most {MAX_STOP_LENGTH}")
    return text


def check_object(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse JSON that is nested too deeply, or that holds text which cannot be encoded."""
    layer: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for each in layer:
            if isinstance(each, dict):
                below += [*each, *each.values()]
            elif isinstance(each, list):
                below += each
            elif isinstance(each, str):
                check_text(each)
        layer = below
        if not layer:
            return value
    raise ValueError(f"this is nested too deeply: use at most {MAX_DEPTH} levels")


Prompts = str | list[str] | list[int] | list[list[int]]


def _check_prompt(prompt: Any) -> Prompts:
    """Refuse what is no form of a prompt. Only sets of types are compared, because there may be a context full of ids."""
    kinds = set(map(type, prompt)) if isinstance(prompt, list) else None
    is_ids = kinds == {list} and all(set(map(type, part)) <= {int} for part in prompt)
    if not (isinstance(prompt, str) or kinds in (set(), {str}, {int}) or is_ids):
        raise ValueError(FORMS["prompt"])
    for text in [prompt] if isinstance(prompt, str) else prompt if kinds == {str} else []:
        check_text(text)
    return prompt


def _check_text_or_objects(value: Any) -> str | list[dict[str, Any]]:
    """Refuse what is neither text nor a list of objects."""
    if isinstance(value, str):
        return check_text(value)
    if not isinstance(value, list) or not value:
        raise ValueError("give text, or a list of objects that is not empty")
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"this has {len(value)} entries: give at most {MAX_MESSAGES}")
    for number, each in enumerate(value):
        if not isinstance(each, dict):
            raise ValueError(f"entry {number} is no object: give an object, or text in place of the list")
        check_object(each)
    return value


def _check_name(name: str) -> str:
    """Refuse a drafter's name that could not stand in a path, because that is how it is unloaded."""
    if not re.fullmatch(r"[\w.:@+-]+(/[\w.:@+-]+)*", name, re.ASCII):
        raise ValueError("use letters, digits and . _ - : @ +, with single slashes between them")
    return name


def at_most(limit: int) -> BeforeValidator:
    """Refuse a longer list or object before anything in it is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > limit:
            raise ValueError(f"this has {len(value)} entries: give at most {limit}")
        return value

    return BeforeValidator(check)


# Only the first mistake of a request is told.
FIRST_ERROR = Field(fail_fast=True)
# JSON has one kind of number.
Number = Annotated[float, Field(strict=False, allow_inf_nan=False)]
Text = Annotated[str, AfterValidator(check_text)]
Name = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_check_name)]
Object = Annotated[dict[str, Any], AfterValidator(check_object)]
Prompt = Annotated[Prompts, PlainValidator(_check_prompt)]
TextOrObjects = Annotated[str | list[dict[str, Any]], PlainValidator(_check_text_or_objects)]
StopString = Annotated[Text, AfterValidator(_check_stop)]
FormText = Annotated[str, Field(min_length=1, max_length=MAX_FORM_LENGTH)]


class ProtocolObject(BaseModel):
    """An object of the protocol. It has few fields: pydantic would make an error of each one that is unknown.

    Attributes:
        REFUSED: fields that other servers know: the values that ask for nothing, and why others are refused.
    """

    model_config = STRICT
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:
            raise ValueError(f"this object has {len(value)} fields: send at most {MAX_FIELDS}")
        for name in cls.REFUSED.keys() & value:
            harmless, reason = cls.REFUSED[name]
            given = value[name]
            if given is not None and not any(type(given) is type(each) and given == each for each in harmless):
                raise ValueError(f"{name} is not served here, because {reason}")
        return {name: each for name, each in value.items() if name not in cls.REFUSED} if cls.REFUSED else value
