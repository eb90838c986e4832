"""What passes and drafts cost: interpolated, corrected slowly while serving, and kept in a file."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY

from selfspec.loop.costs import Costs, Drift

NAMES = {"card": "H200", "target": "some/model", "version": "1"}


def calibrated() -> Costs:
    costs = Costs()
    for size, seconds in [(1, 5.0), (64, 5.0), (128, 7.0), (256, 11.0)]:
        costs.note("pass", (size, 1, 0), seconds)
    for depth, seconds in [(1, 0.5), (4, 1.1)]:
        costs.note("draft", (1, depth, 1), seconds)
        costs.note("draft", (8, depth, 1), 2 * seconds)
    return costs


# The model.


@pytest.mark.parametrize(("num_nodes", "seconds"), [(1, 5.0), (30, 5.0), (96, 6.0), (128, 7.0), (192, 9.0), (320, 13.0)])
def test_between_calibrated_sizes_are_straight_lines_and_the_last_goes_on(num_nodes: int, seconds: float) -> None:
    assert calibrated().pass_seconds(num_nodes, 1) == pytest.approx(seconds)


@PROPERTY
@given(st.dictionaries(st.integers(1, 600), st.floats(0.1, 9.0), min_size=1), st.lists(st.integers(1, 900), min_size=2))
def test_a_larger_pass_never_costs_less(seconds: dict[int, float], sizes: list[int]) -> None:
    """However the calibration came out."""
    costs = Costs()
    for size, time in seconds.items():
        costs.note("pass", (size, 1, 0), time)
    times = [costs.pass_seconds(size, 1) for size in sorted(sizes)]
    assert all(after >= before - 1e-9 for before, after in pairwise(times))


def test_a_long_context_costs_more_for_more_rows() -> None:
    costs = calibrated()
    costs.note("pass", (64, 8, 1000), 6.0)
    assert costs.pass_seconds(64, 8, 2000) == pytest.approx(7.0)
    assert costs.pass_seconds(128, 4, 1000) == pytest.approx(7.5)
    assert costs.pass_seconds(1, 1, 0) == pytest.approx(5.0)


def test_without_any_timing_a_node_is_guessed_to_add_one_percent() -> None:
    costs = Costs()
    assert costs.pass_seconds(11, 1) / costs.pass_seconds(1, 1) == pytest.approx(1.1)
    assert costs.draft_seconds(1, 4, 1) == 0.0


@pytest.mark.parametrize(
    ("num_rows", "depth", "seconds"),
    [(1, 1, 0.5), (1, 4, 1.1), (1, 2, 0.7), (1, 6, 1.5), (5, 4, 2.2), (8, 4, 2.2), (64, 4, 2.2)],
)
def test_drafts_cost_by_depth_and_by_the_next_power_of_two_of_rows(num_rows: int, depth: int, seconds: float) -> None:
    assert calibrated().draft_seconds(num_rows, depth, 1) == pytest.approx(seconds)


# Corrections.


def test_a_single_outlier_changes_nothing() -> None:
    costs = calibrated()
    for seconds in [7.0, 7.0, 70.0, 7.0]:
        costs.correct("pass", (128, 1, 0), seconds)
        assert costs.pass_seconds(128, 1) == pytest.approx(7.0)


def test_a_lasting_change_is_followed_and_holds_for_neighbouring_sizes_too() -> None:
    costs = calibrated()
    for _ in range(Drift.MEMORY):
        costs.correct("pass", (128, 1, 0), 8.4)
    assert costs.pass_seconds(128, 1) == pytest.approx(8.4)
    assert costs.pass_seconds(256, 1) == pytest.approx(1.2 * 11.0)
    assert costs.pass_seconds(64, 2) == pytest.approx(1.2 * 5.0)


def test_groups_of_rows_are_corrected_apart() -> None:
    costs = calibrated()
    for _ in range(Drift.MEMORY):
        costs.correct("pass", (64, 1, 0), 5.0)
        costs.correct("pass", (64, 64, 0), 10.0)
    assert costs.pass_seconds(64, 1) == pytest.approx(5.0)
    assert costs.pass_seconds(64, 64) == pytest.approx(10.0)


def test_without_a_calibration_the_first_timing_counts_and_sizes_beyond_it_are_guessed_cheap() -> None:
    costs = Costs()
    costs.correct("pass", (1, 1, 0), 0.02)
    assert costs.pass_seconds(1, 1) == pytest.approx(0.02)
    assert costs.pass_seconds(8, 1) == pytest.approx(0.02 * 1.07)
    costs.correct("pass", (8, 1, 0), 0.05)
    assert costs.pass_seconds(8, 1) == pytest.approx(0.05)
    # What the larger size showed goes on.
    assert costs.pass_seconds(16, 1) > 0.08
    costs.correct("draft", (1, 4, 1), 0.01)
    assert costs.draft_seconds(1, 4, 1) == pytest.approx(0.01)
    assert costs.draft_seconds(1, 1, 1) == pytest.approx(0.004)


def test_another_number_of_rows_begins_with_how_the_costs_of_others_rise() -> None:
    costs = Costs()
    for size, seconds in [(1, 0.02), (8, 0.04), (16, 0.08)]:
        costs.correct("pass", (size, 1, 0), seconds)
    costs.correct("pass", (8, 8, 0), 0.05)
    assert costs.pass_seconds(16, 8) == pytest.approx(0.1, rel=0.1)


def test_sizes_far_beyond_all_that_were_timed_are_out_of_reach_without_a_calibration() -> None:
    costs = Costs()
    assert costs.reach == 2
    costs.correct("pass", (8, 8, 0), 0.02)
    assert costs.reach == 16
    assert calibrated().reach > 1 << 30


# The file.


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    costs = calibrated()
    for _ in range(Drift.MEMORY):
        costs.correct("pass", (128, 1, 0), 70.0)
    path = tmp_path / "new" / "costs.json"
    costs.save(path, **NAMES)
    loaded = Costs.load(path, **NAMES)
    assert loaded.is_calibrated
    assert [loaded.pass_seconds(size, 1) for size in (1, 96, 128, 300)] == [
        calibrated().pass_seconds(size, 1) for size in (1, 96, 128, 300)
    ]
    assert loaded.draft_seconds(3, 2, 1) == calibrated().draft_seconds(3, 2, 1)
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


@pytest.mark.parametrize("name", list(NAMES))
def test_a_calibration_for_something_else_is_not_used(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    calibrated().save(tmp_path / "costs.json", **NAMES)
    with caplog.at_level(logging.DEBUG, "selfspec.loop.costs"):
        assert not Costs.load(tmp_path / "costs.json", **{**NAMES, name: "another"}).is_calibrated
    assert "another" in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps(NAMES),
        json.dumps({**NAMES, "pass": 3, "draft": []}),
        json.dumps({**NAMES, "pass": [[1, 1]], "draft": []}),
        json.dumps({**NAMES, "pass": [[1, 1, 0, "5"]], "draft": []}),
        json.dumps({**NAMES, "pass": [[1, 1, 0, -5.0]], "draft": []}),
        json.dumps({**NAMES, "pass": [[1, 1, 0, float("nan")]], "draft": []}),
        json.dumps({**NAMES, "pass": [[0, 1, 0, 5.0]], "draft": []}),
        b"\xff\xfe\x00",
    ],
)
def test_a_damaged_file_is_not_used(tmp_path: Path, content: str | bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.DEBUG, "selfspec.loop.costs"):
        assert not Costs.load(path, **NAMES).is_calibrated
    assert str(path) in caplog.text


def test_no_file_is_no_calibration(tmp_path: Path) -> None:
    assert not Costs.load(tmp_path / "costs.json", **NAMES).is_calibrated
