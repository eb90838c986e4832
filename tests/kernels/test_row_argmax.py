"""The greedy choice: the kernel against its twin."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, NEEDS_TRITON

from selfspec.kernels.reference import row_argmax_reference
from selfspec.kernels.row_argmax import BLOCK_V, launch_row_argmax

pytestmark = NEEDS_TRITON


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 33, BLOCK_V, BLOCK_V + 1, pytest.param(128_256, marks=pytest.mark.gpu)])
def test_row_argmax_equals_its_twin(vocab_size: int, dtype: torch.dtype) -> None:
    """The first of equal greatest logits, in one chunk or two; a NaN or an infinity anywhere is told."""
    logits = torch.randn(2, 5, vocab_size).to(dtype)
    logits[0, 0] = 1.0
    logits[0, 1] = -torch.inf
    logits[0, 2, [vocab_size // 2, -1]] = 9.0
    logits[0, 3, -1] = torch.nan
    logits[0, 4, vocab_size // 3] = torch.inf
    logits[1, 0, 0] = -torch.inf
    logits[1, 1] = torch.nan
    logits = logits.to(DEVICE)
    for rows in (logits, logits[:, 1], logits[0, ::2]):
        best, is_valid = launch_row_argmax(rows)
        expected_best, expected_valid = row_argmax_reference(rows)
        assert torch.equal(best, expected_best) and torch.equal(is_valid, expected_valid)
    assert torch.equal(is_valid, logits[0, ::2].amax(-1).isfinite())


def test_row_argmax_is_torchs_where_rows_are_sound() -> None:
    logits = torch.randint(0, 9, (7, 300), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(row_argmax_reference(logits)[0], logits.argmax(-1))
