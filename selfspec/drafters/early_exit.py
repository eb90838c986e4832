"""Early exit: the target's own first layers draft, a few trained blocks on top, and verification goes on where they stopped.

Draft and verification share the first E layers' KV cache: every drafted node's entries are what verification needs, so that
`verify` moves the chosen nodes' entries to their slots and runs the layers from E on only. The blocks have a cache of their
own, an entry for each token: with the root at position T it holds entries 0 … T - 1 and gets the root's at the next
proposal, computed from the hidden states entering layer E, which are exact for drafted nodes, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from selfspec.cache.kv import CacheRow, KVCache
from selfspec.drafters.growth import append
from selfspec.drafters.waiting_features import Pending
from selfspec.heads.early_exit import EarlyExitHead
from selfspec.loop.drafter import Drafter
from selfspec.model.layers import Resume, decoder_layers
from selfspec.model.load import lay_out
from selfspec.model.target import SplitTarget, Target, Verification
from selfspec.tree import CandidateTree, TreeGrower, chain

if TYPE_CHECKING:
    from selfspec.loop.accept import Acceptance
    from selfspec.loop.sequence import Batch, Sequence


@dataclass
class _Row:
    """One sequence's state: the blocks' cache row, the hidden states not entered yet, the target's prefix length."""

    cache_row: CacheRow
    pending: Pending
    num_committed: int


class EarlyExitDrafter(Drafter):
    """Drafts with a trained early-exit head without LoRA.

    Args:
        num_draft_tokens: depth of the tree.
        num_nodes: most nodes of the tree, root included.
        width: nodes expanded at each depth, and children considered of each.
    """

    is_costly = True
    verifies_itself = True

    def __init__(
        self,
        target: Target,
        head: EarlyExitHead,
        *,
        num_draft_tokens: int = 4,
        num_nodes: int = 12,
        width: int = 3,
        name: str = "early_exit",
    ) -> None:
        assert not head.config.lora_rank, "adapted layers have keys and values of their own: a draft model serves them"
        self.name = name
        self.head = head.to(target.device, target.dtype)
        lay_out(self.head)
        self.exit_layer = head.config.exit_layer
        self.features = (self.exit_layer,)
        self.num_draft_tokens = num_draft_tokens
        self.num_nodes = num_nodes
        self.width = width
        self._target = target
        self._split = SplitTarget(target, self.exit_layer)
        self._blocks = head.student(target.model)
        resume = decoder_layers(self._blocks)[1][0]
        assert isinstance(resume, Resume)
        self._resume = resume
        shape = replace(target.kv_shape, num_layers=len(head.config.blocks))
        self._cache = KVCache(shape, dtype=target.dtype, device=target.device)
        self._rows: dict[Sequence, _Row] = {}
        # Hidden states [B, M, E] of every node drafted in this step.
        self._drafted: torch.Tensor | None = None

    def admit(self, sequence: Sequence, features: Mapping[int, torch.Tensor]) -> None:
        hidden = features[self.exit_layer]
        row = self._rows[sequence] = _Row(self._cache.open_row(), Pending(), sequence.row.length)
        row.pending.add(hidden, 0, 0, hidden.shape[1])

    def retire(self, sequence: Sequence) -> None:
        if (row := self._rows.pop(sequence, None)) is not None:
            self._cache.release(row.cache_row)

    def propose(self, batch: Batch, num_draft_tokens: int) -> CandidateTree:
        K = num_draft_tokens
        self._drafted = None
        if K == 0:
            return chain(batch.roots)
        rows = [self._rows[sequence] for sequence in batch.sequences]
        cache_rows = [row.cache_row for row in rows]
        grower = TreeGrower(batch.roots, self.width)
        nodes = replace(chain(batch.roots), is_chain=False, scores=torch.zeros(len(batch), 1, device=batch.device))
        drafted = self._split.enter(nodes, batch.rows, batch.cache, 1)
        hidden = self._catch_up(rows, drafted)
        below: CandidateTree | None = None
        width_before = 1
        for depth in range(1, K + 1):
            tokens, parent = grower.grow(self._logits(hidden))
            nodes = append(nodes, tokens, parent, width_before=width_before, scores=grower.beam_scores)
            entered = self._split.enter(nodes, batch.rows, batch.cache, tokens.shape[1])
            drafted = torch.cat([drafted, entered], dim=1)
            if depth < K:
                # The blocks' cache has the root in its prefix.
                below = append(below, tokens, parent, width_before=width_before)
                hidden = self._run_blocks(below, cache_rows, entered)
            width_before = tokens.shape[1]
        self._drafted = drafted
        origins = torch.arange(nodes.num_nodes, device=batch.device).expand_as(nodes.tokens)
        return replace(nodes, origins=origins).prune(self.num_nodes)

    def verify(self, target: Target, batch: Batch, tree: CandidateTree) -> Verification:
        """Go on at layer E with what drafting computed; the first layers' KV moves to the slots of the nodes kept."""
        if self._drafted is None or tree.origins is None:
            return super().verify(target, batch, tree)
        E = self.exit_layer
        batch.cache.arrange(batch.cache.locate(batch.rows), tree.origins, num_layers=E)
        hidden = self._drafted.gather(1, tree.origins[:, :, None].expand(-1, -1, self._drafted.shape[-1]))
        return self._split.resume(tree, batch.rows, batch.cache, hidden)

    def commit(
        self, batch: Batch, tree: CandidateTree, acceptance: Acceptance, features: Mapping[int, torch.Tensor]
    ) -> None:
        """The accepted path's hidden states wait to be entered; the root's may have been."""
        taken = features[self.exit_layer]
        for b, sequence in enumerate(batch.sequences):
            row = self._rows[sequence]
            num_nodes = sequence.row.length - row.num_committed
            num_new = sequence.row.length - row.cache_row.length - len(row.pending)
            row.pending.add(taken, b, num_nodes - num_new, num_nodes)
            row.num_committed = sequence.row.length

    def _catch_up(self, rows: list[_Row], roots: torch.Tensor) -> torch.Tensor:
        """Enter the pending hidden states and the roots' [B, 1, E]; the blocks' output [B, 1, E] at the roots."""
        for b, row in enumerate(rows):
            row.pending.add(roots, b, 0, 1)
        sizes = [len(row.pending) for row in rows]
        hidden = Pending.collect([row.pending for row in rows], max(sizes))  # [B, N, E]
        counts = torch.tensor(sizes).to(roots.device)
        # Which tokens these are does not matter: the hidden states stand for them.
        offsets = torch.arange(hidden.shape[1], device=roots.device)
        tokens = torch.where(offsets < counts[:, None], 0, -1)
        out = self._run_blocks(chain(tokens[:, 0], tokens[:, 1:]), [row.cache_row for row in rows], hidden)
        for row, size in zip(rows, sizes, strict=True):
            self._cache.advance(row.cache_row, size)
            row.pending.drop(size)
        return out.gather(1, (counts - 1)[:, None, None].expand(-1, 1, out.shape[-1]))

    def _run_blocks(self, nodes: CandidateTree, rows: list[CacheRow], hidden: torch.Tensor) -> torch.Tensor:
        """The blocks over the last nodes, whose states entering layer E are `hidden` [B, W, E]; their normed output."""
        self._resume.hidden = hidden
        num_new = hidden.shape[1]
        output = self._target.forward(self._blocks.base_model, nodes, rows, self._cache, num_new=num_new)
        self._resume.hidden = None
        return output.last_hidden_state

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        return self._target.model.get_output_embeddings()(normed)
