"""EAGLE: a one-layer head drafts a candidate tree from the target's features (https://arxiv.org/abs/2406.16858).

The head has its own KV cache. Invariant: with the root at position T, a tree grows from entries 0 … T - 1, each computed
from the target's features (`selfspec.heads.eagle` says what an entry pairs). The features of the last verify pass wait, and
are entered before the next tree grows, over what was drafted in their slots. Entry T - 1 carries the root's embedding, and
its logits give the first drafts. Drafted nodes are scratch entries after it: a node of depth d is entry T - 1 + d, and its
hidden input is the output of its parent's entry.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from selfspec.cache.blocks import CacheRow
from selfspec.cache.kv import KVShape, Places
from selfspec.drafters.fused_eagle import EaglePass, Growth
from selfspec.drafters.growth import LayerPass, as_tensors, from_tensors, grow, over_nodes, spread
from selfspec.drafters.waiting_features import WaitingFeatures
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.kernels.tree_attention import tree_attention
from selfspec.loop.drafter import DefaultShape, Drafter, DraftShape, Outcome, Proposal
from selfspec.model.layers import private_copy
from selfspec.model.load import lay_out
from selfspec.model.output import LogitShape
from selfspec.model.packed_linear import PackedLinear
from selfspec.model.target import Target
from selfspec.tree import CandidateTree, chain

if TYPE_CHECKING:
    from selfspec.loop.batch import Batch
    from selfspec.loop.sequence import Sequence

logger = logging.getLogger(__name__)

# The most features of a row that wait while nothing is drafted.
MAX_PENDING = 256


@dataclass
class _Row:
    """One sequence's state: its cache row, and the concatenated features that wait to be entered."""

    cache_row: CacheRow
    pending: WaitingFeatures


