"""Linear layers for prefill, draft and verify on a CPU: the same weights, laid out for oneDNN once at load.

A decoding pass multiplies a handful of rows by every weight. By default torch runs a gemv for one row and a general gemm for
two to sixteen. At these sizes the gemm reads memory at a fraction of its speed, so a pass over four nodes costs up to twice
a pass over one. oneDNN's packed layout, which torch.compile's freezing uses too, keeps both near the memory's speed.

Invariant: a packed layer gives its plain weight back bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight is stored in oneDNN's blocked layout. For inference only.

    `weight` gives the plain [out, in] tensor back, bit for bit.
    """

    # The number of rows the layout is tuned for: a typical candidate tree.
    ROWS_HINT = 16
    # Fewer rows are filled up to four, because oneDNN multiplies four faster than one, two or three.
    MIN_ROWS = 4

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), self.ROWS_HINT)

    @property
    def weight(self) -> torch.Tensor:
        return self._packed.to_dense()

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


def pack_linear_layers(model: nn.Module) -> int:
    """Replace every plain float32 `nn.Linear` on the CPU by a packed one, in place; returns how many were replaced."""
    num_packed = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            # Only float32, because oneDNN packs lower precision only on some processors.
            if type(child) is nn.Linear and child.weight.device.type == "cpu" and child.weight.dtype == torch.float32:
                setattr(module, name, PackedLinear(child))
                num_packed += 1
    return num_packed
