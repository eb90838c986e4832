# mypy: allow-untyped-defs
"""The greedy choice at every node: the first greatest logit of each row [V], and whether that logit is finite.

NaN counts as +inf. A row's maximum is then finite unless the row holds a NaN or +inf, or -inf alone. Rows are cut into
chunks of `BLOCK_V`, and each is read once. The first kernel writes every chunk's maximum and its index, [R, C] float32 and
int32. The second takes the first of the greatest.
"""

from __future__ import annotations

import torch

from selfspec.kernels.jit import is_compiled_for, jit, tl, triton
from selfspec.kernels.reference import row_argmax_reference

BLOCK_V = 4096


@jit()
def _chunk_argmax_kernel(logits_ptr, max_ptr, index_ptr, V, stride_r, BLOCK_V: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    offs_v = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    logits = tl.load(logits_ptr + row * stride_r + offs_v, mask=mask_v, other=-float("inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("inf"))
    best = tl.max(logits, 0)
    part = row * tl.num_programs(1) + chunk
    tl.store(max_ptr + part, best)
    tl.store(index_ptr + part, tl.min(tl.where(logits == best, offs_v, V), 0))


@jit()
def _row_argmax_kernel(max_ptr, index_ptr, best_ptr, is_valid_ptr, V, num_chunks, BLOCK_C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < num_chunks
    chunk_max = tl.load(max_ptr + row * num_chunks + offs_c, mask=mask_c, other=-float("inf"))
    index = tl.load(index_ptr + row * num_chunks + offs_c, mask=mask_c, other=V)
    best = tl.max(chunk_max, 0)
    tl.store(best_ptr + row, tl.min(tl.where(chunk_max == best, index, V), 0).to(tl.int64))
    tl.store(is_valid_ptr + row, tl.abs(best) < float("inf"))


def row_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Best index [...], int64, of each row of `logits [..., V]`, and whether its logit is finite [...], bool.

    See `row_argmax_reference`.
    """
    return launch_row_argmax(logits) if is_compiled_for(logits) else row_argmax_reference(logits)


def launch_row_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`row_argmax` by the kernels; shapes as there."""
    *shape, V = logits.shape
    rows = logits.reshape(-1, V)
    assert rows.stride(1) == 1
    R, C = len(rows), triton.cdiv(V, BLOCK_V)
    chunk_max = torch.empty(R, C, dtype=torch.float32, device=logits.device)
    index = torch.empty(R, C, dtype=torch.int32, device=logits.device)
    best = torch.empty(shape, dtype=torch.int64, device=logits.device)
    is_valid = torch.empty(shape, dtype=torch.bool, device=logits.device)
    _chunk_argmax_kernel[(R, C)](rows, chunk_max, index, V, rows.stride(0), BLOCK_V=BLOCK_V, num_warps=8)
    _row_argmax_kernel[(R,)](chunk_max, index, best, is_valid, V, C, BLOCK_C=triton.next_power_of_2(C), num_warps=1)
    return best, is_valid
