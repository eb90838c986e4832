"""The paged KV cache's tensors: what prefill and verify read and write, and the stage "compact", which keeps a path.

A verify pass writes the candidate tree's N nodes after a row's prefix, at storage indices `length … length + N - 1`, in
scratch slots of the row's own blocks. Compacting moves the accepted path's entries to the prefix's end, and the next pass
overwrites the rest. `selfspec.cache.blocks` decides which blocks a row has.

Invariant: after compaction and `advance` a row holds what a prefill of its committed tokens would have stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from selfspec.cache.blocks import BlockPool, CacheRow
from selfspec.cache.rows import RowState
from selfspec.kernels.jit import is_compiled_for
from selfspec.kernels.kv_compaction import kv_compaction
from selfspec.kernels.slots import slots_of
from selfspec.kernels.tree_layout import TreeLayout
from selfspec.tree import CandidateTree


@dataclass(frozen=True)
class KVShape:
    """What one token stores: L layers, G key-value heads, and the sizes of a key and of a value."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_values_per_token(self) -> int:
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_values_per_token * dtype.itemsize


@dataclass(frozen=True)
class Places:
    """Where rows lie in the pool, on its device.

    Attributes:
        lengths: [B] int64, the length of each row's prefix.
        block_tables: [B, M] int64, each row's blocks, padded with block 0.
        rows: the rows themselves, on the host; None in a CUDA graph, which will run with other numbers.
    """

    lengths: torch.Tensor
    block_tables: torch.Tensor
    rows: Sequence[CacheRow] | None = None

    @classmethod
    def unpack(cls, numbers: torch.Tensor) -> Places:
        """From the tensor [B, 1 + M] that `KVCache.pack` made."""
        return cls(numbers[:, 0].contiguous(), numbers[:, 1:])

    def advanced(self, num_tokens: torch.Tensor) -> Places:
        """The same rows with `num_tokens` [B] more tokens in their prefixes."""
        rows = None
        if self.rows is not None and not is_compiled_for(num_tokens):
            # Only the kernels' twins read rows. Where kernels run, this would wait for the device.
            rows = [replace(row, length=row.length + n) for row, n in zip(self.rows, num_tokens.tolist(), strict=True)]
        return Places(self.lengths + num_tokens, self.block_tables, rows)


@dataclass
class SideLayer:
    """A drafter's own layer in the cache's slots: keys [num_slots, G, D] and values [num_slots, G, Dv]."""

    keys: torch.Tensor
    values: torch.Tensor


_SERIALS = itertools.count()
# The fewest bytes that a pool grows by where CUDA graphs hold its addresses, because every growth invalidates all graphs.
CAPTURED_GROWTH = 64 << 20


