"""Candidate trees: what the draft stage gives and the verify stage takes. Pure tensors, no model.

Invariants: node 0 is the root, the last committed token, and its KV is not in the prefix yet; `parents[i] < i`; a node's
position is the prefix length plus its depth. A padding node has token -1, parent -1 and depth 0. It sees only the prefix and
itself, is nobody's child, and can never be accepted, whatever token the target chooses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from selfspec.kernels.tree_growth import grow_layer
from selfspec.kernels.tree_prune import prune_tree


@dataclass(frozen=True)
class CandidateTree:
    """A batch of trees of N nodes each, padded to one shape.

    Attributes:
        tokens, parents, depths: [B, N] int64.
        max_depth: K, the greatest depth that the shape allows; kept on the host because no loop should ask the device.
        is_chain: every row is one path laid out in order (`parents[i] == i - 1`, padding only at the end).
        scores: [B, N] float32, the drafter's estimate of the log-probability that the path down to the node is accepted. It
            never rises along a path. None where the drafter has no estimate.
        draft_probs: [B, N, V] the distribution that each node's token was *drawn* from; None for deterministic drafts, whose
            distribution is a point mass, whatever the drafter's own probabilities were.
        origins: [B, N] each node's index among all nodes that its drafter computed; None where the drafter kept none.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    max_depth: int
    is_chain: bool = False
    scores: torch.Tensor | None = None
    draft_probs: torch.Tensor | None = None
    origins: torch.Tensor | None = None

    @property
    def is_deterministic(self) -> bool:
        return self.draft_probs is None

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def is_real(self) -> torch.Tensor:
        """[B, N] bool: true where the node is not padding."""
        return self.tokens >= 0

    def ancestor_mask(self) -> torch.Tensor:
        """[B, N, N] bool: `mask[b, i, j]` is true iff j is i or an ancestor of i in row b."""
        B, N = self.tokens.shape
        eye = torch.eye(N, dtype=torch.bool, device=self.tokens.device).expand(B, N, N)
        if self.is_chain:
            chain = torch.ones(N, N, dtype=torch.bool, device=self.tokens.device).tril()
            return torch.where(self.is_real[:, :, None], chain, eye)
        # Reachability by doubling: log2(depth) products instead of one loop per node.
        mask = eye | (self.parents[:, :, None] == torch.arange(N, device=self.tokens.device))
        reach = 1
        while reach < self.max_depth:
            mask = torch.bmm(mask.float(), mask.float()) > 0
            reach *= 2
        return mask

    def of_rows(self, index: torch.Tensor) -> CandidateTree:
        """The trees of the rows `index` alone."""

        def taken(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[index]

        return replace(
            self,
            tokens=self.tokens[index],
            parents=self.parents[index],
            depths=self.depths[index],
            scores=taken(self.scores),
            draft_probs=taken(self.draft_probs),
            origins=taken(self.origins),
        )

    def limit_depth(self, limits: torch.Tensor) -> CandidateTree:
        """Turn the nodes of row b that are deeper than `limits[b]`, `limits` [B], into padding; the root always stays."""
        keep = self.depths <= limits[:, None].clamp(min=0)
        return replace(
            self,
            tokens=torch.where(keep, self.tokens, -1),
            parents=torch.where(keep, self.parents, -1),
            depths=torch.where(keep, self.depths, 0),
        )

    def prune(self, num_nodes: int) -> CandidateTree:
        """Keep the `num_nodes` best-scored nodes of every row, in their order.

        A node is never kept without its parent, because scores never rise along a path and a tie goes to the lower index,
        the ancestor's.
        """
        if num_nodes >= self.num_nodes:
            return self
        assert self.is_deterministic, "a sampled draft must not be selected by its own scores"
        if self.is_chain:
            return replace(
                self,
                tokens=self.tokens[:, :num_nodes],
                parents=self.parents[:, :num_nodes],
                depths=self.depths[:, :num_nodes],
                scores=None if self.scores is None else self.scores[:, :num_nodes],
                max_depth=min(self.max_depth, num_nodes - 1),
            )
        assert self.scores is not None, "pruning a tree needs scores"
        tokens, parents, depths, scores, kept = prune_tree(self.tokens, self.parents, self.depths, self.scores, num_nodes)
        return replace(
            self,
            tokens=tokens,
            parents=parents,
            depths=depths,
            scores=scores,
            origins=None if self.origins is None else self.origins.gather(1, kept),
            max_depth=min(self.max_depth, num_nodes - 1),
        )


def chain(
    roots: torch.Tensor,
    drafts: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
) -> CandidateTree:
    """A path per row: the root, then the drafts before the first -1.

    Args:
        roots: [B].
        drafts: [B, K]; None for only the roots.
        scores: [B, K] log-probability that draft k and all before it are accepted.
        draft_probs: [B, K, V] for sampled drafts.
    """
    if drafts is None:
        tokens = roots[:, None]
        return CandidateTree(tokens, torch.full_like(tokens, -1), torch.zeros_like(tokens), max_depth=0, is_chain=True)
    B, K = drafts.shape
    is_real = (drafts >= 0).cumprod(1).bool()
    tokens = torch.cat([roots[:, None], torch.where(is_real, drafts, -1)], dim=1)
    depths = torch.arange(K + 1, device=roots.device).expand(B, K + 1)
    return CandidateTree(
        tokens=tokens,
        parents=torch.where(tokens >= 0, depths - 1, -1),
        depths=torch.where(tokens >= 0, depths, 0),
        max_depth=K,
        is_chain=True,
        scores=None if scores is None else torch.cat([scores.new_zeros(B, 1), scores], dim=1),
        draft_probs=None
        if draft_probs is None
        else torch.cat([draft_probs.new_zeros(B, 1, draft_probs.shape[2]), draft_probs], dim=1),
    )


def from_parents(tokens: torch.Tensor, parents: torch.Tensor, scores: torch.Tensor | None = None) -> CandidateTree:
    """A tree from explicit parents, which give the depths. Asserts `parents[i] < i` and a root at node 0.

    Args:
        tokens, parents: [B, N] int64; padding nodes have token -1 and parent -1.
        scores: [B, N].
    """
    B, N = tokens.shape
    index = torch.arange(N, device=tokens.device)
    assert bool((parents < index).all()) and bool((parents[:, 0] == -1).all()), "parents must precede their children"
    assert bool(((parents >= 0) == (tokens >= 0))[:, 1:].all()), "padding has neither a token nor a parent"
    depths = torch.zeros_like(parents)
    ancestor = parents
    while bool((ancestor >= 0).any()):
        depths = depths + (ancestor >= 0)
        ancestor = torch.where(ancestor >= 0, parents.gather(1, ancestor.clamp(min=0)), -1)
    return CandidateTree(tokens, parents, depths, max_depth=int(depths.max()), scores=scores)


def spread(tree: CandidateTree, roots: torch.Tensor, index: torch.Tensor) -> CandidateTree:
    """A tree of the A rows `index` as one of all B rows; the other rows get only their root.

    Args:
        tree: [A, N].
        roots: [B].
        index: [A].
    """
    B, N = len(roots), tree.num_nodes
    if len(index) == B:
        return tree

    def put(values: torch.Tensor, filler: float) -> torch.Tensor:
        return values.new_full((B, N), filler).index_copy_(0, index, values)

    tokens = put(tree.tokens, -1)
    tokens[:, 0] = roots
    assert tree.scores is not None
    return CandidateTree(
        tokens=tokens,
        parents=put(tree.parents, -1),
        depths=put(tree.depths, 0),
        max_depth=tree.max_depth,
        scores=put(tree.scores, 0.0),
    )


class TreeGrower:
    """Best-first growth of candidate trees, one depth at a time, on the device (https://arxiv.org/abs/2406.16858).

    At every depth the `width` best nodes, the beam, are expanded, and all their children are candidates. A node's score is
    the sum of its path's log-probabilities. It never rises along a path, so the best N candidates form a tree.

    Args:
        roots: [B].

    Attributes:
        beam_scores: [B, W], the scores of the nodes that are expanded next.
    """

    def __init__(self, roots: torch.Tensor, width: int) -> None:
        self.width = width
        # Tokens, parents and depths [3, B, nodes] of each depth.
        self._nodes = [torch.stack([roots, torch.full_like(roots, -1), torch.zeros_like(roots)])[:, :, None]]
        self._scores = [torch.zeros(len(roots), 1, device=roots.device)]
        # The root is node 0.
        self._beam = self._nodes[0][2]
        self.beam_scores = self._scores[0]
        self._num_nodes = 1

    def grow(self, logits: torch.Tensor, token_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Give every node of the beam its `width` likeliest children; the best of them all are the next beam.

        Args:
            logits: [B, W, V] for the present beam's W nodes; at first only the root.
            token_ids: [V] the target's id for each draft id, where they differ.

        Returns:
            The next beam's tokens [B, W'], and the index [B, W'] of each one's parent in the present beam.
        """
        layer = grow_layer(
            logits,
            self._beam,
            self.beam_scores,
            num_children=min(self.width, logits.shape[-1]),
            width=self.width,
            first_node=self._num_nodes,
            depth=len(self._nodes),
            token_ids=token_ids,
        )
        self._nodes.append(layer.nodes)
        self._scores.append(layer.scores)
        self._num_nodes += layer.scores.shape[1]
        self._beam, tokens, parents = layer.beam
        self.beam_scores = layer.beam_scores
        return tokens, parents

    def tree(self, num_nodes: int) -> CandidateTree:
        """The tree of the best `num_nodes` candidates, root included."""
        tokens, parents, depths = torch.cat(self._nodes, dim=2)
        scores = torch.cat(self._scores, dim=1)
        return CandidateTree(tokens, parents, depths, max_depth=len(self._nodes) - 1, scores=scores).prune(num_nodes)
