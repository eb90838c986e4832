"""The paged KV cache: one pool of blocks shared by all sequences, a list of blocks for each.

A row's committed prefix fills its storage indices `0 … length - 1`; a verify pass writes the candidate tree's N nodes at
`length … length + N - 1`, in scratch slots of the row's own blocks. Accepting a path copies its rows down to the prefix's
end; everything else there is overwritten by the next pass. The pool grows on demand, whatever the model's maximum. On a GPU
one with a limit has all its blocks from the start: other addresses would outdate every CUDA graph.

Full blocks of a prefix never change, so that rows which begin alike can share them: `publish` offers a row's blocks under a
digest of all tokens up to their end, `adopt` gives an empty row those that fit. A published block that no row uses keeps its
content until its place is needed, the one unused for longest first.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from array import array
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

import torch

from selfspec.kernels.kv_compaction import kv_compaction
from selfspec.kernels.slots import slots_of
from selfspec.kernels.tree_attention import TreeLayout
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


@dataclass(eq=False)
class CacheRow:
    """One sequence's place in the pool."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    is_contiguous: bool = True


@dataclass(frozen=True)
class Places:
    """Where rows lie in the pool, on its device.

    Attributes:
        lengths: [B] int64, the tokens of each prefix.
        block_tables: [B, M] int64, padded with block 0.
        rows: the same on the host; None where a CUDA graph will run with other numbers.
    """

    lengths: torch.Tensor
    block_tables: torch.Tensor
    rows: list[CacheRow] | None = None

    @classmethod
    def unpack(cls, numbers: torch.Tensor) -> Places:
        """From what `KVCache.pack` made, [B, 1 + M]."""
        return cls(numbers[:, 0].contiguous(), numbers[:, 1:])

    def advanced(self, num_tokens: torch.Tensor) -> Places:
        """The same rows with `num_tokens` [B] more in their prefixes, as tensors alone."""
        return Places(self.lengths + num_tokens, self.block_tables)


@dataclass(frozen=True)
class _Published:
    """A full block that rows may share, and those of the target's features of its tokens that are kept: [block_size, E]."""

    block: int
    features: dict[int, torch.Tensor]


_SERIALS = itertools.count()
# Bytes by which a pool on a GPU grows at least.
GPU_GROWTH = 64 << 20


class CacheFull(MemoryError):
    """The pool may not grow any further, and every block is in use."""


