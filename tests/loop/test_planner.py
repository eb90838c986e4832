"""The planner: it drafts what measurements say pays, nothing where nothing does, and all there is where it is off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY

from selfspec.config import SamplingParams
from selfspec.drafters import DraftModelDrafter
from selfspec.loop.accept import Acceptance
from selfspec.loop.batch import Batch
from selfspec.loop.decode import decode
from selfspec.loop.drafter import Drafter, Proposal
from selfspec.loop.planner import Ask, Planner
from selfspec.loop.sequence import Request, open_sequence
from selfspec.model.target import Target
from selfspec.tree import CandidateTree, chain, from_parents

K = 6


class FixedDrafter(Drafter):
    """Only its settings are read here."""

    num_draft_tokens = K

    def __init__(self, *, is_costly: bool) -> None:
        self.is_costly = is_costly

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        return Proposal(chain(batch.roots))


WHOLE = Ask(K)
COSTLY = FixedDrafter(is_costly=True)
CHEAP = FixedDrafter(is_costly=False)


@pytest.fixture(scope="module")
def target() -> Target:
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=4096,
        initializer_range=0.4,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return Target(transformers.LlamaForCausalLM(config).eval())


def batch_of(target: Target, *rooms: int) -> Batch:
    """A batch whose rows may still emit so many tokens."""
    batch = Batch(target, target.new_cache())
    for room in rooms:
        batch.add(open_sequence(target, Request([1, 2, 3], SamplingParams(max_new_tokens=room)), batch.cache.open_row()))
    return batch


def ask(planner: Planner, drafter: Drafter, batch: Batch) -> Ask:
    """As a step asks."""
    limit = min(drafter.num_draft_tokens, max(sequence.max_depth for sequence in batch.sequences))
    return planner.ask(limit, len(batch), is_costly=drafter.is_costly)


def observe(
    planner: Planner, tree: CandidateTree, acceptance: Acceptance, draft: float, verify: float, asked: Ask | None = None
) -> None:
    planner.observe(
        asked or Ask(tree.max_depth), tree, planner.measure(tree).tolist(), acceptance.num_accepted.tolist(), draft, verify
    )


def outcome(tree: CandidateTree, num_accepted: list[int]) -> Acceptance:
    """An acceptance of which only the counts matter."""
    filler = torch.full((len(num_accepted), tree.max_depth + 1), -1)
    return Acceptance(filler, torch.tensor(num_accepted), filler, torch.ones(len(num_accepted), dtype=torch.bool))


def take_steps(
    planner: Planner,
    batch: Batch,
    count: int,
    *,
    num_holding: int,
    verify: Callable[[int], float],
    draft: float,
    drafter: Drafter = COSTLY,
) -> list[int]:
    """Steps of a machine whose pass over n nodes takes `verify(n)` and a draft token `draft` seconds, the first
    `num_holding` of every draft being right; returns the depths that the planner chose.
    """
    depths = []
    for _ in range(count):
        asked = ask(planner, drafter, batch)
        depth = asked.depth
        tree = chain(torch.ones(len(batch), dtype=torch.int64), torch.ones(len(batch), depth, dtype=torch.int64))
        acceptance = outcome(tree, [min(num_holding, depth)] * len(batch))
        observe(planner, tree, acceptance, draft * depth, verify(depth + 1), asked)
        depths.append(depth)
    return depths


def usual(depths: list[int]) -> int:
    return Counter(depths).most_common(1)[0][0]


def test_drafting_stops_where_drafts_never_hold_and_resumes_where_they_begin_to(target: Target) -> None:
    """[N5] off but for rare probes, which notice that it has come to pay; and off again when it stops."""
    planner = Planner()
    batch = batch_of(target, 1000)
    machine = {"verify": lambda num_nodes: 1 + 0.05 * num_nodes, "draft": 0.2}
    off = take_steps(planner, batch, 400, num_holding=0, **machine)[100:]
    assert usual(off) == 0
    assert 0 < sum(depth > 0 for depth in off) <= 300 // Planner.PROBE_EVERY + 1
    assert max(off) <= 2, "a probe is short"
    on = take_steps(planner, batch, 4000, num_holding=K, **machine)
    assert usual(on[-200:]) == K
    off = take_steps(planner, batch, 400, num_holding=0, **machine)[200:]
    assert usual(off) == 0


def test_plain_decoding_is_measured_now_and_then_while_drafting(target: Target) -> None:
    """[N5] else nobody would know that drafting has come to lose."""
    for drafter in (COSTLY, CHEAP):
        depths = take_steps(
            Planner(), batch_of(target, 1000), 480, num_holding=K, verify=lambda n: 1.0, draft=0.0, drafter=drafter
        )
        assert usual(depths) == K
        assert depths.count(0) == 480 // Planner.PROBE_EVERY


def test_a_costly_draft_that_would_hold_is_still_not_worth_any_price(target: Target) -> None:
    """[N5] a draft token that costs as much as a pass can never win."""
    planner = Planner()
    depths = take_steps(planner, batch_of(target, 1000), 300, num_holding=K, verify=lambda n: 1.0, draft=1.5)
    assert usual(depths[100:]) == 0


@PROPERTY
@given(
    seconds=st.lists(st.floats(0.5, 3.0), min_size=K + 1, max_size=K + 1),
    draft=st.floats(0.0, 0.5),
    num_holding=st.integers(0, K),
)
def test_the_depth_chosen_has_the_most_expected_tokens_a_second(
    target: Target, seconds: list[float], draft: float, num_holding: int
) -> None:
    """Its own formula, with every size measured, however irregular the times are, and acceptance known."""
    planner = Planner()
    # Every size seen, and enough trials that nothing is left of the prior.
    for depth in [*range(K), *[K] * 300]:
        tree = chain(torch.tensor([1]), torch.ones(1, depth, dtype=torch.int64))
        observe(planner, tree, outcome(tree, [min(depth, num_holding)]), draft * depth, seconds[depth])
    rates = [(1 + min(depth, num_holding)) / (seconds[depth] + draft * depth) for depth in range(K + 1)]
    batch = batch_of(target, 1000)
    chosen = [ask(planner, COSTLY, batch).depth for _ in range(10)]
    # The second step is the probe of plain decoding; counts that fade are not whole, so near-ties may go either way.
    del chosen[1]
    assert len(set(chosen)) == 1
    assert rates[chosen[0]] >= max(rates) * (1 - 1e-3)


def test_batch_sizes_are_measured_apart(target: Target) -> None:
    """[N5] what pays for one row may not for eight."""
    planner = Planner()
    alone, many = batch_of(target, 1000), batch_of(target, *[1000] * 8)
    for _ in range(4):
        take_steps(planner, alone, 100, num_holding=2, verify=lambda n: 1.0, draft=0.05)
        take_steps(planner, many, 100, num_holding=2, verify=lambda n: float(n), draft=0.05)
    assert usual(take_steps(planner, alone, 40, num_holding=2, verify=lambda n: 1.0, draft=0.05)) == 2
    assert usual(take_steps(planner, many, 40, num_holding=2, verify=lambda n: float(n), draft=0.05)) == 0


def test_a_new_number_of_rows_begins_with_what_others_cost(target: Target) -> None:
    """As sequences end, every smaller batch is new: none of them may try again what did not pay for the larger ones."""
    planner = Planner()
    take_steps(planner, batch_of(target, *[1000] * 8), 300, num_holding=2, verify=lambda n: 0.8 * n, draft=0.4)
    for num_rows in (7, 6, 5):
        cost = num_rows / 10
        depths = take_steps(
            planner, batch_of(target, *[1000] * num_rows), 8, num_holding=2, verify=lambda n, cost=cost: cost * n, draft=0.4
        )
        assert sum(depths) <= 2


def test_one_slow_first_pass_does_not_decide_for_ever(target: Target) -> None:
    """A warm-up is no measurement to keep: what it made look costly is tried again, for drafts and for pruned trees."""
    planner = Planner()
    batch = batch_of(target, 1000)
    take_steps(planner, batch, 1, num_holding=K, verify=lambda n: 50.0, draft=0.05)
    depths = take_steps(planner, batch, 600, num_holding=K, verify=lambda n: 1.0, draft=0.05)
    assert usual(depths[-100:]) == K

    planner = Planner()
    whole = tree_with_chances([[0.9] * K])
    sizes = []
    for step in range(600):
        tree = planner.prune(whole, ask(planner, CHEAP, batch))
        observe(planner, tree, outcome(tree, [0]), 0.0, 50.0 if step == 0 else 1.0)
        sizes.append(tree.num_nodes)
    assert usual(sizes[-100:]) == K + 1


# Pruning.


def tree_with_chances(chances: list[list[float]]) -> CandidateTree:
    """A star per row whose children hold with the given probabilities."""
    B, N = len(chances), 1 + len(chances[0])
    tree = from_parents(torch.full((B, N), 5), torch.tensor([[-1] + [0] * (N - 1)] * B))
    return replace(tree, scores=torch.cat([torch.zeros(B, 1), torch.tensor(chances).log()], dim=1))


@PROPERTY
@given(
    chances=st.lists(st.lists(st.floats(0.01, 1.0), min_size=7, max_size=7), min_size=1, max_size=3),
    seconds=st.lists(st.floats(0.5, 2.0), min_size=8, max_size=8),
)
def test_pruning_keeps_the_number_of_nodes_with_the_most_expected_tokens_a_second(
    chances: list[list[float]], seconds: list[float]
) -> None:
    """With every size measured: the sum of the best nodes' chances over the time of a pass of that size."""
    planner = Planner()
    whole = tree_with_chances(chances)
    B = len(chances)
    for size in range(1, 9):
        tree = whole.prune(size)
        # Without scores nothing is learnt of their worth.
        observe(planner, replace(tree, scores=None), outcome(tree, [0] * B), 0.0, seconds[size - 1])
    gains = [sum(sum(sorted(row)[len(row) - count :]) for row in chances) for count in range(8)]
    rates = [(B + gain) / time for gain, time in zip(gains, seconds, strict=True)]
    pruned = planner.prune(whole, WHOLE)
    assert rates[pruned.num_nodes - 1] >= max(rates) * (1 - 1e-5)
    assert torch.equal(pruned.tokens, whole.prune(pruned.num_nodes).tokens)


