"""Comparing: the first difference is found wherever it is, and every mode is charged only its own time."""

from collections.abc import Iterator

import pytest

from selfspec.bench.compare import Difference, Mode, TimedAnswer, check_transformers_can, first_difference, race
from selfspec.config import SamplingParams


def mode(*outputs: list[int]) -> Mode:
    return Mode("mode", [TimedAnswer("", output, len(output), 0.1) for output in outputs], seconds=1.0)


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        (mode([1, 2], [3]), mode([1, 2], [3]), None),
        (mode([1, 2], [3]), mode([1, 2], [4]), Difference(1, 0)),
        (mode([1, 2, 3]), mode([1, 5, 6]), Difference(0, 1)),
        (mode([1, 2, 3]), mode([1, 2]), Difference(0, 2)),
        (mode([]), mode([1]), Difference(0, 0)),
    ],
)
def test_first_difference(ours, theirs, difference):
    assert first_difference(ours, theirs) == difference
    assert first_difference(theirs, ours) == difference


def test_race_takes_turns_and_times_each_run_alone():
    order = []
    now = 0.0

    def answers(name: str, num_passes: int, seconds: float) -> Iterator[TimedAnswer]:
        nonlocal now
        for i in range(2):
            order.append((name, i))
            now += seconds
            yield TimedAnswer("", [1, 2, 3, 4], num_passes, seconds)

    plain, drafted = race(
        {"none": answers("none", 4, 3.0), "ngram": answers("ngram", 2, 0.5)}, 2, lambda: None, clock=lambda: now
    )
    assert order == [("none", 0), ("ngram", 0), ("none", 1), ("ngram", 1)]
    assert (plain.seconds, drafted.seconds) == (6.0, 1.0)
    assert (plain.name, plain.num_tokens, plain.num_target_passes, plain.acceptance_length) == ("none", 8, 8, 1.0)
    assert drafted.acceptance_length == 2.0


def test_transformers_baseline_is_greedy_only():
    check_transformers_can(SamplingParams(max_new_tokens=7, seed=1))
    for sampling in (SamplingParams(temperature=1), SamplingParams(stop="x"), SamplingParams(n=2)):
        with pytest.raises(ValueError, match="greedy only"):
            check_transformers_can(sampling)
