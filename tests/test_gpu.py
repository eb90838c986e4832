"""The same laws on a CUDA device: noise bit for bit, float32 tokens equal to the CPU's, low precision up to rounding."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from support import FAMILIES, OracleTreeDrafter, identity, random_prompts, tiny_model

from selfspec import SamplingParams, Target, generate
from selfspec.drafters import Drafter, DraftModelDrafter, MedusaDrafter, NgramDrafter
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.kernels.noise import Stream, gumbel, uniform
from selfspec.loop.drafter import NoDrafter
from selfspec.loop.planner import Planner
from selfspec.loop.scheduler import Scheduler
from selfspec.loop.sequence import Request

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


def random_medusa(target: Target) -> MedusaDrafter:
    torch.manual_seed(2)
    head = MedusaHead(MedusaConfig(target=identity(target), num_heads=3, has_output_layer=True))
    return MedusaDrafter(target, head, num_nodes=16)


# Four rows of at most 16 nodes each: the planner reads the scores of larger batches, too.
STEPPING: dict[str, Callable[[Target], Drafter]] = {
    "none": lambda target: NoDrafter(),
    "ngram": lambda target: NgramDrafter(15),
    "medusa": random_medusa,
}


@pytest.mark.parametrize("use_cost_guard", [False, True])
@pytest.mark.parametrize("name", STEPPING)
def test_a_step_waits_for_the_device_once_at_most(name: str, use_cost_guard: bool) -> None:
    """In greedy decoding a step's report is all that the host reads, and nothing else waits."""
    target = Target(tiny_model("llama", max_position_embeddings=4096).cuda())
    scheduler = Scheduler(target, target.new_cache(max_tokens=8192), max_batch=4)
    group = scheduler.add_group(STEPPING[name](target), Planner(is_active=use_cost_guard))
    # No answer ends within the 60 rounds below, even if every draft is accepted.
    sampling = SamplingParams(max_new_tokens=1200, ignore_eos=True)
    num_waits, num_nodes = [], []
    with target.lock, torch.inference_mode():
        for prompt in random_prompts(4, (5, 20), seed=3):
            scheduler.submit(Request(prompt, sampling), group)
        for _ in range(20):
            scheduler.round()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(40):
                before = target.passes.num_set_up, id(group.batch._history)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    [step] = scheduler.round()
                # A new graph and a longer history are made now and then, and may wait.
                if before == (target.passes.num_set_up, id(group.batch._history)):
                    num_waits.append(sum("called a synchronizing CUDA operation" in str(each.message) for each in caught))
                    num_nodes.append(step.tree.num_nodes)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            scheduler.close()
    assert len(num_waits) >= 10 and max(num_waits) <= 1, num_waits
    assert max(num_nodes) <= 16
    if not use_cost_guard:
        assert (max(num_nodes) > 1) == (name != "none")