class KVCache:
    """A pool of `block_size`-token blocks.

    Args:
        shape: what one token stores.
        block_size: tokens a block.
        max_tokens: the most tokens the pool may ever hold, None for no limit but memory.
        use_sharing: keep published blocks for rows to come; needs `max_tokens`, since kept blocks fill the pool.
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
    ) -> None:
        assert max_tokens is not None or not use_sharing
        self.shape = shape
        self.block_size = block_size
        self.max_blocks = None if max_tokens is None else max_tokens // block_size
        self.use_sharing = use_sharing
        # Names this pool's addresses: another one whenever they change.
        self.serial = next(_SERIALS)
        self._free: list[int] = []
        self._num_blocks = 0
        self._num_users: dict[int, int] = {}
        self._published: dict[bytes, _Published] = {}
        self._digests: dict[int, bytes] = {}
        # Published blocks without users, in the order in which they are given up.
        self._idle: dict[int, None] = {}
        self.keys = torch.empty(shape.num_layers, 0, shape.num_kv_heads, shape.key_dim, dtype=dtype, device=device)
        self.values = torch.empty(shape.num_layers, 0, shape.num_kv_heads, shape.value_dim, dtype=dtype, device=device)
        if self.max_blocks is not None and device.type == "cuda":
            self._allocate_all(self.max_blocks)

    def _allocate_all(self, num_blocks: int) -> None:
        try:
            self._grow(num_blocks)
        except torch.OutOfMemoryError as error:
            size = num_blocks * self._bytes_per_block / 2**30
            free = torch.cuda.mem_get_info(self.device)[0] / 2**30
            raise MemoryError(
                f"a KV cache of {num_blocks * self.block_size} tokens takes {size:.1f} GiB, and {free:.1f} GiB are free on "
                f"{self.device}: lower max_tokens, a server's cache_tokens"
            ) from error

    def reset(self) -> None:
        """Forget every row and all that was published; the memory stays, and with it what was captured for its addresses."""
        # Ascending numbers are a heap.
        self._free = list(range(self._num_blocks))
        for known in (self._num_users, self._published, self._digests, self._idle):
            known.clear()

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that the pool can hold, whole blocks of them."""
        return None if self.max_blocks is None else self.max_blocks * self.block_size

    @property
    def _bytes_per_block(self) -> int:
        return self.block_size * self.shape.bytes_per_token(self.keys.dtype)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_used_blocks(self) -> int:
        return self._num_blocks - self.num_free_blocks

    def open_row(self) -> CacheRow:
        return CacheRow()

    def release(self, row: CacheRow) -> None:
        """Give a row's blocks back; the row is empty afterwards."""
        row.length = 0
        self.trim(row)
        row.is_contiguous = True

    def trim(self, row: CacheRow) -> None:
        """Give back the blocks that a row's prefix does not need."""
        # The last first: a prefix is of no use without its beginning.
        while len(row.blocks) * self.block_size >= row.length + self.block_size:
            block = row.blocks.pop()
            self._num_users[block] -= 1
            if self._num_users[block]:
                continue
            del self._num_users[block]
            if block in self._digests:
                self._idle[block] = None
            else:
                heapq.heappush(self._free, block)

    def reserve(self, rows: list[CacheRow], num_nodes: int) -> None:
        """Give every row room for `num_nodes` slots past its prefix, growing the pool where needed.

        Raises:
            CacheFull: the pool may not grow any further; nothing has changed.
        """
        wanted = self._num_wanted(rows, num_nodes)
        missing = sum(wanted) - len(self._free)
        if missing > 0:
            self._find_blocks(missing)
        for row, count in zip(rows, wanted, strict=True):
            for _ in range(count):
                block = heapq.heappop(self._free)
                self._num_users[block] = 1
                row.is_contiguous = row.is_contiguous and (not row.blocks or block == row.blocks[-1] + 1)
                row.blocks.append(block)

    def can_reserve(self, rows: list[CacheRow], num_nodes: int, *, num_spare: int = 0) -> bool:
        """Whether `reserve` would find the room, and leave `num_spare` blocks."""
        if self.max_blocks is None:
            return True
        return sum(self._num_wanted(rows, num_nodes)) + num_spare <= self.max_blocks - self.num_used_blocks

    def _num_wanted(self, rows: list[CacheRow], num_nodes: int) -> list[int]:
        return [max(-(-(row.length + num_nodes) // self.block_size) - len(row.blocks), 0) for row in rows]

    def publish(self, row: CacheRow, token_ids: Sequence_[int], features: Mapping[int, torch.Tensor] | None = None) -> None:
        """Offer the full blocks of a row's prefix, which holds `token_ids`, to rows that begin alike.

        Args:
            features: of these tokens, each [1, T, E]; a row whose drafter wants features adopts only what has them.
        """
        if not self.use_sharing:
            return
        assert len(token_ids) == row.length
        for number, digest in enumerate(self._digests_of(token_ids)):
            if digest not in self._published:
                self._published[digest] = _Published(row.blocks[number], {})
                self._digests[row.blocks[number]] = digest
            kept = self._published[digest].features
            span = slice(number * self.block_size, (number + 1) * self.block_size)
            for name, hidden in (features or {}).items():
                if name not in kept:
                    # A copy, lest one block keep a whole prompt's features alive.
                    kept[name] = hidden[0, span].clone()

    def adopt(self, row: CacheRow, token_ids: Sequence_[int], features: Sequence_[int] = ()) -> dict[int, torch.Tensor]:
        """Let an empty row begin with the published blocks that hold the beginning of `token_ids`.

        Returns:
            The features asked for, each [1, T, E], of the T tokens that the row has now; nothing where T is 0.
        """
        assert not row.blocks
        found: list[_Published] = []
        for digest in self._digests_of(token_ids) if self.use_sharing else ():
            known = self._published.get(digest)
            if known is None or not known.features.keys() >= set(features):
                break
            found.append(known)
        for known in found:
            self._num_users[known.block] = self._num_users.get(known.block, 0) + 1
            self._idle.pop(known.block, None)
            row.blocks.append(known.block)
        row.length = len(found) * self.block_size
        row.is_contiguous = all(after == before + 1 for before, after in pairwise(row.blocks))
        if not found:
            return {}
        return {name: torch.cat([known.features[name] for known in found])[None] for name in features}

    def _digests_of(self, token_ids: Sequence_[int]) -> Iterator[bytes]:
        """One for every full block: a digest of all tokens up to its end, so that equal digests mean equal prefixes."""
        digest = b""
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            tokens = array("q", token_ids[end - self.block_size : end]).tobytes()
            digest = hashlib.blake2b(digest + tokens, digest_size=16).digest()
            yield digest

    def _find_blocks(self, num_missing: int) -> None:
        """Make `num_missing` more blocks free: enlarge the pool, and give up idle blocks where it may not grow."""
        # By half at least, so that copying stays a constant cost a token. On a GPU new addresses outdate what was captured,
        # and a drafter's layer or two are small.
        least = 32 if self.device.type == "cpu" else max(256, GPU_GROWTH // self._bytes_per_block)
        num_new = max(num_missing, self._num_blocks // 2, least)
        if self.max_blocks is not None:
            num_new = min(num_new, self.max_blocks - self._num_blocks)
        num_lost = max(num_missing - num_new, 0)
        if num_lost > len(self._idle):
            raise CacheFull(
                f"the KV cache holds {self.max_blocks} blocks of {self.block_size} tokens and needs "
                f"{num_lost - len(self._idle)} more: lower the batch size or raise the cache's max_tokens"
            )
        if num_new:
            self._grow(num_new)
        for block in list(islice(self._idle, num_lost)):
            del self._idle[block]
            del self._published[self._digests.pop(block)]
            heapq.heappush(self._free, block)

    def _grow(self, num_new: int) -> None:
        num_slots = (self._num_blocks + num_new) * self.block_size
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(old.shape[0], num_slots, *old.shape[2:])
            new[:, : old.shape[1]] = old
            setattr(self, name, new)
        self.serial = next(_SERIALS)
        for block in range(self._num_blocks, self._num_blocks + num_new):
            heapq.heappush(self._free, block)
        self._num_blocks += num_new

    def pack(self, rows: list[CacheRow], num_columns: int = 0) -> torch.Tensor:
        """Lengths and block tables of rows as one host tensor [B, 1 + M] int64, of `num_columns` columns M at least."""
        num_columns = max(num_columns, *(len(row.blocks) for row in rows))
        return torch.tensor([[row.length, *row.blocks, *[0] * (num_columns - len(row.blocks))] for row in rows])

    def locate(self, rows: list[CacheRow]) -> Places:
        """Where rows lie now; growth and `advance` outdate it."""
        return replace(Places.unpack(self.pack(rows).to(self.device, non_blocking=True)), rows=rows)

    def layout(self, places: Places, tree: CandidateTree, num_new: int | None = None) -> tuple[TreeLayout, torch.Tensor]:
        """Where a pass reads, and the slots it writes; `reserve` must have made the room.

        Args:
            num_new: how many of the tree's last nodes the pass computes, all by default; the others are stored already.

        Returns:
            The layout and the new nodes' slots [B * num_new].
        """
        N = tree.num_nodes
        first = 0 if num_new is None else N - num_new
        lengths, tables, rows = places.lengths, places.block_tables, places.rows
        for row in rows or ():
            assert row.length + N <= len(row.blocks) * self.block_size, "reserve comes before layout"
        has_slots = rows is not None and self.device.type == "cpu"
        layout = TreeLayout(
            block_tables=tables,
            lengths=lengths,
            host_lengths=None if rows is None else [row.length for row in rows],
            depths=tree.depths,
            ancestor_mask=tree.ancestor_mask()[:, first:],
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
        """Move the scratch entries `origins` [B, N], ascending, to the first N scratch slots, in the first layers only."""
        lengths, tables = places.lengths, places.block_tables
        source = self._slots(tables, lengths[:, None] + origins)
        target = self._slots(tables, lengths[:, None] + torch.arange(origins.shape[1], device=self.device))
        kv_compaction(self.keys[:num_layers], self.values[:num_layers], source, target)

    def compact(self, places: Places, tree: CandidateTree, path: torch.Tensor, num_accepted: torch.Tensor) -> None:
        """Move the accepted path's KV to the prefix's end. `advance` then counts it in.

        Args:
            path: [B, K + 1] accepted nodes, the root first, -1 past the end.
            num_accepted: [B] accepted nodes without the root.

        A row that repeats the one before it, as a filled-up batch has them, moves nothing: two programs at once on one
        path would read what the other has written.
        """
        if tree.is_chain:
            # A chain's path lies in its storage order already.
            return
        lengths, tables = places.lengths, places.block_tables
        steps = torch.arange(path.shape[1], device=self.device).expand_as(path)
        # Past the path's end a slot is moved onto itself: shapes stay fixed and nothing changes.
        target = self._slots(tables, lengths[:, None] + steps.minimum(num_accepted[:, None]))
        source_nodes = torch.where(path >= 0, path, path.gather(1, num_accepted[:, None]))
        source = self._slots(tables, lengths[:, None] + source_nodes)
        # No two rows have a scratch slot in common. The root's stays where it is.
        is_repeated = torch.cat([target.new_zeros(1, dtype=torch.bool), target[1:, 0] == target[:-1, 0]])[:, None]
        source, target = (torch.where(is_repeated, target[:, :1], each) for each in (source, target))
        kv_compaction(self.keys, self.values, source, target)

    def advance(self, row: CacheRow, num_tokens: int) -> None:
        """Count `num_tokens` stored tokens as committed."""
        row.length += num_tokens
        assert row.length <= len(row.blocks) * self.block_size

    def rewind(self, row: CacheRow, length: int) -> None:
        """Forget everything behind `length` tokens; blocks stay with the row."""
        assert length <= row.length
        row.length = length
