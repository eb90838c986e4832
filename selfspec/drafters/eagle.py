"""EAGLE: a one-layer head continues the target's features and grows a tree (https://arxiv.org/abs/2406.16858).

The head has a KV cache of its own. With the root at position T it holds entries 0 … T - 1, each computed from the target's
features (see `selfspec.heads.eagle` for what an entry pairs): features that came with the last verify pass are pending
and are entered, over whatever was drafted there, before the next tree grows. Entry T - 1 carries the root's embedding, and
its logits are the first draft's. Drafted nodes are scratch entries behind it: a node of depth d is entry T - 1 + d, and
its hidden input is the output of its parent's entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from selfspec.cache.kv import CacheRow, KVCache, KVShape, Places
from selfspec.drafters.fused_eagle import EaglePass, Growth
from selfspec.drafters.growth import LayerPass, grow, over_nodes, spread, tree_by_graph
from selfspec.drafters.waiting_features import Pending
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.kernels.linear import MAX_ROWS
from selfspec.kernels.tree_attention import tree_attention
from selfspec.loop.drafter import Drafter
from selfspec.model.graphs import CHUNK_BUCKETS, NODE_BUCKETS, ROW_BUCKETS, bucket, column_bucket, fill_rows
from selfspec.model.load import lay_out
from selfspec.model.target import Target
from selfspec.tree import CandidateTree, chain

if TYPE_CHECKING:
    from selfspec.loop.accept import Acceptance
    from selfspec.loop.sequence import Batch, Sequence

# Entries of a prompt that a pass takes, and features of a row that may wait while nothing is drafted.
PREFILL_CHUNK = 256
MAX_PENDING = 256


@dataclass
class _Row:
    """One sequence's state: its cache row, and the features, side by side, that wait to be entered."""

    cache_row: CacheRow
    pending: Pending


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
        self._target = target
        self.head = head.to(target.device, target.dtype)
        self.features = head.features
        depth, size, breadth = (4, 8, 2) if target.device.type == "cpu" else (6, 16, 4)
        self.num_draft_tokens = num_draft_tokens or depth
        self.num_nodes = num_nodes or size
        self.width = width or breadth
        layers = nn.ModuleDict({"head": head, "output": head.output_layer(target.model.get_output_embeddings())})
        lay_out(layers)
        self._output_layer = layers["output"]
        self._embed = target.model.get_input_embeddings()
        self._draft_ids = head.draft_ids
        config = head.config
        shape = KVShape(1, config.num_kv_heads, config.head_dim, config.head_dim)
        self._cache = KVCache(shape, dtype=target.dtype, device=target.device)
        self._scaling = config.head_dim**-0.5
        self._pass = None
        if EaglePass.is_common(head, self._output_layer):
            assert isinstance(head, EagleHead)
            self._pass = EaglePass(head, self._output_layer, self._embed, self._cache)
        self._rows: dict[Sequence, _Row] = {}

    def admit(self, sequence: Sequence, features: Mapping[int, torch.Tensor]) -> None:
        """Enter all of the prompt but its last feature, which waits like those of a verify pass."""
        taken = torch.cat([features[name] for name in self.features], dim=-1)  # [1, T, number of them * E]
        row = self._rows[sequence] = _Row(self._cache.open_row(), Pending())
        num_entries = max(taken.shape[1] - 1, 0)
        # A copy, lest it keep the whole prompt's alive.
        row.pending.add(taken[:, num_entries:].clone(), 0, 0, taken.shape[1] - num_entries)
        tokens = sequence.prefix_ids[1:]
        for first in range(0, num_entries, PREFILL_CHUNK):
            chunk = slice(first, min(num_entries, first + PREFILL_CHUNK))
            self._enter_prompt(row.cache_row, tokens[chunk], taken[:, chunk])

    def _enter_prompt(self, row: CacheRow, tokens: list[int], waiting: torch.Tensor) -> None:
        """Commit one chunk of a prompt; by a graph, padded, where there is one."""
        graphs, num_entries = self._target.graphs, len(tokens)
        size = bucket(num_entries, CHUNK_BUCKETS) if graphs is not None else None
        padding = (size or num_entries) - num_entries
        ids = torch.tensor(tokens + [-1] * padding)
        self._cache.reserve([row], len(ids))

        def enter(places: Places, ids: torch.Tensor, waiting: torch.Tensor) -> None:
            self._enter(chain(ids[:1], ids[None, 1:]), places, self._fuse(waiting), len(ids))

        if graphs is None or size is None:
            enter(self._cache.locate([row]), ids.to(self._cache.device, non_blocking=True), waiting)
        else:

            def body(numbers: torch.Tensor, ids: torch.Tensor, waiting: torch.Tensor) -> tuple[torch.Tensor, ...]:
                enter(Places.unpack(numbers), ids, waiting)
                return ()

            numbers = self._cache.pack([row], column_bucket(len(row.blocks)))
            waiting = F.pad(waiting, (0, 0, 0, padding))
            graphs(("eagle prompt", self._cache.serial), body, (numbers, ids, waiting))
        self._cache.advance(row, num_entries)
        self._cache.trim(row)

    def retire(self, sequence: Sequence) -> None:
        if (row := self._rows.pop(sequence, None)) is not None:
            self._cache.release(row.cache_row)

    def propose(self, batch: Batch, num_draft_tokens: int) -> CandidateTree:
        K = num_draft_tokens
        # A prompt of one token has no feature to start from.
        active = [b for b, s in enumerate(batch.sequences) if len(self._rows[s].pending)]
        if K == 0 or not active:
            return chain(batch.roots)
        sequences = [batch.sequences[b] for b in active]
        self.was_behind = self._catch_up(sequences, self.num_draft_tokens + 1)
        counts = [len(self._rows[s].pending) for s in sequences]
        tree = self._propose_by_graph(batch, sequences, counts, K)
        if tree is None:
            tree = self._propose_by_pass(batch, sequences, counts, K)
        for sequence, num_entries in zip(sequences, counts, strict=True):
            row = self._rows[sequence]
            self._cache.advance(row.cache_row, num_entries)
            row.pending.drop(num_entries)
        return tree if len(active) == len(batch) else spread(tree, batch.roots, torch.tensor(active).to(batch.device))

    def commit(
        self, batch: Batch, tree: CandidateTree, acceptance: Acceptance, features: Mapping[int, torch.Tensor]
    ) -> None:
        """The accepted path's features wait to be entered."""
        taken = torch.cat([features[name] for name in self.features], dim=-1)  # [B, K + 1, number of them * E]
        for b, sequence in enumerate(batch.sequences):
            row = self._rows[sequence]
            row.pending.add(taken, b, 0, sequence.row.length - row.cache_row.length - len(row.pending))
        self._catch_up(batch.sequences, MAX_PENDING)

    def _catch_up(self, sequences: list[Sequence], most: int) -> bool:
        """Where more than `most` features of a row wait, enter all but the newest of every row; whether there were."""
        counts = [len(self._rows[sequence].pending) for sequence in sequences]
        if max(counts) <= most:
            return False
        sequences = [sequence for sequence, count in zip(sequences, counts, strict=True) if count > 1]
        counts = [count - 1 for count in counts if count > 1]
        rows = [self._rows[sequence].cache_row for sequence in sequences]
        num_entries = max(counts)
        self._cache.reserve(rows, num_entries)
        tokens = self._waiting_ids(sequences, counts, num_entries)[:, 1:].to(self._cache.device)
        entries, hidden = chain(tokens[:, 0], tokens[:, 1:]), self._fuse(self._waiting(sequences, num_entries))
        self._enter(entries, self._cache.locate(rows), hidden, num_entries)
        for sequence, count in zip(sequences, counts, strict=True):
            row = self._rows[sequence]
            self._cache.advance(row.cache_row, count)
            row.pending.drop(count)
        return True

    def _propose_by_pass(self, batch: Batch, sequences: list[Sequence], counts: list[int], depth: int) -> CandidateTree:
        rows = [self._rows[sequence].cache_row for sequence in sequences]
        num_entries = max(counts)
        self._cache.reserve(rows, num_entries + self.width * depth)
        # The host counts with where rows lie, so that it is told what is entered in between.
        places = self._cache.locate(rows)
        later = [replace(row, length=row.length + count) for row, count in zip(rows, counts, strict=True)]
        ids = self._waiting_ids(sequences, counts, num_entries).to(batch.device)
        return self._draft(places, self._cache.locate(later), ids, self._waiting(sequences, num_entries), depth)

    def _propose_by_graph(
        self, batch: Batch, sequences: list[Sequence], counts: list[int], depth: int
    ) -> CandidateTree | None:
        """The whole proposal as one CUDA graph, where there is one."""
        graphs = self._target.graphs
        num_rows = bucket(len(sequences), ROW_BUCKETS)
        num_entries = bucket(self.num_draft_tokens + 1, NODE_BUCKETS)
        if graphs is None or num_rows is None or num_entries is None:
            return None
        rows = [self._rows[sequence].cache_row for sequence in sequences]
        self._cache.reserve(rows, num_entries + self.width * depth)
        # Rows that are filled up with do what the last one does.
        filled = rows + [rows[-1]] * (num_rows - len(rows))
        ids = fill_rows(self._waiting_ids(sequences, counts, num_entries), num_rows)
        waiting = fill_rows(self._waiting(sequences, num_entries), num_rows)
        numbers = self._cache.pack(filled, column_bucket(max(len(row.blocks) for row in rows)))

        def draft(numbers: torch.Tensor, ids: torch.Tensor, waiting: torch.Tensor) -> CandidateTree:
            places = Places.unpack(numbers)
            return self._draft(places, places.advanced((ids[:, 1:] >= 0).sum(1)), ids, waiting, depth)

        key = ("eagle", self._cache.serial, depth, self.width, self.num_nodes)
        return tree_by_graph(graphs, key, draft, (numbers, ids, waiting), num_rows=len(rows), depth=depth)

    def _waiting_ids(self, sequences: list[Sequence], counts: list[int], num_entries: int) -> torch.Tensor:
        """Host tensor [A, 1 + num_entries]: the root, then the tokens whose embeddings the entries need, -1 past them."""
        ids = []
        for sequence, count in zip(sequences, counts, strict=True):
            first = self._rows[sequence].cache_row.length + 1
            tokens = sequence.tokens_between(first, first + count)
            # The last entry carries the root's embedding.
            ids.append([tokens[-1], *tokens, *[-1] * (num_entries - count)])
        return torch.tensor(ids)

    def _waiting(self, sequences: list[Sequence], num_entries: int) -> torch.Tensor:
        """[A, num_entries, number of features * E]; past a row's own anything."""
        return Pending.collect([self._rows[sequence].pending for sequence in sequences], num_entries)

    def _draft(self, places: Places, later: Places, ids: torch.Tensor, waiting: torch.Tensor, depth: int) -> CandidateTree:
        """Enter what waits, then grow a tree: device work alone.

        Args:
            places, later: where the rows lie before and after what waits is entered.
            ids: as `_waiting_ids` gives them.
        """
        roots, tokens = ids[:, 0], ids[:, 1:]
        entries, hidden = chain(tokens[:, 0], tokens[:, 1:]), self._fuse(waiting)
        last = ((tokens >= 0).sum(1) - 1)[:, None, None]

        def last_of(outputs: torch.Tensor) -> torch.Tensor:
            return outputs.gather(1, last.expand(-1, 1, outputs.shape[-1]))

        run: LayerPass
        if self._pass is not None and len(ids) * max(entries.num_nodes, self.width) <= MAX_ROWS:
            layout, slots = self._cache.layout(places, entries)
            angles = self._pass.angles(layout.lengths[:, None] + entries.depths)
            logits, fed = (last_of(each) for each in self._pass(hidden, tokens.clamp(min=0), angles, layout, slots))
            run = Growth(self._pass, later, fed, depth=depth, width=self.width)
        else:
            normed, fed = (last_of(each) for each in self._enter(entries, places, hidden, tokens.shape[1]))
            logits = self._output_layer(normed)

            @over_nodes
            def run(nodes: CandidateTree, num_new: int, parent: torch.Tensor) -> torch.Tensor:
                nonlocal fed
                hidden = fed.gather(1, parent[:, :, None].expand(-1, -1, fed.shape[-1]))
                normed, fed = self._enter(nodes, later, hidden, num_new)
                return self._output_layer(normed)

        return grow(roots, logits, run, depth=depth, width=self.width, num_nodes=self.num_nodes, token_ids=self._draft_ids)

    def _fuse(self, waiting: torch.Tensor) -> torch.Tensor:
        """[A, N, E] from features side by side."""
        return self.head.fuse(list(waiting.chunk(len(self.features), dim=-1)))

    def _enter(
        self, entries: CandidateTree, places: Places, hidden: torch.Tensor, num_new: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head over the last `num_new` of `entries`, whose KV goes to the rows' scratch slots."""
        layout, write_slots = self._cache.layout(places, entries, num_new)
        keys, values = self._cache.keys[0], self._cache.values[0]

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys.index_copy_(0, write_slots, key.transpose(1, 2).flatten(0, 1))
            values.index_copy_(0, write_slots, value.transpose(1, 2).flatten(0, 1))
            return tree_attention(query, keys, values, layout, self._scaling)

        new = slice(entries.num_nodes - num_new, None)
        positions = layout.lengths[:, None] + entries.depths[:, new]
        return self.head(hidden, self._embed(entries.tokens[:, new].clamp(min=0)), positions, attend)
