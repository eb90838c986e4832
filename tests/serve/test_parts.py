"""Answers taken apart: whatever the pieces of text, the parts are the same, and nothing that was said is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.serve.channels import ChannelParser
from selfspec.serve.options import CHANNELS, REASONING_FORMATS, TOOL_FORMATS
from selfspec.serve.parts import CONTENT, REASONING, PartParser, Parts, Said, TagParser
from selfspec.serve.syntax import TAGS, Syntax
from selfspec.serve.tool_calls import FORMATS, Call

THINK = TAGS["think"]
NUMBER = {"properties": {"days": {"type": "integer"}, "city": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather", "parameters": NUMBER}}]
PARIS = Call("weather", '{"city": "Paris"}')
SAYS = '{"name": "weather", "arguments": {"city": "Paris"}}'
SAYS_TOO = '{"name": "weather", "parameters": {"city": "Paris"}}'


def tags(form: str | None = None, *, is_open: bool = False, hidden: tuple[str, ...] = ()) -> PartParser:
    return TagParser(THINK, (FORMATS[form], TOOLS) if form else None, is_open=is_open, hidden=hidden)


def channels() -> PartParser:
    return ChannelParser(has_reasoning=True, has_calls=True)


def parts_of(parser: PartParser, pieces: list[str]) -> Parts:
    """All parts of an answer that comes in pieces."""
    whole = Parts()
    for part in [*(parser.push(piece) for piece in pieces), parser.push("", is_last=True)]:
        for piece in part.pieces:
            if isinstance(piece, Said):
                whole.say(piece.kind, piece.text)
            else:
                whole.pieces.append(piece)
    return whole


def said(reasoning: str = "", content: str = "", calls: Sequence[Call] = ()) -> Parts:
    """Parts in their usual order."""
    return Parts([Said(kind, text) for kind, text in ((REASONING, reasoning), (CONTENT, content)) if text] + list(calls))


Case = tuple[Callable[[], PartParser], str, Parts]
CASES: dict[str, Case] = {
    "plain": (tags, " Hello\n", said("", " Hello\n")),
    "reasoning": (tags, "<think>\nHm.\n</think>\n\nYes.", said("Hm.", "Yes.")),
    "reasoning that the prompt opened": (lambda: tags(is_open=True), "\nHm.\n</think>\n\nYes.", said("Hm.", "Yes.")),
    "reasoning that opens twice": (lambda: tags(is_open=True), "<think>\nHm.</think>Yes.", said("Hm.", "Yes.")),
    "reasoning that is cut": (lambda: tags(is_open=True), "Hm, </thin", said("Hm, </thin", "")),
    "a tag as a word": (tags, "The tag <think> opens.", said("", "The tag <think> opens.")),
    "a tag within reasoning": (tags, "<think>a <think> b</think>c", said("a <think> b", "c")),
    "hermes": (lambda: tags("hermes"), f"Look.\n<tool_call>\n{SAYS}\n</tool_call>\n", said("", "Look.", [PARIS])),
    "hermes, two calls": (
        lambda: tags("hermes"),
        f"<think>Hm.</think>\n<tool_call>{SAYS}</tool_call>\n<tool_call>{SAYS}</tool_call>",
        said("Hm.", "", [PARIS, PARIS]),
    ),
    "hermes without its end": (lambda: tags("hermes"), f"<tool_call>\n{SAYS}\n", said("", "", [PARIS])),
    "hermes that is cut": (lambda: tags("hermes"), f"A <tool_call>\n{SAYS[:20]}", said("", f"A <tool_call>\n{SAYS[:20]}")),
    "hermes that is no JSON": (
        lambda: tags("hermes"),
        "A\n<tool_call>weather?</tool_call>\nB",
        said("", "A\n<tool_call>weather?</tool_call>\nB"),
    ),
    "hermes as tags": (
        lambda: tags("hermes"),
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        said("", "", [Call("weather", '{"city": "Paris", "days": 3}')]),
    ),
    "llama3": (lambda: tags("llama3"), f"\n{SAYS_TOO}", said("", "", [PARIS])),
    "llama3, two calls": (lambda: tags("llama3"), f"{SAYS_TOO}; {SAYS_TOO}", said("", "", [PARIS, PARIS])),
    "llama3 with its tag": (lambda: tags("llama3"), f"Look.<|python_tag|>{SAYS_TOO}", said("", "Look.", [PARIS])),
    "llama3, JSON that is no call": (lambda: tags("llama3"), ' {"name": "Ann"} ', said("", ' {"name": "Ann"} ')),
    "llama3, JSON later": (lambda: tags("llama3"), f"So: {SAYS_TOO}", said("", f"So: {SAYS_TOO}")),
    "llama3, its tag in a string": (
        lambda: tags("llama3"),
        '{"name": "weather", "parameters": {"city": "<|python_tag|>"}}',
        said("", "", [Call("weather", '{"city": "<|python_tag|>"}')]),
    ),
    "mistral": (lambda: tags("mistral"), f"[TOOL_CALLS][{SAYS}, {SAYS}]", said("", "", [PARIS, PARIS])),
    "mistral by names": (
        lambda: tags("mistral"),
        'A [TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]weather[CALL_ID]aB3[ARGS]{"city": "Paris"}',
        said("", "A", [PARIS, PARIS]),
    ),
    "mistral that is cut": (lambda: tags("mistral"), "[TOOL_CALLS]weather[AR", said("", "[TOOL_CALLS]weather[AR")),
    "half a character in a call": (
        lambda: tags("mistral"),
        '[TOOL_CALLS]weather{"city": "\\ud800"}',
        said("", '[TOOL_CALLS]weather{"city": "\\ud800"}'),
    ),
    "a number that JSON has not": (lambda: tags("mistral"), '[TOOL_CALLS]w{"a": NaN}', said("", '[TOOL_CALLS]w{"a": NaN}')),
    "endless nesting": (
        lambda: tags("mistral"),
        '[TOOL_CALLS]w{"a": ' + "[" * 9999,
        said("", '[TOOL_CALLS]w{"a": ' + "[" * 9999),
    ),
    "control tokens": (
        lambda: tags("mistral", hidden=("[TOOL_CALLS]", "</s>", "</s2>")),
        "A</s>B</s2></s[TOOL_CALLS]" + SAYS.replace("P", "</s>P"),
        said("", "AB</s[TOOL_CALLS]" + SAYS),
    ),
    "channels": (
        channels,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.\n<|return|>",
        said("Hm.", "Yes.\n"),
    ),
    "channels, two messages in one": (
        channels,
        "<|channel|>commentary<|message|>Look.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        said("", "Look.\nYes."),
    ),
    "channels, a call": (
        channels,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        said("Hm.", "", [PARIS]),
    ),
    "channels, the recipient first": (
        channels,
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}',
        said("", "", [PARIS]),
    ),
    "channels, a call that is cut": (
        channels,
        ' to=functions.weather<|channel|>commentary<|message|>{"ci',
        said("", ' to=functions.weather<|channel|>commentary<|message|>{"ci'),
    ),
    "channels without a header": (channels, " Hello", said("", " Hello")),
    "channels, the beginning of a word": (channels, "to", said("", "to")),
    "channels, a header without an end": (
        channels,
        "<|channel|>" + "final " * 99 + "<|message|>",
        said("", "<|channel|>" + "final " * 99 + "<|message|>"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_has_its_parts_whole_and_in_pieces_of_every_size(name: str) -> None:
    make, text, expected = CASES[name]
    assert make().push(text, is_last=True) == expected
    for size in (1, 2, 3, 5, 8, 13):
        assert parts_of(make(), [text[i : i + size] for i in range(0, len(text), size)]) == expected


MARKS = [*THINK, "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"]
WORDS = st.sampled_from([*MARKS, SAYS, SAYS_TOO, "{", "a", " ", "\n", "<", "</s>"])
CHANNEL_WORDS = st.sampled_from(
    [*ChannelParser.MARKS, "analysis", "final", " to=functions.weather", '{"city": 1}', "a", " ", "t", "to", "<|", "</s>"]
)
PARSERS: dict[str, tuple[st.SearchStrategy[str], Callable[[], PartParser]]] = {
    **{
        f"{form}, {is_open}": (WORDS, lambda form=form, is_open=is_open: tags(form, is_open=is_open, hidden=("</s>",)))
        for form in (None, *FORMATS)
        for is_open in (False, True)
    },
    "channels": (CHANNEL_WORDS, lambda: ChannelParser(has_reasoning=True, has_calls=True, hidden=("</s>",))),
    "channels, content alone": (CHANNEL_WORDS, lambda: ChannelParser(has_reasoning=False, has_calls=False)),
}


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_parts_do_not_depend_on_the_pieces(name: str, data: Any) -> None:
    words, make = PARSERS[name]
    text = "".join(data.draw(st.lists(words, max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parts_of(make(), pieces) == make().push(text, is_last=True)


NO_CALLS = WORDS.filter(lambda word: word not in (SAYS, SAYS_TOO, *THINK))


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=100, deadline=None)
@given(text=st.lists(NO_CALLS, max_size=12).map("".join))
def test_where_there_is_no_call_all_text_is_content(form: str, text: str) -> None:
    assert tags(form).push(text, is_last=True) == said("", text)


@pytest.mark.parametrize(
    ("make", "piece"),
    [
        (lambda: tags("hermes"), " \n"),
        (lambda: tags("hermes"), "<tool_call"),
        (lambda: tags("hermes"), "<tool_call>"),
        (lambda: tags("hermes"), "<tool_call><function=a><parameter=b></function></tool_call>"),
        (lambda: tags("mistral"), "[TOOL_CALLS]a{}"),
        (channels, "<|channel|>"),
        (channels, " "),
    ],
)
def test_long_answers_cost_their_length(make: Callable[[], PartParser], piece: str) -> None:
    def seconds(number: int) -> float:
        parser, start = make(), time.process_time()
        for _ in range(number):
            parser.push(piece)
        parser.push("", is_last=True)
        return time.process_time() - start

    # Of quadratic work, sixteen times as many pieces would cost 256 times as much.
    short = min(seconds(500) for _ in range(3))
    assert seconds(8000) < 80 * short + 0.05


def test_calls_are_as_clients_and_templates_know_them() -> None:
    """Mistral's templates take ids of nine letters and digits alone."""
    records = [PARIS.record() for _ in range(50)]
    assert len({record["id"] for record in records}) == 50
    for record in records:
        assert record["type"] == "function" and record["function"]["name"] == "weather"
        assert len(record["id"]) == 9 and record["id"].isalnum()
        assert json.loads(record["function"]["arguments"]) == {"city": "Paris"}


