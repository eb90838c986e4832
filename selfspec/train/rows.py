"""Samples packed into rows of one length, without attention from one conversation to another.

Positions restart at 0 with every conversation and with the padding at a row's end; the target's attention tells the texts
apart by them (see `selfspec.model.attention.TextPass`). Every sample lies in one row. A sample longer than a row is cut at
the row's end.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

from selfspec.traffic.masking import Sample


@dataclass(frozen=True)
class PackedRows(Dataset[dict[str, torch.Tensor]]):
    """Rows to train on.

    Attributes:
        input_ids, position_ids: int64 [R, L].
        loss_mask: bool [R, L], true where the token is one to train on.
        num_tokens: tokens of conversations, padding not counted.
        num_lost_tokens: tokens that were cut off at the end of a row, and tokens of samples that were left out because the
            part that fitted had nothing to train on.
        num_cut_samples, num_left_out_samples: samples that lost their end, and samples that were left out.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    num_tokens: int
    num_lost_tokens: int
    num_cut_samples: int = 0
    num_left_out_samples: int = 0

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.input_ids[index],
            "loss_mask": self.loss_mask[index],
            "position_ids": self.position_ids[index],
        }

    def digest(self, *names: str) -> str:
        """A hash of some of the rows' tensors, by name."""
        digest = hashlib.sha256(repr(tuple(self.input_ids.shape)).encode())
        for name in names:
            digest.update(getattr(self, name).numpy().tobytes())
        return digest.hexdigest()

    @property
    def fill_rate(self) -> float:
        """The share of the rows' tokens that is not padding."""
        return self.num_tokens / max(1, self.input_ids.numel())


def pack(samples: Sequence[Sample], length: int, *, pad_id: int = 0, seed: int = 0, is_shared: bool = True) -> PackedRows:
    """Pack by best fit, longest sample first. `seed` decides the order of the rows.

    Args:
        length: L, tokens of a row.
        is_shared: several samples may share a row.
    """
    if length < 1:
        raise ValueError(f"length={length} is not allowed: use at least 1 token")
    fitting = [sample for sample in samples if any(sample.loss_mask[:length])]
    sizes = [min(len(sample.input_ids), length) for sample in fitting]
    bins = _best_fit(sizes, length) if is_shared else [[index] for index in range(len(sizes))]
    random.Random(seed).shuffle(bins)

    R, L = len(bins), length
    input_ids = torch.full((R, L), pad_id, dtype=torch.int64)
    loss_mask = torch.zeros(R, L, dtype=torch.bool)
    position_ids = torch.zeros(R, L, dtype=torch.int64)
    num_tokens = 0
    for row, members in enumerate(bins):
        start = 0
        for sample in (fitting[member] for member in members):
            end = min(start + len(sample.input_ids), L)
            input_ids[row, start:end] = torch.tensor(sample.input_ids[: end - start])
            loss_mask[row, start:end] = torch.tensor(sample.loss_mask[: end - start])
            position_ids[row, start:end] = torch.arange(end - start)
            start = end
        position_ids[row, start:] = torch.arange(L - start)
        num_tokens += start
    num_given = sum(len(sample.input_ids) for sample in samples)
    num_cut = sum(len(sample.input_ids) > length for sample in fitting)
    return PackedRows(
        input_ids, loss_mask, position_ids, num_tokens, num_given - num_tokens, num_cut, len(samples) - len(fitting)
    )


def _best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """For each bin, the indices of its sizes. Each size goes, largest first, where it leaves the least room."""
    bins: list[list[int]] = []
    bins_with_room: dict[int, list[int]] = defaultdict(list)
    # The keys of `bins_with_room` that have a bin, sorted.
    rooms: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[index]
        place = bisect_left(rooms, size)
        if place == len(rooms):
            bins.append([])
            chosen, room = len(bins) - 1, capacity
        else:
            room = rooms[place]
            chosen = bins_with_room[room].pop()
            if not bins_with_room[room]:
                rooms.pop(place)
        bins[chosen].append(index)
        if left := room - size:
            if not bins_with_room[left]:
                insort(rooms, left)
            bins_with_room[left].append(chosen)
    return bins
