"""Which keys the nodes of a pass see, and where they lie in the paged cache.

A pass has one of two forms. In the *uniform* form each of B rows has N nodes, and tensors of nodes are [B, N]. In the
*ragged* form a row has as many nodes as it needs, or none. All nodes lie one row after the other, and tensors of nodes are
[1, F].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch

from selfspec.kernels.slots import slots_of


@dataclass
class TreeLayout:
    """Which keys the nodes of one pass see, and where they lie.

    Attributes:
        block_tables: [B, P] int64.
        lengths: [B] int64, T of each row; `host_lengths` is the same on the host, or None if the host does not know it.
        depths: [B, M] int64, of the tree's stored nodes. A pass queries the last N of these. Ragged: [1, F], all queried.
        ancestor_mask: [B, N, M] bool; None where `paths` says the same. Ragged: [F, F], or None for chains, too.
        row_slots: for each row, the slots of its T + M keys in storage order, as a slice where they are consecutive. Only
            the CPU needs them.
        max_depth: K, a bound on the nodes' depths; None if M - 1 is the best bound known.
        paths: [B, N, K + 1 or more] int64, the `path_slots` where they are known already. Ragged: [1, F, K + 1 or more].
        is_chain: every row is one path in storage order, with padding only after it. The result at a padding node may then
            differ from the formula; nobody reads it.
        starts: [B + 1] int64, which makes the pass ragged: row b has the flat nodes `starts[b]` to `starts[b + 1] - 1`, and
            its node j is stored at storage index `lengths[b] + j`. Flat nodes from `starts[B]` on are no row's; nothing is
            read or written for them. `host_starts` is the same on the host, or None if the host does not know it.
        max_nodes: ragged only: a bound on a row's nodes; None if F is the best bound known.
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
    starts: torch.Tensor | None = None
    host_starts: list[int] | None = None
    max_nodes: int | None = None
    _biases: dict[tuple[int, int | None, int, torch.dtype], torch.Tensor | None] = field(default_factory=dict)

    @property
    def node_bound(self) -> int:
        """A bound on the stored nodes of a row."""
        return self.depths.shape[1] if self.max_nodes is None else self.max_nodes

    @property
    def depth_bound(self) -> int:
        """K: no node is deeper."""
        return self.node_bound - 1 if self.max_depth is None else self.max_depth

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
        mask = self.ancestor_mask if self.starts is None else self.ancestor_mask[None]
        B, N, M = mask.shape
        K = self.depth_bound
        # Nodes that are no ancestors go to one more column, which is cut off.
        column = torch.where(mask, self.depths[:, None], K + 1)
        path = self.node_slots.new_zeros(B, N, K + 2).scatter_(2, column, self.node_slots[:, None].expand(B, N, M))
        return path[:, :, : K + 1].contiguous()

    @cached_property
    def node_slots(self) -> torch.Tensor:
        """[B, M] int64, or [1, F]: the slots of the stored nodes."""
        index = torch.arange(self.depths.shape[1], device=self.depths.device)
        if self.starts is None:
            return slots_of(self.block_tables, self.lengths[:, None] + index, self.block_size)
        # Nodes of no row count as the last row's.
        row = torch.searchsorted(self.starts[1:-1], index, right=True)
        in_row = self.lengths[row] + index - self.starts[row]
        in_table = in_row.clamp(max=self.block_tables.shape[1] * self.block_size - 1)
        return slots_of(self.block_tables[row], in_table[:, None], self.block_size).T

    @cached_property
    def rows(self) -> list[tuple[slice, TreeLayout]]:
        """Ragged form: the flat nodes of each row that has any, and the row's layout alone, which is uniform.

        Only the CPU needs them; the device is asked for what the host does not know.
        """
        assert self.starts is not None
        starts = self.starts.tolist() if self.host_starts is None else self.host_starts
        lengths = self.lengths.tolist() if self.host_lengths is None else self.host_lengths
        return [
            (slice(start, end), self._row(b, slice(start, end), lengths[b]))
            for b, (start, end) in enumerate(pairwise(starts))
            if start < end
        ]

    def _row(self, b: int, nodes: slice, length: int) -> TreeLayout:
        row = slice(b, b + 1)
        depths = self.depths[:, nodes]
        if self.ancestor_mask is not None:
            mask = self.ancestor_mask[nodes, nodes]
        elif self.is_chain:
            N = nodes.stop - nodes.start
            mask = torch.ones(N, N, dtype=torch.bool, device=depths.device).tril()
        else:
            assert self.paths is not None
            # A node's ancestor at a depth is the node of that depth whose slot is on the path.
            on_path = self.paths[0, nodes][:, depths[0]] == self.node_slots[:, nodes]
            mask = on_path & (depths <= depths.T)
        return TreeLayout(
            self.block_tables[row],
            self.lengths[row],
            [length],
            depths,
            mask[None],
            self.block_size,
            row_slots=None if self.row_slots is None else self.row_slots[row],
            max_depth=self.max_depth,
            is_chain=self.is_chain,
        )

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
