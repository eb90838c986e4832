# mypy: allow-untyped-defs
"""Move the accepted path's rows of the KV pool to the end of the prefix: keys and values of all layers in one launch.

A destination may be another node's source, so everything is read before the first write. In torch, indexing copies the
sources first. In the kernel, a program owns the same BLOCK_E numbers of every slot on its path, in one layer, and holds them
all in registers; no two programs share an address. A slot that stays where it is moves no byte.
"""

from __future__ import annotations

import torch

from selfspec.kernels.jit import is_compiled_for, jit, tl, triton
from selfspec.kernels.reference import kv_compaction_reference

# The most slots of a path, and the most numbers that a program holds in registers.
MAX_PATH = 128
TILE = 4096


@jit()
def _move(pool_ptr, source, target, mask_moved, offs_e, WIDTH: tl.constexpr):
    """Move numbers `offs_e [BLOCK_E]` of slots `source [BLOCK_P]` to slots `target [BLOCK_P]`."""
    mask = mask_moved[:, None] & (offs_e < WIDTH)
    kept = tl.load(pool_ptr + source[:, None] * WIDTH + offs_e, mask=mask, other=0.0)
    # One thread may overwrite a slot that another has still to read.
    tl.debug_barrier()
    tl.store(pool_ptr + target[:, None] * WIDTH + offs_e, kept, mask=mask)


@jit(do_not_specialize=("P",))
def _kv_compaction_kernel(
    key_ptr,
    value_ptr,
    source_ptr,
    target_ptr,
    num_slots,
    P,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    offs_p = tl.arange(0, BLOCK_P)
    mask_p = offs_p < P
    source = tl.load(source_ptr + b * P + offs_p, mask=mask_p, other=0)
    target = tl.load(target_ptr + b * P + offs_p, mask=mask_p, other=0)
    mask_moved = mask_p & (source != target)
    NUM_KEY_BLOCKS: tl.constexpr = (KEY_WIDTH + BLOCK_E - 1) // BLOCK_E
    if block < NUM_KEY_BLOCKS:
        offs_e = block * BLOCK_E + tl.arange(0, BLOCK_E)
        _move(key_ptr + layer * num_slots * KEY_WIDTH, source, target, mask_moved, offs_e, KEY_WIDTH)
    else:
        offs_e = (block - NUM_KEY_BLOCKS) * BLOCK_E + tl.arange(0, BLOCK_E)
        _move(value_ptr + layer * num_slots * VALUE_WIDTH, source, target, mask_moved, offs_e, VALUE_WIDTH)


def kv_compaction(
    key_cache: torch.Tensor, value_cache: torch.Tensor, source_slots: torch.Tensor, target_slots: torch.Tensor
) -> None:
    """Move slots of all layers, in place; see `kv_compaction_reference`.

    Args:
        key_cache, value_cache: [L, num_slots, G, D] and [L, num_slots, G, Dv].
        source_slots, target_slots: [P] or [B, P].
    """
    assert source_slots.shape == target_slots.shape, (source_slots.shape, target_slots.shape)
    # A whole batch in one row has more slots than any path, and registers cannot hold them.
    if is_compiled_for(key_cache) and source_slots.shape[-1] <= MAX_PATH:
        launch_kv_compaction(key_cache, value_cache, source_slots, target_slots)
    else:
        kv_compaction_reference(key_cache, value_cache, source_slots, target_slots)


def launch_kv_compaction(
    key_cache: torch.Tensor, value_cache: torch.Tensor, source_slots: torch.Tensor, target_slots: torch.Tensor
) -> None:
    """`kv_compaction` by the kernel; shapes as there, and P is at most MAX_PATH."""
    assert key_cache.is_contiguous() and value_cache.is_contiguous()
    P = source_slots.shape[-1]
    assert P <= MAX_PATH, P
    source_slots, target_slots = source_slots.reshape(-1, P).contiguous(), target_slots.reshape(-1, P).contiguous()
    L, num_slots, G, D = key_cache.shape
    key_width, value_width = G * D, G * value_cache.shape[3]
    block_p = triton.next_power_of_2(P)
    block_e = min(TILE // block_p, triton.next_power_of_2(max(key_width, value_width)))
    num_blocks = triton.cdiv(key_width, block_e) + triton.cdiv(value_width, block_e)
    _kv_compaction_kernel[(num_blocks, len(source_slots), L)](
        key_cache,
        value_cache,
        source_slots,
        target_slots,
        num_slots,
        P,
        KEY_WIDTH=key_width,
        VALUE_WIDTH=value_width,
        BLOCK_P=block_p,
        BLOCK_E=block_e,
    )
