"""The number of threads: measured where it is torch's own choice, and never the user's to lose."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from selfspec.model import threads
from selfspec.model.linear_layout import PLAIN, choose_num_threads, lay_out_linear_layers, ranking


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Eight threads, which torch has chosen on a machine of eight processors."""
    before = torch.get_num_threads()
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


def seconds_with(times: dict[int, float]) -> float:
    return times[torch.get_num_threads()]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({8: 1.0, 4: 1.5, 2: 2.0, 1: 4.0}, 8),
        ({8: 2.0, 4: 1.0, 2: 1.1, 1: 2.0}, 4),
        ({8: 1.05, 4: 1.0, 2: 1.0, 1: 1.0}, 8),
        ({8: 9.0, 4: 8.0, 2: 7.0, 1: 1.0}, 1),
    ],
)
def test_fewer_threads_are_used_where_they_are_clearly_faster(free: None, times: dict[int, float], chosen: int) -> None:
    threads.settle(lambda: seconds_with(times))
    assert torch.get_num_threads() == chosen


def test_a_slow_spell_in_one_round_decides_nothing(free: None) -> None:
    noise = iter([5.0] + [0.0] * 100)
    threads.settle(lambda: seconds_with({8: 1.0, 4: 1.5, 2: 2.0, 1: 4.0}) + next(noise))
    assert torch.get_num_threads() == 8


@pytest.mark.parametrize("name", threads.VARIABLES)
def test_a_number_in_the_environment_stays(free: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "8")
    assert not threads.are_free()
    threads.settle(lambda: pytest.fail("nothing is to be measured"))
    assert torch.get_num_threads() == 8


def test_a_number_that_was_set_in_torch_stays(free: None) -> None:
    assert threads.are_free()
    torch.set_num_threads(3)
    threads.settle(lambda: pytest.fail("nothing is to be measured"))
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
    assert not threads.are_free()


def test_a_large_model_is_laid_out_for_the_number_that_was_chosen(free: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.model.linear_layout.MIN_TIMED_BYTES", 1)
    monkeypatch.setattr("selfspec.model.linear_layout.time_samples", lambda layers: {None: 1.0 + torch.get_num_threads()})
    ranked: list[int] = []

    def noted(sizes: object, forms: object, num_threads: int) -> dict[tuple[int, int], list[object]]:
        ranked.append(num_threads)
        return {}

    monkeypatch.setattr("selfspec.model.linear_layout.ranking", noted)
    choose_num_threads.cache_clear()
    try:
        lay_out_linear_layers(nn.Sequential(nn.Linear(8, 8)), forms=[PLAIN])
    finally:
        choose_num_threads.cache_clear()
        ranking.cache_clear()
    assert ranked == [1] and torch.get_num_threads() == 1