@pytest.mark.parametrize(("promised", "kept", "expected"), [(0.9, 0.05, 1), (0.05, 0.9, 3)])
def test_what_the_scores_promised_is_compared_with_what_came(promised: float, kept: float, expected: int) -> None:
    """A chain of two drafts at half a pass each: whether it is verified follows what held, not what its scores say."""
    planner = Planner()
    scores = torch.tensor([[promised, promised]]).log()
    whole = chain(torch.tensor([5]), torch.tensor([[6, 7]]), scores)
    for step in range(300):
        held = 2 if (step * kept) % 1 < kept else 0
        # Every size is measured before it is up to the planner.
        tree = planner.prune(whole, WHOLE) if step > 100 else whole.prune(1 + step % 3)
        observe(planner, tree, outcome(tree, [min(held, tree.max_depth)]), 0.0, 1 + 0.25 * (tree.num_nodes - 1))
        size = tree.num_nodes
    assert size == expected


def test_padding_promises_nothing() -> None:
    """A row that drafts less does not make the others' nodes look better, whatever score its padding carries."""
    planner = Planner()
    tokens = torch.tensor([[5, 6, 7, 8], [5, -1, -1, -1]])
    parents = torch.tensor([[-1, 0, 0, 0], [-1, -1, -1, -1]])
    scores = torch.tensor([[0.0, -0.1, -5.0, -5.0], [0.0, 0.0, 0.0, 0.0]])
    tree = from_parents(tokens, parents, scores)
    for size in range(1, 5):
        observe(planner, tree.prune(size), outcome(tree.prune(size), [0, 0]), 0.0, 1 + 0.2 * size)
    assert planner.prune(tree, WHOLE).num_nodes == 2


