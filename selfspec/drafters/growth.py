"""Draft a candidate tree with a model that drafts one depth per pass: what EAGLE, draft models and early exit share.

The nodes that a pass computes are scratch entries of the drafter's own cache, one depth (a layer of the tree) after the
other. Invariant: every node's parent is in the layer before it. Unlike a verified tree these nodes may have no root; the
first layer then follows the prefix's last entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from selfspec.loop.planner import Shape
from selfspec.tree import CandidateTree, TreeGrower

# (the newest layer's tokens [B, W], each one's parent [B, W] within the layer before) -> logits [B, W, V].
LayerPass = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# (all nodes so far, how many of them are new, parents as above) -> logits [B, W, V].
NodesPass = Callable[[CandidateTree, int, torch.Tensor], torch.Tensor]


def tree_shapes(depth: int, width: int, num_nodes: int) -> list[Shape]:
    """Trees of every depth up to `depth`, with at most `num_nodes` nodes each, the root included."""
    if width == 1:
        return [Shape(each) for each in range(1, depth + 1)]
    return [Shape(each, width, min(num_nodes - 1, width + (each - 1) * width**2)) for each in range(1, depth + 1)]


def grow(
    roots: torch.Tensor,
    logits: torch.Tensor,
    run: LayerPass,
    *,
    depth: int,
    width: int,
    num_nodes: int,
    token_ids: torch.Tensor | None = None,
) -> CandidateTree:
    """The best `num_nodes` candidates after `depth` layers of at most `width` nodes each.

    Args:
        roots: [B].
        logits: [B, 1, V], which give the root's children.
        run: one pass over the newest layer.
        token_ids: [V] the target's id for each draft id, where they differ.
    """
    grower = TreeGrower(roots, width)
    for at in range(1, depth + 1):
        tokens, parent = grower.grow(logits, token_ids)
        if at < depth:
            logits = run(tokens, parent)
    return grower.tree(num_nodes)


def over_nodes(run: NodesPass) -> LayerPass:
    """Turn a pass that takes all nodes so far into one that takes the newest layer."""
    nodes: CandidateTree | None = None
    width_before = 1

    def run_layer(tokens: torch.Tensor, parent: torch.Tensor) -> torch.Tensor:
        nonlocal nodes, width_before
        nodes = append(nodes, tokens, parent, width_before=width_before)
        width_before = tokens.shape[1]
        return run(nodes, width_before, parent)

    return run_layer


def append(
    nodes: CandidateTree | None,
    tokens: torch.Tensor,
    parent: torch.Tensor,
    *,
    width_before: int,
    scores: torch.Tensor | None = None,
) -> CandidateTree:
    """The nodes and one more layer.

    Args:
        tokens: [B, W].
        parent: [B, W] each one's parent, by its index in the layer before, which has `width_before` nodes.
        scores: [B, W], kept where the nodes have scores too.
    """
    if nodes is None:
        return CandidateTree(tokens, torch.full_like(tokens, -1), torch.zeros_like(tokens), max_depth=0, scores=scores)
    depth = nodes.max_depth + 1
    return CandidateTree(
        tokens=torch.cat([nodes.tokens, tokens], dim=1),
        parents=torch.cat([nodes.parents, parent + nodes.num_nodes - width_before], dim=1),
        depths=torch.cat([nodes.depths, torch.full_like(tokens, depth)], dim=1),
        max_depth=depth,
        scores=None if nodes.scores is None or scores is None else torch.cat([nodes.scores, scores], dim=1),
    )


def as_tensors(tree: CandidateTree) -> tuple[torch.Tensor, ...]:
    """A scored tree's tokens, parents, depths and scores, each [B, N], because a pass can return only tensors."""
    assert tree.scores is not None
    return tree.tokens, tree.parents, tree.depths, tree.scores


def from_tensors(tensors: Sequence[torch.Tensor], *, depth: int) -> CandidateTree:
    """The tree, at most `depth` deep, from the tensors [B, N] of `as_tensors`."""
    tokens, parents, depths, scores = tensors
    return CandidateTree(tokens, parents, depths, max_depth=min(depth, tokens.shape[1] - 1), scores=scores)
