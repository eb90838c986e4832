"""Compaction by torch and by the kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICE, NEEDS_TRITON
from strategies import PROPERTY

from selfspec.kernels.kv_compaction import MAX_PATH, kv_compaction, launch_kv_compaction
from selfspec.kernels.reference import kv_compaction_reference


@PROPERTY
@given(st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True), st.integers(0, 5))
def test_compaction_moves_rows_as_if_all_were_read_first(nodes: list[int], start: int) -> None:
    """[K2] a destination that is another row's source must not be read after it was written."""
    path = sorted(nodes)
    generator = torch.Generator().manual_seed(start)
    keys = torch.randn(2, 20, 3, 4, generator=generator)
    values = torch.randn(2, 20, 3, 2, generator=generator)
    old_keys, old_values = keys.clone(), values.clone()
    source = torch.tensor([start + node for node in path])
    target = torch.arange(start, start + len(path))
    kv_compaction(keys, values, source, target)
    for slot in range(20):
        origin = int(source[slot - start]) if start <= slot < start + len(path) else slot
        assert torch.equal(keys[:, slot], old_keys[:, origin])
        assert torch.equal(values[:, slot], old_values[:, origin])


def test_compaction_may_name_one_move_twice() -> None:
    """The end of a short path is moved again to fill a batch's shape."""
    keys, values = torch.arange(8.0).view(1, 8, 1, 1), torch.arange(8.0, 16.0).view(1, 8, 1, 1)
    kv_compaction(keys, values, torch.tensor([3, 6, 6, 6]), torch.tensor([2, 3, 3, 3]))
    assert keys.flatten().tolist() == [0, 1, 3, 6, 4, 5, 6, 7]
    assert values.flatten().tolist() == [8, 9, 11, 14, 12, 13, 14, 15]


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path_length", [1, 2, 5, 17])
def test_compaction_equals_its_twin(path_length: int, dtype: torch.dtype) -> None:
    """[K2] two rows of a batch, ascending paths whose destinations are other nodes' sources, layers and odd widths."""
    generator = torch.Generator().manual_seed(path_length)
    num_nodes = 2 * path_length
    for G, D, Dv in ((1, 5, 3), (3, 20, 8)):
        keys = torch.randn(3, 4 + 2 * num_nodes, G, D, generator=generator).to(DEVICE, dtype)
        values = torch.randn(3, 4 + 2 * num_nodes, G, Dv, generator=generator).to(DEVICE, dtype)
        first = torch.tensor([[2], [2 + num_nodes]])
        nodes = torch.rand(2, num_nodes, generator=generator).argsort(1)[:, :path_length].sort(1).values
        source, target = (first + nodes).to(DEVICE), (first + torch.arange(path_length)).to(DEVICE)
        # The end of a shorter path: its last move is named again.
        source[1, path_length // 2 :], target[1, path_length // 2 :] = (
            source[1, path_length // 2],
            target[1, path_length // 2],
        )
        expected_keys, expected_values = keys.clone(), values.clone()
        kv_compaction_reference(expected_keys, expected_values, source, target)
        launch_kv_compaction(keys, values, source, target)
        assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)


@NEEDS_TRITON
@pytest.mark.gpu
@pytest.mark.parametrize("path_length", [2, 9, 64, MAX_PATH])
def test_compaction_reads_everything_first(path_length: int) -> None:
    """[K2] every destination but the first is another node's source, repeatedly: a race would show."""
    keys, values = torch.randn(2, 8, 600, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    source = torch.arange(101, 101 + path_length, device=DEVICE)
    expected_keys, expected_values = keys.clone(), values.clone()
    for _ in range(200):
        kv_compaction_reference(expected_keys, expected_values, source, source - 1)
        launch_kv_compaction(keys, values, source, source - 1)
    assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)
