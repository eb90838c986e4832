"""Noise that is a function of key and position, and the processing of logits that every decoded token goes through."""

from __future__ import annotations

import pytest
import scipy.stats
import torch
from support import VOCAB_SIZE, random_prompts, tiny_model, tiny_target
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec import SamplingParams, Target, generate
from selfspec.kernels.noise import Stream, gumbel, sample_key, splitmix64, uniform
from selfspec.loop.sampling import Sampler

PROMPTS = random_prompts(4, (2, 20), seed=8)


def sampler_of(params: list[SamplingParams], history: torch.Tensor, prompt: list[int], total: list[int]) -> Sampler:
    keys = torch.arange(len(params)) + 1
    return Sampler(params, keys, history, torch.tensor(total), torch.tensor(prompt), (2,))


def test_splitmix64_gives_the_published_sequence() -> None:
    """The reference implementation's first outputs for seed 0."""
    golden = torch.tensor(0x9E3779B97F4A7C15 - (1 << 64))
    outputs = [int(splitmix64(golden * i)) % (1 << 64) for i in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_noise_is_uniform_and_its_streams_positions_and_keys_are_unrelated() -> None:
    keys = torch.tensor([sample_key(0, 0), sample_key(0, 1), sample_key(1, 0), 5])
    draws = torch.stack([uniform(keys, torch.full_like(keys, t), s, 4096) for t in (0, 1, 9) for s in Stream])
    flat = draws.flatten(0, 1)
    assert (flat > 0).all() and (flat < 1).all()
    for row in flat:
        assert scipy.stats.kstest(row.numpy(), "uniform").pvalue > 1e-4
    # 48 rows of 4,096: a correlation's standard error is 1/64, the largest of 1,128 pairs stays below five of them.
    correlations = torch.corrcoef(flat) - torch.eye(len(flat))
    assert correlations.abs().max() < 5 / 64


def test_noise_depends_on_key_position_and_stream_alone() -> None:
    keys, positions = torch.tensor([7, 8, 9]), torch.tensor([3, 4, 5])
    together = gumbel(keys, positions, Stream.TARGET, 50)
    for b in range(3):
        assert torch.equal(together[b], gumbel(keys[b : b + 1], positions[b : b + 1], Stream.TARGET, 50)[0])
    grid = gumbel(keys[:, None].expand(3, 2), positions[:, None] + torch.arange(2), Stream.TARGET, 50)
    assert torch.equal(grid[:, 0], together)


def test_choosing_at_all_nodes_equals_choosing_one_by_one() -> None:
    params = [SamplingParams(temperature=t) for t in (0.0, 0.7, 1.5)]
    logits = torch.randn(3, 5, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    depths = torch.tensor([[0, 1, 1, 2, 3]] * 3)
    sampler = sampler_of(params, torch.zeros(3, 16, dtype=torch.int64), [4] * 3, [4, 5, 6])
    chosen, _ = sampler.laws.choose(logits, depths)
    for node in range(5):
        depth = int(depths[0, node])
        processed = sampler.process(logits[:, node], depth)
        assert torch.equal(chosen[:, node], sampler.draw(processed, depth, Stream.TARGET))
    # Siblings share their noise: equal logits choose equal tokens.
    same = logits[:, 1:2].expand(-1, 5, -1)
    chosen, _ = sampler.laws.choose(same, depths)
    assert torch.equal(chosen[:, 1], chosen[:, 2])


def test_filters_are_transformers_own_in_its_order() -> None:
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    params = SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=0.05)
    sampler = sampler_of([params] * 2, torch.zeros(2, 8, dtype=torch.int64), [4, 4], [4, 4])
    expected = LogitsProcessorList(
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)]
    )(None, logits)
    assert torch.equal(sampler.process(logits, 0), expected)


FILTERS = [
    {"top_k": 4},
    {"top_k": 1},
    {"top_p": 0.7},
    {"top_p": 1e-3},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 500, "top_p": 0.5},
    {},
]


