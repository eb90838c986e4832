"""What the device knows of the rows that decode: lengths, roots, texts and sampling settings, by slot.

Passes read and update these tensors themselves, so the host can launch a step before it has read the last one's tokens. The
host writes a slot once, when its row begins to decode.

Invariant: a slot's length and root follow the accepted tokens, in the order in which passes were launched. The last slot,
`null`, is nobody's: the rows that fill up a batch have it, and its length stays 0.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

# Columns of `RowState.integers`.
LENGTH, ROOT, KEY, TOP_K = range(4)
# Tokens that a walk may write after a text's end.
MAX_WALK = 128
# The fewest tokens of a text that there is room for.
MIN_CAPACITY = 1024


class RowState:
    """The tensors of one cache's slots.

    Args:
        num_slots: how many rows may decode at once.

    Attributes:
        integers: [S + 1, 4] int64, S slots and `null`: length of the committed prefix, root, noise key, top-k.
        fractions: [S + 1, 3] float32: temperature, top-p, min-p.
        history: [S + 1, C] int64, prompt and output of each row, with room for a walk after the end.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.device = device
        self.num_slots = num_slots
        self.integers = torch.zeros(num_slots + 1, 4, dtype=torch.int64, device=device)
        self.fractions = torch.zeros(num_slots + 1, 3, device=device)
        self.history = torch.zeros(num_slots + 1, MIN_CAPACITY, dtype=torch.int64, device=device)
        self._owned: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()
        # A sorted list is a heap, which gives out the lowest slots first.
        self._free = list(range(num_slots))

    @property
    def null(self) -> int:
        return self.num_slots

    @property
    def num_open(self) -> int:
        return self.num_slots - len(self._free)

    def reset(self) -> None:
        """Take every slot back."""
        self._free = list(range(self.num_slots))

    def open(self) -> int:
        """Take a free slot."""
        return heapq.heappop(self._free)

    def close(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    def put(self, slot: int, tokens: Sequence[int], *, key: int, top_k: int, fractions: tuple[float, float, float]) -> None:
        """Write what a row begins with: its text, whose last token is the root, and its sampling settings."""
        numbers = torch.tensor([len(tokens) - 1, tokens[-1], key, top_k])
        self.integers[slot].copy_(numbers, non_blocking=True)
        self.fractions[slot].copy_(torch.tensor(fractions), non_blocking=True)
        self.history[slot, : len(tokens)].copy_(torch.tensor(tokens), non_blocking=True)

    def advance(self, slots: torch.Tensor, tokens: torch.Tensor, num_new: torch.Tensor) -> None:
        """Append what a pass emitted to each row's text. Device work only.

        Args:
            slots: [B]; `null` may come more than once, and stays empty.
            tokens: [B, K + 1], the row's new tokens first; the last of them is the new root.
            num_new: [B], how many there are.
        """
        lengths = self.integers[slots, LENGTH]
        index = lengths[:, None] + 1 + torch.arange(tokens.shape[1], device=self.device)
        self.history[slots[:, None], index] = tokens.clamp(min=0)
        is_row = slots != self.null
        roots = tokens.gather(1, (num_new - 1)[:, None])[:, 0].clamp(min=0)
        new = torch.stack([lengths + num_new, roots], dim=1)
        self.integers[slots, :2] = torch.where(is_row[:, None], new, 0)

    def owned(self, owner: Any, width: int, dtype: torch.dtype) -> torch.Tensor:
        """A drafter's own tensor [S + 1, width], made when it is first asked for."""
        if owner not in self._owned:
            self._owned[owner] = torch.zeros(self.num_slots + 1, width, dtype=dtype, device=self.device)
        return self._owned[owner]

    def has_room(self, num_tokens: int) -> bool:
        """Whether texts of `num_tokens` tokens, with a walk after them, fit."""
        return num_tokens + MAX_WALK <= self.history.shape[1]

    def grow(self, num_slots: int, num_tokens: int) -> None:
        """Make room for more slots or longer texts; tensors move to other addresses."""
        capacity = self.history.shape[1]
        while capacity < num_tokens + MAX_WALK:
            capacity *= 2
        old_slots = self.num_slots
        self._free += range(old_slots, num_slots)
        self.num_slots = max(num_slots, old_slots)

        def larger(old: torch.Tensor, width: int) -> torch.Tensor:
            new = old.new_zeros(self.num_slots + 1, width)
            # Without `null`, whose content means nothing.
            new[:old_slots, : old.shape[1]] = old[:old_slots]
            return new

        self.integers, self.fractions = larger(self.integers, 4), larger(self.fractions, 3)
        self.history = larger(self.history, capacity)
        for owner, tensor in list(self._owned.items()):
            self._owned[owner] = larger(tensor, tensor.shape[1])