class KVCache(BlockPool):
    """A block pool with tensors: one slot per token in every layer.

    Args:
        shape: what one token stores.
        max_tokens, block_size, use_sharing: as in `BlockPool`.
        is_captured: CUDA graphs hold the addresses, so the cache takes all its memory at once if it has a limit, and grows
            in large steps if it has none.

    Attributes:
        keys, values: [L, num_slots, G, D]. The last block is nobody's; rows that fill up a batch write there.
        state: what the device knows of the rows that decode.
        serial: identifies the addresses of all these tensors in graph keys; it changes whenever they do.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int = 16,
        max_tokens: int | None = None,
        use_sharing: bool = False,
        is_captured: bool = False,
    ) -> None:
        bytes_per_block = block_size * shape.bytes_per_token(dtype)
        least_growth = max(256, CAPTURED_GROWTH // bytes_per_block) if is_captured else 32
        super().__init__(block_size=block_size, max_tokens=max_tokens, use_sharing=use_sharing, least_growth=least_growth)
        self.shape = shape
        self.serial = next(_SERIALS)
        layer = (block_size, shape.num_kv_heads)
        self.keys = torch.zeros(shape.num_layers, *layer, shape.key_dim, dtype=dtype, device=device)
        self.values = torch.zeros(shape.num_layers, *layer, shape.value_dim, dtype=dtype, device=device)
        self.state = RowState(1, device)
        self._sides: WeakKeyDictionary[Any, SideLayer] = WeakKeyDictionary()
        # The host's copy of the block tables, by slot; the null slot's never changes.
        self._tables = torch.zeros(2, 0, dtype=torch.int64)
        if self.max_blocks is not None and is_captured:
            try:
                self.grow(self.max_blocks)
            except torch.OutOfMemoryError as error:
                size = self.max_blocks * bytes_per_block / 2**30
                free = torch.cuda.mem_get_info(device)[0] / 2**30
                raise MemoryError(
                    f"a KV cache of {self.max_tokens} tokens takes {size:.1f} GiB, and {free:.1f} GiB are free on "
                    f"{device}: lower max_tokens (a server's cache_tokens)"
                ) from error

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def reset(self) -> None:
        """Forget every row, its slot and everything published; the blocks stay."""
        super().reset()
        self.state.reset()

    def grow(self, num_new: int) -> None:
        """Add `num_new` free blocks. The tensors move to other addresses with what rows hold."""
        num_slots = (self.num_blocks + num_new + 1) * self.block_size

        def larger(old: torch.Tensor, dim: int) -> torch.Tensor:
            new = old.new_empty(*old.shape[:dim], num_slots, *old.shape[dim + 1 :])
            held = self.num_blocks * self.block_size
            new.narrow(dim, 0, held).copy_(old.narrow(dim, 0, held))
            # Finite, because what nobody's rows compute from it should be finite.
            new.narrow(dim, num_slots - self.block_size, self.block_size).zero_()
            return new

        # Allocate all first: if the last does not fit, nothing has changed.
        keys, values = larger(self.keys, 1), larger(self.values, 1)
        sides = {owner: (larger(side.keys, 0), larger(side.values, 0)) for owner, side in self._sides.items()}
        self.keys, self.values = keys, values
        for owner, tensors in sides.items():
            self._sides[owner].keys, self._sides[owner].values = tensors
        self.serial = next(_SERIALS)
        super().grow(num_new)
        self._tables[-1] = self.num_blocks

    def side(self, owner: Any, shape: KVShape) -> SideLayer:
        """The layer that `owner` keeps in this cache's slots, of a shape of one layer; made when it is first asked for."""
        if owner not in self._sides:
            layer = (self.keys.shape[1], shape.num_kv_heads)
            keys, values = (self.keys.new_zeros(*layer, size) for size in (shape.key_dim, shape.value_dim))
            self._sides[owner] = SideLayer(keys, values)
        return self._sides[owner]

    def make_room(self, num_rows: int, num_tokens: int = 0) -> None:
        """See that `num_rows` rows may decode at once, with texts of `num_tokens` tokens."""
        state = self.state
        if num_rows > state.num_slots or not state.has_room(num_tokens):
            null = self._tables[-1:]
            state.grow(num_rows, num_tokens)
            missing = state.num_slots + 1 - len(self._tables)
            new = self._tables.new_zeros(missing, self._tables.shape[1])
            self._tables = torch.cat([self._tables[:-1], new, null])
            self.serial = next(_SERIALS)

    def open_slot(self, row: CacheRow) -> int:
        """Give a row a slot, for as long as it decodes."""
        row.slot, row.num_packed = self.state.open(), 0
        return row.slot

    def close_slot(self, row: CacheRow) -> None:
        """Take a row's slot back."""
        assert row.slot is not None
        self.state.close(row.slot)
        row.slot = None

    def pack_slots(self, rows: Sequence[CacheRow], num_rows: int, num_columns: int) -> torch.Tensor:
        """The slots and block tables of rows that decode, as one host tensor [num_rows, 1 + num_columns] int64.

        Rows after the last one have the slot `null`.
        """
        if num_columns > self._tables.shape[1]:
            wider = self._tables.new_zeros(len(self._tables), num_columns)
            wider[:, : self._tables.shape[1]] = self._tables
            wider[-1] = self.num_blocks
            self._tables = wider
        slots = [self.state.null] * num_rows
        for place, row in enumerate(rows):
            assert row.slot is not None
            slots[place] = row.slot
            if row.num_packed < len(row.blocks):
                self._tables[row.slot, row.num_packed : len(row.blocks)] = torch.tensor(row.blocks[row.num_packed :])
                row.num_packed = len(row.blocks)
        index = torch.tensor(slots)
        return torch.cat([index[:, None], self._tables[index, :num_columns]], dim=1)

    def publish(
        self, row: CacheRow, token_ids: Sequence[int], kept: Mapping[Hashable, torch.Tensor | None] | None = None
    ) -> None:
        """Offer the full blocks of a row's prefix, which holds `token_ids`, to rows that begin alike.

        Args:
            kept: what is kept with the blocks, by name: a feature of these T tokens [1, T, E], or None where the name says
                it all. A row adopts only blocks that keep what its drafter needs.
        """
        for number, block in enumerate(self.publish_blocks(row, token_ids)):
            span = slice(number * self.block_size, (number + 1) * self.block_size)
            for name, hidden in (kept or {}).items():
                # What the name says lies in the row's own block, and another row's may be on offer.
                is_there = hidden is not None or block.number == row.blocks[number]
                if name not in block.kept and is_there:
                    # A copy, because a view would keep a whole prompt's features alive.
                    block.kept[name] = None if hidden is None else hidden[0, span].clone()

    def adopt(self, row: CacheRow, token_ids: Sequence[int], names: Sequence[Hashable] = ()) -> dict[Hashable, torch.Tensor]:
        """Let an empty row begin with the published blocks that hold the beginning of `token_ids`.

        Returns:
            The features among `names`, each [1, T, E], of the T tokens that the row has now; empty where T is 0.
        """
        found = self.adopt_blocks(row, token_ids, names)
        features = [name for name in names if found and found[0].kept[name] is not None]
        return {name: torch.cat([block.kept[name] for block in found])[None] for name in features}

    def pack(self, rows: Sequence[CacheRow], num_columns: int = 0) -> torch.Tensor:
        """The rows' lengths and block tables as one host tensor [B, 1 + M] int64, M at least `num_columns`."""
        num_columns = max(num_columns, *(len(row.blocks) for row in rows))
        return torch.tensor([[row.length, *row.blocks, *[0] * (num_columns - len(row.blocks))] for row in rows])

    def place(self, rows: Sequence[CacheRow], num_nodes: int) -> Places:
        """Reserve `num_nodes` slots after every row's prefix; returns where the rows lie now.

        The result is for one pass, because growth and `advance` outdate it.

        Raises:
            CacheFull: there is no room. Nothing has changed.
        """
        self.reserve(rows, num_nodes)
        return self.locate(rows)

    def locate(self, rows: Sequence[CacheRow]) -> Places:
        """Where the rows lie now; nothing is reserved."""
        return replace(Places.unpack(self.pack(rows).to(self.device, non_blocking=True)), rows=list(rows))

    def layout(self, places: Places, tree: CandidateTree, num_new: int | None = None) -> tuple[TreeLayout, torch.Tensor]:
        """Where a pass reads and which slots it writes. `place` comes first, because the room must be there.

        Args:
            num_new: how many of the tree's last nodes the pass computes; all by default. The others are stored already.

        Returns:
            The layout, and the new nodes' slots [B * num_new].
        """
        N = tree.num_nodes
        first = 0 if num_new is None else N - num_new
        lengths, tables, rows = places.lengths, places.block_tables, places.rows
        for row in rows or ():
            assert row.length + N <= len(row.blocks) * self.block_size, "place comes before layout"
        # Only the kernel's twin reads slots, and the mask of a chain.
        is_compiled = is_compiled_for(self.keys)
        has_slots = rows is not None and not is_compiled
        layout = TreeLayout(
            block_tables=tables,
            lengths=lengths,
            host_lengths=None if rows is None else [row.length for row in rows],
            depths=tree.depths,
            ancestor_mask=None if is_compiled and tree.is_chain else tree.ancestor_mask()[:, first:],
            block_size=self.block_size,
            row_slots=[self.row_slots(row, row.length + N) for row in rows or ()] if has_slots else None,
            max_depth=tree.max_depth,
            is_chain=tree.is_chain,
        )
        return layout, self._slots(tables, lengths[:, None] + torch.arange(first, N, device=self.device)).flatten()

    def _slots(self, tables: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return slots_of(tables, index, self.block_size)

    def row_slots(self, row: CacheRow, num_keys: int) -> slice | torch.Tensor:
        """The slots of a row's first `num_keys` storage indices, as a slice where they are consecutive."""
        if row.is_contiguous:
            first = row.blocks[0] * self.block_size
            return slice(first, first + num_keys)
        index = torch.arange(num_keys, device=self.device)
        return self._slots(torch.tensor([row.blocks]).to(self.device), index[None])[0]

    def arrange(self, places: Places, origins: torch.Tensor, *, num_layers: int) -> None:
        """Move the scratch entries `origins` [B, N], ascending, to the first N scratch slots, in the first `num_layers`."""
        lengths, tables = places.lengths, places.block_tables
        source = self._slots(tables, lengths[:, None] + origins)
        target = self._slots(tables, lengths[:, None] + torch.arange(origins.shape[1], device=self.device))
        kv_compaction(self.keys[:num_layers], self.values[:num_layers], source, target)

    def compact(self, places: Places, tree: CandidateTree, path: torch.Tensor, num_accepted: torch.Tensor) -> None:
        """Move the accepted path's KV to the prefix's end. `advance` then counts it in.

        A row that repeats the one before it, as in a batch that was filled up, moves nothing, because two programs on one
        path would read what the other has written.

        Args:
            path: [B, K + 1] accepted nodes, the root first, -1 after the end.
            num_accepted: [B] accepted nodes without the root.
        """
        if tree.is_chain:
            # A chain's nodes are stored in path order already.
            return
        lengths, tables = places.lengths, places.block_tables
        steps = torch.arange(path.shape[1], device=self.device).expand_as(path)
        # After the path's end a slot moves onto itself, because shapes must stay fixed.
        target = self._slots(tables, lengths[:, None] + steps.minimum(num_accepted[:, None]))
        source_nodes = torch.where(path >= 0, path, path.gather(1, num_accepted[:, None]))
        source = self._slots(tables, lengths[:, None] + source_nodes)
        # Different rows have no scratch slot in common, so an equal root slot shows a repeated row. The root never moves.
        is_repeated = torch.cat([target.new_zeros(1, dtype=torch.bool), target[1:, 0] == target[:-1, 0]])[:, None]
        source, target = (torch.where(is_repeated, target[:, :1], each) for each in (source, target))
        kv_compaction(self.keys, self.values, source, target)
