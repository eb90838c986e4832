"""Where a token lies in a paged pool.

A pool stores one row per slot. Storage index `i` of batch row `b` lies in slot
`block_tables[b, i // block_size] * block_size + i % block_size`.
"""

from __future__ import annotations

import torch


def slots_of(block_tables: torch.Tensor, index: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots [B, S], int64, of the storage indices `index [B, S]` in the rows of `block_tables [B, M]`."""
    return block_tables.gather(1, index // block_size) * block_size + index % block_size
