"""RMSNorm: the kernel against its twin."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, DTYPES, HAS_CUDA, NEEDS_TRITON

from selfspec.kernels.reference import rms_norm_reference
from selfspec.kernels.rms_norm import launch_rms_norm

pytestmark = NEEDS_TRITON

RMS_NORM_RULES = [{}, {"is_rounded_first": True}, {"offset": 1.0}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 5, 64, 576, pytest.param(4096, marks=pytest.mark.gpu)])
def test_rms_norm_equals_its_twin(width: int, dtype: torch.dtype) -> None:
    """Rows of a slice, heads of a slice, heads with another order of dimensions, and shapes of one to five dimensions."""
    generator = torch.Generator().manual_seed(width)
    merged = torch.randn(2, 3, 5 * width, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(width, generator=generator).to(DEVICE, dtype)
    heads = merged[..., width : 3 * width].unflatten(-1, (2, width))
    for x in (merged[0, 0, :width], merged[0, :, :width], merged[..., :width], heads, heads.transpose(1, 2), heads[None]):
        for options in RMS_NORM_RULES:
            out, expected = launch_rms_norm(x, weight, 1e-5, **options), rms_norm_reference(x, weight, 1e-5, **options)
            assert out.is_contiguous() and out.dtype == dtype
            # One unit in the last place where the two round a tie's neighbourhood apart, twice if they round twice.
            eps = 2.1 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
            torch.testing.assert_close(out, expected, atol=eps / 10, rtol=eps)


@pytest.mark.parametrize("width", [72, 75, pytest.param(4096, marks=pytest.mark.gpu)])
def test_a_row_of_rms_norm_is_the_same_in_any_company(width: int) -> None:
    """[N1]"""
    for dtype in DTYPES:
        x = torch.randn(130 if HAS_CUDA else 34, width).to(DEVICE, dtype)
        weight = torch.randn(width).to(DEVICE, dtype)
        alone = torch.cat([launch_rms_norm(row, weight, 1e-5) for row in x[:, None]])
        for num_rows in (2, 7, 16, 33, len(x) - 1, len(x)):
            assert torch.equal(launch_rms_norm(x[:num_rows], weight, 1e-5), alone[:num_rows])
            assert torch.equal(launch_rms_norm(x[None, 1:num_rows], weight, 1e-5)[0], alone[1:num_rows])
