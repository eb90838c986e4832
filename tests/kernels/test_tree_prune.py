"""Pruning: the kernel against its twin, which the tests of trees compare with what pruning promises."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, NEEDS_TRITON, random_parents

from selfspec.kernels.reference_growth import LEAST, prune_tree_reference
from selfspec.kernels.tree_prune import launch_prune_tree

pytestmark = NEEDS_TRITON


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 33, 130, 511, 1024])
def test_a_pruned_tree_is_the_twins(num_nodes: int) -> None:
    """Bit for bit: scores that differ, that are equal and that cannot be; padding anywhere, with any score."""
    generator = torch.Generator().manual_seed(num_nodes)
    parents = torch.tensor([random_parents(num_nodes, seed) for seed in range(4)])
    steps = -torch.rand(4, num_nodes, generator=generator)
    steps[1] = (steps[1] * 2).round()
    steps[2] = 0.0
    steps[:, 0] = 0.0
    depths, scores = torch.zeros_like(parents), steps.clone()
    for node in range(1, num_nodes):
        before = parents[:, node, None]
        depths[:, node] = depths.gather(1, before)[:, 0] + 1
        scores[:, node] += scores.gather(1, before)[:, 0]
    is_leaf = ~(parents[:, :, None] == torch.arange(num_nodes)).any(1)
    is_padding = is_leaf & (torch.rand(4, num_nodes, generator=generator) < 0.4) & (torch.arange(num_nodes) > 0)
    scores[3, is_leaf[3]] = LEAST
    scores = torch.where(is_padding & (parents % 2 == 0), 9.0, scores)
    tokens = torch.randint(0, 1 << 40, (4, num_nodes), generator=generator).masked_fill(is_padding, -1)
    tree = (tokens, parents.masked_fill(is_padding, -1), depths.masked_fill(is_padding, 0), scores)
    for size in {1, 2, num_nodes // 3, num_nodes - 1, num_nodes} & set(range(1, num_nodes + 1)):
        ours = launch_prune_tree(*(x.to(DEVICE) for x in tree), size)
        for got, expected in zip(ours, prune_tree_reference(*tree, size), strict=True):
            assert got.dtype == expected.dtype and torch.equal(got.cpu(), expected)
