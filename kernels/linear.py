# mypy: allow-untyped-defs
"""Linear layers. A row's result does not depend on how many other rows there are.

    out[r, o] = sum_i x[r, i] * weight[o, i] + bias[o] (+ residual[r, o], added to the rounded sum)

One program computes BLOCK_OUT outputs of BLOCK_R rows. It walks through its stripe of the weight in steps of BLOCK_IN, in
ascending order, and adds up in float32. A weight with few outputs would leave multiprocessors idle, so two programs share
each of its tiles and take half of the inputs each. The one that finishes last adds the other's sums to its own; the order of
two does not matter. Where rows fill several tiles, these are neighbours in launch order, so the stripe comes from memory
once and then from L2.

The weight's rows are the left operand of the matrix instruction and x is the right one. BLOCK_OUT then decides which
instruction runs, and BLOCK_OUT follows from the weight's shape alone. With x on the left, 64 rows would run another
instruction than 16.

**An RMSNorm between two layers** needs no launch of its own. The layer before it (`linear_before_norm`) writes its output h,
h times the norm's weight and, for each row and program, a sum of squares. The layer after it (`normed_linear`) reads the
weighted rows and scales its own sums, because the norm divides a whole row by one number:

    sum_i (h_i * w_i / rms) * weight[o, i]  =  (sum_i (h_i * w_i) * weight[o, i]) / rms

**A gated MLP's first layer** (`normed_gated_linear`) has gate and up in one weight [2F, IN]. Each program takes half of its
outputs from either and writes `silu(gate) * up`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from selfspec.kernels.gated_activation import gated_silu
from selfspec.kernels.jit import is_compiled_for, jit, shared_memory, tl, triton
from selfspec.kernels.linear_epilogue import rounded, store, store_gated, sum_pairs
from selfspec.kernels.rms_norm import Norm, rms_norm
from selfspec.kernels.wide_linear import launch_wide, tile_of

# More rows than this are multiplied by `selfspec.kernels.wide_linear` where the card can: for sums of one part, and of two.
MAX_NARROW_ROWS = (128, 256)
# One step of the sum, the same for every weight because the order of additions is part of the result.
BLOCK_IN, FLOAT32_BLOCK_IN = 128, 32
ROW_TILES = (16, 32, 64, 128)
MAX_STAGES = 8


class Tile(NamedTuple):
    """How a program is built for weights of at least `min_outputs` rows; `shared_kib` bounds the memory of its stages."""

    min_outputs: int
    block_out: int
    num_warps: int
    shared_kib: int
    num_parts: int = 1


# Stripes of 64 outputs and more run on `wgmma`. They are narrower where most multiprocessors would get none, and have two
# parts where twice the programs still fit the card at once.
TILES = (Tile(12288, 128, 8, 200), Tile(4225, 64, 4, 200), Tile(2048, 64, 4, 200, num_parts=2), Tile(0, 16, 2, 100))
# With more rows than HIGH_ROWS, stripes of 64 outputs become 128: a row's bits are the same, and x is read half as often.
HIGH_ROWS, HIGH_OUTPUTS, HIGH_WARPS = 128, 128, 8
FLOAT32_TILE = Tile(0, 32, 4, 0)


@dataclass(frozen=True)
class NormedRows:
    """Rows and the norm through which the next layer reads them. The kernel that wrote the rows may have begun the norm.

    Attributes:
        hidden: [..., E], before the norm.
        weighted: [..., E], `hidden * (offset + weight) / divisor`; None if no kernel began the norm.
        squares: [R, P] float32, for each row one sum of squares from every program that wrote a part of it.
    """

    hidden: torch.Tensor
    norm: Norm
    weighted: torch.Tensor | None = None
    squares: torch.Tensor | None = None

    def finish(self) -> torch.Tensor:
        """The normed rows [..., E], by the norm's own kernel."""
        return rms_norm(self.hidden, self.norm.weight, self.norm.eps, **self.norm.rule)


