"""Kinds of faults that users of other engines reported in public, each tried here so that none comes to stay."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
import torch
import transformers
from support import COMMON, MOE, VOCAB_SIZE, eagle_head, tiny_model, tiny_target
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from selfspec import SamplingParams, Target, generate, load_drafter, stream
from selfspec.api import completion_of
from selfspec.drafters import EagleDrafter, drafter_of
from selfspec.engine import SpecEngine
from selfspec.heads.eagle import EagleConfig
from selfspec.loop.decode import decode
from selfspec.loop.sequence import Request
from selfspec.model.layers import decoder_layers
from selfspec.model.target import FINAL
from selfspec.traffic.masking import render

GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def by_transformers(model: Any, prompt: list[int], count: int = 12) -> list[int]:
    tokens = torch.tensor([prompt])
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, len(prompt) :].tolist()


def built(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


# Rotary tables that depend on the length of the text.


def longrope(original: int, longest: int) -> Any:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 3.0, 9.0, 20.0],
        "original_max_position_embeddings": original,
    }
    changes = {"max_position_embeddings": longest, "original_max_position_embeddings": original, "rope_parameters": rope}
    return built(transformers.Phi3Config(**{**COMMON, **changes}))


def test_a_rotary_table_that_changes_with_the_length_limits_the_context(caplog: pytest.LogCaptureFixture) -> None:
    """Within the limit neighbours, drafts and chunks change nothing; beyond it a prompt is refused in one sentence."""
    model = longrope(40, 256)
    reference = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, logger="selfspec"):
        target = Target(model, name="phi")
    assert "phi: its longrope rotary table changes beyond 40 tokens" in caplog.text and target.context_length == 40
    prompts = [ids(8, 1), ids(27, 2)]
    expected = [by_transformers(reference, prompt) for prompt in prompts]
    for drafter in (None, load_drafter("ngram", target), load_drafter("truncated:1", target)):
        got = generate(target, prompts, drafter=drafter, sampling=GREEDY, batch_size=2, use_cost_guard=False)
        assert [completion.token_ids for completion in got] == expected
    # An answer ends where the table would change.
    [cut] = generate(target, [ids(36, 3)], sampling=GREEDY)
    assert (len(cut.token_ids), cut.finish_reason) == (4, "length")
    with pytest.raises(ValueError, match="phi takes 40 with its answer: shorten the prompt"):
        generate(target, [ids(40, 3)], sampling=GREEDY)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "dynamic"])
def test_the_other_rotary_tables_are_the_models_own(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    if kind == "yarn":
        rope |= {"original_max_position_embeddings": 64}
    model = tiny_model("llama", rope_parameters=rope)
    reference = copy.deepcopy(model)
    target = Target(model)
    assert target.context_length == 256
    for prompt in (ids(9, 1), ids(60, 2)):
        [completion] = generate(
            target, [prompt], drafter=load_drafter("ngram", target), sampling=GREEDY, use_cost_guard=False
        )
        assert completion.token_ids == by_transformers(reference, prompt)


# Windows that a modeling file keeps to its mask.


@pytest.mark.parametrize("window", [8, 120])
@pytest.mark.parametrize(
    ("cls", "changes"),
    [
        ("PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        (
            "Qwen2MoeConfig",
            {
                "num_experts": 4,
                "shared_expert_intermediate_size": 16,
                "use_sliding_window": True,
                "max_window_layers": 1,
                **MOE,
            },
        ),
    ],
)
def test_a_window_that_only_the_mask_has_is_refused_by_name(cls: str, changes: dict[str, Any], window: int) -> None:
    """However long it is: a check that is shorter than the window would not see it."""
    config = getattr(transformers, cls)(**{**COMMON, **changes, "sliding_window": window})
    with pytest.raises(ValueError, match=rf"{config.model_type} (applies its sliding window|gives different logits)"):
        Target(built(config))


def test_a_window_longer_than_the_context_is_none() -> None:
    config = transformers.PhimoeConfig(**{**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 256})
    model = built(config)
    reference = copy.deepcopy(model)
    [completion] = generate(Target(model), [ids(20, 2)], sampling=GREEDY)
    assert completion.token_ids == by_transformers(reference, ids(20, 2))


# Ends that the model has no logits for.


def test_an_end_beyond_the_logits_can_never_come_and_harms_nobody() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [2, VOCAB_SIZE + 7]
    target = Target(model)
    assert target.eos_token_ids == (2,)
    engine = SpecEngine(target, [load_drafter("ngram", target)], cache_tokens=512, use_cost_guard=False)
    sampling = SamplingParams(max_new_tokens=8, min_new_tokens=4)
    [*_, last] = engine.stream([Request([5, 6], sampling)])
    assert last.completion is not None and not engine.problems
    engine.close()


# Wrappers around a text model.


@pytest.mark.parametrize("depth", [2, 4])
def test_a_text_model_in_a_wrapper_has_every_drafter(depth: int) -> None:
    """Also where the vision tower is as deep as the text model."""
    text = {**COMMON, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "num_hidden_layers": 4}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**vision, "num_hidden_layers": depth}, mm_tokens_per_image=4
    )
    target = Target(built(config))
    assert ".".join(decoder_layers(target.model)[0]) == "model.language_model.layers"
    prompts = [ids(5, 1), ids(20, 2)]
    expected = [completion.token_ids for completion in generate(target, prompts, sampling=GREEDY)]
    eagle = EagleDrafter(target, eagle_head(target, feature_layers=(1, 3)))
    for drafter in (load_drafter("ngram", target), load_drafter("truncated:1", target), eagle):
        got = generate(target, prompts, drafter=drafter, sampling=GREEDY, batch_size=2, use_cost_guard=False)
        assert [completion.token_ids for completion in got] == expected


# A head's own layer.


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt-neox", "gemma3", "gpt-oss", "qwen3"])
def test_an_eagle_head_has_a_shape_for_every_family(family: str) -> None:
    """Whatever the configuration calls its sizes; the text is the target's."""
    target = tiny_target(family)
    layer = EagleConfig.layer_shape(target.config)
    identity = eagle_head(target).config.target
    head_cls = type(eagle_head(target))
    config = EagleConfig(target=identity, feature_layers=(0, 2), draft_vocab_size=target.vocab_size, **layer)
    drafter = drafter_of(head_cls(config), target)
    expected = generate(target, [ids(9, 1)], sampling=GREEDY)[0].token_ids
    got = generate(target, [ids(9, 1)], drafter=drafter, sampling=GREEDY, use_cost_guard=False)[0].token_ids
    assert got == expected


