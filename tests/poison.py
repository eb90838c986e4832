"""Memory that says when it is read before it is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` and its kin come filled with NaN or the greatest integer: what nobody wrote shows.

    For the tests of a folder: import it into their conftest.py.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device="cuda" if torch.cuda.is_available() else "cpu").new_empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
