"""Linear layers for prefill, draft and verify on a CPU: the same weights, laid out for oneDNN once at load.

A decoding pass multiplies a handful of rows by every weight. By default torch runs a gemv for one row and a general gemm for
two to sixteen. At these sizes the gemm reads memory at a fraction of its speed, so a pass over four nodes costs up to twice
a pass over one. oneDNN's packed layout, which torch.compile's freezing uses too, keeps both near the memory's speed.

Invariant: a packed layer gives its plain weight back bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from selfspec.model.memory import release_free_memory

# Bytes of plain weights after which freed ones are given back.
RELEASE_EVERY = 8 << 20


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight is stored in oneDNN's blocked layout. For inference only.

    `weight` gives the plain [out, in] tensor back, bit for bit. It is made anew each time, and `rows` makes a part of it.

    Args:
        table: [out, in], the same weight in 16 bits, where an embedding shares it.
    """

    # The number of rows the layout is tuned for: a typical candidate tree.
    ROWS_HINT = 16
    # Fewer rows are filled up to four, because oneDNN multiplies four faster than one, two or three.
    MIN_ROWS = 4

    def __init__(self, linear: nn.Linear, table: torch.Tensor | None = None) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), self.ROWS_HINT)
        self._table = table

    @property
    def weight(self) -> torch.Tensor:
        return self._packed.to_dense()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows `ids` [n] of the plain weight, [n, in]."""
        return self.weight[ids] if self._table is None else self._table[ids].float()

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


def pack_linear_layers(model: nn.Module, tables: Mapping[int, torch.Tensor] | None = None) -> int:
    """Replace every plain float32 `nn.Linear` on the CPU by a packed one, in place; returns how many were replaced.

    Args:
        tables: 16-bit tables by the `id` of a weight that a layer may share, from `compact_embeddings`.
    """
    # Names and not the layers themselves, because a list of layers would keep every plain weight until the last is packed.
    places = [(parent, name) for parent in model.modules() for name, child in parent.named_children() if _is_packable(child)]
    num_bytes = 0
    # The LM head, which is often the largest, comes last, when the others have given back what they freed.
    for parent, name in reversed(places):
        linear: Any = parent.get_submodule(name)
        setattr(parent, name, PackedLinear(linear, (tables or {}).get(id(linear.weight))))
        num_bytes += linear.weight.nbytes
        del linear
        if num_bytes >= RELEASE_EVERY:
            release_free_memory()
            num_bytes = 0
    release_free_memory()
    return len(places)


def _is_packable(module: nn.Module) -> bool:
    # Only float32, because oneDNN packs lower precision only on some processors.
    return type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype == torch.float32
