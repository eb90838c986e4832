"""Features that wait between a verify pass and the next draft, which enters them into a drafter's cache.

The tensors stay as they came, and each row notes which stretch of them is its own. Noting is no device work, however many
rows there are and however long nothing is drafted. One gather collects the features when a draft begins.

Invariant: a row's features are kept and dropped in the order of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class WaitingFeatures:
    """One row's features, as stretches of tensors that it shares with other rows."""

    # (features [B, N, E], and the stretch of their flattened rows [B * N, E]: the first row, and how many)
    _stretches: list[tuple[torch.Tensor, int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(count for _, _, count in self._stretches)

    def add(self, features: torch.Tensor, row: int, start: int, end: int) -> None:
        """Add `features[row, start:end]` after the others; `features` is a contiguous [B, N, E]."""
        if end > start:
            self._stretches.append((features, row * features.shape[1] + start, end - start))

    def drop(self, count: int) -> None:
        """Drop the first `count` features."""
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
        """The first features of A rows, [A, num_columns, E]; a row that has fewer, but at least one, repeats its last."""
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
