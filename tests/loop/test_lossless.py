"""The law of the project: speculation changes how fast tokens come, never which.

Greedy output equals transformers' `generate` token for token in float32, for every family, drafter, tree and batch; sampled
output with a seed equals plain sampling with that seed, for every setting. [K1]-[K4] and [S5] all break these when broken.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from support import FAMILIES, OracleTreeDrafter, random_prompts, tiny_model, tiny_target
from transformers import PreTrainedModel

from selfspec import SamplingParams, Target, generate
from selfspec.config import SamplingParams as Params
from selfspec.drafters import Drafter, DraftModelDrafter, NgramDrafter

NUM_TOKENS = 24
PROMPTS = random_prompts(7, (1, 40), seed=3)


def reference(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers' generate emits greedily."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def drafters(target: Target, answers: dict[tuple[int, ...], list[int]]) -> dict[str, Drafter | None]:
    """One of each kind; the trees hold the truth often enough that long and short paths both occur."""
    return {
        "none": None,
        "ngram": NgramDrafter(6, max_match=3),
        "truncated": DraftModelDrafter(target.truncated(target.num_layers - 1), target.vocab_size, num_draft_tokens=3),
        "oracle-tree": OracleTreeDrafter(answers, hit=0.75, num_nodes=9),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(family: str) -> None:
    model = tiny_model(family)
    expected = [reference(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    target = Target(model)
    answers = {tuple(p): e for p, e in zip(PROMPTS, expected, strict=True)}
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS)
    for name, drafter in drafters(target, answers).items():
        for batch_size, use_guard in ((1, False), (7, False), (7, True)):
            got = generate(
                target, PROMPTS, drafter=drafter, sampling=sampling, batch_size=batch_size, use_cost_guard=use_guard
            )
            assert [c.token_ids for c in got] == expected, (name, batch_size, use_guard)
    passes = sum(c.num_target_passes for c in generate(target, PROMPTS, drafter=drafter, sampling=sampling))
    assert passes < 0.7 * sum(map(len, expected)), "the oracle's paths were not accepted"


def test_a_draft_model_of_another_shape_changes_nothing() -> None:
    target = tiny_target("llama")
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS)
    expected = [c.token_ids for c in generate(target, PROMPTS, sampling=sampling)]
    for draft in (tiny_target("qwen2", seed=5), tiny_target("gpt2", seed=6), tiny_target("llama", seed=0)):
        drafter = DraftModelDrafter(draft, target.vocab_size, num_draft_tokens=4)
        for batch_size in (1, 3):
            got = generate(target, PROMPTS, drafter=drafter, sampling=sampling, batch_size=batch_size, use_cost_guard=False)
            assert [c.token_ids for c in got] == expected
            assert drafter._cache.num_used_blocks == 0 and not drafter._rows


SETTINGS = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.3},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 0.9, "top_p": 0.7},
    "min-p": {"temperature": 1.3, "min_p": 0.1},
    "repetition": {"temperature": 0.8, "repetition_penalty": 1.4},
    "presence-frequency": {"temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    "bias-and-minimum": {"temperature": 1.0, "logit_bias": {5: 3.0, 9: -100.0}, "min_new_tokens": 20},
    "greedy-penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "everything": {
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {7: 1.5},
        "min_new_tokens": 10,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_sampling_with_a_seed_equals_plain_sampling(name: str) -> None:
    """[S4] penalties see each node's own path; [S5] alone, in a batch, beside unseeded neighbours."""
    target = tiny_target("llama", num_hidden_layers=2)
    params = [Params(max_new_tokens=24, seed=100 + i, **SETTINGS[name]) for i in range(len(PROMPTS))]
    expected = [c.token_ids for c in generate(target, PROMPTS, sampling=params)]
    answers = {tuple(p): e for p, e in zip(PROMPTS, expected, strict=True)}
    for label, drafter in drafters(target, answers).items():
        for batch_size in (1, 3, 7):
            got = generate(target, PROMPTS, drafter=drafter, sampling=params, batch_size=batch_size, use_cost_guard=False)
            assert [c.token_ids for c in got] == expected, (label, batch_size)
    # Mixed company: every other row has another law, and no seed.
    mixed = [p if i % 2 else Params(max_new_tokens=24, temperature=1.1) for i, p in enumerate(params)]
    got = generate(target, PROMPTS, drafter=NgramDrafter(4), sampling=mixed, batch_size=7)
    for i in range(1, len(PROMPTS), 2):
        assert got[i].token_ids == expected[i]


