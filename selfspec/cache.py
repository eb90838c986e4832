"""The paged KV cache: one pool of blocks shared by all sequences, a list of blocks for each.

A row's committed prefix fills its storage indices `0 … length - 1`; a verify pass writes the candidate tree's N nodes at
`length … length + N - 1`, in scratch slots of the row's own blocks. Accepting a path copies its rows down to the prefix's
end; everything else there is overwritten by the next pass. The pool grows on demand, whatever the model's maximum.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch

from selfspec.accept import Acceptance
from selfspec.kernels.kv_compaction import kv_compaction
from selfspec.kernels.reference import slots_of
from selfspec.kernels.tree_attention import TreeLayout
from selfspec.tree import CandidateTree


@dataclass(frozen=True)
class KVShape:
    """What one token stores: L layers, G key-value heads, and the sizes of a key and of a value."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


@dataclass(eq=False)
class CacheRow:
    """One sequence's place in the pool."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    is_contiguous: bool = True


class KVCache:
    """A pool of `block_size`-token blocks.

    Args:
        shape: what one token stores.
        block_size: tokens a block.
        max_tokens: the most tokens the pool may ever hold, None for no limit but memory.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int = 16,
        max_tokens: int | None = None,
    ) -> None:
        self.shape = shape
        self.block_size = block_size
        self.max_blocks = None if max_tokens is None else max_tokens // block_size
        self._free: list[int] = []
        self._num_blocks = 0
        self.keys = torch.empty(shape.num_layers, 0, shape.num_kv_heads, shape.key_dim, dtype=dtype, device=device)
        self.values = torch.empty(shape.num_layers, 0, shape.num_kv_heads, shape.value_dim, dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self._num_blocks - len(self._free)

    def open_row(self) -> CacheRow:
        return CacheRow()

    def release(self, row: CacheRow) -> None:
        """Give a row's blocks back; the row is empty afterwards."""
        for block in row.blocks:
            heapq.heappush(self._free, block)
        row.blocks.clear()
        row.length = 0
        row.is_contiguous = True

    def reserve(self, rows: list[CacheRow], num_nodes: int) -> None:
        """Give every row room for `num_nodes` slots past its prefix, growing the pool where needed.

        Raises:
            MemoryError: the pool may not grow any further.
        """
        wanted = [-(-(row.length + num_nodes) // self.block_size) - len(row.blocks) for row in rows]
        missing = sum(max(count, 0) for count in wanted) - len(self._free)
        if missing > 0:
            self._grow(missing)
        for row, count in zip(rows, wanted, strict=True):
            for _ in range(count):
                block = heapq.heappop(self._free)
                row.is_contiguous = row.is_contiguous and (not row.blocks or block == row.blocks[-1] + 1)
                row.blocks.append(block)

    def _grow(self, num_missing: int) -> None:
        """Enlarge the pool by half at least, so that copying stays a constant cost a token."""
        num_new = max(num_missing, self._num_blocks // 2, 32)
        if self.max_blocks is not None:
            num_new = min(num_new, self.max_blocks - self._num_blocks)
        if num_new < num_missing:
            raise MemoryError(
                f"the KV cache holds {self.max_blocks} blocks of {self.block_size} tokens and needs {num_missing} more: "
                "lower the batch size or raise the cache's max_tokens"
            )
        num_slots = (self._num_blocks + num_new) * self.block_size
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(old.shape[0], num_slots, *old.shape[2:])
            new[:, : old.shape[1]] = old
            setattr(self, name, new)
        for block in range(self._num_blocks, self._num_blocks + num_new):
            heapq.heappush(self._free, block)
        self._num_blocks += num_new

    def layout(
        self, rows: list[CacheRow], tree: CandidateTree, num_new: int | None = None
    ) -> tuple[TreeLayout, torch.Tensor]:
        """Where a pass reads, and the slots it writes; `reserve` must have made the room.

        Args:
            num_new: how many of the tree's last nodes the pass computes, all by default; the others are stored already.

        Returns:
            The layout and the new nodes' slots [B * num_new].
        """
        N = tree.num_nodes
        first = 0 if num_new is None else N - num_new
        for row in rows:
            assert row.length + N <= len(row.blocks) * self.block_size, "reserve comes before layout"
        lengths, tables = self._lengths_and_tables(rows)
        layout = TreeLayout(
            block_tables=tables,
            lengths=lengths,
            host_lengths=[row.length for row in rows],
            depths=tree.depths,
            ancestor_mask=tree.ancestor_mask()[:, first:],
            block_size=self.block_size,
            row_slots=[self._row_slots(row, row.length + N) for row in rows] if self.device.type == "cpu" else None,
            max_depth=tree.max_depth,
            is_chain=tree.is_chain,
        )
        return layout, self._slots(tables, lengths[:, None] + torch.arange(first, N, device=self.device)).flatten()

    def _lengths_and_tables(self, rows: list[CacheRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """Prefix lengths [B] and block tables [B, M], padded with block 0."""
        num_columns = max(len(row.blocks) for row in rows)
        tables = [row.blocks + [0] * (num_columns - len(row.blocks)) for row in rows]
        return torch.tensor([row.length for row in rows]).to(self.device), torch.tensor(tables).to(self.device)

    def _slots(self, tables: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return slots_of(tables, index, self.block_size)

    def _row_slots(self, row: CacheRow, num_keys: int) -> slice | torch.Tensor:
        if row.is_contiguous:
            first = row.blocks[0] * self.block_size
            return slice(first, first + num_keys)
        index = torch.arange(num_keys, device=self.device)
        return self._slots(torch.tensor([row.blocks]).to(self.device), index[None])[0]

    def arrange(self, rows: list[CacheRow], origins: torch.Tensor, *, num_layers: int) -> None:
        """Move the scratch entries `origins` [B, N], ascending, to the first N scratch slots, in the first layers only."""
        lengths, tables = self._lengths_and_tables(rows)
        source = self._slots(tables, lengths[:, None] + origins)
        target = self._slots(tables, lengths[:, None] + torch.arange(origins.shape[1], device=self.device))
        kv_compaction(self.keys[:num_layers], self.values[:num_layers], source, target)

    def compact(self, rows: list[CacheRow], tree: CandidateTree, acceptance: Acceptance) -> None:
        """Move the accepted path's KV to the prefix's end. `advance` then counts it in."""
        if tree.is_chain:
            # A chain's path lies in its storage order already.
            return
        path = acceptance.path
        lengths, tables = self._lengths_and_tables(rows)
        steps = torch.arange(path.shape[1], device=self.device).expand_as(path)
        # Past the path's end a slot is moved onto itself: shapes stay fixed and nothing changes.
        target = self._slots(tables, lengths[:, None] + steps.minimum(acceptance.num_accepted[:, None]))
        source_nodes = torch.where(path >= 0, path, path.gather(1, acceptance.num_accepted[:, None]))
        source = self._slots(tables, lengths[:, None] + source_nodes)
        kv_compaction(self.keys, self.values, source, target)

    def advance(self, row: CacheRow, num_tokens: int) -> None:
        """Count `num_tokens` stored tokens as committed."""
        row.length += num_tokens
        assert row.length <= len(row.blocks) * self.block_size

    def rewind(self, row: CacheRow, length: int) -> None:
        """Forget everything behind `length` tokens; blocks stay with the row."""
        assert length <= row.length
        row.length = length