def sampled_chain() -> CandidateTree:
    """Drawn tokens with scores beside them, the later of which promise nothing."""
    scores = torch.tensor([[-0.01, -20.0, -30.0]])
    return chain(torch.tensor([1]), torch.tensor([[2, 3, 4]]), scores, torch.full((1, 3, 6), 1 / 6))


def test_a_sampled_tree_is_never_pruned_by_its_own_scores() -> None:
    """[S7] however little its tokens promise and however much they cost; the same tree, not drawn, is."""
    planner = Planner()
    drawn = sampled_chain()
    for size in range(1, 5):
        tree = replace(drawn, draft_probs=None).prune(size)
        observe(planner, tree, outcome(tree, [0]), 0.0, float(size))
    assert planner.prune(drawn, WHOLE) is drawn
    assert planner.prune(replace(drawn, draft_probs=None), WHOLE).num_nodes < 4


def test_a_tree_without_scores_is_verified_whole() -> None:
    tree = chain(torch.tensor([1]), torch.tensor([[2, 3, 4]]))
    assert Planner().prune(tree, WHOLE) is tree


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_how_much_of_a_sampled_draft_is_verified_is_decided_before_it_is_drawn(target: Target, temperature: float) -> None:
    """[S7] in the loop: every pass verifies the whole draft that was asked for."""
    asked = []

    class Watched(DraftModelDrafter):
        def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
            asked.append(num_draft_tokens)
            return super().propose(batch, num_draft_tokens)

    drafter = Watched(target.truncated(1), target.vocab_size, is_sampled=True)
    sampling = SamplingParams(max_new_tokens=60, temperature=temperature, seed=1)
    steps = list(decode(target, [Request([1, 2, 3], sampling)], drafter=drafter, planner=Planner()))
    assert [step.tree.num_nodes - 1 for step in steps] == asked
    assert all(step.tree.is_real.all() for step in steps)
    assert max(asked) > 0


