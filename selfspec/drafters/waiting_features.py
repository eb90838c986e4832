"""Features of committed tokens that wait to be entered into a drafter's cache.

They stay where a verify pass left them, and each row notes its stretch: noting costs no device work, however many rows there
are and however long nothing is drafted. One gather collects them when a draft begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class WaitingFeatures:
    """One row's features, in stretches of tensors that it shares with other rows."""

    # (features [B, N, E] and their row flattened to [B * N, E] places: the first, and how many)
    _stretches: list[tuple[torch.Tensor, int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(count for _, _, count in self._stretches)

    def add(self, features: torch.Tensor, row: int, start: int, end: int) -> None:
        """Let `features[row, start:end]`, of a contiguous [B, N, E], wait after the others."""
        if end > start:
            self._stretches.append((features, row * features.shape[1] + start, end - start))

    def drop(self, count: int) -> None:
        """Forget the first `count`."""
        while count:
            features, first, size = self._stretches[0]
            taken = min(size, count)
            count -= taken
            if taken == size:
                del self._stretches[0]
            else:
                self._stretches[0] = features, first + taken, size - taken

    @staticmethod
    def collect(rows: Sequence[WaitingFeatures], num_columns: int) -> torch.Tensor:
        """[A, num_columns, E] of rows that have one feature or more: the first ones, past the last that one again."""
        offsets: dict[int, int] = {}
        sources: list[torch.Tensor] = []
        size = 0
        index = []
        for row in rows:
            places: list[int] = []
            for features, first, count in row._stretches:
                if id(features) not in offsets:
                    offsets[id(features)] = size
                    sources.append(features)
                    size += features.shape[0] * features.shape[1]
                base = offsets[id(features)] + first
                places += range(base, base + count)
            index += (places + places[-1:] * (num_columns - len(places)))[:num_columns]
        flat = [features.flatten(0, 1) for features in sources]
        table = torch.cat(flat) if len(flat) > 1 else flat[0]
        where = torch.tensor(index).to(table.device, non_blocking=True)
        return table.index_select(0, where).view(len(rows), num_columns, -1)
