"""Linear layers for prefill, draft and verify on a CPU: the same weights, laid out for oneDNN.

A decoding pass multiplies a handful of rows by every weight. By default torch runs a gemv for one row and a general gemm for
two to sixteen, which reads memory at a fraction of its speed. oneDNN's packed layout, which torch.compile's freezing uses
too, keeps both near the memory's speed on many processors.

Invariant: a packed layer gives its plain weight back bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from selfspec.model.stored_linear import StoredLinear


class PackedLinear(StoredLinear):
    """An `nn.Linear` whose weight is stored in oneDNN's blocked layout."""

    # The number of rows the layout is tuned for: a typical candidate tree.
    ROWS_HINT = 16
    # Fewer rows are filled up to four, because oneDNN multiplies four faster than one, two or three.
    MIN_ROWS = 4

    def __init__(self, linear: nn.Linear, table: torch.Tensor | None = None) -> None:
        super().__init__(linear, table)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), self.ROWS_HINT)

    @property
    def weight(self) -> torch.Tensor:
        return self._packed.to_dense()

    @property
    def num_bytes(self) -> int:
        return self.in_features * self.out_features * torch.float32.itemsize

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        num_rows = rows.shape[0]
        if num_rows < self.MIN_ROWS:
            rows = F.pad(rows, (0, 0, 0, self.MIN_ROWS - num_rows))
        out = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return out[:num_rows].view(*x.shape[:-1], self.out_features)


def can_pack() -> bool:
    """True where this torch build has oneDNN's packed linear layers."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
