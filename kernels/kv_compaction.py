"""Move the accepted path's rows of the KV pool to the end of the prefix, all layers at once.

The path's source rows ascend and never lie before their destination, but a destination may be another path node's source;
`index_select` reads everything before the first write, so overlapping moves are safe.
"""

from __future__ import annotations

import torch

from selfspec.kernels.reference import kv_compaction_reference


def kv_compaction(
    key_cache: torch.Tensor, value_cache: torch.Tensor, source_slots: torch.Tensor, target_slots: torch.Tensor
) -> None:
    """In place; arguments as in `kv_compaction_reference`."""
    assert source_slots.shape == target_slots.shape, (source_slots.shape, target_slots.shape)
    kv_compaction_reference(key_cache, value_cache, source_slots, target_slots)
