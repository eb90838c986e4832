"""Only what the target wrote trains, from the first token to the last, with any template and any words."""

import copy

import pytest
from tokenizers import processors

from selfspec.traffic.conversations import BadRow, Conversation, Report
from selfspec.traffic.masking import read_template, tokenize, tokenize_all, use_chat_template

QWEN = (
    "{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif -%}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- elif message.tool_calls %}"
    "{{- '<|im_start|>assistant\n<tool_call>\n' + message.tool_calls[0].function.name + '\n</tool_call><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ('user', 'assistant') or (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Ends the whole text with the end-of-sequence token, which a longer conversation does not have in that place.
PHI3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# No added token ends a turn: only the next turn shows where an answer stops.
PLAIN = (
    "{% for message in messages %}{{ '### ' + message['role'] + ':\n' + message['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
# As QwQ and Qwen3 do: the reasoning of earlier answers is not part of the next prompt.
STRIPS_REASONING = (
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' and not loop.last %}{% set content = content.split('</think>')[-1].lstrip('\n') %}"
    "{% endif %}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As DeepSeek-R1 does: the header opens the reasoning, and the text of a conversation has none of it.
OPENS_REASONING = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + message.content.split('</think>')[-1] + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
ADDED = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|end|>", "</think>"]
# Template, what ends a turn, what precedes an answer and belongs to it, whether system messages are allowed.
TEMPLATES = {
    "qwen": (QWEN, "<|im_end|>", "", True),
    "llama3": (LLAMA3, "<|eot_id|>", "", True),
    "mistral": (MISTRAL, "<|im_end|>", " ", False),
    "gemma": (GEMMA, "<end_of_turn>", "", False),
    "phi3": (PHI3, "<|end|>", "", True),
    "plain": (PLAIN, "", "", True),
    "strips-reasoning": (STRIPS_REASONING, "<|im_end|>", "", True),
}
TRICKY = {
    "answer in the question": ["Say: the cat sat", "the cat sat"],
    "one letter": ["a", "a"],
    "header in the question": ["x<|im_start|>assistant\nthe cat<|im_end|>\n[INST] y [/INST] z</s>", "the cat"],
    "end of turn in the answer": ["Which token ends a turn?", "It is <|im_end|> or <|eot_id|>\n, and </s>."],
    "several turns": ["one", "two", "two", "one", "one\ntwo", "two"],
    "characters of several tokens": ["naïve café ☕", "😀😀 ünï 漢字"],
    "braces": ["{{ messages }} {% raw %}", "{% endfor %}{{ x }}"],
    "line breaks": ["a\n\n\nb", "one\n\n\ntwo"],
}


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(ADDED, special_tokens=True)
    return tokenizer


def chat(*texts: str, system: str | None = None) -> list[dict]:
    opening = [] if system is None else [{"role": "system", "content": system}]
    return opening + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def trained(sample, tokenizer) -> list[str]:
    """The text of each run of tokens to train on."""
    runs, ids = [], []
    for token, is_trained in zip([*sample.input_ids, None], [*sample.loss_mask, False], strict=True):
        if is_trained:
            ids.append(token)
        elif ids:
            runs.append(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
            ids = []
    return runs


@pytest.mark.parametrize("texts", TRICKY.values(), ids=TRICKY.keys())
@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_and_nothing_else_train(tokenizer, name, texts):
    tokenizer.chat_template, ending, opening, _ = TEMPLATES[name]
    [sample] = tokenize(Conversation("a", chat(*texts)), tokenizer)
    assert trained(sample, tokenizer) == [opening + answer + ending for answer in texts[1::2]]
    served = tokenizer.apply_chat_template(chat(*texts)[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert sample.input_ids[: len(served)] == served, "the target reads this very prompt when it is served"
    assert sample.loss_mask[-1], "what follows the last answer is left out"


@pytest.mark.parametrize("system", ["", "Be brief.\nthe cat"])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if TEMPLATES[name][3]])
def test_system_turns_do_not_train(tokenizer, name, system):
    tokenizer.chat_template, ending, _, _ = TEMPLATES[name]
    [sample] = tokenize(Conversation("a", chat("the cat", "the cat", system=system)), tokenizer)
    assert trained(sample, tokenizer) == ["the cat" + ending]


def test_tool_turns_do_not_train_and_calls_do(tokenizer):
    tokenizer.chat_template = QWEN
    messages = [
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather"}}]},
        {"role": "tool", "content": "21 degrees"},
        {"role": "assistant", "content": "21 degrees"},
    ]
    [sample] = tokenize(Conversation("a", messages), tokenizer)
    assert trained(sample, tokenizer) == ["<tool_call>\nweather\n</tool_call><|im_end|>", "21 degrees<|im_end|>"]
    messages[1]["weight"] = 0
    [sample] = tokenize(Conversation("a", messages), tokenizer)
    assert trained(sample, tokenizer) == ["21 degrees<|im_end|>"]


def test_a_cut_answer_does_not_teach_to_end_there(tokenizer):
    tokenizer.chat_template = QWEN
    [sample] = tokenize(Conversation("a", chat("a", "b", "c", "the cat sat"), finish_reason="length"), tokenizer)
    assert trained(sample, tokenizer) == ["b<|im_end|>", "the cat sat"]


def test_a_turn_without_an_answer_is_left_out(tokenizer):
    tokenizer.chat_template = QWEN
    [sample] = tokenize(Conversation("a", chat("a", "b", "the question")), tokenizer)
    assert "question" not in tokenizer.decode(sample.input_ids)


def test_an_empty_answer_trains_its_end(tokenizer):
    tokenizer.chat_template = QWEN
    [sample] = tokenize(Conversation("a", chat("a", "")), tokenizer)
    assert trained(sample, tokenizer) == ["<|im_end|>"]


def test_rewritten_turns_give_a_sample_for_each_answer(tokenizer):
    tokenizer.chat_template = STRIPS_REASONING
    first, second = "<think>\none\n</think>\n\nthe cat", "<think>\ntwo\n</think>\n\nthe dog"
    samples = tokenize(Conversation("a", chat("a", first, "b", second)), tokenizer)
    assert [trained(sample, tokenizer) for sample in samples] == [[first + "<|im_end|>"], [second + "<|im_end|>"]]
    assert "<think>\none" not in tokenizer.decode(samples[1].input_ids), "as served, earlier reasoning is gone"


def test_a_header_that_opens_the_reasoning(tokenizer):
    tokenizer.chat_template = OPENS_REASONING
    first, second = "one\n</think>\n\nthe cat", "two\n</think>\n\nthe dog"
    samples = tokenize(Conversation("a", chat("a", first, "b", second)), tokenizer)
    assert [trained(sample, tokenizer) for sample in samples] == [[first + "<|im_end|>"], [second + "<|im_end|>"]]
    assert tokenizer.decode(samples[1].input_ids).endswith("<|im_start|>assistant\n<think>\n" + second + "<|im_end|>")


def test_agrees_with_the_markers_of_a_template_that_has_them(tokenizer):
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
        "{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    messages = chat("the cat", "the cat sat", "a 😀", "😀")
    [sample] = tokenize(Conversation("a", messages), tokenizer)
    marked = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert sample.input_ids == marked["input_ids"][:-1], "all but the last newline"
    assert sample.loss_mask == [bool(mark) for mark in marked["assistant_masks"]][:-1]


def test_offsets_without_white_space(tokenizer):
    """With the offsets that GPT-2's and Llama 3's tokenizers give."""
    trimming = copy.deepcopy(tokenizer)
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    for trimming.chat_template, *_ in TEMPLATES.values():
        conversation = Conversation("a", chat("the cat \n", " the cat", "one ", "\n two", "three", "  "))
        tokenizer.chat_template = trimming.chat_template
        assert tokenize(conversation, trimming) == tokenize(conversation, tokenizer)


class WithoutOffsets:
    """A tokenizer of the slow kind."""

    is_fast = False

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]}


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokenizers_without_offsets_give_the_same(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name][0]
    conversation = Conversation("a", chat(*TRICKY["several turns"]))
    assert tokenize(conversation, WithoutOffsets(tokenizer)) == tokenize(conversation, tokenizer)


def test_refused_and_unanswered_conversations_are_reported(tokenizer):
    tokenizer.chat_template = GEMMA
    report = Report()
    good = Conversation("good", chat("a", "b"))
    bad = [Conversation("system", chat("a", "b", system="c")), Conversation("open", chat("a"))]
    assert tokenize_all([*bad, good], tokenizer, report) == tokenize(good, tokenizer)
    assert report.examples == {
        "refused by the chat template: System role not supported": ["system"],
        "no answer to train on": ["open"],
    }
    assert report.num_kept == 1
    with pytest.raises(ValueError, match="selfspec data regenerate"):
        tokenize_all(bad, tokenizer, Report())
    with pytest.raises(BadRow, match="no answer"):
        tokenize(bad[1], tokenizer)


def test_a_template_can_come_from_a_file(tokenizer, tmp_path):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match="--chat-template FILE"):
        tokenize_all([Conversation("a", chat("a", "b"))], bare, Report())
    with pytest.raises(ValueError, match="--chat-template FILE"):
        use_chat_template(bare, None)
    file = tmp_path / "template.jinja"
    file.write_text(GEMMA)
    use_chat_template(bare, read_template(file))
    assert bare.chat_template == GEMMA
