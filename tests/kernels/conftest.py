"""Shared by the tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_cases import DEVICE


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """`torch.empty` comes filled with NaN or the greatest integer: what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=DEVICE).new_empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