def test_filters_without_a_path_choose_what_transformers_own_choose() -> None:
    """At every node at once, rows of all filters in one batch; bias and penalties come before the filters."""
    params = [SamplingParams(temperature=0.5 + i / 5, **each) for i, each in enumerate(FILTERS)]  # type: ignore[arg-type]
    params += [p.with_(logit_bias={3: 2.0}, presence_penalty=0.5, min_new_tokens=6) for p in params]
    B = len(params)
    sampler = sampler_of(params, torch.randint(VOCAB_SIZE, (B, 12)), [2] * B, [4] * B)
    assert not sampler.is_pathless and not sampler.is_plain
    generator = torch.Generator().manual_seed(2)
    for _ in range(40):
        logits = torch.randn(B, VOCAB_SIZE, generator=generator) * 2
        expected = sampler.draw(sampler.process(logits, 1), 1, Stream.TARGET)
        chosen, is_valid = sampler.laws.choose(sampler.follow_paths(logits, 1)[:, None], torch.ones(B, 1, dtype=torch.int64))
        assert is_valid.all() and torch.equal(chosen[:, 0], expected)


def test_equal_logits_are_kept_or_dropped_together() -> None:
    """Where transformers' nucleus ends between them, by the order of a sort; its top-k and min-p keep them all, too."""
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0, -torch.inf]).expand(1, 2000, 6)
    depths = torch.arange(2000)[None]
    for settings in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.6}):
        sampler = sampler_of([SamplingParams(temperature=1.0, **settings)], torch.zeros(1, 4, dtype=torch.int64), [1], [1])
        chosen, _ = sampler.laws.choose(logits, depths)
        assert chosen.unique().tolist() == [0, 1, 2, 3]


def test_penalties_count_the_emitted_tokens_of_each_rows_own_path() -> None:
    """[S4] tokens, not steps; the prompt counts for the repetition penalty only; walked tokens count at once."""
    logits = torch.zeros(2, VOCAB_SIZE)
    history = torch.zeros(2, 12, dtype=torch.int64)
    history[0, :5] = torch.tensor([9, 9, 7, 8, 8])
    history[1, :3] = torch.tensor([9, 10, 11])
    params = [SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, temperature=1.0)] * 2
    sampler = sampler_of(params, history, [2, 2], [5, 3])
    processed = sampler.process(logits, 0)
    assert processed[0, [9, 7, 8]].tolist() == [0.0, -0.75, -1.0]
    assert processed[1, [9, 10, 11]].tolist() == [0.0, 0.0, -0.75]
    sampler.record(torch.tensor([8, 12]), 0)
    processed = sampler.process(logits, 1)
    assert processed[0, 8] == -1.25 and processed[1, 12] == -0.75
    # Rows keep their own settings in mixed company.
    mixed = sampler_of([params[0], SamplingParams(temperature=1.0)], history, [2, 2], [5, 3])
    assert torch.equal(mixed.process(logits, 0)[1], logits[1])
    assert torch.equal(mixed.process(logits, 0)[0], sampler.process(logits, 0)[0])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"min_new_tokens": 16}, {"min_new_tokens": 16}),
        ({"logit_bias": {5: 4.0, 2: -3.0}}, {"sequence_bias": [[[5], 4.0], [[2], -3.0]]}),
        (
            {"repetition_penalty": 0.8, "min_new_tokens": 10, "logit_bias": {8: 2.0}},
            {"repetition_penalty": 0.8, "min_new_tokens": 10, "sequence_bias": [[[8], 2.0]]},
        ),
    ],
)
def test_greedy_with_penalties_equals_transformers_generate(ours: dict[str, object], theirs: dict[str, object]) -> None:
    """[S4]"""
    model = tiny_model("llama")
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, **theirs)
        expected.append(out[0, len(prompt) :].tolist())
    target = Target(model)
    got = generate(target, PROMPTS, sampling=SamplingParams(max_new_tokens=24, **ours), batch_size=4)  # type: ignore[arg-type]
    assert [c.token_ids for c in got] == expected


def test_logits_that_are_not_finite_are_an_error() -> None:
    """[S3]"""
    target = tiny_target("llama")
    target.model.lm_head.weight.data[4] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite after 0 tokens"):
        generate(target, PROMPTS[:1], sampling=SamplingParams(max_new_tokens=4))