@jit(do_not_specialize=("R",))
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    squares_ptr,
    norm_weight_ptr,
    out_ptr,
    next_weighted_ptr,
    next_squares_ptr,
    sums_ptr,
    counters_ptr,
    R,
    IN,
    OUT,
    eps,
    scale,
    norm_offset,
    norm_factor,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    IS_GATED: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    num_row_tiles = tl.cdiv(R, BLOCK_R)
    tile_r = tl.program_id(0) % num_row_tiles
    tile_out = tl.program_id(0) // num_row_tiles // NUM_PARTS
    offs_r = tile_r * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_in = tl.arange(0, BLOCK_IN)
    lane = tl.arange(0, BLOCK_OUT)
    if IS_GATED:
        # The first half of the lanes are gates, the second half the same outputs of `up`.
        HALF: tl.constexpr = BLOCK_OUT // 2
        mask_out = tile_out * HALF + lane % HALF < OUT // 2
        offs_out = tile_out * HALF + lane % HALF + lane // HALF * (OUT // 2)
    else:
        offs_out = tile_out * BLOCK_OUT + lane
        mask_out = offs_out < OUT
    mask_r = offs_r < R
    if squares_ptr is not None:
        offs_p = tl.arange(0, BLOCK_P)
        squares = tl.load(squares_ptr + offs_r[:, None] * P + offs_p, mask=mask_r[:, None] & (offs_p < P), other=0.0)
    x_rows = x_ptr + offs_r.to(tl.int64)[:, None] * IN + offs_in
    weight_rows = weight_ptr + offs_out.to(tl.int64)[:, None] * IN + offs_in

    start, end = 0, IN
    if NUM_PARTS == 2:
        part = tl.program_id(0) // num_row_tiles % 2
        middle = tl.cdiv(IN, 2 * BLOCK_IN) * BLOCK_IN
        start, end = part * middle, tl.where(part == 0, middle, IN)
    acc = tl.zeros([BLOCK_OUT, BLOCK_R], tl.float32)
    for first in range(start, end, BLOCK_IN):
        mask_x = mask_r[:, None]
        mask_weight = mask_out[:, None]
        if HAS_TAIL:
            mask_in = first + offs_in < IN
            mask_x = mask_x & mask_in
            mask_weight = mask_weight & mask_in
        weight = tl.load(weight_rows + first, mask=mask_weight, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_rows + first, mask=mask_x, other=0.0, eviction_policy="evict_last")
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    if NUM_PARTS == 2:
        SIZE: tl.constexpr = BLOCK_OUT * BLOCK_R
        tile = tile_out * num_row_tiles + tile_r
        sums = sums_ptr + tile * 2 * SIZE + lane[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
        tl.store(sums + part * SIZE, acc, cache_modifier=".cg")
        # All threads must have stored before one of them counts.
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == 0:
            return
        tl.store(counters_ptr + tile, 0)
        acc += tl.load(sums + (1 - part) * SIZE, cache_modifier=".cg")
    if squares_ptr is not None:
        acc *= (scale * tl.rsqrt(sum_pairs(squares, BLOCK_R) / IN + eps))[None, :]
    out = rounded(acc, bias_ptr, offs_out, mask_out, out_ptr.dtype.element_ty)
    if IS_GATED:
        gate, up = tl.split(tl.permute(tl.reshape(out, (2, HALF, BLOCK_R)), (1, 2, 0)))
        store_gated(gate, up, out_ptr, offs_r, tile_out * HALF + tl.arange(0, HALF), mask_r, OUT // 2)
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


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., OUT] from x [..., IN], weight [OUT, IN] and bias [OUT]: `F.linear`.

    Args:
        residual: [..., OUT], added to the result.
    """
    if _is_compiled_for(x):
        return launch_linear(x, weight, bias, residual)
    out = F.linear(x, weight, bias)
    return out if residual is None else residual + out


def begin_norm(hidden: torch.Tensor, norm: Norm) -> NormedRows:
    """`NormedRows` of hidden [..., E] that no layer wrote, with the same bits as if one had."""
    if not _is_compiled_for(hidden):
        return NormedRows(hidden, norm)
    # A layer without inputs adds nothing to its residual, the rows.
    return launch_linear_before_norm(hidden[..., :0], norm.weight.new_empty(len(norm.weight), 0), None, hidden, norm)


def linear_before_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, norm: Norm
) -> NormedRows:
    """`linear` with the norm begun that the next layer reads it through.

    Args:
        x, weight, bias: [..., IN], [OUT, IN] and [OUT].
        residual: [..., OUT], added to the result.
        norm: of width OUT.
    """
    if _is_compiled_for(x):
        return launch_linear_before_norm(x, weight, bias, residual, norm)
    return NormedRows(linear(x, weight, bias, residual), norm)


def normed_linear(x: NormedRows, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` of normed rows: [..., OUT] from x [..., E], weight [OUT, E] and bias [OUT]."""
    if x.weighted is None:
        return linear(x.finish(), weight, bias)
    return launch_linear(x, weight, bias)


def normed_gated_linear(x: NormedRows, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(gate) * up` of normed rows: [..., F] from x [..., E], weight [2F, E] with the gate first, and bias [2F]."""
    if x.weighted is None:
        return gated_silu(linear(x.finish(), weight, bias))
    return launch_linear(x, weight, bias, is_gated=True)


def _is_compiled_for(x: torch.Tensor) -> bool:
    return is_compiled_for(x) and x.shape[:-1].numel() > 0


def launch_linear(
    x: torch.Tensor | NormedRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
) -> torch.Tensor:
    """`linear`, `normed_linear` and `normed_gated_linear` by the kernel.

    Args:
        x, weight, bias: [..., IN], [OUT, IN] and [OUT].
        residual: [..., OUT], added to the result.

    Returns:
        [..., OUT], or [..., OUT / 2] where `is_gated`.
    """
    return _launch(x, weight, bias, residual, None, is_gated)[0]


def launch_linear_before_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, norm: Norm
) -> NormedRows:
    """`linear_before_norm` by the kernel; shapes as there."""
    hidden, weighted, squares = _launch(x, weight, bias, residual, norm, False)
    return NormedRows(hidden, norm, weighted, squares)


def _launch(
    x: torch.Tensor | NormedRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm: Norm | None,
    is_gated: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The output [..., OUT], and with a norm to come the weighted rows [..., OUT] and squares [R, P]; None otherwise."""
    before = x if isinstance(x, NormedRows) else None
    rows = x.weighted if isinstance(x, NormedRows) else x
    assert rows is not None
    OUT, IN = weight.shape
    leading, R = rows.shape[:-1], rows.shape[:-1].numel()
    assert rows.shape[-1] == IN and rows.dtype == weight.dtype and weight.is_contiguous(), (rows.shape, rows.dtype)
    assert bias is None or (bias.shape == (OUT,) and bias.is_contiguous()), bias
    assert residual is None or (residual.shape == (*leading, OUT) and residual.is_contiguous()), residual
    assert norm is None or (norm.weight.shape == (OUT,) and norm.weight.is_contiguous() and not is_gated), norm
    assert not is_gated or OUT % 2 == 0
    num_outputs = OUT // 2 if is_gated else OUT
    out = rows.new_empty(*leading, num_outputs)
    rows = rows.reshape(R, IN).contiguous()
    narrow, block_in, block_r, num_stages = _tile(rows, OUT, R)
    is_split = narrow.num_parts == 2 and IN > 0
    wide = tile_of(rows, weight, num_parts=1 + is_split, is_gated=is_gated) if R > MAX_NARROW_ROWS[is_split] else None
    outputs_of_tile = wide.block_out if wide is not None else narrow.block_out // (1 + is_gated)
    num_tiles = triton.cdiv(num_outputs, outputs_of_tile)
    weighted = squares = squares_before = None
    if norm is not None:
        weighted, squares = torch.empty_like(out), rows.new_empty(R, num_tiles, dtype=torch.float32)
    if before is not None and before.squares is not None:
        squares_before = before.squares
        assert len(squares_before) == R and squares_before.is_contiguous(), squares_before.shape
    num_squares = 1 if squares_before is None else squares_before.shape[1]
    tensors = (bias, residual, squares_before, None if norm is None else norm.weight, out, weighted, squares)
    numbers = (
        0.0 if before is None else before.norm.eps,
        1.0 if before is None else before.norm.divisor,
        0.0 if norm is None else norm.offset,
        1.0 if norm is None else 1.0 / norm.divisor,
    )
    options = {"P": num_squares, "BLOCK_P": triton.next_power_of_2(num_squares), "IS_GATED": is_gated}
    if wide is not None:
        middle = triton.cdiv(IN, 2 * block_in) * block_in if is_split else IN
        launch_wide(rows, weight, tensors, numbers, wide, middle, **options)
        return out, weighted, squares
    num_programs = num_tiles * triton.cdiv(R, block_r)
    sums = counters = None
    if is_split:
        sums = rows.new_empty(num_programs, 2, narrow.block_out, block_r, dtype=torch.float32)
        counters = _counters(rows.device)
        assert num_programs <= len(counters), num_programs
    _linear_kernel[((1 + is_split) * num_programs,)](
        rows,
        weight,
        *tensors,
        sums,
        counters,
        R,
        IN,
        OUT,
        *numbers,
        HAS_TAIL=IN % block_in != 0,
        NUM_PARTS=1 + is_split,
        BLOCK_R=block_r,
        BLOCK_OUT=narrow.block_out,
        BLOCK_IN=block_in,
        num_warps=narrow.num_warps,
        num_stages=num_stages,
        **options,
    )
    return out, weighted, squares


def _tile(x: torch.Tensor, num_outputs: int, num_rows: int) -> tuple[Tile, int, int, int]:
    """The tile, BLOCK_IN, BLOCK_R and number of stages for `num_rows` rows and a weight of `num_outputs` rows."""
    if x.dtype == torch.float32:
        # No matrix instruction multiplies float32 exactly, so threads hold the operands in registers.
        return FLOAT32_TILE, FLOAT32_BLOCK_IN, ROW_TILES[0], 2
    tile = next(tile for tile in TILES if tile.min_outputs <= num_outputs)
    if num_rows > HIGH_ROWS and tile.block_out == HIGH_OUTPUTS // 2:
        tile = tile._replace(block_out=HIGH_OUTPUTS, num_warps=HIGH_WARPS)
    shared = min(tile.shared_kib * 1024, shared_memory(x.device))
    stages = {size: shared // ((tile.block_out + size) * BLOCK_IN * x.element_size()) for size in ROW_TILES}
    # Two stages must fit, which rules out the largest tiles on cards with little shared memory.
    sizes = [size for size in ROW_TILES if stages[size] >= 2]
    block_r = next((size for size in sizes if size >= num_rows), sizes[-1])
    return tile, BLOCK_IN, block_r, min(MAX_STAGES, stages[block_r])


def _counters(device: torch.device) -> torch.Tensor:
    """A zeroed buffer [16384]; every launch resets what it used.

    Each stream has one. All graphs share one, because they never run at the same time.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return _zeros(device, None)
    return _zeros(device, torch.cuda.current_stream(device).cuda_stream)


@cache
def _zeros(device: torch.device, stream: int | None) -> torch.Tensor:
    return torch.zeros(16384, dtype=torch.int32, device=device)
