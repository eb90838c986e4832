"""Packing loses nothing, mixes nothing, and gives the same rows for the same seed."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import find_packed_sequence_indices

from selfspec.traffic.masking import Sample
from selfspec.train.rows import pack

PAD = 99_999
LENGTH = 12


def numbered(sizes: list[int], is_trained: bool = True) -> list[Sample]:
    """Samples whose tokens occur nowhere else."""
    return [Sample([100 * i + k for k in range(size)], [is_trained] * size) for i, size in enumerate(sizes)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 2 * LENGTH), min_size=1, max_size=40), st.integers(0, 3))
def test_every_sample_lies_whole_in_one_row(sizes, seed):
    samples = numbered(sizes)
    rows = pack(samples, LENGTH, pad_id=PAD, seed=seed)
    found = []
    for row in rows:
        ids, positions = row["input_ids"].tolist(), row["position_ids"].tolist()
        starts = [i for i, position in enumerate(positions) if position == 0] + [LENGTH]
        for start, end in pairwise(starts):
            assert positions[start:end] == list(range(end - start))
            is_padding = ids[start] == PAD
            assert row["loss_mask"][start:end].tolist() == [not is_padding] * (end - start)
            if not is_padding:
                found.append(ids[start:end])
            else:
                assert ids[start:] == [PAD] * (LENGTH - start)
    assert sorted(found) == [sample.input_ids[:LENGTH] for sample in samples]
    assert rows.num_tokens == sum(min(size, LENGTH) for size in sizes)
    assert rows.num_lost_tokens == sum(max(0, size - LENGTH) for size in sizes)
    assert rows.fill_rate == rows.num_tokens / (len(rows) * LENGTH)
    # Two rows that are at most half full would have been packed into one.
    assert sum((row["input_ids"] != PAD).sum() <= LENGTH // 2 for row in rows) <= 1


@settings(deadline=None)
@given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=12))
def test_transformers_sees_the_same_conversations(sizes):
    rows = pack(numbered(sizes), LENGTH, pad_id=PAD)
    owners = torch.where(rows.input_ids == PAD, PAD, rows.input_ids // 100)
    groups = find_packed_sequence_indices(rows.position_ids)
    if groups is None:
        groups = torch.zeros_like(owners)
    same_owner = owners[:, :, None] == owners[:, None, :]
    assert torch.equal(groups[:, :, None] == groups[:, None, :], same_owner)


def test_order_is_drawn_from_the_seed():
    samples = numbered([5, 12, 7, 9, 11, 8, 10])
    rows = [pack(samples, LENGTH, seed=seed).input_ids for seed in (0, 0, 1)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


def test_a_head_without_a_token_to_train_on_is_left_out():
    late = Sample(list(range(20)), [False] * 15 + [True] * 5)
    rows = pack([late, *numbered([4])], LENGTH)
    assert (len(rows), rows.num_tokens, rows.num_lost_tokens) == (1, 4, 20)
    assert len(pack([late], LENGTH)) == 0


def test_types_and_refusal():
    rows = pack(numbered([3]), LENGTH)
    assert (rows.input_ids.dtype, rows.position_ids.dtype, rows.loss_mask.dtype) == (torch.int64, torch.int64, torch.bool)
    with pytest.raises(ValueError, match="length=0"):
        pack([], 0)
