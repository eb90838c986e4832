"""Random candidate trees for property tests, their naive reading, and the settings all property tests share."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st

from selfspec.tree import CandidateTree, from_parents

# Cores are shared, so no deadline; the same examples in every run, so that a failure is a change of the code.
PROPERTY = settings(max_examples=50, deadline=None, derandomize=True)
# Where every example costs model passes.
COSTLY_PROPERTY = settings(PROPERTY, max_examples=25)


@st.composite
def parent_lists(draw: st.DrawFn, *, min_nodes: int = 1, max_nodes: int = 12, has_padding: bool = True) -> list[int]:
    """Parents of one tree; padding (-1) may stand anywhere behind the root, and is nobody's parent."""
    parents = [-1]
    real = [0]
    for i in range(1, draw(st.integers(min_nodes, max_nodes))):
        is_padding = has_padding and draw(st.integers(0, 4)) == 0
        parents.append(-1 if is_padding else draw(st.sampled_from(real)))
        if not is_padding:
            real.append(i)
    return parents


@st.composite
def trees(draw: st.DrawFn, *, num_rows: int | None = None, max_nodes: int = 12, vocab_size: int = 4) -> CandidateTree:
    """Trees of one shape with tokens from a small vocabulary, so that equal siblings occur."""
    B = draw(st.integers(1, 3)) if num_rows is None else num_rows
    N = draw(st.integers(1, max_nodes))
    parents = [draw(parent_lists(min_nodes=N, max_nodes=N)) for _ in range(B)]
    tokens = [
        [draw(st.integers(0, vocab_size - 1)) if i == 0 or parent >= 0 else -1 for i, parent in enumerate(row)]
        for row in parents
    ]
    return from_parents(torch.tensor(tokens), torch.tensor(parents))


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root (or from a padding node itself) down to `node`, by chasing parents."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def naive_ancestor_mask(parents: torch.Tensor) -> torch.Tensor:
    """[B, N, N] from parents [B, N], one node at a time."""
    B, N = parents.shape
    mask = torch.zeros(B, N, N, dtype=torch.bool)
    for b in range(B):
        for i in range(N):
            mask[b, i, path_to(parents[b].tolist(), i)] = True
    return mask
