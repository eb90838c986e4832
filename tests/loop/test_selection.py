"""Which nodes of a whole batch are verified: the likeliest of all rows, and never one without its ancestors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, trees

from selfspec.loop.selection import promised, rank
from selfspec.tree import CandidateTree


@st.composite
def scored_trees(draw: st.DrawFn) -> CandidateTree:
    """Scores never rise along a path, are often equal, and padding has any score."""
    tree = draw(trees(max_nodes=9))
    B, N = tree.tokens.shape
    steps = torch.tensor(draw(st.lists(st.sampled_from([0.0, -0.1, -0.1, -2.0, -40.0]), min_size=B * N, max_size=B * N)))
    scores = steps.view(B, N).clone()
    for b in range(B):
        for i in range(N):
            scores[b, i] = 0.0 if i == 0 else scores[b, i]
            if (parent := int(tree.parents[b, i])) >= 0:
                scores[b, i] += scores[b, parent]
    return replace(tree, scores=scores)


@st.composite
def falling_factors(draw: st.DrawFn, count: int) -> torch.Tensor:
    return torch.tensor(sorted(draw(st.lists(st.floats(1e-6, 3.0), min_size=count, max_size=count)), reverse=True))


@PROPERTY
@given(st.data(), scored_trees())
def test_kept_nodes_are_roots_and_the_likeliest_others_with_their_ancestors(
    data: st.DataObject, tree: CandidateTree
) -> None:
    B, N = tree.tokens.shape
    corrections = data.draw(falling_factors(tree.max_depth + 1))
    factors = data.draw(st.none() | st.lists(st.floats(0.0, 1.0), min_size=B, max_size=B).map(torch.tensor))
    size = data.draw(st.integers(B, B * N))
    ranking = rank(tree.scores, tree.is_real, tree.depths, corrections, factors)
    kept, counts = ranking.select(size)
    assert kept.tolist() == sorted(set(kept.tolist())) and len(kept) == size
    assert counts.tolist() == [sum(int(node) // N == b for node in kept) for b in range(B)]
    is_kept = torch.zeros(B * N, dtype=torch.bool).scatter(0, kept, True).view(B, N)
    assert is_kept[:, 0].all()
    for b, i in is_kept.nonzero().tolist():
        assert tree.parents[b, i] < 0 or is_kept[b, tree.parents[b, i]]
    terms = tree.scores + corrections.log()[tree.depths]
    if factors is not None:
        terms = terms + factors.log()[:, None]
    is_draft = tree.is_real & (tree.depths > 0)
    if (is_kept & ~tree.is_real).any():
        assert is_kept[is_draft].all(), "padding only fills up"
    inside, outside = terms[is_kept & is_draft], terms[~is_kept & is_draft]
    if len(inside) and len(outside):
        assert inside.min() >= outside.max()


@PROPERTY
@given(st.data(), scored_trees())
def test_the_curve_sums_the_likeliest_nodes_down_to_each_depth(data: st.DataObject, tree: CandidateTree) -> None:
    B, N = tree.tokens.shape
    corrections = data.draw(falling_factors(tree.max_depth + 1))
    sizes = sorted({B, *data.draw(st.lists(st.integers(B, B * N + 3), max_size=4))})
    K = max(tree.max_depth, 1)
    curve = rank(tree.scores, tree.is_real, tree.depths, corrections).curve(torch.tensor(sizes), K)
    chances = (tree.scores.exp() * corrections[tree.depths]).clamp(max=1.0)
    for d in range(K):
        is_counted = tree.is_real & (tree.depths > 0) & (tree.depths <= d + 1)
        best = sorted(chances[is_counted].tolist(), reverse=True)
        for size, gain in zip(sizes, curve[d].tolist(), strict=True):
            assert gain == pytest.approx(sum(best[: size - B]), abs=1e-4)


@PROPERTY
@given(st.data(), scored_trees())
def test_promised_sums_the_verified_nodes_chances(data: st.DataObject, tree: CandidateTree) -> None:
    B, N = tree.tokens.shape
    K = max(tree.max_depth, 1)
    ranking = rank(tree.scores, tree.is_real, tree.depths, torch.ones(K + 1))
    kept, _ = ranking.select(data.draw(st.integers(B, B * N)))
    expected = torch.zeros(B, K)
    for node in kept.tolist():
        b, i = divmod(node, N)
        if tree.depths[b, i] > 0:
            expected[b, tree.depths[b, i] - 1] += tree.scores[b, i].exp()
    torch.testing.assert_close(promised(tree.scores, tree.is_real, tree.depths, kept, K), expected)


def test_a_score_that_is_no_number_hides_nothing_but_itself() -> None:
    """And its descendants; their order still puts ancestors first."""
    scores = torch.tensor([[0.0, float("nan"), float("nan"), -1.0], [0.0, -0.5, -0.6, -0.7]])
    depths = torch.tensor([[0, 1, 2, 1], [0, 1, 2, 3]])
    kept, counts = rank(scores, torch.ones(2, 4, dtype=torch.bool), depths, torch.ones(4)).select(7)
    assert kept.tolist() == [0, 1, 3, 4, 5, 6, 7] and counts.tolist() == [3, 4]


def test_a_row_of_padding_gives_its_nodes_to_others() -> None:
    tokens = torch.tensor([[5, -1, -1], [5, 6, 7]])
    scores = torch.tensor([[0.0, 0.0, 0.0], [0.0, -1.0, -9.0]])
    depths = torch.tensor([[0, 0, 0], [0, 1, 2]])
    ranking = rank(scores, tokens >= 0, depths, torch.ones(3))
    assert ranking.select(4)[1].tolist() == [1, 3]
    assert ranking.select(6)[1].tolist() == [3, 3]
