"""The MLP's gate: the kernel against its twin."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, NEEDS_TRITON

from selfspec.kernels.gated_activation import BLOCK_F, launch_gated_silu
from selfspec.kernels.reference import gated_silu_reference

pytestmark = NEEDS_TRITON


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 48, BLOCK_F, BLOCK_F + 5])
def test_gated_silu_equals_its_twin(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 7, 2 * width, generator=torch.Generator().manual_seed(width)).to(DEVICE, dtype) * 4
    x[0, 0, :width] = -80.0
    for rows in (x, x[:, ::3], x[0, 0]):
        out, expected = launch_gated_silu(rows), gated_silu_reference(rows)
        assert out.shape == expected.shape and out.dtype == dtype
        eps = 2.1 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
        torch.testing.assert_close(out, expected, atol=eps / 10, rtol=eps)
