"""Pictures: every benchmark's record can be drawn again, and nothing is drawn from what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfspec.bench.pictures import check_picture
from selfspec.bench.plot_tasks import plot_tasks, plot_throughput
from selfspec.bench.report import RuntimeReport
from selfspec.bench.steps import AnswerTime, Floor, PrefillTime, Promise, StageTimes, StepTime
from selfspec.bench.tasks import Measurement, row_of
from selfspec.bench.throughput import ThroughputRun
from selfspec.cli.main import app

pytest.importorskip("matplotlib")

ENVIRONMENT = {"target": "t", "dtype": "float32", "device": "x86_64", "threads": 2}
REPORT = RuntimeReport(
    dict(ENVIRONMENT),
    floor=Floor(1e9, 2_000_000, 1000),
    steps=[StepTime(512, 1, 0.003, 0.002), StepTime(512, 8, 0.004, 0.003), StepTime(4096, 1, 0.005, None)],
    prefills=[PrefillTime(0, 512, 0.1)],
    stages=[StageTimes("none", 9, 1, 0.0, 0.003, 0.001), StageTimes("x", 9, 8, 0.001, 0.004, 0.001)],
    answers=[
        AnswerTime("none", 0, 10, 10, 2.0, 0.1, True),
        AnswerTime("x", 0, 10, 4, 1.0, 0.05, True),
        AnswerTime("transformers", 0, 10, 10, 4.0, None, True),
    ],
    promises=[Promise(3, 16, 3.0, 2.5, 2.2), Promise(4, 16, 4.0, 3.5, 3.0)],
    peak_bytes={"steps": None},
    notes=["a note"],
)


def measurements(modes: tuple[str, ...]) -> list[Measurement]:
    return [
        Measurement(task, f"{task}-{number}", mode, 2.0 + number, 0.1, 12, 12 if mode == "none" else 5, True, 0.1, 1.0)
        for task, count in (("cats", 5), ("dogs", 1))
        for number in range(count)
        for mode in modes
    ]


def texts_of(picture: Path) -> str:
    """What is written in an SVG: matplotlib notes the text beside the shapes of its letters."""
    return picture.read_text()


@pytest.mark.parametrize("modes", [("none", "eagle"), ("none", "ngram", "eagle", "transformers"), ("none", "transformers")])
def test_tasks_are_drawn_with_whatever_was_measured(tmp_path: Path, modes: tuple[str, ...]) -> None:
    picture = tmp_path / "bench.svg"
    plot_tasks(measurements(modes), ENVIRONMENT, picture)
    drawn = texts_of(picture)
    assert "cats (5)" in drawn and "dogs (1)" in drawn and "overall (6)" in drawn and "threads 2" in drawn
    assert ("transformers = 1" in drawn) == ("transformers" in modes)
    assert ("plain decoding = 1" in drawn) == ("transformers" not in modes)


def test_a_record_is_drawn_again_by_one_command(tmp_path: Path) -> None:
    record, picture = tmp_path / "bench.jsonl", tmp_path / "bench.png"
    head = {"id": "bench", "settings": {}, "environment": ENVIRONMENT}
    rows = [{"id": m.prompt_id, **row_of(m)} for m in measurements(("none", "eagle"))]
    record.write_text("".join(json.dumps(row) + "\n" for row in (head, *rows)))
    result = CliRunner().invoke(app, ["plot", str(record), "--output", str(picture)])
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in result.output

    engine, ratios = tmp_path / "engine.jsonl", tmp_path / "engine.svg"
    runs = [
        {"id": "pair", "num_streams": n, "repeat": 1, "mode": mode, "seconds": s, "num_tokens": 60 * n}
        | {"acceptance_length": 2.0, "is_identical": True}
        for n in (1, 8)
        for mode, s in (("none", 2.0), ("eagle", 1.0))
    ]
    head = {"id": "bench-engine", "settings": {}, "environment": ENVIRONMENT}
    engine.write_text("".join(json.dumps(row) + "\n" for row in (head, *runs)))
    result = CliRunner().invoke(app, ["plot", str(engine), "--output", str(ratios)])
    assert result.exit_code == 0, result.output
    assert "Speed of eagle" in texts_of(ratios) and "streams at once" in texts_of(ratios)

    report, folder = tmp_path / "runtime.json", tmp_path / "plots"
    REPORT.save(report)
    assert RuntimeReport.load(report) == REPORT
    result = CliRunner().invoke(app, ["plot", str(report), "--output", str(folder)])
    assert result.exit_code == 0, result.output
    assert sorted(file.name for file in folder.iterdir()) == ["end_to_end.png", "promises.png", "stages.png", "steps.png"]


def test_streams_are_drawn_in_order(tmp_path: Path) -> None:
    runs = [
        ThroughputRun(n, repeat, mode, seconds * repeat, 60, 2.0, True)
        for n in (8, 1)
        for repeat in (1, 2)
        for mode, seconds in (("none", 2.0), ("x", 1.0))
    ]
    plot_throughput(runs, ENVIRONMENT, tmp_path / "engine.png")
    assert (tmp_path / "engine.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("not json\n", "is no benchmark's record"),
        ('{"id": "a", "prompt": "the cat"}\n', "is no benchmark's record"),
        ('{"id": "bench", "settings": {}, "environment": {}}\n', "holds no measurement yet"),
        ("\x00\x01", "is no benchmark's record"),
        ("", "is no benchmark's record"),
    ],
)
def test_what_is_no_record_gets_a_sentence(tmp_path: Path, content: str | None, message: str) -> None:
    record = tmp_path / "record.jsonl"
    if content is not None:
        record.write_text(content)
    result = CliRunner().invoke(app, ["plot", str(record), "--output", str(tmp_path / "picture.png")])
    assert result.exit_code == 1 and message in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "picture.png").exists()


def test_a_picture_needs_a_name_and_a_folder(tmp_path: Path) -> None:
    check_picture(tmp_path / "a.SVG")
    for path in (tmp_path / "a.pdf", tmp_path / "a", tmp_path / "absent" / "a.png"):
        with pytest.raises(ValueError, match="end in|not a directory"):
            check_picture(path)
