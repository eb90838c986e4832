"""Medusa: heads on the target's last hidden state draft all depths at once (https://arxiv.org/abs/2401.10774).

Of every row the drafter keeps one feature, the last committed token's: with the root at position T it is that of T - 1,
whose head i predicts token T + 1 + i, the draft of depth i + 1. The heads' distributions do not depend on the path, so the
tree is the best-first product of their most likely tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from selfspec.drafters.growth import tree_by_graph
from selfspec.heads.medusa import MedusaHead
from selfspec.loop.drafter import Drafter
from selfspec.model.graphs import ROW_BUCKETS, bucket, fill_rows
from selfspec.model.load import lay_out
from selfspec.model.target import FINAL, Target
from selfspec.tree import CandidateTree, TreeGrower, chain

if TYPE_CHECKING:
    from selfspec.loop.accept import Acceptance
    from selfspec.loop.sequence import Batch, Sequence


_SERIALS = itertools.count()


class MedusaDrafter(Drafter):
    """Drafts with trained Medusa heads.

    Args:
        num_nodes: most nodes of the tree, root included.
        width: tokens of each head that are considered.
    """

    features = (FINAL,)
    is_costly = True

    def __init__(
        self,
        target: Target,
        head: MedusaHead,
        *,
        num_draft_tokens: int | None = None,
        num_nodes: int | None = None,
        width: int = 8,
        name: str = "medusa",
    ) -> None:
        self.name = name
        # Names this drafter's weights to the graphs, for good: an id may come again once a head is unloaded.
        self._serial = next(_SERIALS)
        self._target = target
        self.head = head.to(target.device, target.dtype)
        self.lm_head = target.model.get_output_embeddings()
        self._embed = target.model.get_input_embeddings()
        lay_out(self.head)
        self.num_draft_tokens = min(num_draft_tokens or head.config.num_heads, head.config.num_heads)
        # On a CPU a pass over more than six nodes costs noticeably more than one over one.
        self.num_nodes = num_nodes or (8 if target.device.type == "cpu" else 16)
        self.width = min(width, target.vocab_size)
        self._dtype = target.dtype
        self._hidden_size = head.config.target.hidden_size
        # The feature [E] of every row's last committed token; a prompt of one token has none yet.
        self._last: dict[Sequence, torch.Tensor | None] = {}

    def admit(self, sequence: Sequence, features: Mapping[int, torch.Tensor]) -> None:
        hidden = features[FINAL][0]
        self._last[sequence] = hidden[-1] if len(hidden) else None

    def retire(self, sequence: Sequence) -> None:
        self._last.pop(sequence, None)

    def propose(self, batch: Batch, num_draft_tokens: int) -> CandidateTree:
        if num_draft_tokens == 0:
            return chain(batch.roots)
        rows = [self._last[sequence] for sequence in batch.sequences]
        blank = torch.zeros(self._hidden_size, dtype=self._dtype, device=batch.device)
        hidden = torch.stack([blank if row is None else row for row in rows])  # [B, E]
        roots = batch.roots
        tree = self._propose_by_graph(hidden, roots, num_draft_tokens) or self._draft(hidden, roots, num_draft_tokens)
        if all(row is not None for row in rows):
            return tree
        is_active = torch.tensor([row is not None for row in rows]).to(batch.device)
        return tree.limit_depth(torch.where(is_active, tree.max_depth, 0))

    def _propose_by_graph(self, hidden: torch.Tensor, roots: torch.Tensor, depth: int) -> CandidateTree | None:
        """`_draft` as a CUDA graph, where there is one."""
        graphs, num_rows = self._target.graphs, bucket(len(roots), ROW_BUCKETS)
        if graphs is None or num_rows is None:
            return None

        inputs = [fill_rows(each, num_rows) for each in (hidden, roots)]
        key = ("medusa", self._serial, depth)
        return tree_by_graph(graphs, key, partial(self._draft, depth=depth), inputs, num_rows=len(roots), depth=depth)

    def _draft(self, hidden: torch.Tensor, roots: torch.Tensor, depth: int) -> CandidateTree:
        """The tree from the features [B, E] and the roots [B]: device work alone."""
        embedded = self._embed(roots)
        log_probs = self.head(hidden, embedded, self.lm_head, depth).float().log_softmax(-1)  # [B, K, V]
        best = log_probs.topk(self.width, dim=-1)
        grower = TreeGrower(roots, width=self.num_nodes)
        beam = 1
        for level in range(best.values.shape[1]):
            shape = (len(roots), beam, self.width)
            tokens, _ = grower.expand(best.indices[:, level, None].expand(shape), best.values[:, level, None].expand(shape))
            beam = tokens.shape[1]
        return grower.tree(self.num_nodes)

    def commit(
        self, batch: Batch, tree: CandidateTree, acceptance: Acceptance, features: Mapping[int, torch.Tensor]
    ) -> None:
        """Keep the feature of the last accepted node: the token before the new root."""
        hidden = features[FINAL]
        last = acceptance.num_accepted[:, None, None].expand(-1, 1, hidden.shape[-1])
        hidden = hidden.gather(1, last)[:, 0]
        for sequence, row in zip(batch.sequences, hidden, strict=True):
            self._last[sequence] = row
