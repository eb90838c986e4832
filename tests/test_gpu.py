"""The same laws on a CUDA device: noise bit for bit, float32 tokens equal to the CPU's, low precision up to rounding."""

from __future__ import annotations

import pytest
import torch
from support import FAMILIES, OracleTreeDrafter, random_prompts, tiny_model

from selfspec import SamplingParams, Target, generate
from selfspec.drafters import DraftModelDrafter, NgramDrafter
from selfspec.kernels.noise import Stream, gumbel, uniform

pytestmark = pytest.mark.gpu
PROMPTS = random_prompts(7, (1, 40), seed=3)
NUM_TOKENS = 24


def test_noise_is_the_cpus() -> None:
    keys, positions = torch.arange(64) * 12345 - 7, torch.arange(64)
    for stream in Stream:
        here = uniform(keys, positions, stream, 1000)
        there = uniform(keys.cuda(), positions.cuda(), stream, 1000).cpu()
        assert torch.equal(here, there)
    # The logarithms may round differently in the last place.
    here = gumbel(keys, positions, Stream.TARGET, 1000)
    there = gumbel(keys.cuda(), positions.cuda(), Stream.TARGET, 1000).cpu()
    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_float32_tokens_are_the_cpus(family: str, temperature: float) -> None:
    sampling = [SamplingParams(max_new_tokens=NUM_TOKENS, temperature=temperature, seed=i) for i in range(len(PROMPTS))]
    expected = [c.token_ids for c in generate(Target(tiny_model(family)), PROMPTS, sampling=sampling, batch_size=7)]
    target = Target(tiny_model(family).cuda())
    answers = {tuple(p): e for p, e in zip(PROMPTS, expected, strict=True)}
    for drafter in (
        None,
        NgramDrafter(6),
        DraftModelDrafter(target.truncated(2), target.vocab_size, num_draft_tokens=3),
        OracleTreeDrafter(answers),
    ):
        got = generate(target, PROMPTS, drafter=drafter, sampling=sampling, batch_size=4, use_cost_guard=False)
        assert [c.token_ids for c in got] == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.8},
        {"top_k": 5},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_float32_filtered_tokens_are_the_cpus(settings: dict[str, float]) -> None:
    """Kernel there, transformers' filters here; alone and beside greedy rows and rows whose law needs their paths."""
    params = [SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.9, seed=i, **settings) for i in range(len(PROMPTS))]
    expected = [c.token_ids for c in generate(Target(tiny_model("llama")), PROMPTS, sampling=params, batch_size=7)]
    target = Target(tiny_model("llama").cuda())
    answers = {tuple(p): e for p, e in zip(PROMPTS, expected, strict=True)}
    for drafter in (None, NgramDrafter(6), OracleTreeDrafter(answers)):
        for batch_size in (1, 4):
            got = generate(target, PROMPTS, drafter=drafter, sampling=params, batch_size=batch_size, use_cost_guard=False)
            assert [c.token_ids for c in got] == expected
    others = (SamplingParams(max_new_tokens=NUM_TOKENS), SamplingParams(max_new_tokens=NUM_TOKENS, frequency_penalty=0.3))
    for other in others:
        mixed = [p if i % 2 else other for i, p in enumerate(params)]
        got = generate(target, PROMPTS, drafter=NgramDrafter(6), sampling=mixed, batch_size=7, use_cost_guard=False)
        assert [c.token_ids for c in got[1::2]] == expected[1::2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_emits_the_argmax_up_to_rounding(dtype: torch.dtype) -> None:
    """[N1]"""
    model = tiny_model("llama").to("cuda", dtype)
    target = Target(model)
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    expected = [c.token_ids for c in generate(target, PROMPTS, sampling=sampling)]
    answers = {tuple(p): e for p, e in zip(PROMPTS, expected, strict=True)}
    got = generate(
        target, PROMPTS, drafter=OracleTreeDrafter(answers), sampling=sampling, batch_size=7, use_cost_guard=False
    )
    for prompt, completion in zip(PROMPTS, got, strict=True):
        ids = torch.tensor([prompt + completion.token_ids], device="cuda")
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[0].float()[len(prompt) - 1 : -1]
        emitted = logits.gather(1, torch.tensor(completion.token_ids, device="cuda")[:, None])[:, 0]
        scale = logits.abs().amax()
        assert ((logits.amax(1) - emitted) <= 8 * torch.finfo(dtype).eps * scale).all()
