"""More kinds of faults that users of other engines reported in public: in what requests ask for, and in imported heads."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import eagle_head, random_prompts, tiny_model, tiny_target
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from selfspec import SamplingParams, Target, generate, load_drafter
from selfspec.drafters import drafter_of
from selfspec.engine import SpecEngine
from selfspec.heads.eagle import EagleHead
from selfspec.interop import export_head, import_head
from selfspec.loop.sequence import Request
from selfspec.model.target import FINAL

DRAFTERS = ("none", "ngram", "truncated:1")
GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True)
PROMPTS = random_prompts(3, (4, 20), seed=3)


def answers(target: Target, drafter: str, sampling: SamplingParams, batch_size: int = 3) -> list[Any]:
    options = {"sampling": sampling, "batch_size": batch_size, "use_cost_guard": False}
    return generate(target, PROMPTS, drafter=load_drafter(drafter, target), **options)


# What a head learns from.


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 0.0625}),
        ("gemma2", {"final_logit_softcapping": 5.0}),
    ],
)
def test_a_teacher_has_its_models_scale_and_cap(family: str, changes: dict[str, float]) -> None:
    """Without them the labels are 1 to 2 nats from what the model predicts."""
    target = tiny_target(family, **changes)
    ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        expected = target.model(ids, use_cache=False).logits.log_softmax(-1)
        states = target.hidden_states(ids, torch.arange(ids.shape[1])[None], (FINAL,))[FINAL]
        labels = target.logits_of(states).log_softmax(-1)
    assert float((expected.exp() * (expected - labels)).sum(-1).abs().max()) < 1e-5


# Windows that a configuration switches on and off.


@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm3"])
def test_a_window_is_applied_just_where_it_is_switched_on(family: str, is_on: bool) -> None:
    config = tiny_model(family).config.to_dict() | {"use_sliding_window": is_on, "sliding_window": 6, "max_window_layers": 1}
    # The kinds of the layers follow from the switch.
    config.pop("layer_types", None)
    torch.manual_seed(0)
    kind = type(tiny_model(family).config)
    model = AutoModelForCausalLM.from_config(kind.from_dict(config), attn_implementation="eager").float().eval()
    own = copy.deepcopy(model)
    target = Target(model)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = own.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None)
        expected.append(out[0, len(prompt) :].tolist())
    for drafter in DRAFTERS:
        assert [answer.token_ids for answer in answers(target, drafter, GREEDY)] == expected


# Answers without an end, and tokens without a name.


@pytest.mark.parametrize("ends", [None, [], [-1, 2]])
@pytest.mark.parametrize("least", [0, 6])
def test_a_model_may_have_no_end_token(ends: Any, least: int) -> None:
    model = tiny_model("llama")
    model.generation_config = GenerationConfig()
    model.generation_config.eos_token_id = ends
    model.config.eos_token_id = ends
    target = Target(model)
    sampling = SamplingParams(max_new_tokens=20, min_new_tokens=least)
    expected = [answer.token_ids for answer in answers(target, "none", sampling)]
    for drafter in DRAFTERS[1:]:
        assert [answer.token_ids for answer in answers(target, drafter, sampling)] == expected
    assert ends == [-1, 2] or all(len(ids) == 20 for ids in expected)


def test_a_token_that_the_tokenizer_does_not_know_harms_nobody(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Models may have more logits than their tokenizer has tokens; such an id may come, beside stop strings."""
    target = Target(tiny_model("llama", vocab_size=len(tiny_tokenizer) + 24), tiny_tokenizer)
    unknown = len(tiny_tokenizer) + 5
    sampling = SamplingParams(max_new_tokens=6, stop=("zzz",), logprobs=True, logit_bias={unknown: 100.0}, ignore_eos=True)
    for drafter in DRAFTERS:
        for answer in answers(target, drafter, sampling):
            assert answer.token_ids == [unknown] * 6 and answer.text == "" and answer.finish_reason == "length"


# Drafts beside log-probabilities, penalties and forms.


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.3, "top_k": 7, "seed": 2}])
def test_log_probabilities_are_the_same_with_drafts(settings: dict[str, Any]) -> None:
    target = tiny_target("llama")
    sampling = GREEDY.with_(logprobs=True, **settings)
    plain = answers(target, "none", sampling, batch_size=1)
    for drafter in DRAFTERS[1:]:
        for ours, theirs in zip(answers(target, drafter, sampling), plain, strict=True):
            assert ours.token_ids == theirs.token_ids and ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
            assert all(value <= 0 for value in ours.logprobs) and min(ours.logprobs) < -1e-6


