"""Sampled output has exactly the target's law, whoever drafts, and the test that says so can tell the known wrong rules.

A tiny target at vocabulary 12 makes the law of the first three tokens computable: 1,728 triples, each the product of three
softmaxes. Counts over many seeds are compared with it by a G-test. [S1] [S6] [S8]
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import scipy.stats
import torch
from support import OracleTreeDrafter, tiny_model

from selfspec import SamplingParams, Target, generate
from selfspec.drafters import DraftModelDrafter
from selfspec.kernels.noise import Stream
from selfspec.loop.accept import Acceptance, accept_sampled
from selfspec.loop.sampling import Sampler
from selfspec.tree import CandidateTree, chain

V = 12
# One token: it is the first tree's root, and thousands of samples need no prefill.
PROMPT = [3]
TEMPERATURE = 0.8
# Below this the law is called violated. The seeds are fixed, so a right rule passes always, not 999 times in 1,000.
ALPHA = 1e-3


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", seed=1, vocab_size=V, initializer_range=0.35))


@pytest.fixture(scope="module")
def draft() -> Target:
    return Target(tiny_model("llama", seed=2, vocab_size=V, initializer_range=0.35))


@pytest.fixture(scope="module")
def law(target: Target) -> torch.Tensor:
    """[V, V, V] exact probabilities of the first three tokens."""
    firsts = torch.arange(V)
    pairs = torch.cartesian_prod(firsts, firsts)
    prompt = torch.tensor(PROMPT)
    batch = torch.cat([prompt.expand(V * V, -1), pairs], dim=1)
    with torch.inference_mode():
        logits = target.model(batch, use_cache=False).logits.double() / TEMPERATURE
    probs = logits.softmax(-1)
    n = len(PROMPT)
    first = probs[0, n - 1]
    second = probs[::V, n]
    third = probs[:, n + 1].view(V, V, V)
    return first[:, None, None] * second[:, :, None] * third


def g_test(counts: torch.Tensor, law: torch.Tensor) -> float:
    """p-value of the G-test, cells with an expectation below 5 pooled into one."""
    counts, expected = counts.flatten().double(), law.flatten() * counts.sum()
    big = expected >= 5
    observed = torch.cat([counts[big], counts[~big].sum()[None]])
    expected = torch.cat([expected[big], expected[~big].sum()[None]])
    positive = observed > 0
    g = 2 * (observed[positive] * (observed[positive] / expected[positive]).log()).sum()
    return float(scipy.stats.chi2.sf(float(g), len(observed) - 1))


def triples(target: Target, drafter: object, num_samples: int, seed: int = 0) -> torch.Tensor:
    sampling = SamplingParams(max_new_tokens=3, temperature=TEMPERATURE, ignore_eos=True, seed=seed, n=num_samples)
    completions = generate(target, [PROMPT], drafter=drafter, sampling=sampling, batch_size=512, use_cost_guard=False)
    counts = torch.zeros(V, V, V)
    ids = torch.tensor([c.token_ids for c in completions])
    counts.index_put_(tuple(ids.T), torch.ones(len(ids)), accumulate=True)
    return counts


@pytest.mark.parametrize("kind", ["none", "sampled", "sampled-k1", "coupled", "tree"])
def test_generated_text_has_the_targets_law(kind: str, target: Target, draft: Target, law: torch.Tensor) -> None:
    """[S6] K = 1 with a poor draft shows an off-by-one in the row that is sampled."""
    drafter = {
        "none": None,
        "sampled": DraftModelDrafter(draft, V, num_draft_tokens=3, is_sampled=True),
        "sampled-k1": DraftModelDrafter(draft, V, num_draft_tokens=1, is_sampled=True),
        "coupled": DraftModelDrafter(draft, V, num_draft_tokens=3),
        "tree": OracleTreeDrafter({tuple(PROMPT): [4, 6, 2]}, hit=0.5, num_nodes=8),
    }[kind]
    assert g_test(triples(target, drafter, 4000), law) > ALPHA


# The rule alone, on one position with known distributions: cheap enough for hundreds of thousands of draws.
TARGET_PROBS = torch.tensor([0.6, 0.3, 0.1, 0.0])
DRAFT_PROBS = torch.tensor([0.2, 0.3, 0.1, 0.4])
NEXT_PROBS = torch.tensor([0.1, 0.2, 0.3, 0.4])


def one_step(num_rows: int, seed: int = 0) -> tuple[CandidateTree, torch.Tensor, Sampler]:
    """`num_rows` independent chains of one drawn token, and target logits for the root and for that token."""
    keys = torch.arange(num_rows) + seed * num_rows
    history = torch.zeros(num_rows, 8, dtype=torch.int64)
    num_tokens = torch.full((num_rows,), 3)
    params = [SamplingParams(temperature=1.0)] * num_rows
    sampler = Sampler(params, keys, history, num_tokens, num_tokens.clone(), ())
    drawn = sampler.draw(DRAFT_PROBS.log().expand(num_rows, -1), 0, Stream.DRAFT)
    tree = chain(torch.ones(num_rows, dtype=torch.int64), drawn[:, None], draft_probs=DRAFT_PROBS.expand(num_rows, 1, -1))
    logits = torch.stack([TARGET_PROBS.log(), NEXT_PROBS.log()]).clamp(min=-80).expand(num_rows, 2, -1)
    return tree, logits, sampler


def first_token_law(acceptance: Acceptance) -> torch.Tensor:
    return torch.bincount(acceptance.tokens[:, 0], minlength=4)


def test_rule_keeps_the_law_and_accepts_as_often_as_it_can() -> None:
    tree, logits, sampler = one_step(200_000)
    acceptance = accept_sampled(tree, logits, sampler)
    assert g_test(first_token_law(acceptance), TARGET_PROBS.double()) > ALPHA
    # The acceptance probability is sum(min(target, draft)) = 0.6; five standard errors of 200,000 trials.
    rate = float(acceptance.num_accepted.double().mean())
    assert abs(rate - 0.6) < 5 * math.sqrt(0.24 / 200_000)
    accepted = acceptance.num_accepted == 1
    bonus = torch.bincount(acceptance.tokens[accepted, 1], minlength=4)
    assert g_test(bonus, NEXT_PROBS.double()) > ALPHA


FILTERS = {
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.75},
    "top-p, cold": {"temperature": 0.5, "top_p": 0.9},
    "min-p": {"min_p": 0.1},
    "all": {"temperature": 1.4, "top_k": 20, "top_p": 0.8, "min_p": 0.03},
    "none": {"temperature": 0.7},
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", FILTERS)
def test_choices_at_all_nodes_have_the_law_of_transformers_filters(name: str, device: str) -> None:
    """Thousands of nodes at positions of their own; no token that the filters drop is ever chosen."""
    params = SamplingParams(**{"temperature": 1.0, **FILTERS[name]})  # type: ignore[arg-type]
    logits = 2 * torch.randn(1, 48, generator=torch.Generator().manual_seed(5))
    one = torch.ones(1, dtype=torch.int64)
    on_cpu = Sampler([params], one, torch.zeros(1, 8, dtype=torch.int64), one, one, ())
    law = on_cpu.process(logits, 0)[0].double().softmax(-1)
    sampler = Sampler([params], one.to(device), torch.zeros(1, 8, device=device).long(), one.to(device), one.to(device), ())
    tokens, _ = sampler.laws.choose(logits.to(device).expand(1, 40_000, -1), torch.arange(40_000, device=device)[None])
    counts = torch.bincount(tokens.flatten().cpu(), minlength=48)
    assert (counts[law == 0] == 0).all()
    assert g_test(counts[law > 0], law[law > 0]) > ALPHA


def test_power_resampling_from_the_target_instead_of_the_residual_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, logits, sampler = one_step(200_000)
    draw = Sampler.draw

    def wrong(self: Sampler, processed: torch.Tensor, depth: int, stream: Stream) -> torch.Tensor:
        return draw(self, TARGET_PROBS.log().expand_as(processed) if stream == Stream.RESIDUAL else processed, depth, stream)

    monkeypatch.setattr(Sampler, "draw", wrong)
    assert g_test(first_token_law(accept_sampled(tree, logits, sampler)), TARGET_PROBS.double()) < 1e-9


def test_power_keeping_only_ones_own_matching_draw_is_caught() -> None:
    """[S8] a draw of one's own for each draft, kept where both agree and dropped where not: law target * draft."""
    tree, _, sampler = one_step(200_000)
    own = sampler.draw(TARGET_PROBS.log().expand(200_000, -1), 0, Stream.TARGET)
    kept = own[own == tree.tokens[:, 1]]
    assert len(kept) > 10_000
    assert g_test(torch.bincount(kept, minlength=4), TARGET_PROBS.double()) < 1e-9


