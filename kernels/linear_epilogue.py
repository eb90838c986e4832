# mypy: allow-untyped-defs
"""The end of a linear layer's program, shared by its two kernels: bias, residual, gate, and the norm that begins.

Invariant: both kernels give a row the same bits, because everything after a row's sums is elementwise, or adds up pairs of
neighbours in an order that no tile changes.
"""

from __future__ import annotations

from selfspec.kernels.jit import jit, tl


@jit()
def sum_pairs(x, R: tl.constexpr):
    """Row sums [R] of x [R, N], N a power of two. Neighbours are added first, whatever the tensor's layout."""
    for _ in tl.static_range(16):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (R, x.shape[1] // 2, 2)), 2)
    return tl.reshape(x, (R,))


@jit()
def rounded(acc, bias_ptr, offs_out, mask_out, dtype: tl.constexpr):
    """Sums acc [BLOCK_OUT, BLOCK_R] with the bias, in the outputs' type."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_out, mask=mask_out, other=0.0).to(tl.float32)[:, None]
    return acc.to(dtype)


@jit()
def store(
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
    BLOCK_R: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Write outputs [BLOCK_OUT, BLOCK_R], with the residual added, and begin the next norm if there is one."""
    mask_out = offs_out < OUT
    offs = offs_r.to(tl.int64)[None, :] * OUT + offs_out[:, None]
    mask = mask_out[:, None] & mask_r[None, :]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offs, mask=mask, other=0.0)
        out = (out.to(tl.float32) + residual.to(tl.float32)).to(out.dtype)
    tl.store(out_ptr + offs, out, mask=mask)
    if norm_weight_ptr is not None:
        hidden = out.to(tl.float32)
        norm_weight = norm_offset + tl.load(norm_weight_ptr + offs_out, mask=mask_out, other=0.0).to(tl.float32)
        weighted = hidden * (norm_weight * norm_factor)[:, None]
        tl.store(next_weighted_ptr + offs, weighted.to(out.dtype), mask=mask)
        # Lanes past the last output hold zeros.
        next_squares = sum_pairs(tl.trans(hidden * hidden), BLOCK_R)
        num_tiles = tl.cdiv(OUT, BLOCK_OUT)
        tl.store(next_squares_ptr + offs_r * num_tiles + tile_out, next_squares, mask=mask_r)


@jit()
def store_gated(gate, up, out_ptr, offs_r, offs_out, mask_r, num_outputs):
    """Write `silu(gate) * up` of gate and up, [outputs, BLOCK_R] each."""
    gate = gate.to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
    offs = offs_r.to(tl.int64)[None, :] * num_outputs + offs_out[:, None]
    mask = (offs_out < num_outputs)[:, None] & mask_r[None, :]
    tl.store(out_ptr + offs, (activated * up.to(tl.float32)).to(up.dtype), mask=mask)