@pytest.mark.parametrize(
    "settings",
    [{"presence_penalty": 2.0}, {"frequency_penalty": -2.0}, {"repetition_penalty": 5.0}, {"repetition_penalty": 0.2}],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_count_no_draft(settings: dict[str, float], temperature: float) -> None:
    target = tiny_target("llama")
    sampling = GREEDY.with_(temperature=temperature, seed=3, **settings)
    plain = [answer.token_ids for answer in answers(target, "none", sampling, batch_size=1)]
    assert plain != [answer.token_ids for answer in answers(target, "none", GREEDY.with_(temperature=temperature, seed=3))]
    for drafter in DRAFTERS[1:]:
        assert [answer.token_ids for answer in answers(target, drafter, sampling)] == plain


@pytest.mark.parametrize("num_more_logits", [0, 24])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_drafts_keep_to_a_form_and_to_its_end(
    num_more_logits: int, temperature: float, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """The parser is asked for nothing after its end, and every drafter's JSON is the same."""
    pytest.importorskip("llguidance", reason="forms need llguidance: pip install 'selfspec[serve]'")
    from selfspec.serve.grammar import GrammarCompiler
    from selfspec.serve.protocol import ResponseFormat

    target = Target(tiny_model("llama", vocab_size=len(tiny_tokenizer) + num_more_logits), tiny_tokenizer)
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
    form = ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
    sampling = SamplingParams(max_new_tokens=60, temperature=temperature, seed=1)
    texts = []
    for drafter in DRAFTERS[1:]:
        loaded = load_drafter(drafter, target)
        assert loaded is not None
        engine = SpecEngine(target, [loaded], cache_tokens=512, use_cost_guard=False)
        for name in ("none", drafter):
            request = Request(target.encode("the cat"), sampling, begin_grammar=GrammarCompiler(target).compile(form))
            [*_, last] = engine.stream([request], drafter=name)
            assert last.error is None and last.completion is not None and last.completion.finish_reason == "stop"
            texts.append(last.completion.text)
        engine.close()
    assert json.loads(texts[0])["a"] in ("x", "y") and set(texts) == {texts[0]}


@pytest.mark.parametrize("settings", [{"min_tokens": 40}, {"ignore_eos": True}])
def test_a_form_decides_where_an_answer_ends(settings: dict[str, Any]) -> None:
    """What would go on after the form's end is refused before it begins."""
    pytest.importorskip("fastapi", reason="requests need pydantic: pip install 'selfspec[serve]'")
    from selfspec.serve.protocol import ChatRequest

    form = {"type": "json_object"}
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "response_format": form}
    with pytest.raises(ValueError, match="response_format decides where an answer ends: leave out"):
        ChatRequest.model_validate({**body, **settings})


# Clients that leave.


@pytest.mark.parametrize("num_events", [1, 5])
def test_a_client_that_leaves_keeps_no_block(num_events: int) -> None:
    target = tiny_target("llama")
    drafter = load_drafter("ngram", target)
    assert drafter is not None
    engine = SpecEngine(target, [drafter], cache_tokens=1024, use_cost_guard=False)
    endless = SamplingParams(max_new_tokens=200, ignore_eos=True)
    events = engine.stream([Request(prompt, endless, i) for i, prompt in enumerate(PROMPTS)], drafter="ngram")
    for _ in range(num_events):
        next(events)
    events.close()
    # Asked on the engine's own thread, between two steps.
    assert engine.call(lambda: engine.num_used_blocks) == 0
    [*_, last] = engine.stream([Request(PROMPTS[0], GREEDY)], drafter="ngram")
    assert last.completion is not None and len(last.completion.token_ids) == 20
    engine.close()


# Heads as others publish them.

Imported = Callable[..., EagleHead]


@pytest.fixture(scope="module")
def deep() -> Target:
    return tiny_target("llama", num_hidden_layers=8, layer_types=None)


@pytest.fixture
def imported(deep: Target, tmp_path: Path) -> Imported:
    """Exports a head for an engine, changes the config as others write it, and imports it again."""

    def bring(head: EagleHead, **config: Any) -> EagleHead:
        head.save_pretrained(tmp_path / "head")
        export_head(str(tmp_path / "head"), deep, "vllm", tmp_path / "export")
        file = tmp_path / "export" / "config.json"
        record = {**json.loads(file.read_text()), **config}
        file.write_text(json.dumps({key: value for key, value in record.items() if value is not None}))
        head = import_head(str(tmp_path / "export"), deep)
        assert isinstance(head, EagleHead)
        return head

    return bring


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 1e4, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
    ids=["old", "new", "new beside a default"],
)
def test_theta_is_read_wherever_transformers_writes_it(config: dict[str, Any], deep: Target, imported: Imported) -> None:
    assert imported(eagle_head(deep, feature_layers=(2, 4, 5)), **config).config.rope_theta == 5e5


def test_a_heads_own_length_clamps_no_position(deep: Target, imported: Imported) -> None:
    """Heads are published with a max_position_embeddings of 2,048 or less, and draft beyond it."""
    short = imported(eagle_head(deep, feature_layers=(2, 4, 5)), max_position_embeddings=16)
    long = replace(short.config)
    assert short.config == long
    prompt = random_prompts(1, (40, 40), seed=8)
    drafted = generate(deep, prompt, drafter=drafter_of(short, deep), sampling=GREEDY, use_cost_guard=False)[0]
    assert drafted.token_ids == generate(deep, prompt, sampling=GREEDY)[0].token_ids
    whole = drafter_of(eagle_head(deep, feature_layers=(2, 4, 5)), deep)
    same = generate(deep, prompt, drafter=whole, sampling=GREEDY, use_cost_guard=False)[0]
    assert drafted.num_accepted_tokens == same.num_accepted_tokens


def test_a_heads_attention_may_be_wider_than_its_hidden_states(deep: Target, imported: Imported) -> None:
    head = eagle_head(deep, feature_layers=(2, 4, 5))
    wide = EagleHead(replace(head.config, head_dim=16))
    assert wide.config.num_heads * 16 == 2 * deep.config.hidden_size
    again = imported(wide)
    assert again.config == wide.config
    for name, weight in wide.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    [drafted] = generate(deep, PROMPTS[:1], drafter=drafter_of(again, deep), sampling=GREEDY, use_cost_guard=False)
    assert drafted.token_ids == generate(deep, PROMPTS[:1], sampling=GREEDY)[0].token_ids
