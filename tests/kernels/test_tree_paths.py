"""Slots of paths by the kernel against the twin, and the twin against chasing parents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import BLOCK_SIZE, DEVICE, NEEDS_TRITON, make_case, random_parents
from strategies import PROPERTY, path_to, trees

from selfspec.kernels.tree_paths import launch_tree_paths, tree_paths
from selfspec.tree import CandidateTree, from_parents


@PROPERTY
@given(trees(), st.data())
def test_a_path_has_the_slots_of_the_nodes_up_to_the_root(tree: CandidateTree, data: st.DataObject) -> None:
    """Padding anywhere, blocks out of order, some of the nodes, and more depth than the trees have."""
    B, N = tree.tokens.shape
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=B, max_size=B))
    tables = torch.tensor(data.draw(st.permutations(range(B * 6)))).view(B, 6)
    nodes = data.draw(st.none() | st.lists(st.integers(0, B * N - 1), max_size=B * N))
    max_depth = tree.max_depth + data.draw(st.integers(0, 2))
    asked = None if nodes is None else torch.tensor(nodes, dtype=torch.int64)
    paths = tree_paths(tree.parents, tree.depths, torch.tensor(lengths), tables, BLOCK_SIZE, max_depth, asked)
    assert paths.shape == (B * N if nodes is None else len(nodes), max_depth + 1)
    for flat, path in zip(range(B * N) if nodes is None else nodes, paths.tolist(), strict=True):
        row = flat // N
        index = [lengths[row] + node for node in path_to(tree.parents[row].tolist(), flat % N)]
        slots = [int(tables[row, i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE for i in index]
        assert path == slots + [0] * (max_depth + 1 - len(slots))


@NEEDS_TRITON
@pytest.mark.parametrize("num_nodes", [1, 7, 33, 70])
def test_tree_paths_equals_its_twin(num_nodes: int) -> None:
    parents = torch.tensor([random_parents(num_nodes, seed) for seed in range(3)])
    is_leaf = ~(parents[:, :, None] == torch.arange(num_nodes)).any(1)
    parents[is_leaf & (torch.arange(num_nodes) % 3 == 2)] = -1
    tree = from_parents(torch.where((parents >= 0) | (torch.arange(num_nodes) == 0), 5, -1), parents)
    lengths = torch.tensor([0, 17, 6])
    generator = torch.Generator().manual_seed(num_nodes)
    # Tables are some columns of longer ones.
    tables = torch.randperm(3 * 30, generator=generator).view(3, 30)[:, :25]
    kept = torch.randperm(3 * num_nodes, generator=generator)[: 2 * num_nodes].sort().values
    for nodes in (None, kept, kept[:0]):
        for max_depth in (tree.max_depth, tree.max_depth + 3):
            expected = tree_paths(tree.parents, tree.depths, lengths, tables, BLOCK_SIZE, max_depth, nodes)
            arguments = (x.to(DEVICE) for x in (tree.parents, tree.depths, lengths, tables))
            asked = None if nodes is None else nodes.to(DEVICE)
            out = launch_tree_paths(*arguments, BLOCK_SIZE, max_depth, asked)
            assert torch.equal(out.cpu(), expected)


def test_paths_are_those_of_the_ancestor_mask() -> None:
    """Where the mask says the same, on and past a block's end; entries past a node's depth mean nothing."""
    case = make_case([random_parents(9, seed) for seed in range(2)], [3, 10])
    layout, parents = case.layout, torch.tensor(case.parents)
    paths = tree_paths(parents, layout.depths, layout.lengths, layout.block_tables, BLOCK_SIZE, layout.depth_bound)
    is_path = torch.arange(layout.depth_bound + 1) <= layout.depths[:, :, None]
    assert torch.equal(paths.view_as(layout.path_slots)[is_path], layout.path_slots[is_path])
