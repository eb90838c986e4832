"""Which blocks of the paged KV cache belong to which row: free list, sharing, eviction. Host only; no tensors.

Prefill and verify reserve blocks here, and compact keeps a path in them. A row's committed prefix fills its storage indices
`0 … length - 1`, block after block.

Invariant: full blocks of a prefix never change, so rows that begin alike can share them. `publish_blocks` offers a row's
full blocks under a digest of all tokens up to the block's end; `adopt_blocks` gives an empty row the blocks that match. A
published block without users keeps its content until its place is needed; the one unused for longest goes first.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any


class CacheFull(MemoryError):
    """The pool may not grow any further, and too few blocks are free."""


@dataclass(eq=False)
class CacheRow:
    """One text's place in the pool. A row never serves a second text, because it remembers the first one's digests.

    Attributes:
        slot: the row's place in `selfspec.cache.rows.RowState` while it decodes.
        num_packed: how many of its blocks stand in the host's copy of that slot's block table.
    """

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    is_contiguous: bool = True
    # One digest for each full block of the text so far, of all tokens up to the block's end.
    digests: list[bytes] = field(default_factory=list)
    slot: int | None = None
    num_packed: int = 0


@dataclass(eq=False, slots=True)
class Block:
    """One block: its users, the digest that it is published under, and what is kept with it, by name."""

    number: int
    num_users: int = 0
    digest: bytes | None = None
    kept: dict[Hashable, Any] = field(default_factory=dict)


class BlockPool:
    """Blocks of `block_size` tokens each, shared by all rows.

    Args:
        max_tokens: the most tokens the pool may ever hold; None for no limit but memory.
        use_sharing: keep published blocks for later rows. Needs `max_tokens`, because kept blocks fill the pool.
        least_growth: the fewest blocks that the pool grows by.
    """

    def __init__(
        self, *, block_size: int = 16, max_tokens: int | None = None, use_sharing: bool = False, least_growth: int = 32
    ) -> None:
        assert max_tokens is not None or not use_sharing
        self.block_size = block_size
        self.max_blocks = None if max_tokens is None else max_tokens // block_size
        self.use_sharing = use_sharing
        self.least_growth = least_growth
        self._blocks: list[Block] = []
        # A heap that gives out the lowest numbers first, because rows should be contiguous where they can be.
        self._free: list[int] = []
        self._published: dict[bytes, Block] = {}
        # Published blocks without users, in the order in which they will be given up.
        self._idle: dict[int, Block] = {}

    def reset(self) -> None:
        """Forget every row and everything published; the blocks stay."""
        self._blocks = [Block(number) for number in range(len(self._blocks))]
        # A sorted list is a heap.
        self._free = list(range(len(self._blocks)))
        self._published.clear()
        self._idle.clear()

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that the pool can hold, in whole blocks."""
        return None if self.max_blocks is None else self.max_blocks * self.block_size

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_used_blocks(self) -> int:
        return len(self._blocks) - self.num_free_blocks

    def open_row(self) -> CacheRow:
        return CacheRow()

    def release(self, row: CacheRow) -> None:
        """Take a row's blocks back; the row is empty afterwards."""
        row.length = 0
        self.trim(row)
        row.is_contiguous = True

    def trim(self, row: CacheRow, num_ahead: int = 0) -> None:
        """Take back the blocks that a row does not need for its prefix.

        Args:
            num_ahead: by how many tokens the prefix may be longer than is known here, because of steps in flight.
        """
        # The last block first, because a prefix is of no use without its beginning.
        while len(row.blocks) * self.block_size >= row.length + num_ahead + self.block_size:
            block = self._blocks[row.blocks.pop()]
            block.num_users -= 1
            if block.num_users:
                continue
            if block.digest is not None:
                self._idle[block.number] = block
            else:
                heapq.heappush(self._free, block.number)
        row.num_packed = min(row.num_packed, len(row.blocks))

    def advance(self, row: CacheRow, num_tokens: int) -> None:
        """Count `num_tokens` stored tokens as committed."""
        row.length += num_tokens
        assert row.length <= len(row.blocks) * self.block_size

    def rewind(self, row: CacheRow, length: int) -> None:
        """Forget everything after the first `length` tokens; the blocks stay with the row."""
        assert length <= row.length
        row.length = length

    def reserve(self, rows: Sequence[CacheRow], num_nodes: int) -> None:
        """Give every row room for `num_nodes` slots after its prefix. The pool grows if it must.

        Raises:
            CacheFull: the pool may not grow any further. Nothing has changed.
        """
        wanted = self._num_wanted(rows, num_nodes)
        missing = sum(wanted) - len(self._free)
        if missing > 0:
            self._find_blocks(missing)
        for row, count in zip(rows, wanted, strict=True):
            for _ in range(count):
                number = heapq.heappop(self._free)
                self._blocks[number].num_users = 1
                row.is_contiguous = row.is_contiguous and (not row.blocks or number == row.blocks[-1] + 1)
                row.blocks.append(number)

    def can_reserve(self, rows: Sequence[CacheRow], num_nodes: int) -> bool:
        """Whether `reserve` would find the room."""
        return self.max_blocks is None or sum(self._num_wanted(rows, num_nodes)) <= self.max_blocks - self.num_used_blocks

    def can_adopt(
        self, row: CacheRow, token_ids: Sequence[int], names: Iterable[Hashable], num_tokens: int, num_spare: int
    ) -> bool:
        """Whether an empty row could adopt blocks, reserve room for `num_tokens` in all, and leave `num_spare` blocks."""
        if self.max_blocks is None:
            return True
        found = self._shared(row, token_ids, names)
        # A block without users counts as free until it is adopted.
        num_taken = -(-num_tokens // self.block_size) - sum(block.num_users > 0 for block in found)
        return num_taken + num_spare <= self.max_blocks - self.num_used_blocks

    def publish_blocks(self, row: CacheRow, token_ids: Sequence[int]) -> list[Block]:
        """Offer the full blocks of a row's prefix, which holds `token_ids`; returns the offered blocks in order.

        Where an earlier row has published a block under the same digest, that block stays on offer.
        """
        if not self.use_sharing:
            return []
        assert len(token_ids) == row.length
        offered = []
        for number, digest in zip(row.blocks, self._digests(row, token_ids), strict=False):
            if digest not in self._published:
                block = self._blocks[number]
                block.digest = digest
                self._published[digest] = block
            offered.append(self._published[digest])
        return offered

    def adopt_blocks(self, row: CacheRow, token_ids: Sequence[int], names: Iterable[Hashable] = ()) -> list[Block]:
        """Let an empty row begin with the published blocks for the beginning of `token_ids` that keep all `names`."""
        assert not row.blocks
        found = self._shared(row, token_ids, names)
        for block in found:
            block.num_users += 1
            self._idle.pop(block.number, None)
            row.blocks.append(block.number)
        row.length = len(found) * self.block_size
        row.is_contiguous = all(after == before + 1 for before, after in pairwise(row.blocks))
        return found

    def _shared(self, row: CacheRow, token_ids: Sequence[int], names: Iterable[Hashable]) -> list[Block]:
        found: list[Block] = []
        wanted = set(names)
        for digest in self._digests(row, token_ids) if self.use_sharing else ():
            block = self._published.get(digest)
            if block is None or not block.kept.keys() >= wanted:
                break
            found.append(block)
        return found

    def _digests(self, row: CacheRow, token_ids: Sequence[int]) -> list[bytes]:
        """A digest for every full block of `token_ids`, remembered in the row. Equal digests mean equal prefixes."""
        known, num_full = row.digests, len(token_ids) // self.block_size
        for number in range(len(known), num_full):
            tokens = array("q", token_ids[number * self.block_size : (number + 1) * self.block_size]).tobytes()
            before = known[-1] if known else b""
            known.append(hashlib.blake2b(before + tokens, digest_size=16).digest())
        return known[:num_full]

    def _num_wanted(self, rows: Sequence[CacheRow], num_nodes: int) -> list[int]:
        return [max(-(-(row.length + num_nodes) // self.block_size) - len(row.blocks), 0) for row in rows]

    def _find_blocks(self, num_missing: int) -> None:
        """Make `num_missing` more blocks free: grow the pool, and give up idle blocks where it may not grow."""
        # By half at least, because copying then costs a constant time per token.
        num_new = max(num_missing, len(self._blocks) // 2, self.least_growth)
        if self.max_blocks is not None:
            num_new = min(num_new, self.max_blocks - len(self._blocks))
        num_lost = max(num_missing - num_new, 0)
        if num_lost > len(self._idle):
            raise CacheFull(
                f"the KV cache holds {self.max_blocks} blocks of {self.block_size} tokens and needs "
                f"{num_lost - len(self._idle)} more: lower the batch size or raise the cache's max_tokens"
            )
        if num_new:
            self.grow(num_new)
        for block in list(islice(self._idle.values(), num_lost)):
            assert block.digest is not None
            del self._idle[block.number], self._published[block.digest]
            self._blocks[block.number] = Block(block.number)
            heapq.heappush(self._free, block.number)

    def grow(self, num_new: int) -> None:
        """Add `num_new` free blocks."""
        first = len(self._blocks)
        for number in range(first, first + num_new):
            self._blocks.append(Block(number))
            heapq.heappush(self._free, number)