def test_an_eagle_head_turns_as_its_target_does() -> None:
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    shape = EagleConfig.layer_shape(transformers.LlamaConfig(**{**COMMON, "rope_parameters": llama3}))
    assert shape["rope_theta"] == 5e5
    assert shape["rope_scaling"] == {key: value for key, value in llama3.items() if key != "rope_theta"}
    plain = EagleConfig.layer_shape(tiny_model("llama").config)
    assert plain["rope_scaling"] is None and plain["rope_theta"] == 10000.0
    gemma = tiny_model("gemma3").config
    assert EagleConfig.layer_shape(gemma)["rope_theta"] == gemma.rope_parameters["full_attention"]["rope_theta"]


# Extremes of sampling.


@pytest.mark.parametrize("temperature", [1e-46, 1e-40, 1e-38, 1e-31, 1e-30, 1e-20])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.1}])
def test_a_temperature_near_nothing_is_greedy(temperature: float, filters: dict[str, Any]) -> None:
    target = tiny_target("llama")
    expected = generate(target, [ids(4, 1)], sampling=GREEDY)[0].token_ids
    sampling = GREEDY.with_(temperature=temperature, seed=1, **filters)
    for drafter in (None, load_drafter("ngram", target)):
        got = generate(target, [ids(4, 1)], drafter=drafter, sampling=sampling, use_cost_guard=False)
        assert got[0].token_ids == expected


def test_hidden_states_of_packed_texts_are_those_of_the_texts_alone() -> None:
    target = tiny_target("llama")
    first, second = torch.tensor(ids(21, 1)), torch.tensor(ids(27, 2))
    positions = torch.cat([torch.arange(21), torch.arange(27)])[None]
    packed = target.hidden_states(torch.cat([first, second])[None], positions, (FINAL,))[FINAL][0, 21:]
    alone = target.hidden_states(second[None], torch.arange(27)[None], (FINAL,))[FINAL][0]
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


# An answer's first space.


