# mypy: allow-untyped-defs
"""Linear layers for the many rows of a prompt. A row has the bits that `linear` gives it alone.

The sums are those of `selfspec.kernels.linear`, in the same order: the weight is the left operand, inputs are added in
ascending order, and a weight whose sums have two parts adds them at the end. The instruction's sums depend neither on the
tile's size nor on how many inputs one call takes, so the tile is chosen for speed: 128 rows, loaded by the copy engine.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from selfspec.kernels.jit import TensorDescriptor, jit, shared_memory, tl, triton
from selfspec.kernels.linear_epilogue import rounded, store, store_gated, sum_pairs


class WideTile(NamedTuple):
    """What a program computes, and how it is compiled."""

    block_r: int
    block_out: int
    block_in: int
    num_warps: int
    num_stages: int


# For one part, for two parts, and for a gate and its up, whose programs compute twice as many sums.
TILE, PARTS_TILE = WideTile(128, 128, 64, 8, 5), WideTile(128, 128, 64, 8, 4)
GATED_TILE, GATED_PARTS_TILE = WideTile(128, 128, 64, 8, 4), WideTile(128, 64, 64, 8, 4)
# Stripes of the weight that are in use at a time.
NUM_STRIPES = 8


@jit(do_not_specialize=("R",))
def _wide_linear_kernel(
    x_desc,
    weight_desc,
    bias_ptr,
    residual_ptr,
    squares_ptr,
    norm_weight_ptr,
    out_ptr,
    next_weighted_ptr,
    next_squares_ptr,
    R,
    IN,
    OUT,
    middle,
    eps,
    scale,
    norm_offset,
    norm_factor,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    IS_GATED: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STRIPES: tl.constexpr,
):
    """The outputs of BLOCK_R rows, loaded by the copy engine. Where a sum has two parts, the second begins at `middle`.

    NUM_STRIPES stripes of the weight are in use at a time, so they and the rows come from L2.
    """
    num_row_tiles = tl.cdiv(R, BLOCK_R)
    num_outputs = OUT // 2 if IS_GATED else OUT
    first_stripe = tl.program_id(0) // (NUM_STRIPES * num_row_tiles) * NUM_STRIPES
    num_stripes = tl.minimum(tl.cdiv(num_outputs, BLOCK_OUT) - first_stripe, NUM_STRIPES)
    program = tl.program_id(0) - first_stripe * num_row_tiles
    tile_out = first_stripe + program % num_stripes
    first_out = tile_out * BLOCK_OUT
    first_r = program // num_stripes * BLOCK_R
    offs_out = first_out + tl.arange(0, BLOCK_OUT)
    offs_r = first_r + tl.arange(0, BLOCK_R)
    mask_out = offs_out < num_outputs
    mask_r = offs_r < R

    acc = tl.zeros([BLOCK_OUT, BLOCK_R], tl.float32)
    up_acc = acc
    for part in tl.static_range(NUM_PARTS):
        sums = tl.zeros([BLOCK_OUT, BLOCK_R], tl.float32)
        up_sums = sums
        for first in range(part * middle, IN if part == NUM_PARTS - 1 else middle, BLOCK_IN):
            x = tl.trans(x_desc.load([first_r, first]))
            sums = tl.dot(weight_desc.load([first_out, first]), x, sums)
            if IS_GATED:
                up_sums = tl.dot(weight_desc.load([num_outputs + first_out, first]), x, up_sums)
        acc = sums if part == 0 else acc + sums
        up_acc = up_sums if part == 0 else up_acc + up_sums
    if squares_ptr is not None:
        offs_p = tl.arange(0, BLOCK_P)
        squares = tl.load(squares_ptr + offs_r[:, None] * P + offs_p, mask=mask_r[:, None] & (offs_p < P), other=0.0)
        factors = (scale * tl.rsqrt(sum_pairs(squares, BLOCK_R) / IN + eps))[None, :]
        acc *= factors
        up_acc *= factors
    dtype = out_ptr.dtype.element_ty
    out = rounded(acc, bias_ptr, offs_out, mask_out, dtype)
    if IS_GATED:
        up = rounded(up_acc, bias_ptr, num_outputs + offs_out, mask_out, dtype)
        store_gated(out, up, out_ptr, offs_r, offs_out, mask_r, num_outputs)
    else:
        store(
            out,
            residual_ptr,
            norm_weight_ptr,
            out_ptr,
            next_weighted_ptr,
            next_squares_ptr,
            offs_r,
            offs_out,
            mask_r,
            tile_out,
            OUT,
            norm_offset,
            norm_factor,
            BLOCK_R,
            BLOCK_OUT,
        )


def tile_of(x: torch.Tensor, weight: torch.Tensor, *, num_parts: int, is_gated: bool) -> WideTile | None:
    """The tile for x [..., IN] and weight [OUT, IN]; None where the copy engine cannot load them.

    It has as many stages as fit into the card's shared memory.
    """
    row_bytes = x.shape[-1] * x.element_size()
    if (
        x.dtype == torch.float32
        or row_bytes % 16
        or not row_bytes
        or weight.data_ptr() % 16
        or not _has_copy_engine(x.device)
    ):
        return None
    tile = ((GATED_TILE, GATED_PARTS_TILE) if is_gated else (TILE, PARTS_TILE))[num_parts - 1]
    stage_bytes = (tile.block_r + tile.block_out * (1 + is_gated)) * tile.block_in * x.element_size()
    num_stages = min(tile.num_stages, shared_memory(x.device) // stage_bytes)
    return tile._replace(num_stages=num_stages) if num_stages >= 2 else None


def launch_wide(
    x: torch.Tensor,
    weight: torch.Tensor,
    tensors: tuple[torch.Tensor | None, ...],
    numbers: tuple[float, ...],
    tile: WideTile,
    middle: int,
    **options: Any,
) -> None:
    """Launch the kernel for contiguous x [R, IN] and weight [OUT, IN].

    Args:
        tensors: the kernel's pointers after the operands, in its order.
        numbers: `eps` and those after it.
        middle: where the second part of a sum begins; IN if it has one part.
    """
    (R, IN), OUT = x.shape, len(weight)
    num_outputs = OUT // 2 if options["IS_GATED"] else OUT
    num_programs = triton.cdiv(R, tile.block_r) * triton.cdiv(num_outputs, tile.block_out)
    _wide_linear_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(x, [tile.block_r, tile.block_in]),
        TensorDescriptor.from_tensor(weight, [tile.block_out, tile.block_in]),
        *tensors,
        R,
        IN,
        OUT,
        middle,
        *numbers,
        NUM_PARTS=1 if middle == IN else 2,
        BLOCK_R=tile.block_r,
        BLOCK_OUT=tile.block_out,
        BLOCK_IN=tile.block_in,
        NUM_STRIPES=NUM_STRIPES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **options,
    )


@cache
def _has_copy_engine(device: torch.device) -> bool:
    """Whether tiles can be loaded by descriptors: from compute capability 9.0 on, and in the interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)
