"""Medusa: heads on the target's last hidden state draft all depths at once (https://arxiv.org/abs/2401.10774).

Invariant: for every row the cache's state keeps one feature, that of the last token before the root. With the root at
position T, it is the feature of T - 1, from which head i predicts token T + 1 + i, the draft of depth i + 1. The heads'
distributions do not depend on the path, so the candidate tree is the best-first product of their likeliest tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from selfspec.cache.kv import KVCache, Places
from selfspec.cache.rows import ROOT
from selfspec.drafters.growth import as_tensors, from_tensors
from selfspec.heads.medusa import MedusaHead
from selfspec.kernels.product_tree import product_tree
from selfspec.kernels.tree_growth import likeliest
from selfspec.loop.drafter import DefaultShape, Drafter, DraftShape, Observed, Proposal
from selfspec.loop.planner import Shape
from selfspec.model.layers import private_copy
from selfspec.model.load import lay_out
from selfspec.model.target import FINAL, Target
from selfspec.tree import CandidateTree, chain

if TYPE_CHECKING:
    from selfspec.loop.batch import Batch


class MedusaDrafter(Drafter):
    """Drafts with trained Medusa heads. It uses a copy of the given head that shares the weights.

    Args:
        num_draft_tokens: depth of the tree, at most the number of heads, which is the default.
        num_nodes: most nodes of the tree, root included.
        width: tokens of each head that are considered.
    """

    features = (FINAL,)
    is_costly = True
    is_resident = True
    default_shape = DefaultShape(cpu=DraftShape(0, 8, 8), gpu=DraftShape(0, 16, 8))

    def __init__(
        self,
        target: Target,
        head: MedusaHead,
        *,
        num_draft_tokens: int | None = None,
        num_nodes: int | None = None,
        width: int | None = None,
        name: str = "medusa",
    ) -> None:
        shape = self.default_shape.on(target.device)
        self.name = name
        self._target = target
        self._lm_head = None if head.config.has_output_layer else target.logits_of
        self.head = private_copy(head).to(target.device, target.dtype)
        lay_out(self.head, may_round=True)
        self._embed = target.model.get_input_embeddings()
        self.num_draft_tokens = min(num_draft_tokens or head.config.num_heads, head.config.num_heads)
        self.num_nodes = num_nodes or shape.num_nodes
        self.width = min(width or shape.width, target.vocab_size)

    def shapes(self, num_rows: int) -> list[Shape]:
        return [Shape(depth, 1, self.num_nodes - 1) for depth in range(1, self.num_draft_tokens + 1)]

    def attach(self, cache: KVCache) -> None:
        self._hidden(cache)

    def _hidden(self, cache: KVCache) -> torch.Tensor:
        """[S + 1, E]: by slot, the feature of the last token before the root."""
        return cache.state.owned(self, self.head.config.target.hidden_size, cache.keys.dtype)

    def observe(self, cache: KVCache, observed: Observed) -> None:
        """Keep the feature of each row's last committed token."""
        entries = observed.entries
        assert entries is not None
        self._hidden(cache)[entries.owners] = observed.features[FINAL][entries.nodes[entries.last]]

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        cache, depth = batch.cache, num_draft_tokens
        if depth == 0:
            return Proposal(chain(batch.roots))

        def draft(slots: torch.Tensor, places: Places) -> tuple[torch.Tensor, ...]:
            tree = self._draft(self._hidden(cache)[slots], cache.state.integers[slots, ROOT], depth)
            # A prompt of one token has no feature yet.
            return as_tensors(tree.limit_depth(torch.where(places.lengths > 0, depth, 0)))

        key = ("medusa", self.graph_key, depth, self.num_nodes, self.width)
        return Proposal(from_tensors(self._target.passes.draft(key, draft, batch.rows, cache), depth=depth))

    def _draft(self, hidden: torch.Tensor, roots: torch.Tensor, depth: int) -> CandidateTree:
        """The tree from features [B, E] and roots [B]. A function of tensors."""
        logits = self.head(hidden, self._embed(roots), self._lm_head, depth)  # [B, K, V]
        tokens, parents, depths, scores = product_tree(roots, *likeliest(logits, self.width), self.num_nodes)
        return CandidateTree(tokens, parents, depths, max_depth=min(depth, tokens.shape[1] - 1), scores=scores)
