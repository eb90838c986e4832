"""What all layouts of a linear layer have in common, whatever form they hold the weight in. For inference only."""

from __future__ import annotations

import torch
from torch import nn


class StoredLinear(nn.Module):
    """An `nn.Linear` whose weight is held in a form of its own.

    `weight` gives the plain [out, in] tensor back. It is made anew each time, and `rows` makes a part of it.

    Args:
        table: [out, in], the same weight in 16 bits, where an embedding shares it.
    """

    def __init__(self, linear: nn.Linear, table: torch.Tensor | None = None) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._table = table

    @property
    def weight(self) -> torch.Tensor:
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """What a pass reads of the weight."""
        raise NotImplementedError

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows `ids` [n] of the plain weight, [n, in]."""
        return self.weight[ids] if self._table is None else self._table[ids].float()
