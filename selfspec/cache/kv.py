"""The paged KV cache's tensors: what prefill and verify read and write, and the stage "compact", which keeps a path.

A verify pass writes the candidate tree's N nodes after a row's prefix, at storage indices `length … length + N - 1`, in
scratch slots of the row's own blocks. Compacting moves the accepted path's entries to the prefix's end, and the next pass
overwrites the rest. `selfspec.cache.blocks` decides which blocks a row has.

Invariant: after compaction and `advance` a row holds what a prefill of its committed tokens would have stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from selfspec.cache.blocks import BlockPool, CacheRow
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
        keys, values: [L, num_slots, G, D].
        serial: identifies the addresses of `keys` and `values` in graph keys; it changes whenever they do.
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
        self.keys = torch.empty(shape.num_layers, 0, shape.num_kv_heads, shape.key_dim, dtype=dtype, device=device)
        self.values = torch.empty(shape.num_layers, 0, shape.num_kv_heads, shape.value_dim, dtype=dtype, device=device)
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

    def grow(self, num_new: int) -> None:
        """Add `num_new` free blocks. The tensors move to other addresses with what rows hold."""
        num_slots = (self.num_blocks + num_new) * self.block_size
        # Allocate both first: if the second does not fit, nothing has changed.
        larger = [old.new_empty(old.shape[0], num_slots, *old.shape[2:]) for old in (self.keys, self.values)]
        for old, new in zip((self.keys, self.values), larger, strict=True):
            new[:, : old.shape[1]] = old
        self.keys, self.values = larger
        self.serial = next(_SERIALS)
        super().grow(num_new)

    def publish(self, row: CacheRow, token_ids: Sequence[int], features: Mapping[int, torch.Tensor] | None = None) -> None:
        """Offer the full blocks of a row's prefix, which holds `token_ids`, to rows that begin alike.

        Args:
            features: of these T tokens, each [1, T, E]. A row whose drafter needs features adopts only blocks with them.
        """
        for number, block in enumerate(self.publish_blocks(row, token_ids)):
            span = slice(number * self.block_size, (number + 1) * self.block_size)
            for name, hidden in (features or {}).items():
                if name not in block.kept:
                    # A copy, because a view would keep a whole prompt's features alive.
                    block.kept[name] = hidden[0, span].clone()

    def adopt(self, row: CacheRow, token_ids: Sequence[int], features: Sequence[int] = ()) -> dict[int, torch.Tensor]:
        """Let an empty row begin with the published blocks that hold the beginning of `token_ids`.

        Returns:
            The features asked for, each [1, T, E], of the T tokens that the row has now; empty where T is 0.
        """
        found = self.adopt_blocks(row, token_ids, features)
        return {name: torch.cat([block.kept[name] for block in found])[None] for name in features} if found else {}

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
            row_slots=[self._row_slots(row, row.length + N) for row in rows or ()] if has_slots else None,
            max_depth=tree.max_depth,
            is_chain=tree.is_chain,
        )
        return layout, self._slots(tables, lengths[:, None] + torch.arange(first, N, device=self.device)).flatten()

    def _slots(self, tables: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return slots_of(tables, index, self.block_size)

    def _row_slots(self, row: CacheRow, num_keys: int) -> slice | torch.Tensor:
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
