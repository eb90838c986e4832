"""Rotary embedding and the stores that go with it: the kernel against its twin."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, DTYPES, KERNEL_TOLERANCES, NEEDS_TRITON
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from selfspec.kernels.reference import rms_norm_reference, rotary_store_reference
from selfspec.kernels.rms_norm import Norm
from selfspec.kernels.rotary import launch_rotary_store

pytestmark = NEEDS_TRITON


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("H", "G", "D"), [(2, 2, 8), (9, 3, 16), (4, 1, 20)])
def test_rotary_store_equals_its_twin(H: int, G: int, D: int, dtype: torch.dtype) -> None:
    """And the twin is what transformers does; one row of angles serves several texts, or each has its own."""
    generator = torch.Generator().manual_seed(H)
    B, N = 2, 3
    qkv = torch.randn(B, N, (H + 2 * G) * D, generator=generator).to(DEVICE, dtype)
    slots = torch.tensor([4, 0, 7, 2, 9, 5], device=DEVICE)
    for rows, rule in ((1, None), (B, None), (1, {}), (B, {"is_rounded_first": True}), (1, {"offset": 1.0})):
        angles = torch.randn(rows, N, D // 2, generator=generator).to(DEVICE).repeat(1, 1, 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        weights = torch.randn(2, D, generator=generator).to(DEVICE, dtype)
        norms = None if rule is None else tuple(Norm.of(weight, 1e-2, **rule) for weight in weights)
        results = []
        for run in (launch_rotary_store, rotary_store_reference):
            keys, values = torch.full((2, 11, G, D), torch.nan, dtype=dtype, device=DEVICE)
            results.append((run(qkv, cos, sin, slots, keys, values, norms), keys, values))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True, **KERNEL_TOLERANCES[dtype])
        assert int(results[0][1].isnan().sum()) == 5 * G * D
        query, key, value = (each.unflatten(2, (-1, D)) for each in qkv.split([H * D, G * D, G * D], dim=2))
        if rule is not None:
            query, key = (
                rms_norm_reference(x, weight, 1e-2, **rule) for x, weight in zip((query, key), weights, strict=True)
            )
        query, key = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
        assert torch.equal(results[1][0], query)
        assert torch.equal(results[1][1][slots], key.flatten(0, 1)) and torch.equal(
            results[1][2][slots], value.flatten(0, 1)
        )