def test_seeds_decide() -> None:
    """[S5] equal seeds repeat, other seeds and unseeded requests differ, and samples of one request differ."""
    target = tiny_target("llama")
    prompt = [PROMPTS[0]]
    draw = lambda **settings: [  # noqa: E731
        tuple(c.token_ids)
        for c in generate(target, prompt, sampling=SamplingParams(max_new_tokens=24, temperature=1.0, **settings))
    ]
    assert draw(seed=1) == draw(seed=1)
    assert draw(seed=1) != draw(seed=2)
    assert draw() != draw()
    samples = draw(seed=1, n=4)
    assert len(set(samples)) == 4 and samples[:1] == draw(seed=1)


def test_sampled_drafts_repeat_with_their_seed_in_any_batch() -> None:
    target = tiny_target("llama", num_hidden_layers=2)
    params = [Params(max_new_tokens=16, temperature=0.9, top_p=0.9, seed=i) for i in range(len(PROMPTS))]
    drafter = DraftModelDrafter(target.truncated(1), target.vocab_size, num_draft_tokens=3, is_sampled=True)
    runs = [
        [
            c.token_ids
            for c in generate(target, PROMPTS, drafter=drafter, sampling=params, batch_size=batch_size, use_cost_guard=False)
        ]
        for batch_size in (1, 4, 7)
    ]
    assert runs[0] == runs[1] == runs[2]


def test_logprobs_are_the_targets_own() -> None:
    """Emitted tokens' log-probabilities do not depend on the drafter and equal a teacher-forced forward's."""
    target = tiny_target("llama")
    sampling = SamplingParams(max_new_tokens=20, logprobs=True, temperature=0.7, seed=4)
    plain = generate(target, PROMPTS[:3], sampling=sampling)
    answers = {tuple(p): c.token_ids for p, c in zip(PROMPTS[:3], plain, strict=True)}
    speculative = generate(target, PROMPTS[:3], sampling=sampling, drafter=OracleTreeDrafter(answers), batch_size=3)
    for prompt, a, b in zip(PROMPTS, plain, speculative, strict=False):
        assert a.logprobs is not None and b.logprobs is not None and len(a.logprobs) == len(a.token_ids)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        with torch.inference_mode():
            logits = target.model(torch.tensor([prompt + a.token_ids]), use_cache=False).logits[0]
        forced = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(a.token_ids)[:, None])[:, 0]
        assert a.logprobs == pytest.approx(forced.tolist(), abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_emits_the_argmax_up_to_rounding(dtype: torch.dtype) -> None:
    """[N1] every emitted token is the target's argmax under teacher forcing, or within a rounding step or two of it."""
    model = tiny_model("llama").to(dtype)
    target = Target(model)
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    expected = [c.token_ids for c in generate(target, PROMPTS, sampling=sampling)]
    answers = {tuple(p): e for p, e in zip(PROMPTS, expected, strict=True)}
    for drafter, batch_size in itertools.product(drafters(target, answers).values(), (1, 7)):
        got = generate(target, PROMPTS, drafter=drafter, sampling=sampling, batch_size=batch_size, use_cost_guard=False)
        for prompt, completion in zip(PROMPTS, got, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + completion.token_ids]), use_cache=False).logits[0].float()
            logits = logits[len(prompt) - 1 : -1]
            emitted = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            gap = logits.amax(1) - emitted
            # Logits near `scale` are stored in steps of eps * scale; a few layers of rounding add up to a few steps.
            scale = logits.abs().amax()
            assert (gap <= 8 * torch.finfo(dtype).eps * scale).all(), gap.max()
