"""Which keys the nodes of a pass see, and where they lie in the paged cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from selfspec.kernels.slots import slots_of


@dataclass
class TreeLayout:
    """Which keys the nodes of one pass see, and where they lie.

    Attributes:
        block_tables: [B, P] int64.
        lengths: [B] int64, T of each row; `host_lengths` is the same on the host, or None if the host does not know it.
        depths: [B, M] int64, of the tree's stored nodes. A pass queries the last N of these.
        ancestor_mask: [B, N, M] bool; None where `paths` says the same.
        row_slots: for each row, the slots of its T + M keys in storage order, as a slice where they are consecutive. Only
            the CPU needs them.
        max_depth: K, a bound on the nodes' depths; None if M - 1 is the best bound known.
        paths: [B, N, K + 1 or more] int64, the `path_slots` where they are known already.
        is_chain: every row is one path in storage order, with padding only after it. The result at a padding node may then
            differ from the formula; nobody reads it.
    """

    block_tables: torch.Tensor
    lengths: torch.Tensor
    host_lengths: list[int] | None
    depths: torch.Tensor
    ancestor_mask: torch.Tensor | None
    block_size: int
    row_slots: list[slice | torch.Tensor] | None = None
    max_depth: int | None = None
    is_chain: bool = False
    paths: torch.Tensor | None = None
    _biases: dict[tuple[int, int | None, int, torch.dtype], torch.Tensor | None] = field(default_factory=dict)

    @property
    def depth_bound(self) -> int:
        """K: no node is deeper."""
        return self.depths.shape[1] - 1 if self.max_depth is None else self.max_depth

    @property
    def length_bound(self) -> int:
        """A bound on the rows' prefix lengths, found without asking the device."""
        return self.block_tables.shape[1] * self.block_size if self.host_lengths is None else max(self.host_lengths)

    @cached_property
    def path_slots(self) -> torch.Tensor:
        """[B, N, K + 1] int64: the slot of each queried node's ancestor at each depth, and its own at its own depth.

        Entries past a node's own depth mean nothing.
        """
        if self.paths is not None:
            return self.paths
        assert self.ancestor_mask is not None
        B, N, M = self.ancestor_mask.shape
        K = self.depth_bound
        nodes = torch.arange(M, device=self.depths.device).expand(B, M)
        slots = slots_of(self.block_tables, self.lengths[:, None] + nodes, self.block_size)
        # Nodes that are no ancestors go to one more column, which is cut off.
        column = torch.where(self.ancestor_mask, self.depths[:, None], K + 1)
        path = slots.new_zeros(B, N, K + 2).scatter_(2, column, slots[:, None].expand(B, N, M))
        return path[:, :, : K + 1].contiguous()

    def bias(self, row: int, sliding_window: int | None, num_groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """One row's additive mask [num_groups * N, T + M], cached for the pass; None where every key is visible."""
        key = (row, sliding_window, num_groups, dtype)
        if key not in self._biases:
            self._biases[key] = self._make_bias(*key)
        return self._biases[key]

    def _make_bias(self, row: int, sliding_window: int | None, num_groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        assert self.host_lengths is not None and self.ancestor_mask is not None
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