class EagleDrafter(Drafter):
    """Drafts with a trained EAGLE head. It uses a copy of the given head that shares the weights.

    Args:
        num_draft_tokens: depth of the tree.
        num_nodes: most nodes of the tree, root included.
        width: nodes expanded at each depth, and children considered for each.
    """

    is_costly = True
    default_shape = DefaultShape(cpu=DraftShape(4, 8, 2), gpu=DraftShape(6, 16, 4))

    def __init__(
        self,
        target: Target,
        head: EagleHead | Eagle1Head,
        *,
        num_draft_tokens: int | None = None,
        num_nodes: int | None = None,
        width: int | None = None,
        name: str = "eagle",
    ) -> None:
        shape = self.default_shape.on(target.device)
        self.name = name
        self._target = target
        self.features = head.features
        self.num_draft_tokens = num_draft_tokens or shape.num_draft_tokens
        self.num_nodes = num_nodes or shape.num_nodes
        self.width = width or shape.width
        # Products with the target's LM head become logits as the target's own do.
        has_own_output = isinstance(head, EagleHead) and head.lm_head is not None
        self._logit_shape = LogitShape() if has_own_output else target.logit_shape
        own = private_copy(head).to(target.device, target.dtype)
        self._draft_ids = own.draft_ids
        lm_head = target.model.get_output_embeddings()
        look_up = lm_head.rows if isinstance(lm_head, PackedLinear) else None
        layers = nn.ModuleDict({"head": own, "output": own.output_layer(lm_head, look_up)})
        lay_out(layers)
        self.head = own
        self._output_layer = layers["output"]
        self._embed = target.model.get_input_embeddings()
        config = head.config
        self._cache = target.new_cache(KVShape(1, config.num_kv_heads, config.head_dim, config.head_dim))
        self._scaling = config.head_dim**-0.5
        self._pass: EaglePass | None = None
        if EaglePass.is_common(own, self._output_layer):
            assert isinstance(own, EagleHead)
            self._pass = EaglePass(own, self._output_layer, self._embed, self._cache)
            self._check_pass()
        self._rows: dict[Sequence, _Row] = {}

    def admit(self, sequence: Sequence, features: Mapping[int, torch.Tensor]) -> None:
        """Enter all of the prompt's features but the last, which waits like those of a verify pass."""
        taken = torch.cat([features[name] for name in self.features], dim=-1)  # [1, T, number of them * E]
        row = self._rows[sequence] = _Row(self._cache.open_row(), WaitingFeatures())
        num_entries = max(taken.shape[1] - 1, 0)
        # A copy, because a view would keep the whole prompt's features alive.
        row.pending.add(taken[:, num_entries:].clone(), 0, 0, taken.shape[1] - num_entries)
        tokens = sequence.prefix_ids[1:]
        size = self._target.passes.chunk_size
        for first in range(0, num_entries, size):
            chunk = slice(first, min(num_entries, first + size))
            self._enter_prompt(row.cache_row, tokens[chunk], taken[:, chunk])

    def _enter_prompt(self, row: CacheRow, tokens: list[int], waiting: torch.Tensor) -> None:
        """Commit one chunk of a prompt: T tokens, and the features [1, T, number of features * E] paired with them."""
        passes = self._target.passes
        shape = passes.chunk_shape(len(tokens), row, self._cache)
        num_entries = len(tokens) if shape is None else shape.num_nodes
        padding = num_entries - len(tokens)

        def enter(places: Places, ids: torch.Tensor, waiting: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self._enter(chain(ids[:, 0], ids[:, 1:]), places, self._fuse(waiting), ids.shape[1])
            return ()

        given = (torch.tensor([tokens + [-1] * padding]), F.pad(waiting, (0, 0, 0, padding)) if padding else waiting)
        passes.enter("eagle prompt", enter, [row], self._cache, shape=shape, given=given, num_slots=num_entries)
        self._cache.advance(row, len(tokens))
        self._cache.trim(row)

    def retire(self, sequence: Sequence) -> None:
        if (row := self._rows.pop(sequence, None)) is not None:
            self._cache.release(row.cache_row)

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        # A prompt of one token has no feature to start from.
        active = [b for b, s in enumerate(batch.sequences) if len(self._rows[s].pending)]
        if num_draft_tokens == 0 or not active:
            return Proposal(chain(batch.roots))
        sequences = [batch.sequences[b] for b in active]
        was_behind = self._catch_up(sequences, self.num_draft_tokens + 1)
        tree = self._grow(sequences, num_draft_tokens)
        if len(active) < len(batch):
            tree = spread(tree, batch.roots, torch.tensor(active).to(batch.device))
        return Proposal(tree, is_typical=not was_behind)

    def commit(self, batch: Batch, proposal: Proposal, outcome: Outcome) -> None:
        """Keep the accepted path's features, which wait to be entered."""
        taken = torch.cat([outcome.features[name] for name in self.features], dim=-1)  # [B, K + 1, number of them * E]
        for b, (sequence, count) in enumerate(zip(batch.sequences, outcome.num_new, strict=True)):
            self._rows[sequence].pending.add(taken, b, 0, count)
        self._catch_up(batch.sequences, MAX_PENDING)

    def _catch_up(self, sequences: list[Sequence], most: int) -> bool:
        """If more than `most` features of a row wait, enter all but the newest of every row; returns whether it did."""
        counts = [len(self._rows[sequence].pending) for sequence in sequences]
        if max(counts) <= most:
            return False
        sequences = [sequence for sequence, count in zip(sequences, counts, strict=True) if count > 1]
        counts = [count - 1 for count in counts if count > 1]
        rows = [self._rows[sequence].cache_row for sequence in sequences]
        num_entries = max(counts)
        places = self._cache.place(rows, num_entries)
        tokens = self._waiting_ids(sequences, counts, num_entries)[:, 1:].to(self._cache.device)
        entries, hidden = chain(tokens[:, 0], tokens[:, 1:]), self._fuse(self._waiting(sequences, num_entries))
        self._enter(entries, places, hidden, num_entries)
        self._count_in(sequences, counts)
        return True

    def _grow(self, sequences: list[Sequence], depth: int) -> CandidateTree:
        """Enter the waiting features of the rows, and grow a tree for each row."""
        passes = self._target.passes
        rows = [self._rows[sequence].cache_row for sequence in sequences]
        counts = [len(self._rows[sequence].pending) for sequence in sequences]
        shape = passes.entries_shape(len(rows), self.num_draft_tokens + 1)
        num_entries = max(counts) if shape is None else shape.num_nodes

        def draft(places: Places, ids: torch.Tensor, waiting: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return as_tensors(self._draft(places, ids, waiting, depth))

        tree = passes.enter(
            ("eagle", depth, self.width, self.num_nodes),
            draft,
            rows,
            self._cache,
            shape=shape,
            given=(self._waiting_ids(sequences, counts, num_entries), self._waiting(sequences, num_entries)),
            num_slots=num_entries + self.width * depth,
        )
        self._count_in(sequences, counts)
        return from_tensors(tree, depth=depth)

    def _count_in(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Count `counts` features of each row as entered."""
        for sequence, count in zip(sequences, counts, strict=True):
            row = self._rows[sequence]
            self._cache.advance(row.cache_row, count)
            row.pending.drop(count)

    def _waiting_ids(self, sequences: list[Sequence], counts: list[int], num_entries: int) -> torch.Tensor:
        """Host tensor [A, 1 + num_entries]: the root, then the tokens whose embeddings the entries need, then -1."""
        ids = []
        for sequence, count in zip(sequences, counts, strict=True):
            first = self._rows[sequence].cache_row.length + 1
            tokens = sequence.tokens_between(first, first + count)
            # The last entry carries the root's embedding.
            ids.append([tokens[-1], *tokens, *[-1] * (num_entries - count)])
        return torch.tensor(ids)

    def _waiting(self, sequences: list[Sequence], num_entries: int) -> torch.Tensor:
        """The rows' waiting features [A, num_entries, number of features * E]; garbage after a row's last."""
        return WaitingFeatures.collect([self._rows[sequence].pending for sequence in sequences], num_entries)

    def _draft(self, places: Places, ids: torch.Tensor, waiting: torch.Tensor, depth: int) -> CandidateTree:
        """Enter the waiting features, then grow a tree. A function of tensors.

        Args:
            places: where the rows lie before the features are entered.
            ids: [A, 1 + N], as `_waiting_ids` gives them.
            waiting: [A, N, number of features * E].
        """
        roots, tokens = ids[:, 0], ids[:, 1:]
        counts = (tokens >= 0).sum(1)
        later = places.advanced(counts)
        entries, hidden = chain(tokens[:, 0], tokens[:, 1:]), self._fuse(waiting)
        last = (counts - 1)[:, None, None]

        def last_of(outputs: torch.Tensor) -> torch.Tensor:
            return outputs.gather(1, last.expand(-1, 1, outputs.shape[-1]))

        run: LayerPass
        if self._pass is not None:
            products, fed = (last_of(each) for each in self._enter_fused(self._pass, entries, places, hidden))
            run = Growth(self._pass, later, fed, depth=depth, width=self.width)
        else:
            normed, fed = (last_of(each) for each in self._enter(entries, places, hidden, tokens.shape[1]))
            products = self._output_layer(normed)

            @over_nodes
            def run(nodes: CandidateTree, num_new: int, parent: torch.Tensor) -> torch.Tensor:
                nonlocal fed
                hidden = fed.gather(1, parent[:, :, None].expand(-1, -1, fed.shape[-1]))
                normed, fed = self._enter(nodes, later, hidden, num_new)
                return self._output_layer(normed)

        def shaped(tokens: torch.Tensor, parent: torch.Tensor) -> torch.Tensor:
            return self._logit_shape(run(tokens, parent))

        shape = {"depth": depth, "width": self.width, "num_nodes": self.num_nodes}
        return grow(roots, self._logit_shape(products), shaped, token_ids=self._draft_ids, **shape)

    def _enter_fused(
        self, fused: EaglePass, entries: CandidateTree, places: Places, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Products [A, N, V] and states to feed back [A, N, E], by the fused pass, from `hidden` [A, N, E]."""
        layout, slots = self._cache.layout(places, entries)
        angles = fused.angles(layout.lengths[:, None] + entries.depths)
        return fused(hidden, entries.tokens.clamp(min=0), angles, layout, slots)

    @torch.inference_mode()
    def _check_pass(self) -> None:
        """Drop the fused pass if it differs from the head's own forward, because a head may have parts unknown to it."""
        assert self._pass is not None
        generator = torch.Generator().manual_seed(0)
        size = self.head.config.target.hidden_size
        hidden = torch.randn(1, 5, size, generator=generator).to(self._cache.device, self._cache.keys.dtype)
        tokens = torch.arange(5, device=self._cache.device)[None] % self._target.config.vocab_size
        entries, row = chain(tokens[:, 0], tokens[:, 1:]), self._cache.open_row()
        places = self._cache.place([row], 5)
        own = self._output_layer(self._enter(entries, places, hidden, 5)[0]).float()
        fused = self._enter_fused(self._pass, entries, places, hidden)[0].float()
        self._cache.release(row)
        # In low precision the two round at different places.
        gap = float((fused - own).norm() / own.norm())
        if not gap < (1e-3 if hidden.dtype == torch.float32 else 5e-2):
            logger.warning(
                "%s: the fused pass gives different logits (relative gap %.2g), so the head's own pass runs",
                self.name,
                gap,
            )
            self._pass = None

    def _fuse(self, waiting: torch.Tensor) -> torch.Tensor:
        """The head's fused features [A, N, E] from concatenated ones [A, N, number of features * E]."""
        return self.head.fuse(list(waiting.chunk(len(self.features), dim=-1)))

    def _enter(
        self, entries: CandidateTree, places: Places, hidden: torch.Tensor, num_new: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head over the last `num_new` of `entries` and store their KV in the rows' scratch slots.

        Args:
            hidden: [A, num_new, E], the entries' hidden inputs.

        Returns:
            The normed states for the output layer, and the states to feed back, [A, num_new, E] each.
        """
        layout, write_slots = self._cache.layout(places, entries, num_new)
        keys, values = self._cache.keys[0], self._cache.values[0]

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys.index_copy_(0, write_slots, key.transpose(1, 2).flatten(0, 1))
            values.index_copy_(0, write_slots, value.transpose(1, 2).flatten(0, 1))
            return tree_attention(query, keys, values, layout, self._scaling)

        new = slice(entries.num_nodes - num_new, None)
        positions = layout.lengths[:, None] + entries.depths[:, new]
        return self.head(hidden, self._embed(entries.tokens[:, new].clamp(min=0)), positions, attend)
