"""EAGLE: a one-layer head continues the target's features and grows a tree (https://arxiv.org/abs/2406.16858).

The head has a KV cache of its own. With the root at position T it holds entries 0 … T - 1, each computed from the target's
features (see `selfspec.heads.eagle` for what an entry pairs): features that came with the last verify pass wait as pending
and are entered, over whatever was drafted there, before the next tree grows. Entry T - 1 carries the root's embedding, and
its logits are the first draft's. Drafted nodes are scratch entries behind it: a node of depth d is entry T - 1 + d, and
its hidden input is the output of its parent's entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from selfspec.cache import CacheRow, KVCache, KVShape
from selfspec.drafters.base import Drafter
from selfspec.drafters.growth import grow, spread
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.kernels.tree_attention import tree_attention
from selfspec.packing import can_pack, pack_linear_layers
from selfspec.target import Target
from selfspec.tree import CandidateTree, chain

if TYPE_CHECKING:
    from selfspec.accept import Acceptance
    from selfspec.sequence import Batch, Sequence

PREFILL_CHUNK = 512


@dataclass
class _Row:
    """One sequence's state: its cache row, and the fused features [n, E] that are not entered yet."""

    cache_row: CacheRow
    pending: torch.Tensor


class EagleDrafter(Drafter):
    """Drafts with a trained EAGLE head.

    Args:
        num_draft_tokens: depth of the tree.
        num_nodes: most nodes of the tree, root included.
        width: nodes expanded at each depth, and children considered of each.

    On a CPU the default tree is small: a pass over more than six nodes costs noticeably more than one over one.
    """

    is_costly = True

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
        self.name = name
        self.head = head.to(target.device, target.dtype)
        self.features = head.features
        depth, size, breadth = (4, 8, 2) if target.device.type == "cpu" else (6, 16, 4)
        self.num_draft_tokens = num_draft_tokens or depth
        self.num_nodes = num_nodes or size
        self.width = width or breadth
        layers = nn.ModuleDict({"head": head, "output": head.output_layer(target.model.get_output_embeddings())})
        if target.device.type == "cpu" and can_pack():
            pack_linear_layers(layers)
        self._output_layer = layers["output"]
        self._embed = target.model.get_input_embeddings()
        self._draft_ids = head.draft_ids
        config = head.config
        shape = KVShape(1, config.num_kv_heads, config.head_dim, config.head_dim)
        self._cache = KVCache(shape, dtype=target.dtype, device=target.device)
        self._scaling = config.head_dim**-0.5
        self._rows: dict[Sequence, _Row] = {}

    def admit(self, sequence: Sequence, features: Mapping[int, torch.Tensor]) -> None:
        """Enter all of the prompt but its last feature, which waits like those of a verify pass."""
        fused = self.head.fuse([features[name] for name in self.features])[0]  # [T, E]
        row = _Row(self._cache.open_row(), fused[-1:])
        self._rows[sequence] = row
        tokens = torch.tensor(sequence.prefix_ids[1:]).to(fused.device)
        for hidden, chunk in zip(fused[:-1].split(PREFILL_CHUNK), tokens.split(PREFILL_CHUNK), strict=True):
            if len(chunk):
                entries = chain(chunk[:1], chunk[None, 1:])
                self._enter(entries, [row.cache_row], hidden[None], entries.num_nodes)
                self._cache.advance(row.cache_row, len(chunk))

    def retire(self, sequence: Sequence) -> None:
        if (row := self._rows.pop(sequence, None)) is not None:
            self._cache.release(row.cache_row)

    def propose(self, batch: Batch, num_draft_tokens: int) -> CandidateTree:
        K = num_draft_tokens
        # A prompt of one token has no feature to start from.
        active = [b for b, s in enumerate(batch.sequences) if len(self._rows[s].pending)]
        if K == 0 or not active:
            return chain(batch.roots)
        index = torch.tensor(active).to(batch.device)
        rows = [self._rows[batch.sequences[b]] for b in active]
        normed, fed = self._catch_up(batch, index, rows)  # [A, 1, E] each
        output = self._output_layer
        cache_rows = [row.cache_row for row in rows]

        def run(nodes: CandidateTree, num_new: int, parent: torch.Tensor) -> torch.Tensor:
            nonlocal normed, fed
            hidden = fed.gather(1, parent[:, :, None].expand(-1, -1, fed.shape[-1]))
            normed, fed = self._enter(nodes, cache_rows, hidden, num_new)
            return output(normed)

        tree = grow(
            batch.roots[index],
            output(normed),
            run,
            depth=K,
            width=self.width,
            num_nodes=self.num_nodes,
            token_ids=self._draft_ids,
        )
        return spread(tree, batch.roots, index)

    def commit(
        self, batch: Batch, tree: CandidateTree, acceptance: Acceptance, features: Mapping[int, torch.Tensor]
    ) -> None:
        """The accepted path's features wait to be entered."""
        nodes = acceptance.path.clamp(min=0)[:, :, None]
        taken = [features[name].gather(1, nodes.expand(-1, -1, features[name].shape[-1])) for name in self.features]
        fused = self.head.fuse(taken)  # [B, K + 1, E]
        for b, sequence in enumerate(batch.sequences):
            row = self._rows[sequence]
            num_new = sequence.row.length - row.cache_row.length - len(row.pending)
            row.pending = torch.cat([row.pending, fused[b, :num_new]])

    def _catch_up(self, batch: Batch, index: torch.Tensor, rows: list[_Row]) -> tuple[torch.Tensor, torch.Tensor]:
        """Enter the pending features; the outputs [A, 1, E] of each row's last entry, the one with the root's embedding."""
        counts = [len(row.pending) for row in rows]
        N = max(counts)
        hidden = torch.nn.utils.rnn.pad_sequence([row.pending for row in rows], batch_first=True)  # [A, N, E]
        first = torch.tensor([row.cache_row.length for row in rows]).to(batch.device)
        count = torch.tensor(counts).to(batch.device)
        offsets = torch.arange(N, device=batch.device)
        tokens = batch.history[index].gather(1, first[:, None] + 1 + offsets)
        tokens = torch.where(offsets < count[:, None], tokens, -1)
        entries = chain(tokens[:, 0], tokens[:, 1:])
        outputs = self._enter(entries, [row.cache_row for row in rows], hidden, N)
        for row, num_entries in zip(rows, counts, strict=True):
            self._cache.advance(row.cache_row, num_entries)
            row.pending = row.pending[:0]
        last = (count - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        normed, fed = (output.gather(1, last) for output in outputs)
        return normed, fed

    def _enter(
        self, entries: CandidateTree, rows: list[CacheRow], hidden: torch.Tensor, num_new: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head over the last `num_new` of `entries`, whose KV goes to the rows' scratch slots."""
        self._cache.reserve(rows, entries.num_nodes)
        layout, write_slots = self._cache.layout(rows, entries, num_new)
        keys, values = self._cache.keys[0], self._cache.values[0]

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys.index_copy_(0, write_slots, key.transpose(1, 2).flatten(0, 1))
            values.index_copy_(0, write_slots, value.transpose(1, 2).flatten(0, 1))
            return tree_attention(query, keys, values, layout, self._scaling)

        new = slice(entries.num_nodes - num_new, None)
        positions = layout.lengths[:, None] + entries.depths[:, new]
        return self.head(hidden, self._embed(entries.tokens[:, new].clamp(min=0)), positions, attend)
