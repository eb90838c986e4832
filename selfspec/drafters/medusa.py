"""Medusa: heads on the target's last hidden state draft all depths at once (https://arxiv.org/abs/2401.10774).

Invariant: for every row the drafter keeps one feature, that of the last token before the root. With the root at position T,
it is the feature of T - 1, from which head i predicts token T + 1 + i, the draft of depth i + 1. The heads' distributions do
not depend on the path, so the candidate tree is the best-first product of their likeliest tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from selfspec.drafters.growth import as_tensors, from_tensors
from selfspec.heads.medusa import MedusaHead
from selfspec.kernels.product_tree import product_tree
from selfspec.kernels.tree_growth import likeliest
from selfspec.loop.drafter import DefaultShape, Drafter, DraftShape, Outcome, Proposal
from selfspec.model.layers import private_copy
from selfspec.model.load import lay_out
from selfspec.model.target import FINAL, Target
from selfspec.tree import CandidateTree, chain

if TYPE_CHECKING:
    from selfspec.loop.batch import Batch
    from selfspec.loop.sequence import Sequence

_SERIALS = itertools.count()


class MedusaDrafter(Drafter):
    """Drafts with trained Medusa heads. It uses a copy of the given head that shares the weights.

    Args:
        num_draft_tokens: depth of the tree, at most the number of heads, which is the default.
        num_nodes: most nodes of the tree, root included.
        width: tokens of each head that are considered.
    """

    features = (FINAL,)
    is_costly = True
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
        # Identifies this drafter in graph keys. Not `id()`, which Python reuses after an unload.
        self._serial = next(_SERIALS)
        self._target = target
        self._lm_head = None if head.config.has_output_layer else target.logits_of
        self.head = private_copy(head).to(target.device, target.dtype)
        lay_out(self.head)
        self._embed = target.model.get_input_embeddings()
        self.num_draft_tokens = min(num_draft_tokens or head.config.num_heads, head.config.num_heads)
        self.num_nodes = num_nodes or shape.num_nodes
        self.width = min(width or shape.width, target.vocab_size)
        self._blank = torch.zeros(head.config.target.hidden_size, dtype=target.dtype, device=target.device)
        # The feature [E] of every row's last token before the root; a prompt of one token has none yet.
        self._last: dict[Sequence, torch.Tensor | None] = {}

    def admit(self, sequence: Sequence, features: Mapping[int, torch.Tensor]) -> None:
        hidden = features[FINAL][0]
        # A copy, because a view would keep the whole prompt's features alive.
        self._last[sequence] = hidden[-1].clone() if len(hidden) else None

    def retire(self, sequence: Sequence) -> None:
        self._last.pop(sequence, None)

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        depth = num_draft_tokens
        if depth == 0:
            return Proposal(chain(batch.roots))
        rows = [self._last[sequence] for sequence in batch.sequences]
        hidden = torch.stack([self._blank if row is None else row for row in rows])  # [B, E]

        def draft(hidden: torch.Tensor, roots: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return as_tensors(self._draft(hidden, roots, depth))

        key = ("medusa", self._serial, depth, self.num_nodes, self.width)
        tree = from_tensors(self._target.passes.run_rows(key, draft, (hidden, batch.roots)), depth=depth)
        if any(row is None for row in rows):
            is_active = torch.tensor([row is not None for row in rows]).to(batch.device)
            tree = tree.limit_depth(torch.where(is_active, tree.max_depth, 0))
        return Proposal(tree)

    def _draft(self, hidden: torch.Tensor, roots: torch.Tensor, depth: int) -> CandidateTree:
        """The tree from features [B, E] and roots [B]. A function of tensors."""
        logits = self.head(hidden, self._embed(roots), self._lm_head, depth)  # [B, K, V]
        tokens, parents, depths, scores = product_tree(roots, *likeliest(logits, self.width), self.num_nodes)
        return CandidateTree(tokens, parents, depths, max_depth=min(depth, tokens.shape[1] - 1), scores=scores)

    def commit(self, batch: Batch, proposal: Proposal, outcome: Outcome) -> None:
        """Keep the feature of the last accepted node, the token before the new root."""
        hidden = outcome.features[FINAL]
        last = outcome.acceptance.num_accepted[:, None, None].expand(-1, 1, hidden.shape[-1])
        hidden = hidden.gather(1, last)[:, 0]
        for sequence, row in zip(batch.sequences, hidden, strict=True):
            self._last[sequence] = row
