"""Candidate trees: masks, depths, cutting and pruning against naive readings of the parents."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, naive_ancestor_mask, path_to, trees

from selfspec.tree import CandidateTree, chain, from_parents


def token_path(tree: CandidateTree, row: int, node: int) -> list[int]:
    return [int(tree.tokens[row, i]) for i in path_to(tree.parents[row].tolist(), node)]


def assert_consistent(tree: CandidateTree) -> None:
    """What a tree states twice agrees: depths and mask with parents, padding's three marks, the depth bound."""
    mask = naive_ancestor_mask(tree.parents)
    assert torch.equal(tree.ancestor_mask(), mask)
    assert torch.equal(tree.depths, mask.sum(2) - 1)
    assert int(tree.depths.max()) <= tree.max_depth
    assert bool(tree.is_real[:, 0].all())
    assert torch.equal(tree.is_real[:, 1:], tree.parents[:, 1:] >= 0)
    padding_is_parent = (mask & ~tree.is_real[:, None]).sum(1) > 1
    assert not padding_is_parent.any()


@PROPERTY
@given(trees(max_nodes=20))
def test_ancestor_mask_and_depths_equal_parent_chasing(tree: CandidateTree) -> None:
    assert_consistent(tree)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 8, 9, 16, 17, 33])
def test_ancestor_mask_reaches_the_root_of_a_path_of_any_length(num_nodes: int) -> None:
    """The doubling must stop neither a level early nor at a power of two."""
    parents = torch.arange(num_nodes)[None] - 1
    tree = from_parents(torch.ones(1, num_nodes, dtype=torch.int64), parents)
    assert torch.equal(tree.ancestor_mask()[0], torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril())
    assert tree.max_depth == num_nodes - 1


