"""The tree of heads that do not see the path: the twin against all paths, and the kernel against the twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICE, NEEDS_TRITON
from strategies import PROPERTY

from selfspec.kernels.product_tree import launch_product_tree
from selfspec.kernels.reference_growth import LEAST, product_tree_reference


def naive_tree(
    root: int, tokens: list[list[int]], log_probs: list[list[float]], num_nodes: int
) -> list[tuple[int, int, int, float]]:
    """(token, parent, depth, score) of the best nodes among all paths, read off one node at a time."""
    nodes, layer = [(root, -1, 0, 0.0)], [0]
    for depth, (names, steps) in enumerate(zip(tokens, log_probs, strict=True), start=1):
        parents = sorted(layer, key=lambda node: -nodes[node][3])
        layer = list(range(len(nodes), len(nodes) + len(parents) * len(names)))
        nodes += [
            (name, parent, depth, nodes[parent][3] + step)
            for parent in parents
            for name, step in zip(names, steps, strict=True)
        ]
    kept = sorted(sorted(range(len(nodes)), key=lambda node: -nodes[node][3])[:num_nodes])
    places = {-1: -1} | {node: place for place, node in enumerate(kept)}
    return [(token, places[parent], depth, score) for token, parent, depth, score in (nodes[node] for node in kept)]


@PROPERTY
@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 24), st.integers(1, 4), st.data())
def test_the_twin_gives_the_best_of_all_paths(
    depth: int, width: int, num_nodes: int, num_steps: int, data: st.DataObject
) -> None:
    """Steps from so few numbers, 0 among them, that many paths are equally likely."""
    steps = st.lists(st.integers(0, num_steps).map(lambda step: -0.5 * step), min_size=width, max_size=width)
    log_probs = [[sorted(data.draw(steps), reverse=True) for _ in range(depth)] for _ in range(2)]
    tokens = torch.arange(2 * depth * width).view(2, depth, width) + 50
    roots = torch.tensor([7, 8])
    results = product_tree_reference(roots, tokens, torch.tensor(log_probs).view(2, depth, width), num_nodes)
    for b in range(2):
        expected = naive_tree(7 + b, tokens[b].tolist(), log_probs[b], num_nodes)
        assert list(zip(*(result[b].tolist() for result in results), strict=True)) == expected


@NEEDS_TRITON
@pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    ("depth", "width", "num_nodes"),
    [(1, 1, 1), (2, 1, 8), (1, 5, 4), (2, 3, 64), (4, 8, 16), (3, 5, 33), (8, 3, 20), (5, 10, 64), (4, 10, 128)],
)
def test_a_product_tree_is_the_twins(depth: int, width: int, num_nodes: int) -> None:
    """Bit for bit: paths that differ, paths that are equal, and heads that are certain or have only what cannot be."""
    generator = torch.Generator().manual_seed(depth)
    tokens = torch.randint(0, 1 << 40, (4, depth, width), generator=generator)
    log_probs = -torch.rand(4, depth, width, generator=generator) * 3
    log_probs[1] = (log_probs[1] * 2).round() / 2
    log_probs[2] = -1.25
    log_probs[3, ::2] = LEAST
    log_probs[3, ::2, 0] = 0.0
    log_probs[3, -1] = LEAST
    arguments = (torch.arange(4), tokens, log_probs.sort(-1, descending=True).values)
    ours = launch_product_tree(*(x.to(DEVICE) for x in arguments), num_nodes)
    for got, expected in zip(ours, product_tree_reference(*arguments, num_nodes), strict=True):
        assert got.dtype == expected.dtype and torch.equal(got.cpu(), expected)
