"""Features that wait: noted without device work, collected by one gather."""

from __future__ import annotations

import random

import torch

from selfspec.drafters.waiting_features import WaitingFeatures


def test_rows_collect_what_was_added_and_not_dropped() -> None:
    draw = random.Random(0)
    for _ in range(50):
        rows = [WaitingFeatures() for _ in range(3)]
        expected: list[list[torch.Tensor]] = [[], [], []]
        for _ in range(draw.randrange(1, 6)):
            features = torch.randn(3, 4, 2)
            for b, row in enumerate(rows):
                start = draw.randrange(4)
                end = draw.randrange(start + 1, 5)
                row.add(features, b, start, end)
                expected[b] += list(features[b, start:end])
            for row, kept in zip(rows, expected, strict=True):
                count = draw.randrange(len(kept))
                row.drop(count)
                del kept[:count]
        assert [len(row) for row in rows] == [len(kept) for kept in expected]
        width = draw.randrange(1, 12)
        got = WaitingFeatures.collect(rows, width)
        assert got.shape == (3, width, 2)
        for mine, kept in zip(got, expected, strict=True):
            padded = (kept + kept[-1:] * width)[:width]
            assert torch.equal(mine, torch.stack(padded))


def test_nothing_waits_of_an_empty_stretch() -> None:
    row = WaitingFeatures()
    row.add(torch.zeros(1, 3, 2), 0, 2, 2)
    assert len(row) == 0
