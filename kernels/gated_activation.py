# mypy: allow-untyped-defs
"""The gate of a decoder layer's MLP: `silu(gate) * up` from a merged layer's output [..., 2F], gate first.

As in transformers, the activation is rounded to x's type before the multiplication.
"""

from __future__ import annotations

import torch

from selfspec.kernels.jit import is_compiled_for, jit, tl, triton
from selfspec.kernels.reference import gated_silu_reference

BLOCK_F = 1024


@jit()
def _gated_silu_kernel(x_ptr, out_ptr, F, BLOCK_F: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    offs_f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_f = offs_f < F
    gate = tl.load(x_ptr + row * 2 * F + offs_f, mask=mask_f, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + offs_f, mask=mask_f, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * F + offs_f, (activated * up).to(out_ptr.dtype.element_ty), mask=mask_f)


def gated_silu(x: torch.Tensor) -> torch.Tensor:
    """[..., F] from x [..., 2F]; see `gated_silu_reference`."""
    # Rows are the grid's second dimension, and CUDA allows 65,535 there.
    return launch_gated_silu(x) if is_compiled_for(x) and 0 < x.numel() < x.shape[-1] << 16 else gated_silu_reference(x)


def launch_gated_silu(x: torch.Tensor) -> torch.Tensor:
    """`gated_silu` by the kernel: [..., F] from x [..., 2F]."""
    F = x.shape[-1] // 2
    assert x.shape[-1] == 2 * F, x.shape
    rows = x.reshape(-1, 2 * F).contiguous()
    out = torch.empty(*x.shape[:-1], F, dtype=x.dtype, device=x.device)
    _gated_silu_kernel[(triton.cdiv(F, BLOCK_F), len(rows))](rows, out, F, BLOCK_F=BLOCK_F, num_warps=4)
    return out
