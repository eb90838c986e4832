"""The formulas: against simulation, against the decode loop, against brute force, and at their limits."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import random_prompts, tiny_target

from selfspec import SamplingParams, generate
from selfspec.cache.kv import KVCache, KVShape
from selfspec.loop.batch import Batch
from selfspec.loop.decode import decode
from selfspec.loop.drafter import Drafter, Proposal
from selfspec.loop.planner import Planner
from selfspec.loop.sequence import Request
from selfspec.plan.formulas import (
    acceptance_rate_of,
    best_trees,
    distinct_experts,
    expected_tokens,
    expected_tokens_by_depth,
    kv_bytes,
    pass_seconds,
    speedup,
)
from selfspec.tree import chain

rates = st.floats(0, 1)


@given(st.floats(0, 0.999), st.integers(0, 12))
def test_a_chain_has_the_closed_form(rate, num_draft_tokens):
    closed = (1 - rate ** (num_draft_tokens + 1)) / (1 - rate)
    assert expected_tokens(rate, num_draft_tokens) == pytest.approx(closed)


def test_a_chain_that_always_holds_emits_all_of_it():
    assert expected_tokens(1, 5) == 6
    assert expected_tokens(0, 5) == 1
    assert expected_tokens(0.7, 0) == 1


@pytest.mark.parametrize(("rate", "num_draft_tokens"), [(0.3, 2), (0.6, 4), (0.9, 7)])
def test_a_chain_agrees_with_simulation(rate, num_draft_tokens):
    chance = random.Random(0)
    num_passes = 40_000
    num_tokens = sum(
        1 + sum(1 for _ in itertools.takewhile(lambda _: chance.random() < rate, range(num_draft_tokens)))
        for _ in range(num_passes)
    )
    # Four standard errors of a count between 1 and K + 1.
    tolerance = 4 * num_draft_tokens / 2 / math.sqrt(num_passes)
    assert num_tokens / num_passes == pytest.approx(expected_tokens(rate, num_draft_tokens), abs=tolerance)


class CoinDrafter(Drafter):
    """Drafts the true continuation, each token of it with a fixed chance, and another token in its place otherwise."""

    name = "coin"

    def __init__(self, answers: dict[tuple[int, ...], list[int]], rate: float, num_draft_tokens: int) -> None:
        self.answers = answers
        self.rate = rate
        self.num_draft_tokens = num_draft_tokens
        self.chance = random.Random(1)

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        rows = []
        for sequence in batch.sequences:
            done = len(sequence.token_ids)
            true = self.answers[tuple(sequence.request.prompt_ids)][done : done + num_draft_tokens]
            drafts = [token if self.chance.random() < self.rate else (token + 1) % 61 for token in true]
            rows.append(drafts + [-1] * (num_draft_tokens - len(drafts)))
        return Proposal(chain(batch.roots, torch.tensor(rows, dtype=torch.int64).view(len(rows), -1)))


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_the_decode_loop_emits_what_the_formula_says(rate):
    K = 3
    target = tiny_target("llama", num_hidden_layers=1)
    prompts = random_prompts(6, (4, 8))
    sampling = SamplingParams(max_new_tokens=200, ignore_eos=True)
    expected = generate(target, prompts, sampling=sampling, batch_size=len(prompts))
    answers = {tuple(prompt): completion.token_ids for prompt, completion in zip(prompts, expected, strict=True)}
    drafter = CoinDrafter(answers, rate, K)
    requests = [Request(prompt, sampling) for prompt in prompts]
    options = {"drafter": drafter, "planner": Planner(is_active=False), "max_batch": len(prompts)}
    lengths = [
        len(emitted)
        for step in decode(target, requests, **options)
        for emitted, num_nodes in zip(step.emitted, step.tree.is_real.sum(1).tolist(), strict=True)
        # Near its end an answer has no room for a whole chain.
        if num_nodes == K + 1
    ]
    tolerance = 4 * K / 2 / math.sqrt(len(lengths))
    assert sum(lengths) / len(lengths) == pytest.approx(expected_tokens(rate, K), abs=tolerance)


@given(rates, st.integers(0, 8))
def test_rates_by_depth_of_a_chain_give_its_tokens(rate, num_draft_tokens):
    by_depth = [rate**depth for depth in range(1, num_draft_tokens + 1)]
    assert expected_tokens_by_depth(by_depth) == pytest.approx(expected_tokens(rate, num_draft_tokens))


@given(rates, st.integers(1, 12))
def test_one_rate_makes_a_tree_a_chain(rate, max_depth):
    trees = best_trees([rate], max_depth=max_depth, max_nodes=64)
    assert [tree.num_nodes for tree in trees] == list(range(1, max_depth + 2))
    for tree in trees:
        assert tree.depth == tree.num_nodes - 1
        assert tree.expected_tokens == pytest.approx(expected_tokens(rate, tree.depth))


@given(st.lists(st.floats(0, 0.33), min_size=1, max_size=3))
def test_a_tree_has_the_likeliest_nodes(rank_rates):
    max_depth = 3
    chances = sorted(
        (math.prod(path) for depth in range(1, max_depth + 1) for path in itertools.product(rank_rates, repeat=depth)),
        reverse=True,
    )
    trees = best_trees(rank_rates, max_depth=max_depth, max_nodes=12)
    assert len(trees) == min(12, 1 + len(chances))
    for tree in trees:
        assert tree.expected_tokens == pytest.approx(1 + sum(chances[: tree.num_nodes - 1]))


@given(rates, st.integers(1, 16))
def test_a_length_gives_its_rate_back(rate, num_draft_tokens):
    length = expected_tokens(rate, num_draft_tokens)
    found = acceptance_rate_of(length, num_draft_tokens)
    assert expected_tokens(found, num_draft_tokens) == pytest.approx(length)


def test_speed_up_is_that_of_the_paper():
    # Theorem 3.8 with alpha 0.8, gamma 5, c 0.02.
    paper = (1 - 0.8**6) / ((1 - 0.8) * (5 * 0.02 + 1))
    assert speedup(expected_tokens(0.8, 5), 5 * 0.02) == pytest.approx(paper)
    assert speedup(2.0, 0.5, 1.5) == 1.0


@given(st.integers(1, 4), st.integers(1, 100))
def test_kv_bytes_are_those_of_the_cache(num_rows, num_tokens):
    shape = KVShape(num_layers=2, num_kv_heads=3, key_dim=4, value_dim=5)
    cache = KVCache(shape, dtype=torch.float16, device=torch.device("cpu"))
    rows = [cache.open_row() for _ in range(num_rows)]
    cache.reserve(rows, num_tokens)
    used = cache.num_used_blocks * cache.block_size * shape.bytes_per_token(torch.float16)
    assert kv_bytes(shape.bytes_per_token(torch.float16), num_rows=num_rows, num_tokens=num_tokens) == used
    per_slot = (cache.keys.nbytes + cache.values.nbytes) / cache.keys.shape[1]
    assert per_slot == shape.bytes_per_token(torch.float16)


def test_experts_met():
    assert distinct_experts(8, 2, 1) == pytest.approx(2)
    assert distinct_experts(8, 2, 1000) == pytest.approx(8)
    chance = random.Random(0)
    mean = sum(len({e for _ in range(5) for e in chance.sample(range(8), 2)}) for _ in range(4000)) / 4000
    assert distinct_experts(8, 2, 5) == pytest.approx(mean, abs=0.1)


def test_a_pass_reads_or_computes():
    assert pass_seconds(10.0, 1.0, bandwidth=2.0, peak=4.0) == 5.0
    assert pass_seconds(1.0, 100.0, bandwidth=2.0, peak=4.0) == 25.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_tokens(1.1, 3), "acceptance rate 1.1 is not allowed"),
        (lambda: expected_tokens(0.5, -1), "num_draft_tokens=-1"),
        (lambda: expected_tokens_by_depth([0.5, math.nan]), "acceptance rate nan"),
        (lambda: best_trees([0.8, 0.3], max_depth=2, max_nodes=8), "no more than 1 in sum"),
        (lambda: best_trees([], max_depth=2, max_nodes=8), "at least one"),
        (lambda: acceptance_rate_of(5.5, 4), "give 1 to 5"),
        (lambda: speedup(2.0, -0.1), "draft_cost=-0.1"),
    ],
)
def test_what_cannot_be_is_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
