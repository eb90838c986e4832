"""The ids that the target wrote are what trains; an answer's text is a view of them that may lack what cannot be read."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
from support import tiny_model

from selfspec import SamplingParams, Target, generate
from selfspec.heads.base import tokenizer_hash
from selfspec.loop.text import TextStream
from selfspec.traffic.conversations import Conversation, Report, changed
from selfspec.traffic.forms import parse
from selfspec.traffic.masking import Sample, tokenize, tokenize_all
from selfspec.traffic.regenerate import regenerate
from selfspec.traffic.turns import OTHER_TEXT, OTHER_TOKENIZER

# As gpt-oss writes: an answer has channels, whose marks are special tokens.
CHANNELS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>"]
CHANNEL_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SAID = (
    "<|channel|>analysis<|message|>Short.<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>",
    "<|channel|>analysis<|message|>Again.<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS_REASONING = CHAT.replace("m.content", "m.content.split('</think>')[-1] if not loop.last else m.content")


@pytest.fixture
def tokenizer(tiny_tokenizer: Any) -> Any:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(CHANNELS, special_tokens=True)
    tokenizer.chat_template = CHANNEL_TEMPLATE
    return tokenizer


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def view(tokenizer: Any, ids: list[int]) -> str:
    """The text that serving and regenerating make of an answer."""
    stream = TextStream(tokenizer)
    for token in ids:
        stream.push(token)
    stream.finish()
    return stream.text


def answered(tokenizer: Any, *said: str, **fields: Any) -> Conversation:
    """A conversation as the target answers it: questions, and answers with their ids."""
    messages: list[dict[str, Any]] = []
    for number, answer in enumerate(said):
        ids = ids_of(tokenizer, answer)
        messages.append({"role": "user", "content": f"question {number}"})
        messages.append({"role": "assistant", "content": view(tokenizer, ids), "token_ids": ids})
    return Conversation("a", messages, **{"tokenizer_hash": tokenizer_hash(tokenizer), "finish_reason": "stop", **fields})


def trained(sample: Sample) -> list[list[int]]:
    """Each run of ids that is trained on."""
    runs: list[list[int]] = []
    for i, (token, is_trained) in enumerate(zip(sample.input_ids, sample.loss_mask, strict=True)):
        if is_trained and not (i and sample.loss_mask[i - 1]):
            runs.append([])
        if is_trained:
            runs[-1].append(token)
    return runs


def test_what_was_said_is_what_trains(tokenizer: Any) -> None:
    """Also through a file, and where the view has lost the marks of the channels."""
    conversation = answered(tokenizer, SAID[0])
    assert "<|" not in conversation.messages[1]["content"]
    form, read = parse(json.loads(json.dumps(conversation.record())), "1")
    assert (form, read) == ("messages", conversation)
    [sample] = tokenize(read, tokenizer)
    assert trained(sample) == [ids_of(tokenizer, SAID[0])]
    prompt = ids_of(tokenizer, "<|start|>user<|message|>question 0<|end|><|start|>assistant")
    assert sample.input_ids == [*prompt, *ids_of(tokenizer, SAID[0])]


def test_an_answer_begins_a_sample_where_its_prompt_is_not_what_was_said(tokenizer: Any) -> None:
    """The next prompt shows the earlier answer as the template writes its text, and so the target reads it."""
    conversation = answered(tokenizer, *SAID)
    samples = tokenize(conversation, tokenizer)
    assert [trained(sample) for sample in samples] == [[ids_of(tokenizer, said)] for said in SAID]
    encoded = tokenizer.apply_chat_template(
        [{key: m[key] for key in ("role", "content")} for m in conversation.messages[:3]],
        add_generation_prompt=True,
        return_dict=True,
    )
    assert samples[1].input_ids == [*encoded["input_ids"], *ids_of(tokenizer, SAID[1])]


def test_answers_share_a_sample_where_each_prompt_goes_on_from_the_last(tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT
    said = ["the cat<|im_end|>", "one two<|im_end|>", "three<|im_end|>"]
    conversation = answered(tokenizer, *said)
    [sample] = tokenize(conversation, tokenizer)
    assert trained(sample) == [ids_of(tokenizer, each) for each in said]
    # Ids that are not the ones that the tokenizer makes of the text are kept, and the text after them is read anew.
    odd = [*ids_of(tokenizer, "t"), *ids_of(tokenizer, "he cat<|im_end|>")]
    assert odd != ids_of(tokenizer, said[0])
    conversation.messages[1]["token_ids"] = odd
    first, rest = tokenize(conversation, tokenizer)
    assert trained(first) == [odd]
    assert trained(rest) == [ids_of(tokenizer, each) for each in said[1:]]


def test_reasoning_trains_as_it_was_written(tokenizer: Any) -> None:
    tokenizer.chat_template = STRIPS_REASONING
    said = ["<think>a</think>b<|im_end|>", "<think>c</think>d<|im_end|>"]
    samples = tokenize(answered(tokenizer, *said), tokenizer)
    assert [trained(sample) for sample in samples] == [[ids_of(tokenizer, each)] for each in said]
    assert "<think>a" not in tokenizer.decode(samples[1].input_ids)


def test_answers_with_and_without_ids_share_a_sample(tokenizer: Any) -> None:
    """As in a log, where a client sends the earlier answers back as text."""
    tokenizer.chat_template = CHAT
    conversation = answered(tokenizer, "the cat<|im_end|>", "one two<|im_end|>")
    whole = tokenize(conversation, tokenizer)
    for index in (1, 3):
        del conversation.messages[index]["token_ids"]
        assert tokenize(conversation, tokenizer) == whole


def test_an_answer_not_to_train_on_is_read_and_no_more(tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT
    conversation = answered(tokenizer, "the cat<|im_end|>", "one two<|im_end|>")
    conversation.messages[1]["weight"] = 0
    [sample] = tokenize(conversation, tokenizer)
    assert trained(sample) == [ids_of(tokenizer, "one two<|im_end|>")]
    assert "the cat" in tokenizer.decode(sample.input_ids)


def test_a_cut_answer_has_no_end(tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT
    [sample] = tokenize(answered(tokenizer, "the cat", finish_reason="length"), tokenizer)
    assert trained(sample) == [ids_of(tokenizer, "the cat")]


@pytest.mark.parametrize(
    ("fields", "text", "note"),
    [({"tokenizer_hash": "other"}, "the cat", OTHER_TOKENIZER), ({}, "the dog", OTHER_TEXT)],
    ids=["another tokenizer", "another text"],
)
def test_the_text_trains_where_the_ids_are_not_its_own(
    tokenizer: Any, fields: dict[str, Any], text: str, note: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer.chat_template = CHAT
    conversation = answered(tokenizer, "the cat<|im_end|>", **fields)
    conversation.messages[1]["content"] = text
    with caplog.at_level(logging.WARNING, logger="selfspec"):
        [sample] = tokenize_all([conversation], tokenizer, Report())
    assert trained(sample) == [ids_of(tokenizer, f"{text}<|im_end|>")]
    assert f"1 of 1 answers {note}" in caplog.text


def test_a_message_that_is_changed_has_no_ids() -> None:
    message = {"role": "assistant", "content": "a", "token_ids": [1]}
    assert changed(message, content="a") == message
    assert changed(message, content="b") == {"role": "assistant", "content": "b"}


@pytest.fixture
def target(tokenizer: Any) -> Target:
    """A random target, half of whose tokens are special and so not in its texts."""
    tokenizer.chat_template = CHAT
    tokenizer.add_tokens(["the", " cat", " sat", " on", *map(str, range(10))], special_tokens=True)
    return Target(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer)


def test_regenerated_answers_train_as_the_target_wrote_them(target: Target) -> None:
    asked = [
        Conversation(str(i), [{"role": "user", "content": word}, {"role": "user", "content": f"{word} again"}])
        for i, word in enumerate(["cat", "dog", "mat", "one"])
    ]
    sampling = SamplingParams(max_new_tokens=24, temperature=1.0, seed=2)
    results = list(regenerate(target, asked, Report(), sampling=sampling, batch_size=3))
    assert len(results) == 4
    num_lost = 0
    for result in results:
        _, read = parse(json.loads(json.dumps(result.record())), "1")
        answers = [message for message in read.messages if message["role"] == "assistant"]
        said = [message["token_ids"] for message in answers]
        assert [run for sample in tokenize(read, target.tokenizer) for run in trained(sample)] == said
        # The target read the prompt that training shows before the last answer.
        last = tokenize(read, target.tokenizer)[-1]
        prompt = target.encode([{key: m[key] for key in ("role", "content")} for m in read.messages[:-1]])
        assert last.input_ids[-len(said[-1]) - len(prompt) :] == [*prompt, *said[-1]]
        num_lost += sum(ids_of(target.tokenizer, m["content"]) != m["token_ids"] for m in answers)
    assert num_lost > 0, "some of what was written is not in the texts"


def test_tools_and_arguments_of_a_row_reach_the_target(target: Target) -> None:
    """A row's own arguments come before the target's; both are in the result, which training reads as the target did."""
    target.tokenizer.chat_template = "{{ style }}{{ mood }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + CHAT
    target.set_chat_template_kwargs({"style": "plain", "mood": "calm"})
    tools = [{"type": "function", "function": {"name": "weather"}}]
    message = {"role": "user", "content": "Hi"}
    asked = Conversation("a", [message], tools=tools, chat_template_kwargs={"style": "brief"})
    [result] = regenerate(target, [asked], Report(), sampling=SamplingParams(max_new_tokens=6))
    assert result.chat_template_kwargs == {"style": "brief", "mood": "calm"} and result.tools == tools
    prompt = target.tokenizer(
        f"briefcalm{json.dumps(tools[0])}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )["input_ids"]
    [sample] = tokenize(result, target.tokenizer)
    assert sample.input_ids == [*prompt, *result.messages[1]["token_ids"]]
    [alone] = generate(target, [prompt], sampling=SamplingParams(max_new_tokens=6))
    assert alone.token_ids == result.messages[1]["token_ids"]
