"""The greedy walk by torch and by the kernel, against the twin, and the twin by what it promises."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICE, NEEDS_TRITON, random_parents
from strategies import PROPERTY, trees

from selfspec.kernels.reference import tree_accept_reference
from selfspec.kernels.tree_accept import launch_tree_accept, tree_accept
from selfspec.tree import CandidateTree, from_parents


@PROPERTY
@given(trees(vocab_size=3), st.data())
def test_tree_accept_equals_its_reference(tree: CandidateTree, data: st.DataObject) -> None:
    """Equal siblings, padding anywhere, and shapes deeper than any path left in them."""
    B, N = tree.tokens.shape
    choices = st.lists(st.integers(0, 2), min_size=N, max_size=N)
    chosen = torch.tensor(data.draw(st.lists(choices, min_size=B, max_size=B)))
    for cut in (tree, tree.limit_depth(torch.full((B,), data.draw(st.integers(0, 3))))):
        max_depth = max(cut.max_depth, data.draw(st.integers(0, 4)))
        path, num_accepted = tree_accept(cut.tokens, cut.parents, chosen, max_depth)
        expected_path, expected_num = tree_accept_reference(cut.tokens, cut.parents, chosen, max_depth)
        assert torch.equal(path, expected_path)
        assert torch.equal(num_accepted, expected_num)


@PROPERTY
@given(trees(num_rows=1, vocab_size=2), st.data())
def test_accepted_path_is_the_targets_own_choice_and_ends_only_where_it_must(
    tree: CandidateTree, data: st.DataObject
) -> None:
    """The reference itself, by what it promises: each step a child with the chosen token, no such child at the end."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    chosen = data.draw(st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens)))
    path, num_accepted = tree_accept_reference(tree.tokens, tree.parents, torch.tensor([chosen]), tree.max_depth)
    nodes = [node for node in path[0].tolist() if node >= 0]
    assert nodes[0] == 0 and len(nodes) == 1 + int(num_accepted[0])
    assert path[0, len(nodes) :].tolist() == [-1] * (tree.max_depth + 1 - len(nodes))
    for parent, child in pairwise(nodes):
        assert parents[child] == parent and tokens[child] == chosen[parent]
    last = nodes[-1]
    assert not any(parents[i] == last and tokens[i] == chosen[last] for i in range(1, len(tokens)))


@pytest.mark.parametrize("accept", [tree_accept, tree_accept_reference])
def test_padding_is_never_accepted_when_the_target_chooses_token_zero(
    accept: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """[K7] a padding slot clamped to token 0 anywhere would pass for a child here."""
    tokens = torch.tensor([[0, -1, -1, -1], [0, 0, -1, -1], [0, -1, 0, -1]])
    parents = torch.tensor([[-1, -1, -1, -1], [-1, 0, -1, -1], [-1, -1, 0, -1]])
    path, num_accepted = accept(tokens, parents, torch.zeros(3, 4, dtype=torch.int64), 3)
    assert num_accepted.tolist() == [0, 1, 1]
    assert path.tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [0, 2, -1, -1]]
    # Nor is a slot whose token alone marks it as padding.
    path, num_accepted = accept(tokens, torch.tensor([[-1, 0, 1, 2]] * 3), torch.zeros(3, 4, dtype=torch.int64), 3)
    assert num_accepted.tolist() == [0, 1, 0]


@NEEDS_TRITON
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 33, 130])
def test_tree_accept_equals_its_twin(num_nodes: int) -> None:
    """[K7] equal siblings, padding anywhere, more depth in the shape than in the trees."""
    generator = torch.Generator().manual_seed(num_nodes)
    parents = torch.tensor([random_parents(num_nodes, seed) for seed in range(3)])
    is_leaf = ~(parents[:, :, None] == torch.arange(num_nodes)).any(1)
    is_padding = is_leaf & (torch.rand(3, num_nodes, generator=generator) < 0.3) & (torch.arange(num_nodes) > 0)
    tokens = torch.randint(0, 2, (3, num_nodes), generator=generator).masked_fill(is_padding, -1)
    tree = from_parents(tokens, parents.masked_fill(is_padding, -1))
    for round in range(8):
        chosen = torch.randint(-1, 2, (3, num_nodes), generator=generator)
        # Padding must be told by its token as well as by its parent.
        arguments = (tokens, tree.parents if round % 2 else parents, chosen)
        for max_depth in (num_nodes, tree.max_depth):
            path, num_accepted = launch_tree_accept(*(x.to(DEVICE) for x in arguments), max_depth)
            expected_path, expected_num = tree_accept_reference(*arguments, max_depth)
            assert torch.equal(path.cpu(), expected_path)
            assert torch.equal(num_accepted.cpu(), expected_num)