@PROPERTY
@given(st.data())
def test_chain_equals_the_tree_with_its_parents(data: st.DataObject) -> None:
    """A chain ends at the first -1, whatever stands behind it, and is the tree whose parents are the nodes before."""
    B, K = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 6))
    rows = st.lists(st.integers(-1, 9), min_size=K, max_size=K)
    drafts = torch.tensor(data.draw(st.lists(rows, min_size=B, max_size=B)), dtype=torch.int64).view(B, K)
    roots = torch.arange(B)
    made = chain(roots, drafts)
    tokens = torch.full((B, K + 1), -1)
    tokens[:, 0] = roots
    for b in range(B):
        for k, token in enumerate(drafts[b].tolist(), start=1):
            if token < 0:
                break
            tokens[b, k] = token
    steps = torch.arange(K + 1).expand(B, K + 1)
    expected = from_parents(tokens, torch.where((tokens >= 0) & (steps > 0), steps - 1, -1))
    assert made.is_chain and made.max_depth == K and made.num_nodes == K + 1
    for name in ("tokens", "parents", "depths", "is_real"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name
    assert torch.equal(made.ancestor_mask(), expected.ancestor_mask())
    assert_consistent(made)


def test_chain_without_drafts_is_the_roots() -> None:
    tree = chain(torch.tensor([4, 5]))
    assert tree.tokens.tolist() == [[4], [5]] and tree.parents.tolist() == [[-1], [-1]]
    assert tree.num_nodes == 1 and tree.max_depth == 0
    assert tree.ancestor_mask().all()


def test_chain_lines_scores_and_draft_probs_up_with_its_nodes() -> None:
    """A draft's entry lies at its own node; the root was not drawn."""
    probs = torch.rand(2, 3, 5)
    scores = torch.tensor([[-0.1, -0.2, -0.3], [0.0, 0.0, -1.0]])
    tree = chain(torch.tensor([4, 5]), torch.tensor([[1, 2, 3], [1, -1, -1]]), scores, probs)
    assert tree.scores is not None and tree.draft_probs is not None
    assert torch.equal(tree.scores[:, 1:], scores) and tree.scores[:, 0].tolist() == [0, 0]
    assert torch.equal(tree.draft_probs[:, 1:], probs) and not tree.draft_probs[:, 0].any()
    assert not tree.is_deterministic


@PROPERTY
@given(trees(), st.lists(st.integers(-1, 6), min_size=3, max_size=3))
def test_limit_depth_pads_what_is_deeper_and_touches_nothing_else(tree: CandidateTree, limits: list[int]) -> None:
    """Each row by its own limit; the root stays, whatever the limit."""
    B, N = tree.tokens.shape
    cut = tree.limit_depth(torch.tensor(limits[:B]))
    for b in range(B):
        for i in range(N):
            stays = int(tree.depths[b, i]) <= max(limits[b], 0)
            for name, padding in (("tokens", -1), ("parents", -1), ("depths", 0)):
                before, after = int(getattr(tree, name)[b, i]), int(getattr(cut, name)[b, i])
                assert after == (before if stays else padding), (name, b, i)
    assert_consistent(cut)


@PROPERTY
@given(st.integers(0, 6), st.lists(st.integers(0, 7), min_size=2, max_size=2))
def test_limit_depth_leaves_a_chain_a_chain(length: int, limits: list[int]) -> None:
    drafts = torch.arange(2 * length).view(2, length)
    cut = chain(torch.tensor([1, 2]), drafts).limit_depth(torch.tensor(limits))
    assert cut.is_chain
    assert cut.is_real.sum(1).tolist() == [1 + min(length, limit) for limit in limits]
    assert_consistent(cut)


@st.composite
def scored_trees(draw: st.DrawFn) -> CandidateTree:
    """Scores that fall along paths, often by 0 (a certain child, log-probability exactly 0), so that most are equal."""
    tree = draw(trees())
    B, N = tree.tokens.shape
    scores = torch.zeros(B, N)
    for b in range(B):
        for i in range(1, N):
            parent = int(tree.parents[b, i])
            # Padding's score must not matter, not even where it is the best of all.
            scores[b, i] = scores[b, parent] - draw(st.sampled_from([0.0, 0.0, 0.5, 2.0])) if parent >= 0 else 9.0
    return replace(tree, scores=scores)


@PROPERTY
@given(scored_trees(), st.integers(1, 12))
def test_prune_keeps_the_best_nodes_and_orphans_none(tree: CandidateTree, num_nodes: int) -> None:
    """[K6] equal scores, log-probability exactly 0 included, never part a node from its ancestors."""
    assert tree.scores is not None
    pruned = tree.prune(num_nodes)
    B, N = tree.tokens.shape
    assert pruned.num_nodes == min(num_nodes, N)
    assert pruned.scores is not None
    assert_consistent(pruned)
    for b in range(B):
        num_real = int(tree.is_real[b].sum())
        real = [i for i in range(pruned.num_nodes) if pruned.tokens[b, i] >= 0]
        assert len(real) == min(num_nodes, num_real), "padding must not take a real node's place"
        kept = [(token_path(pruned, b, i), float(pruned.scores[b, i])) for i in real]
        remaining = [(token_path(tree, b, i), float(tree.scores[b, i])) for i in range(N) if tree.tokens[b, i] >= 0]
        for entry in kept:
            assert entry in remaining, "a path of the pruned tree is none of the tree's"
            remaining.remove(entry)
        if kept and remaining:
            assert min(score for _, score in kept) >= max(score for _, score in remaining)
        assert kept[0][0] == [int(tree.tokens[b, 0])], "the root stays node 0"


def test_prune_of_equal_scores_keeps_a_path_whose_nodes_are_far_apart() -> None:
    """[K6] written out: a path of certain nodes behind a branch of siblings that are certain too."""
    parents = torch.tensor([[-1, 0, 0, 0, 2, 4]])
    tree = from_parents(torch.tensor([[7, 1, 2, 3, 4, 5]]), parents, torch.zeros(1, 6))
    assert tree.prune(5).tokens.tolist() == [[7, 1, 2, 3, 4]]
    assert tree.prune(5).parents.tolist() == [[-1, 0, 0, 0, 2]]
    uneven = replace(tree, scores=torch.tensor([[0.0, -1.0, 0.0, -1.0, 0.0, 0.0]]))
    assert uneven.prune(4).tokens.tolist() == [[7, 2, 4, 5]]
    assert uneven.prune(4).parents.tolist() == [[-1, 0, 1, 2]]


@PROPERTY
@given(st.integers(0, 6), st.integers(1, 8))
def test_prune_of_a_chain_is_its_beginning(length: int, num_nodes: int) -> None:
    drafts = torch.arange(2 * length).view(2, length)
    drafts[1, length // 2 :] = -1
    scores = -torch.arange(1.0, length + 1).expand(2, length)
    tree = chain(torch.tensor([8, 9]), drafts, scores)
    pruned = tree.prune(num_nodes)
    shorter = chain(torch.tensor([8, 9]), drafts[:, : num_nodes - 1], scores[:, : num_nodes - 1])
    assert pruned.is_chain and pruned.max_depth == shorter.max_depth
    for name in ("tokens", "parents", "depths", "scores"):
        assert torch.equal(getattr(pruned, name), getattr(shorter, name)), name


def test_a_sampled_tree_is_never_pruned_by_its_scores() -> None:
    """[S7] selecting drawn tokens by their own confidence would bias the output."""
    tree = chain(torch.tensor([1]), torch.tensor([[2, 3]]), torch.tensor([[-0.1, -5.0]]), torch.full((1, 2, 4), 0.25))
    assert tree.prune(3) is tree
    with pytest.raises(AssertionError, match="sampled"):
        tree.prune(2)


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([[1, 2, 3]], [[-1, 2, 0]]),
        ([[1, 2]], [[-1, 1]]),
        ([[1, 2]], [[0, 0]]),
        ([[1, -1]], [[-1, 0]]),
        ([[1, 2]], [[-1, -1]]),
    ],
    ids=["parent behind child", "own parent", "no root", "padding with a parent", "token without a parent"],
)
def test_parents_that_are_no_tree_are_refused(tokens: list[list[int]], parents: list[list[int]]) -> None:
    with pytest.raises(AssertionError):
        from_parents(torch.tensor(tokens), torch.tensor(parents))
