# mypy: allow-untyped-defs
"""Rotary embedding (https://arxiv.org/abs/2104.09864) of a merged layer's queries and keys, stored by the same launch.

    out = x * cos + rotated(x) * sin,    rotated([a, b]) = [-b, a]

The halves a and b of a head are its pairs. Each product and the sum are rounded to x's type, as in transformers. Rotated
keys and the values go to their slots of the KV pool, rotated queries to a tensor of their own. Norms of each query and key
head, as in Qwen3, come first in the same launch.
"""

from __future__ import annotations

import torch

from selfspec.kernels.jit import is_compiled_for, jit, tl, triton
from selfspec.kernels.reference import rotary_store_reference
from selfspec.kernels.rms_norm import Norm

# Heads that one program handles.
BLOCK_HEADS = 8


@jit()
def _load(ptrs, mask):
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@jit()
def _load_halves(ptrs, HALF: tl.constexpr, mask):
    return _load(ptrs, mask), _load(ptrs + HALF, mask)


@jit(do_not_specialize=("stride_row", "stride_cos_b", "stride_cos_n", "num_nodes"))
def _rotary_store_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    query_norm_ptr,
    key_norm_ptr,
    num_nodes,
    stride_row,
    stride_cos_b,
    stride_cos_n,
    eps,
    offset,
    IS_ROUNDED_FIRST: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    offs_d = tl.arange(0, BLOCK_HALF)[None, :]
    HALF: tl.constexpr = D // 2
    mask = (offs_head < H + 2 * G) & (offs_d < HALF)
    x_ptr = qkv_ptr + row * stride_row + offs_head * D + offs_d
    first = tl.load(x_ptr, mask=mask, other=0.0)
    second = tl.load(x_ptr + HALF, mask=mask, other=0.0)
    dtype = first.dtype
    # The second half of cos and sin repeats the first.
    angle = row // num_nodes * stride_cos_b + row % num_nodes * stride_cos_n + offs_d
    cos, sin = _load(cos_ptr + angle, offs_d < HALF), _load(sin_ptr + angle, offs_d < HALF)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if query_norm_ptr is not None:
        divisor = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
        a, b = a * divisor, b * divisor
        if IS_ROUNDED_FIRST:
            a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
        # Value heads are normed here too, but stored from `first` and `second`, as they came.
        query_a, query_b = _load_halves(query_norm_ptr + offs_d, HALF, offs_d < HALF)
        key_a, key_b = _load_halves(key_norm_ptr + offs_d, HALF, offs_d < HALF)
        a = (a * (offset + tl.where(offs_head < H, query_a, key_a))).to(dtype).to(tl.float32)
        b = (b * (offset + tl.where(offs_head < H, query_b, key_b))).to(dtype).to(tl.float32)
    turned_a = ((a * cos).to(dtype).to(tl.float32) - (b * sin).to(dtype).to(tl.float32)).to(dtype)
    turned_b = ((b * cos).to(dtype).to(tl.float32) + (a * sin).to(dtype).to(tl.float32)).to(dtype)

    out = query_ptr + row * H * D + offs_head * D + offs_d
    mask_query = mask & (offs_head < H)
    tl.store(out, turned_a, mask=mask_query)
    tl.store(out + HALF, turned_b, mask=mask_query)
    slot = tl.load(slots_ptr + row)
    out = key_ptr + (slot * G + offs_head - H) * D + offs_d
    mask_key = mask & (offs_head >= H) & (offs_head < H + G)
    tl.store(out, turned_a, mask=mask_key)
    tl.store(out + HALF, turned_b, mask=mask_key)
    out = value_ptr + (slot * G + offs_head - H - G) * D + offs_d
    mask_value = mask & (offs_head >= H + G)
    tl.store(out, first, mask=mask_value)
    tl.store(out + HALF, second, mask=mask_value)


def rotary_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    head_norms: tuple[Norm, Norm] | None = None,
) -> torch.Tensor:
    """Rotate queries and keys; store keys and values; see `rotary_store_reference`.

    Args:
        qkv: [B, N, (H + 2 G) * D].
        cos, sin: [B or 1, N, D].
        slots: [B * N].
        key_cache, value_cache: [num_slots, G, D].

    Returns:
        The rotated queries, [B, N, H, D].
    """
    run = launch_rotary_store if is_compiled_for(qkv) else rotary_store_reference
    return run(qkv, cos, sin, slots, key_cache, value_cache, head_norms)


def launch_rotary_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    head_norms: tuple[Norm, Norm] | None = None,
) -> torch.Tensor:
    """`rotary_store` by the kernel; shapes as there."""
    B, N, _ = qkv.shape
    _, G, D = key_cache.shape
    H = qkv.shape[2] // D - 2 * G
    assert key_cache.is_contiguous() and value_cache.is_contiguous() and value_cache.shape == key_cache.shape
    assert qkv.is_contiguous() and cos.stride(2) == 1 and sin.stride() == cos.stride(), (qkv.stride(), cos.stride())
    assert qkv.dtype == key_cache.dtype and len(slots) == B * N
    if head_norms is not None:
        assert all(norm.weight.shape == (D,) and norm.weight.is_contiguous() for norm in head_norms), head_norms
        assert len({(norm.eps, norm.offset, norm.is_rounded_first) for norm in head_norms}) == 1, head_norms
    query = qkv.new_empty(B, N, H, D)
    _rotary_store_kernel[(B * N, triton.cdiv(H + 2 * G, BLOCK_HEADS))](
        qkv,
        cos,
        sin,
        slots,
        query,
        key_cache,
        value_cache,
        None if head_norms is None else head_norms[0].weight,
        None if head_norms is None else head_norms[1].weight,
        N,
        qkv.shape[2],
        # All texts may share one row of angles.
        cos.stride(0) if len(cos) > 1 else 0,
        cos.stride(1),
        0.0 if head_norms is None else head_norms[0].eps,
        0.0 if head_norms is None else head_norms[0].offset,
        IS_ROUNDED_FIRST=head_norms is not None and head_norms[0].is_rounded_first,
        H=H,
        G=G,
        D=D,
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_HALF=triton.next_power_of_2(D // 2),
        num_warps=2,
    )
    return query
