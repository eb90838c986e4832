"""Linear layers for prefill, draft and verify on a CPU: float32 arithmetic on weights held in the 16 bits that they need.

A pass over a few rows takes as long as its weights take to come from memory. A float32 model usually comes from a checkpoint
of 16 bits. FBGEMM, which torch has on x86, keeps a weight in float16 and widens it in registers, so half as much is read.

Invariants: a layer gives its plain weight back bit for bit. A row's bits do not depend on how many other rows there are, nor
on the number of threads.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import nn

from selfspec.model.stored_linear import StoredLinear

# From [..., R, in] and a packed weight to [..., R, out]; None where torch was built without it.
multiply: Any = getattr(torch.ops.quantized, "linear_dynamic_fp16", None)
# FBGEMM cuts rows into groups of this many, and each group into tiles of a few rows, by a table.
GROUP = 120
# Such a tile's rows get the bits that all rows should have.
TILE = 6
# The most weights of one layer that float16 cannot hold; they are added to the product one by one.
MAX_STRAYS = 256
# Rows that are compared at once, because a copy of a whole weight would be large.
CHUNK_ROWS = 4096
# The largest exponent of a float16.
MAX_EXPONENT = 15


class Strays(NamedTuple):
    """The weights that float16 rounds: where they are, what they are, and what rounding took from them. Each is [n]."""

    rows: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor
    differences: torch.Tensor


class HalfLinear(StoredLinear):
    """An `nn.Linear` whose weight is stored in float16, multiplied by a power of two, and multiplied in float32.

    Args:
        exponent: of that power.
        strays: see `Strays`; None where float16 holds all weights.
    """

    def __init__(
        self, linear: nn.Linear, table: torch.Tensor | None = None, *, exponent: int = 0, strays: Strays | None = None
    ) -> None:
        super().__init__(linear, table)
        weight = linear.weight.detach()
        self._scale = 2.0**-exponent
        self._strays = strays
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight * 2.0**exponent if exponent else weight, None)

    @classmethod
    def of(cls, linear: nn.Linear, table: torch.Tensor | None = None, *, may_round: bool = False) -> Self | None:
        """The layer in 16 bits; None where more than a few weights need more, unless they may be rounded."""
        weight = linear.weight.detach()
        greatest = max(float(rows.abs().max()) for rows in weight.split(CHUNK_ROWS))
        if not 0 < greatest < math.inf:
            return None
        exponent, places = 0, _rounded(weight, 0)
        if len(places):
            # Small weights lose bits, because a float16 has few exponents: use the largest ones.
            exponent = MAX_EXPONENT - math.frexp(greatest)[1]
            places = _rounded(weight, exponent)
        if may_round or not len(places):
            return cls(linear, table, exponent=exponent)
        if len(places) > MAX_STRAYS:
            return None
        rows, columns = places.T
        values = weight[rows, columns]
        differences = values - (values * 2.0**exponent).half().float() * 2.0**-exponent
        return cls(linear, table, exponent=exponent, strays=Strays(rows, columns, values, differences))

    @property
    def weight(self) -> torch.Tensor:
        weight = torch.ops.quantized.linear_unpack_fp16(self._packed)[0].float()
        if self._scale != 1:
            weight *= self._scale
        if self._strays is not None:
            weight[self._strays.rows, self._strays.columns] = self._strays.values
        return weight

    @property
    def num_bytes(self) -> int:
        return 2 * self.in_features * self.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.numel() // self.in_features
        num_missing = padded(num_rows) - num_rows
        if num_missing or x.ndim == 1:
            rows = F.pad(x.reshape(-1, self.in_features), (0, 0, 0, num_missing))
            out = multiply(rows, self._packed)[:num_rows].view(*x.shape[:-1], self.out_features)
        else:
            out = multiply(x, self._packed)
        if self._scale != 1:
            out.mul_(self._scale)
        if self._strays is not None:
            out.index_add_(-1, self._strays.rows, x[..., self._strays.columns] * self._strays.differences)
        if self.bias is not None:
            out.add_(self.bias)
        return out


def _rounded(weight: torch.Tensor, exponent: int) -> torch.Tensor:
    """The row and column [n, 2] of every weight that float16 rounds, after multiplication by `2**exponent`."""
    places = []
    for number, rows in enumerate(weight.split(CHUNK_ROWS)):
        scaled = rows * 2.0**exponent
        if not torch.equal(half := scaled.half().float(), scaled):
            places.append(torch.nonzero(half != scaled) + torch.tensor([number * CHUNK_ROWS, 0]))
    return torch.cat(places) if places else torch.empty(0, 2, dtype=torch.int64)


def padded(num_rows: int) -> int:
    """The number of rows, `num_rows` at least, that FBGEMM computes with the bits that all rows should have."""
    whole = num_rows // GROUP * GROUP
    return whole + row_counts()[num_rows - whole]


@cache
def row_counts() -> list[int]:
    """For 0 to `GROUP` - 1 rows, the number of rows to multiply instead, so that all rows get the same bits.

    Tiles of one or two rows may sum in another order than higher ones. Whether they do depends on the processor, so all are
    tried.
    """
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(600, 40, bias=False)
    linear.weight.data = torch.randn(40, 600, generator=generator).half().float()
    layer = HalfLinear(linear)
    x = torch.randn(GROUP, 600, generator=generator)
    expected = torch.cat([multiply(tile, layer._packed) for tile in x.split(TILE)])
    counts = list(range(GROUP + 1))
    for count in reversed(range(1, GROUP)):
        if not torch.equal(multiply(x[:count], layer._packed), expected[:count]):
            counts[count] = counts[count + 1]
    return counts[:GROUP]


@cache
def can_halve() -> bool:
    """True where this torch build multiplies float16 weights in float32, and on this processor rightly."""
    if multiply is None or "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    try:
        linear = nn.Linear(600, 40, bias=False)
        layer = HalfLinear.of(linear, may_round=True)
        if layer is None:
            return False
        x = torch.linspace(-1, 1, GROUP * 600).view(GROUP, 600).sin()
        expected = x.double() @ layer.weight.double().T
        return bool((layer(x) - expected).norm() < 1e-5 * expected.norm())
    except RuntimeError:
        # The engine that was chosen has no such operator.
        return False
