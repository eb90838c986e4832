# mypy: allow-untyped-defs
"""A linear layer for the few rows of a decoding pass, whose result for a row does not depend on the other rows' number.

    out[r, o] = sum_i x[r, i] * weight[o, i] + bias[o] (+ residual[r, o], to what was rounded before)

One program computes BLOCK_OUT outputs of BLOCK_R rows: it walks through its stripe of the weight in steps of BLOCK_IN, in
ascending order, and adds up in float32. Nothing splits the sum. Rows that fill several tiles are neighbours in launch order,
so that the stripe comes from memory once and from L2 afterwards.

The weight's rows are the left operand of the matrix instruction and x the right one: which instruction a layer runs follows
from BLOCK_OUT, which follows from the weight's shape alone. With x on the left, 64 rows would run another one than 16.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from selfspec.kernels.jit import is_compiled_for, jit, tl, triton

# More rows than this are a prefill's: F.linear is faster there.
MAX_ROWS = 256
# One step of the sum, for every weight: the order of additions is part of the result.
BLOCK_IN, FLOAT32_BLOCK_IN = 128, 32
ROW_TILES = (16, 32, 64)
MAX_STAGES = 8


class Tile(NamedTuple):
    """What a program is for weights of at least `min_outputs` rows; `shared_kib` bounds its stages in flight."""

    min_outputs: int
    block_out: int
    num_warps: int
    shared_kib: int


# Small stripes where a weight has few rows, so that every multiprocessor gets one; two or more programs on each elsewhere.
TILES = (Tile(12288, 64, 4, 100), Tile(4224, 32, 4, 100), Tile(2048, 32, 4, 200), Tile(0, 16, 2, 100))
FLOAT32_TILE = Tile(0, 32, 4, 0)


@jit(do_not_specialize=("R",))
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    R,
    IN,
    OUT,
    HAS_TAIL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    num_row_tiles = tl.cdiv(R, BLOCK_R)
    offs_r = tl.program_id(0) % num_row_tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_out = tl.program_id(0) // num_row_tiles * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    offs_in = tl.arange(0, BLOCK_IN)
    mask_r = offs_r < R
    mask_out = offs_out < OUT
    x_rows = x_ptr + offs_r.to(tl.int64)[:, None] * IN + offs_in
    weight_rows = weight_ptr + offs_out.to(tl.int64)[:, None] * IN + offs_in

    acc = tl.zeros([BLOCK_OUT, BLOCK_R], tl.float32)
    for first in range(0, IN, BLOCK_IN):
        mask_x = mask_r[:, None]
        mask_weight = mask_out[:, None]
        if HAS_TAIL:
            mask_in = first + offs_in < IN
            mask_x = mask_x & mask_in
            mask_weight = mask_weight & mask_in
        weight = tl.load(weight_rows + first, mask=mask_weight, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_rows + first, mask=mask_x, other=0.0, eviction_policy="evict_last")
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_out, mask=mask_out, other=0.0).to(tl.float32)[:, None]
    offs = offs_r.to(tl.int64)[None, :] * OUT + offs_out[:, None]
    mask = mask_out[:, None] & mask_r[None, :]
    if residual_ptr is not None:
        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32) + tl.load(residual_ptr + offs, mask=mask, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., OUT] from x [..., IN], weight [OUT, IN] and bias [OUT]: `F.linear` for up to MAX_ROWS rows.

    Args:
        residual: [..., OUT], added to the result.
    """
    if is_compiled_for(x) and 0 < x.numel() <= MAX_ROWS * x.shape[-1]:
        return launch_linear(x, weight, bias, residual)
    out = F.linear(x, weight, bias)
    return out if residual is None else residual + out


def launch_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear` by the kernel."""
    OUT, IN = weight.shape
    assert x.shape[-1] == IN and x.dtype == weight.dtype and weight.is_contiguous(), (x.shape, x.dtype, weight.shape)
    assert bias is None or (bias.shape == (OUT,) and bias.is_contiguous()), bias
    assert residual is None or (residual.shape == (*x.shape[:-1], OUT) and residual.is_contiguous()), residual
    rows = x.reshape(-1, IN).contiguous()
    R = len(rows)
    out = x.new_empty(*x.shape[:-1], OUT)
    tile, block_in = next(tile for tile in TILES if tile.min_outputs <= OUT), BLOCK_IN
    block_r = next((size for size in ROW_TILES if size >= R), ROW_TILES[-1])
    shared = min(tile.shared_kib * 1024, _shared_memory(x.device))
    num_stages = min(MAX_STAGES, shared // ((tile.block_out + block_r) * block_in * x.element_size()))
    if x.dtype == torch.float32:
        # No matrix instruction multiplies float32 exactly: a thread holds its operands in registers.
        tile, block_in, block_r, num_stages = FLOAT32_TILE, FLOAT32_BLOCK_IN, ROW_TILES[0], 2
    _linear_kernel[(triton.cdiv(OUT, tile.block_out) * triton.cdiv(R, block_r),)](
        rows,
        weight,
        bias,
        residual,
        out,
        R,
        IN,
        OUT,
        HAS_TAIL=IN % block_in != 0,
        BLOCK_R=block_r,
        BLOCK_OUT=tile.block_out,
        BLOCK_IN=block_in,
        num_warps=tile.num_warps,
        num_stages=num_stages,
    )
    return out


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may have for its stages."""
    if device.type != "cuda":
        return 1 << 30
    # Some bytes are the compiler's own.
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"] - 2048