def test_power_sharing_random_numbers_between_accept_and_residual_is_caught() -> None:
    """[N2] a rejection says that the accept number was large; a residual drawn with that number is not uniform."""
    target_probs, draft_probs = DRAFT_PROBS, TARGET_PROBS
    _, _, sampler = one_step(200_000)
    draft = sampler.draw(draft_probs.log().expand(200_000, -1), 0, Stream.DRAFT)
    residual = (target_probs - draft_probs).clamp(min=0)
    residual[1] = 0.4  # two possible tokens, so that there is a choice to bias
    law = (residual / residual.sum()).double()
    accept_noise = sampler.uniform(0, Stream.ACCEPT)
    is_rejected = accept_noise * draft_probs[draft] >= target_probs[draft]
    by_inversion = torch.searchsorted(law.float().cumsum(0), accept_noise[is_rejected])
    assert g_test(torch.bincount(by_inversion, minlength=4), law) < 1e-9
    own_noise = sampler.uniform(0, Stream.RESIDUAL)
    by_inversion = torch.searchsorted(law.float().cumsum(0), own_noise[is_rejected])
    assert g_test(torch.bincount(by_inversion, minlength=4), law) > ALPHA


def test_equal_distributions_accept_everything_without_nan() -> None:
    """[S3] draft equal to target everywhere: the residual is zero, nothing is divided by it, every draft is kept."""
    tree, logits, sampler = one_step(20_000)
    tree = replace(tree, draft_probs=logits[:, :2].softmax(-1).roll(1, 1))
    acceptance = accept_sampled(tree, logits, sampler)
    possible = tree.tokens[:, 1] != 3
    assert (acceptance.num_accepted[possible] == 1).all()
    assert acceptance.is_valid.all() and (acceptance.tokens[:, 0] >= 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_are_an_error_and_minus_inf_is_not(bad: float) -> None:
    """[S3]"""
    tree, logits, sampler = one_step(4)
    logits = logits.clone()
    logits[0, 0, 1] = -torch.inf
    logits[2, 0, 1] = bad
    acceptance = accept_sampled(tree, logits, sampler)
    assert acceptance.is_valid.tolist() == [True, True, False, True]