# Off, and at the end of an output.


def test_an_inactive_planner_drafts_everything_and_measures_nothing(target: Target) -> None:
    """Every draft as deep as it may be, every tree whole, whatever it costs."""
    planner = Planner(is_active=False)
    batch = batch_of(target, 1000)
    depths = take_steps(planner, batch, 200, num_holding=0, verify=lambda n: float(n), draft=9.0)
    assert set(depths) == {K}
    hopeless = tree_with_chances([[1e-6] * K])
    assert planner.prune(hopeless, WHOLE) is hopeless


@pytest.mark.parametrize("is_active", [True, False])
@pytest.mark.parametrize(("rooms", "depth"), [((1,), 0), ((3,), 2), ((1, 4), 3), ((1000,), K)])
def test_no_draft_is_deeper_than_the_roomiest_row_may_emit(
    target: Target, rooms: tuple[int, ...], depth: int, is_active: bool
) -> None:
    """[E3] one place is the bonus token's."""
    batch = batch_of(target, *rooms)
    for drafter in (CHEAP, COSTLY):
        assert ask(Planner(is_active=is_active), drafter, batch).depth == depth


def test_a_step_beside_prompts_tells_what_held_and_no_cost() -> None:
    """It waits for the prompts' passes, too."""
    planner = Planner()
    tree = chain(torch.tensor([1]), torch.ones(1, 2, dtype=torch.int64))
    planner.observe(Ask(2), tree, planner.measure(tree).tolist(), [1], None, None)
    assert not planner._seconds and not planner._draft
    trials = [Planner.PRIOR * Planner.FADE + 1] * 2
    assert planner._trials == trials and planner._hits[0] > planner._hits[1]


def test_a_drafts_cost_is_that_of_the_depth_drafted_whatever_was_pruned(target: Target) -> None:
    """And a depth that was not tried is guessed from those that were."""
    planner = Planner()
    asked = ask(planner, COSTLY, batch_of(target, 1000))
    assert asked.depth == K
    pruned = chain(torch.tensor([1]), torch.ones(1, 2, dtype=torch.int64))
    observe(planner, pruned, outcome(pruned, [0]), 7.0, 1.0, asked)
    seconds = planner._draft_seconds(1)
    assert [seconds(depth) for depth in (0, 2, K)] == [0.0, 3.0, 7.0]


def test_probes_become_rarer_where_nothing_ever_pays(target: Target) -> None:
    """[N5] each is two steps long, since the first has a pause to make up for."""
    planner, batch = Planner(), batch_of(target, 9000)
    depths = take_steps(planner, batch, 2500, num_holding=0, verify=lambda n: float(n), draft=1.0)
    probes = [step for step, depth in enumerate(depths) if depth and step > 100]
    begins = [step for step in probes if step - 1 not in probes]
    assert len(probes) == 2 * len(begins) and {depths[step] for step in probes} == {2}
    gaps = [after - before for before, after in pairwise(begins)]
    # A step without drafts, taken to measure it, does not count.
    assert all(after >= before - 1 for before, after in pairwise(gaps))
    assert gaps[0] < Planner.MAX_PAUSE <= max(gaps) < Planner.MAX_PAUSE + 16
    assert ask(planner, COSTLY, batch).depth == 0
