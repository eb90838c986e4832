"""Attention of a candidate tree over the paged KV cache.

`TreeLayout` is built once a pass and shared by all layers: where each row's keys lie and which of them each node may see.
On CPU every row of the batch is one fused `scaled_dot_product_attention` over its own keys: no padding to the longest row,
no repeated key-value heads (the query heads of a group are stacked along the node axis), and no copy where the row's blocks
are consecutive. Soft-capping and sinks, which the fused form cannot express, go through `tree_attention_reference`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from selfspec.kernels.reference import tree_attention_reference


@dataclass
class TreeLayout:
    """One pass's keys and visibility.

    Attributes:
        block_tables: [B, M] int64.
        lengths: [B] int64, T of each row; `host_lengths` is the same on the host.
        depths: [B, M] int64, of the tree's stored nodes; a pass queries the last N of them.
        ancestor_mask: [B, N, M] bool.
        row_slots: per row, the slots of its T + M keys in storage order: a slice where they are consecutive.
    """

    block_tables: torch.Tensor
    lengths: torch.Tensor
    host_lengths: list[int]
    depths: torch.Tensor
    ancestor_mask: torch.Tensor
    block_size: int
    row_slots: list[slice | torch.Tensor]
    _biases: dict[tuple[int, int | None, int, torch.dtype], torch.Tensor | None] = field(default_factory=dict)

    def bias(self, row: int, sliding_window: int | None, num_groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [num_groups * N, T + M] of one row (None where every key is visible), cached for the pass."""
        key = (row, sliding_window, num_groups, dtype)
        if key not in self._biases:
            self._biases[key] = self._make_bias(*key)
        return self._biases[key]

    def _make_bias(self, row: int, sliding_window: int | None, num_groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        _, N, M = self.ancestor_mask.shape
        T = self.host_lengths[row]
        if N == M == 1 and (sliding_window is None or T < sliding_window):
            return None
        device = self.depths.device
        visible = torch.cat([torch.ones(N, T, dtype=torch.bool, device=device), self.ancestor_mask[row]], dim=1)
        if sliding_window is not None:
            depths = self.depths[row]
            positions = torch.cat([torch.arange(T, device=device), T + depths])
            visible &= (T + depths[M - N :])[:, None] - positions < sliding_window
        bias = torch.zeros(N, T + M, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
        return bias.repeat(num_groups, 1)


def tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layout: TreeLayout,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, N, H, Dv] from query [B, H, N, D] and one layer's pool; see `tree_attention_reference` for the formula."""
    if softcap is not None or sinks is not None or query.device.type != "cpu":
        return tree_attention_reference(
            query,
            key_cache,
            value_cache,
            layout.block_tables,
            layout.lengths,
            layout.depths,
            layout.ancestor_mask,
            layout.block_size,
            scaling,
            sliding_window,
            softcap,
            sinks,
        )
    B, H, N, D = query.shape
    G, Dv = key_cache.shape[1], value_cache.shape[2]
    out = query.new_empty(B, N, H, Dv)
    for b, slots in enumerate(layout.row_slots):
        keys = key_cache[slots].transpose(0, 1)[None]  # [1, G, S, D]
        values = value_cache[slots].transpose(0, 1)[None]
        grouped = query[b].reshape(1, G, (H // G) * N, D)
        bias = layout.bias(b, sliding_window, H // G, query.dtype)
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scaling)
        out[b] = attended.view(H, N, Dv).transpose(0, 1)
    return out