@pytest.fixture(scope="module")
def spaces_in_front() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer as Llama 2 has: a word carries the space before it, and decoding drops one space at the very beginning."""
    words = [
        "hello",
        "world",
        "that",
        "is",
        "nice",
        "it",
        "was",
        "not",
        "true",
        "one",
        "two",
        "three",
        "the",
        "cat",
        "sat",
        "on",
        "a",
        "mat",
    ]
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts = [" ".join(words[i % len(words)] for i in range(j, j + 9)) for j in range(200)]
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=360, special_tokens=specials, show_progress=False))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    record = json.loads(backend.to_str())
    # Bytes are ordinary tokens.
    record["added_tokens"] = record["added_tokens"][:3]
    backend = Tokenizer.from_str(json.dumps(record))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_prompt_and_answer_joined_are_the_text(spaces_in_front: transformers.PreTrainedTokenizerFast) -> None:
    """The answer begins with its space, streamed or whole, and a stop string that begins with one is found."""
    model = tiny_model("llama", vocab_size=len(spaces_in_front))
    target = Target(model, spaces_in_front)
    word = spaces_in_front.convert_tokens_to_ids("▁that")
    forced = SamplingParams(max_new_tokens=3, logit_bias={word: 100.0}, ignore_eos=True)
    [completion] = generate(target, ["hello world"], sampling=forced)
    assert completion.token_ids == [word] * 3 and completion.text == " that that that"
    pieces = [event.text for event in stream(target, "hello world", sampling=forced)]
    assert "".join(pieces) == completion.text and pieces[0] == " that"
    [stopped] = generate(target, ["hello world"], sampling=forced.with_(stop=(" that",)))
    assert (stopped.text, len(stopped.token_ids), stopped.finish_reason) == ("", 1, "stop")


def test_half_a_character_of_the_prompt_is_no_part_of_the_answer(
    spaces_in_front: transformers.PreTrainedTokenizerFast,
) -> None:
    halves = [spaces_in_front.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "é".encode()]
    model = tiny_model("llama", vocab_size=len(spaces_in_front))
    target = Target(model, spaces_in_front)
    word = spaces_in_front.convert_tokens_to_ids("▁that")
    prompt = [*spaces_in_front("hello").input_ids, halves[0]]
    forced = SamplingParams(max_new_tokens=2, logit_bias={word: 100.0}, ignore_eos=True)
    [completion] = generate(target, [prompt], sampling=forced)
    assert completion.text == "that that"


# Names of tokens, and calls of tools.


def test_token_names_joined_are_the_text(spaces_in_front: transformers.PreTrainedTokenizerFast) -> None:
    """As the server's log-probabilities have them: each with its space, none under another's name, each at its offset."""
    pytest.importorskip("fastapi", reason="the server's answers need fastapi: pip install 'selfspec[serve]'")
    from selfspec.serve.answers import CompletionAnswer
    from selfspec.serve.token_names import token_texts

    target = Target(tiny_model("llama", vocab_size=len(spaces_in_front)), spaces_in_front)
    no_bytes = dict.fromkeys(range(3, 259), -100.0)
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=True, logit_bias=no_bytes)
    request = Request(target.encode("hello"), sampling, num_top_logprobs=20)
    [*_, step] = decode(target, [request])
    completion = completion_of(step.finished[0])
    answer = CompletionAnswer("id", "m", spaces_in_front, 1, "none", [request])
    record = answer.choice(0, completion)
    names, offsets = record["logprobs"]["tokens"], record["logprobs"]["text_offset"]
    ordinary = [name for name, token in zip(names, completion.token_ids, strict=True) if token > 2]
    assert "".join(ordinary) == completion.text and any(name.startswith(" ") for name in names)
    for name, offset, token in zip(names, offsets, completion.token_ids, strict=True):
        assert token <= 2 or completion.text.startswith(name, offset)
    assert [len(top) for top in record["logprobs"]["top_logprobs"]] == [20] * 12
    words = range(259, len(spaces_in_front))
    texts = token_texts(spaces_in_front, True)
    assert len({texts.of(token).name for token in words}) == len(words), "no two words have one name"


TOOLS = """{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}(
{%- if quoted %}{{ c.function.arguments | tojson }}{% else %}
{%- for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{% endif %}){% endfor %}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(("style", "expected"), [("true", 'weather({"city": "Paris"})'), ("false", "weather(city=Paris;)")])
def test_arguments_of_tool_calls_reach_the_template_as_objects(
    style: str, expected: str, tiny_tokenizer: transformers.PreTrainedTokenizerFast
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = "{% set quoted = " + style + " %}" + TOOLS
    target = Target(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "18 C"},
    ]
    assert expected in tokenizer.decode(target.encode(messages))
    assert expected in render(tokenizer, messages)
    assert call["function"]["arguments"] == '{"city": "Paris"}', "the caller's messages stay as they were"


@pytest.mark.parametrize(
    ("template", "words"),
    [("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"), ("{{ 1 + 'a' }}", "TypeError: unsupported operand")],
)
def test_a_template_that_fails_is_told_in_its_own_words(
    template: str, words: str, tiny_tokenizer: transformers.PreTrainedTokenizerFast
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = template
    target = Target(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer)
    with pytest.raises(ValueError, match=f"the model's chat template fails on these messages: {words}"):
        target.encode([{"role": "user", "content": "Hi"}])