def test_every_form_has_its_option() -> None:
    assert set(TOOL_FORMATS) == {"auto", "none", CHANNELS, *FORMATS}
    assert set(REASONING_FORMATS) == {"auto", "none", CHANNELS, *TAGS}


TEMPLATES: dict[str, tuple[str, str | None, str | None]] = {
    "Qwen2.5": ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes", None),
    "Qwen3": ("<tool_call>...{{ '<think>\n\n</think>\n\n' }}", "hermes", "think"),
    "DeepSeek-R1": ("{{ '<｜Assistant｜><think>\n' }}", None, "think"),
    "Llama 3.2": ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3", None),
    "Magistral": ("[TOOL_CALLS]name[ARGS]{} [THINK]", "mistral", "mistral"),
    "gpt-oss": ("<|start|>assistant<|channel|>final<|message|>", CHANNELS, CHANNELS),
    "SmolLM2": ("<|im_start|>", None, None),
    "none at all": ("", None, None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_chat_template_shows_how_a_model_writes(name: str) -> None:
    """One template, or one for each use; options have the last word."""
    text, tool_format, reasoning_format = TEMPLATES[name]
    for template in (text, {"default": "", "tool_use": text}):
        syntax = Syntax.of(SimpleNamespace(chat_template=template))
        assert (syntax.tool_format, syntax.reasoning_format) == (tool_format, reasoning_format)
    off = Syntax.of(SimpleNamespace(chat_template=text), tool_format="none", reasoning_format="none")
    assert off.parser(TOOLS) is None
    named = Syntax.of(SimpleNamespace(chat_template=text), tool_format="llama3", reasoning_format="think")
    assert (named.tool_format, named.reasoning_format) == ("llama3", "think")
