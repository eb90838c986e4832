"""Where an answer begins and ends, by templates that end no turn, that open the reasoning, and that read settings."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest

from selfspec.model.chat import TemplateFailure
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.forms import parse
from selfspec.traffic.masking import tokenize, tokenize_all
from selfspec.traffic.turns import NO_END, render

# As GLM-4.5 does: a turn ends where the next one begins.
ENDS_AT_THE_NEXT_TURN = (
    "[gMASK]<sop>{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As base models' templates do.
WORDS_ONLY = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# As QwQ does: the header opens the reasoning, which is left out of earlier answers.
LEAVES_REASONING_OUT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# The header opens the reasoning, and an answer has the same header.
HAS_THE_SAME_HEADER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<think>\n' if m.role == 'assistant' }}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# As Qwen3 does.
THINKS_UNLESS_TOLD = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' and loop.last and '<think>' not in m.content %}\n<think>\n\n</think>\n{% endif %}\n"
    "{{- m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and not enable_thinking %}\n<think>\n\n</think>\n{% endif %}\n{%- endif %}"
)
HAS_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + WORDS_ONLY.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}",
).replace("\n\n", "<|im_end|>")


@pytest.fixture
def tokenizer(tiny_tokenizer: Any) -> Any:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"], special_tokens=True)
    return tokenizer


def conversation(*texts: str, **fields: Any) -> Conversation:
    roles = ("user", "assistant")
    return Conversation("a", [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], **fields)


def trained(conversation: Conversation, tokenizer: Any) -> list[str]:
    """The text of each run of tokens to train on, of all samples."""
    runs: list[str] = []
    for sample in tokenize(conversation, tokenizer):
        ids: list[int] = []
        for token, is_trained in [*zip(sample.input_ids, sample.loss_mask, strict=True), (0, False)]:
            if is_trained:
                ids.append(token)
            elif ids:
                runs.append(tokenizer.decode(ids))
                ids = []
    return runs


def test_an_answer_ends_with_the_token_that_begins_the_next_turn(tokenizer: Any) -> None:
    tokenizer.chat_template = ENDS_AT_THE_NEXT_TURN
    assert trained(conversation("Hi", "Hello", "More", "Yes"), tokenizer) == ["Hello<|user|>", "Yes<|user|>"]
    assert trained(conversation("Hi", "Hello", finish_reason="length"), tokenizer) == ["Hello"]
    call = conversation("Hi", "call")
    call.messages[1]["tool_calls"] = [{"function": {"name": "f", "arguments": "{}"}}]
    assert trained(call, tokenizer) == ["call<|observation|>"]
    call.messages.append({"role": "tool", "content": "18"})
    call.messages.append({"role": "assistant", "content": "It is 18"})
    assert trained(call, tokenizer) == ["call<|observation|>", "It is 18<|user|>"]


def test_a_template_without_an_end_is_told_once_a_file(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer.chat_template = WORDS_ONLY
    with caplog.at_level(logging.WARNING, logger="selfspec"):
        tokenize_all([conversation("a", "b", "c", "d"), conversation("e", "f", finish_reason="length")], tokenizer, Report())
    assert [record.getMessage() for record in caplog.records] == [f"2 of 3 answers {NO_END}"]
    caplog.clear()
    tokenizer.chat_template = ENDS_AT_THE_NEXT_TURN
    tokenize_all([conversation("a", "b")], tokenizer, Report())
    assert not caplog.records


@pytest.mark.parametrize("template", [LEAVES_REASONING_OUT, HAS_THE_SAME_HEADER])
@pytest.mark.parametrize("opening", ["", "<think>\n", "<think>", "\n<think>\n"])
def test_reasoning_is_opened_once(tokenizer: Any, template: str, opening: str) -> None:
    tokenizer.chat_template = template
    asked = conversation("a", f"{opening}why\n</think>\n\nthe cat")
    [sample] = tokenize(asked, tokenizer)
    text = tokenizer.decode(sample.input_ids)
    assert text.endswith("<|im_start|>assistant\n<think>\nwhy\n</think>\n\nthe cat<|im_end|>")
    assert text.count("<think>") == 1
    assert trained(asked, tokenizer) == ["why\n</think>\n\nthe cat<|im_end|>"]


def test_a_tag_that_the_header_does_not_open_is_the_answers(tokenizer: Any) -> None:
    tokenizer.chat_template = HAS_THE_SAME_HEADER.replace("{{ '<think>\n' if m.role == 'assistant' }}", "").replace(
        "<think>\n", ""
    )
    assert trained(conversation("a", "<think>why</think>b"), tokenizer) == ["<think>why</think>b<|im_end|>"]


def test_arguments_of_the_template_decide_what_an_answer_is(tokenizer: Any) -> None:
    """Without thinking the empty reasoning is the prompt's; the target never writes it."""
    tokenizer.chat_template = THINKS_UNLESS_TOLD
    asked = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the cat"}]}
    _, thinking = parse(asked, "1")
    _, plain = parse({**asked, "chat_template_kwargs": {"enable_thinking": False}}, "1")
    assert trained(thinking, tokenizer) == ["<think>\n\n</think>\nthe cat<|im_end|>"]
    assert trained(plain, tokenizer) == ["the cat<|im_end|>"]
    assert parse(json.loads(json.dumps(plain.record())), "1")[1] == plain
    # Those of a whole file are for rows that have none of their own.
    [default] = tokenize_all([thinking], tokenizer, Report(), chat_template_kwargs={"enable_thinking": False})
    assert [default] == tokenize(plain, tokenizer)
    [own] = tokenize_all([plain], tokenizer, Report(), chat_template_kwargs={"enable_thinking": True})
    assert [own] == tokenize(plain, tokenizer)


def test_tools_and_calls_reach_the_template_as_objects(tokenizer: Any) -> None:
    tokenizer.chat_template = HAS_TOOLS
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "18"},
        {"role": "assistant", "content": "Yes"},
    ]
    for given in (tools, json.dumps(tools)):
        _, asked = parse({"messages": messages, "tools": given}, "1")
        assert asked.tools == tools
        [sample] = tokenize(asked, tokenizer)
        assert tokenizer.decode(sample.input_ids).startswith(json.dumps(tools[0]) + "\nuser: Warm?")
        assert trained(asked, tokenizer) == ['weather{"city": "Paris"}<|im_end|>', "Yes<|im_end|>"]
    assert parse(asked.record(), "1")[1] == asked


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ 1 + 'a' }}", "{{ raise_exception('no') }}"])
def test_a_template_that_fails_costs_its_rows_alone(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = "{% if messages[0].content == 'bad' %}" + template + "{% endif %}" + ENDS_AT_THE_NEXT_TURN
    report = Report()
    assert len(tokenize_all([conversation("bad", "x"), conversation("a", "b")], tokenizer, report)) == 1
    [(reason, count)] = report.skipped.items()
    assert reason.startswith("refused by the chat template: ") and count == 1
    with pytest.raises(TemplateFailure):
        render(tokenizer, [{"role": "user", "content": "bad"}])
