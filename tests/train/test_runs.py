"""Runs beside each other: their records become a table and a picture that any browser shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from selfspec.cli.main import app
from selfspec.train.curves import Chart, Line, draw, ticks
from selfspec.train.runs import picture, read_runs

SVG = "{http://www.w3.org/2000/svg}"


def record(scale: float) -> dict[str, Any]:
    return {
        "losses": [{"step": step, "loss": scale * 10 / step} for step in (1, 2, 4)],
        "history": [{"step": step, "acceptance_length": scale * step / 4 + 1} for step in (2, 4)],
        "final": {"acceptance_length": scale + 1, "acceptance_rate_1": 0.5, "acceptance_rate_2": 0.25},
    }


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    places = []
    for name, scale in (("eagle", 2.0), ("medusa", 1.0)):
        place = tmp_path / "runs" / name
        place.mkdir(parents=True)
        (place / "run.json").write_text(json.dumps(record(scale)))
        places.append(place)
    return places


def test_a_picture_has_a_line_for_each_run_in_each_chart(runs: list[Path]) -> None:
    root = ElementTree.fromstring(picture(read_runs(runs)))
    lines = list(root.iter(f"{SVG}polyline"))
    assert len(lines) == 3 * 2
    # One colour for each run, in every chart.
    assert len({line.get("stroke") for line in lines}) == 2
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "eagle" in texts and "medusa" in texts and "Loss" in texts
    # A higher value is higher up: SVG counts from the top.
    [first, second] = [line.get("points") for line in lines[2:4]]
    assert float(first.split(",")[-1]) < float(second.split(",")[-1])


def test_one_run_needs_no_legend_and_old_records_have_no_losses(runs: list[Path]) -> None:
    old = record(1.0)
    del old["losses"]
    (runs[0] / "run.json").write_text(json.dumps(old))
    root = ElementTree.fromstring(picture(read_runs(runs[:1])))
    assert len(list(root.iter(f"{SVG}polyline"))) == 2
    assert "eagle" not in [text.text for text in root.iter(f"{SVG}text")]


def test_the_command_shows_a_table_and_writes_the_picture(runs: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "both.svg"
    result = CliRunner().invoke(app, ["compare-runs", *map(str, runs), "--output", str(output)])
    assert result.exit_code == 0, result.output
    [row] = [line for line in result.output.splitlines() if line.split()[:1] == ["medusa"]]
    assert row.split() == ["medusa", "4", "2.50", "2.00", "2.00", "50%", "25%"]
    assert ElementTree.fromstring(output.read_text()).tag == f"{SVG}svg"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "holds no run.json: name the output folder"), ("{", "is not the record of a"), ("[]", "is not the record of a")],
)
def test_what_is_no_run_is_one_sentence(content: str | None, sentence: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    result = CliRunner().invoke(app, ["compare-runs", str(tmp_path), "--output", str(tmp_path / "curves.svg")])
    assert result.exit_code == 1 and sentence in " ".join(result.output.split())
    assert not (tmp_path / "curves.svg").exists()


def test_runs_of_one_name_are_told_apart_by_their_folders(runs: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "later" / "eagle"
    other.mkdir(parents=True)
    (other / "run.json").write_text(json.dumps(record(1.0)))
    assert [run.name for run in read_runs([runs[0], other])] == ["runs/eagle", "later/eagle"]


@pytest.mark.parametrize(
    ("least", "most"), [(0.0, 1.0), (1.17, 3.44), (3.0, 3.0), (0.0, 3806.0), (-2.0, 1e-3), (12.0, 58.3)]
)
def test_ticks_are_round_few_and_around_the_values(least: float, most: float) -> None:
    found = ticks(least, most)
    assert found[0] <= least + 1e-9 and found[-1] >= most - 1e-9
    assert 2 <= len(found) <= 8 and found == sorted(found)


def test_names_of_places_and_of_lines_are_escaped() -> None:
    chart = Chart("a < b", "task", [Line("x & y", [(0, 1.0), (1, 2.0)]), Line("z", [(0, 2.0)])], names=["<one>", "two"])
    root = ElementTree.fromstring(draw([chart]))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a < b", "x & y", "<one>", "two"} <= set(texts)
