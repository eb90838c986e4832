"""Early exit: the target's first layers and a few trained blocks draft a candidate tree; verify goes on from those layers.

Draft and verify share the first E layers' KV cache. Drafting computes every node's entries there, so the proposal's `verify`
only moves the chosen nodes' entries to their slots and runs the layers from E on.

Invariant: the blocks have their own cache with an entry for each token. With the root at position T it holds entries
0 … T - 1, and the next proposal adds the root's. Entries are computed from the hidden states that enter layer E, which are
exact for drafted nodes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from selfspec.cache.blocks import CacheRow
from selfspec.cache.kv import KVCache, Places
from selfspec.drafters.growth import append, tree_shapes
from selfspec.drafters.waiting_features import WaitingFeatures
from selfspec.heads.early_exit import EarlyExitHead
from selfspec.loop.drafter import DefaultShape, Drafter, DraftShape, Outcome, Proposal
from selfspec.loop.planner import Shape
from selfspec.model.layers import private_copy
from selfspec.model.load import lay_out
from selfspec.model.split import SplitTarget
from selfspec.model.target import Target, Verification
from selfspec.tree import CandidateTree, TreeGrower, chain

if TYPE_CHECKING:
    from selfspec.loop.batch import Batch
    from selfspec.loop.sequence import Sequence

# The most hidden states that one pass of the blocks enters, and that wait while nothing is drafted.
CHUNK = 256


@dataclass
class _Row:
    """One sequence's state: the blocks' cache row, and the hidden states that wait to be entered."""

    cache_row: CacheRow
    pending: WaitingFeatures


class EarlyExitDrafter(Drafter):
    """Drafts with a trained early-exit head without LoRA. It uses a copy of the given head that shares the weights.

    Args:
        num_draft_tokens: depth of the tree.
        num_nodes: most nodes of the tree, root included.
        width: nodes expanded at each depth, and children considered for each.
    """

    is_costly = True
    default_shape = DefaultShape(cpu=DraftShape(4, 12, 3), gpu=DraftShape(4, 12, 3))

    def __init__(
        self,
        target: Target,
        head: EarlyExitHead,
        *,
        num_draft_tokens: int | None = None,
        num_nodes: int | None = None,
        width: int | None = None,
        name: str = "early_exit",
    ) -> None:
        assert not head.config.lora_rank, "layers with LoRA have their own keys and values, so a draft model serves them"
        shape = self.default_shape.on(target.device)
        self.name = name
        self.num_draft_tokens = num_draft_tokens or shape.num_draft_tokens
        self.num_nodes = num_nodes or shape.num_nodes
        self.width = width or shape.width
        self.exit_layer = head.config.exit_layer
        self.features = self.block_names = (self.exit_layer,)
        self.head = private_copy(head).to(target.device, target.dtype)
        lay_out(self.head, may_round=True)
        self._target = target
        self._logits_of = target.logits_of
        self._split = SplitTarget(target, self.exit_layer)
        self._blocks = self.head.student(target.model)
        self._cache = target.new_cache(replace(target.kv_shape, num_layers=len(head.config.blocks)))
        self._rows: dict[Sequence, _Row] = {}

    def shapes(self, num_rows: int) -> list[Shape]:
        return tree_shapes(self.num_draft_tokens, self.width, self.num_nodes)

    def admit(self, sequence: Sequence, features: Mapping[int, torch.Tensor]) -> None:
        hidden = features[self.exit_layer]
        row = self._rows[sequence] = _Row(self._cache.open_row(), WaitingFeatures())
        row.pending.add(hidden, 0, 0, hidden.shape[1])
        self._work_off(row, 0)

    def retire(self, sequence: Sequence) -> None:
        if (row := self._rows.pop(sequence, None)) is not None:
            self._cache.release(row.cache_row)

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        K = num_draft_tokens
        if K == 0:
            return Proposal(chain(batch.roots))
        rows = [self._rows[sequence] for sequence in batch.sequences]
        cache_rows = [row.cache_row for row in rows]
        grower = TreeGrower(batch.roots, self.width)
        nodes = replace(chain(batch.roots), is_chain=False, scores=torch.zeros(len(batch), 1, device=batch.device))
        drafted = self._split.enter(nodes, batch.rows, batch.cache, 1)
        hidden = self._catch_up(rows, drafted)
        below: CandidateTree | None = None
        width_before = 1
        for depth in range(1, K + 1):
            tokens, parent = grower.grow(self._logits_of(hidden))
            nodes = append(nodes, tokens, parent, width_before=width_before, scores=grower.beam_scores)
            entered = self._split.enter(nodes, batch.rows, batch.cache, tokens.shape[1])
            drafted = torch.cat([drafted, entered], dim=1)
            if depth < K:
                # Without the root, because it is in the prefix of the blocks' cache.
                below = append(below, tokens, parent, width_before=width_before)
                hidden = self._run_blocks(below, cache_rows, entered)
            width_before = tokens.shape[1]
        origins = torch.arange(nodes.num_nodes, device=batch.device).expand_as(nodes.tokens)
        tree = replace(nodes, origins=origins).prune(self.num_nodes)
        return Proposal(tree, verify=partial(self._resume, batch.cache, drafted))

    def _resume(self, cache: KVCache, drafted: torch.Tensor, tree: CandidateTree, places: Places) -> Verification:
        """Go on at layer E with what drafting computed. The first layers' KV moves to the kept nodes' slots.

        Args:
            drafted: [B, M, E] hidden states that enter layer E at the M nodes that were drafted.
        """
        assert tree.origins is not None
        cache.arrange(places, tree.origins, num_layers=self.exit_layer)
        hidden = drafted.gather(1, tree.origins[:, :, None].expand(-1, -1, drafted.shape[-1]))
        return self._split.resume(tree, places, cache, hidden)

    def commit(self, batch: Batch, proposal: Proposal, outcome: Outcome) -> None:
        """Keep the accepted path's hidden states, which wait to be entered; the root's may have been entered already."""
        # A copy, because a graph's next run overwrites what its last one gave.
        taken = outcome.features[self.exit_layer].clone()
        for b, (sequence, count) in enumerate(zip(batch.sequences, outcome.num_new, strict=True)):
            row = self._rows[sequence]
            num_missing = sequence.row.length - row.cache_row.length - len(row.pending)
            row.pending.add(taken, b, count - num_missing, count)
            self._work_off(row, CHUNK)

    def _work_off(self, row: _Row, most: int) -> None:
        """If more than `most` hidden states wait, enter all of them, a chunk at a time."""
        if len(row.pending) <= most:
            return
        while size := min(len(row.pending), CHUNK):
            hidden = WaitingFeatures.collect([row.pending], size)
            tokens = torch.zeros(1, size, dtype=torch.int64, device=hidden.device)
            self._run_blocks(chain(tokens[:, 0], tokens[:, 1:]), [row.cache_row], hidden)
            self._cache.advance(row.cache_row, size)
            row.pending.drop(size)

    def _catch_up(self, rows: list[_Row], roots: torch.Tensor) -> torch.Tensor:
        """Enter the waiting hidden states and the roots' [B, 1, E]; returns the blocks' output [B, 1, E] at the roots."""
        for b, row in enumerate(rows):
            row.pending.add(roots, b, 0, 1)
        sizes = [len(row.pending) for row in rows]
        hidden = WaitingFeatures.collect([row.pending for row in rows], max(sizes))  # [B, N, E]
        counts = torch.tensor(sizes).to(roots.device)
        # Any token does, because the blocks read only the hidden states.
        offsets = torch.arange(hidden.shape[1], device=roots.device)
        tokens = torch.where(offsets < counts[:, None], 0, -1)
        out = self._run_blocks(chain(tokens[:, 0], tokens[:, 1:]), [row.cache_row for row in rows], hidden)
        for row, size in zip(rows, sizes, strict=True):
            self._cache.advance(row.cache_row, size)
            row.pending.drop(size)
        return out.gather(1, (counts - 1)[:, None, None].expand(-1, 1, out.shape[-1]))

    def _run_blocks(self, nodes: CandidateTree, rows: list[CacheRow], hidden: torch.Tensor) -> torch.Tensor:
        """The blocks' normed output [B, W, E] at the last W nodes, from the states `hidden` [B, W, E] that enter layer E."""
        places = self._cache.place(rows, nodes.num_nodes)
        model, num_new = self._blocks.base_model, hidden.shape[1]
        output = self._target.run(model, nodes, places, self._cache, num_new=num_new, resume_from=hidden)
        return output.last_hidden_state
