# mypy: allow-untyped-defs
"""RMSNorm (https://arxiv.org/abs/1910.07467). A row's result does not depend on how many other rows there are.

    out = (x / sqrt(mean(x²) + eps)) * (offset + weight)

The formula is computed in float32 and rounded at the end, and in Llama before the multiplication by the weight as well. One
program holds one row [E]; the order in which it adds the squares follows from E. Rows may lie further apart than E, at even
distances in each of two dimensions, so slices of a merged layer's output need no copy. The same goes for the output's rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from selfspec.kernels.jit import is_compiled_for, jit, tl, triton
from selfspec.kernels.reference import rms_norm_reference

# A program's registers hold no longer row.
MAX_WIDTH = 32768


class Norm(NamedTuple):
    """An RMSNorm for other kernels to apply: `x / sqrt(mean(x²) + eps) * (offset + weight)`, weight [E].

    A kernel that begins the norm divides the weight by `divisor` so that the weighted rows cannot overflow. The divisor is
    no less than any magnitude of `offset + weight`, and a power of two, so it rounds nothing.
    """

    weight: torch.Tensor
    eps: float
    offset: float
    is_rounded_first: bool
    divisor: float

    @classmethod
    def of(cls, weight: torch.Tensor, eps: float, *, offset: float = 0.0, is_rounded_first: bool = False) -> Norm:
        """The norm with weight [E], which is read on the host."""
        greatest = float((offset + weight.detach().float()).abs().max())
        exponent = math.ceil(math.log2(greatest)) if 0 < greatest < math.inf else 0
        return cls(weight, eps, offset, is_rounded_first, 2.0**exponent)

    @property
    def rule(self) -> dict[str, Any]:
        """The arguments of `rms_norm` besides the weight and eps."""
        return {"offset": self.offset, "is_rounded_first": self.is_rounded_first}


@jit(do_not_specialize=("num_inner", "stride_outer", "stride_inner", "stride_out"))
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_inner,
    stride_outer,
    stride_inner,
    stride_out,
    eps,
    offset,
    E: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    IS_ROUNDED_FIRST: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    row = tl.program_id(0)
    start = row // num_inner * stride_outer.to(tl.int64) + row % num_inner * stride_inner.to(tl.int64)
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < E
    x = tl.load(x_ptr + tl.multiple_of(start, ALIGNMENT) + offs_e, mask=mask_e, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    weight = offset + tl.load(weight_ptr + offs_e, mask=mask_e, other=0.0).to(tl.float32)
    if IS_ROUNDED_FIRST:
        normed = normed.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(
        out_ptr + tl.multiple_of(row * stride_out.to(tl.int64), ALIGNMENT) + offs_e,
        (normed * weight).to(out_ptr.dtype.element_ty),
        mask=mask_e,
    )


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    is_rounded_first: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[..., E], x's type, from x [..., E] and weight [E]; see `rms_norm_reference`.

    Args:
        out: [..., E] to write into: a contiguous tensor, or some columns of one.
    """
    if is_compiled_for(x) and 0 < x.shape[-1] <= MAX_WIDTH and x.numel():
        return launch_rms_norm(x, weight, eps, offset=offset, is_rounded_first=is_rounded_first, out=out)
    normed = rms_norm_reference(x, weight, eps, offset=offset, is_rounded_first=is_rounded_first)
    return normed if out is None else out.copy_(normed)


def launch_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    is_rounded_first: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rms_norm` by the kernel; shapes as there."""
    E = x.shape[-1]
    assert weight.shape == (E,) and weight.is_contiguous() and E <= MAX_WIDTH, (x.shape, weight.shape)
    rows = x[(None,) * (3 - x.ndim)].flatten(0, -3)  # [outer, inner, E]
    # Vector loads decide the order of additions, so their width must follow from E.
    alignment = math.gcd(E, 16 // x.element_size())
    if rows.stride(2) != 1 or rows.stride(0) % alignment or rows.stride(1) % alignment or rows.data_ptr() % 16:
        rows = rows.clone(memory_format=torch.contiguous_format)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    out_rows = out.view(-1, out.shape[-1]) if out.is_contiguous() else out.flatten(0, -2)
    assert out.shape == x.shape and out.stride(-1) == 1 and out_rows.data_ptr() == out.data_ptr(), (out.shape, out.stride())
    assert out_rows.stride(0) % alignment == 0 and out.data_ptr() % 16 == 0, out.stride()
    block_e = triton.next_power_of_2(E)
    _rms_norm_kernel[(rows.shape[0] * rows.shape[1],)](
        rows,
        weight,
        out,
        rows.shape[1],
        rows.stride(0),
        rows.stride(1),
        out_rows.stride(0),
        eps,
        offset,
        E=E,
        ALIGNMENT=alignment,
        IS_ROUNDED_FIRST=is_rounded_first,
        BLOCK_E=block_e,
        num_warps=min(16, max(1, block_e // 512)),
    )
    return out
