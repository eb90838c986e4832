"""The benchmark: every mode answers, and shows the cost model's prediction next to the measured speed-up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfspec.bench import tasks as benchmark
from selfspec.bench.prompts import read_benchmark
from selfspec.bench.records import read_record
from selfspec.bench.tasks import PLAIN, Costs, Measurement, measurement_of, summarise_tasks
from selfspec.cli.main import app
from selfspec.cli.tables import show_benchmark


def measured(task: str, prompt_id: str, mode: str, seconds: float, passes: int, draft: float, verify: float) -> Measurement:
    return Measurement(task, prompt_id, mode, seconds, 0.0, 12, passes, True, draft, verify)


def test_a_prediction_is_acceptance_over_costs():
    # A plain pass takes 0.1 s; a drafted step 0.02 s of drafting and 0.11 s of verifying, and the loop itself the rest.
    rows = [
        measured("a", "1", PLAIN, 1.2, 12, 0.0, 1.2),
        measured("a", "1", "x", 0.6, 4, 0.08, 0.44),
        measured("b", "2", PLAIN, 1.2, 12, 0.0, 1.2),
        measured("b", "2", "x", 0.9, 6, 0.12, 0.66),
    ]
    summaries = summarise_tasks(rows)
    costs = summaries["a"]["x"].costs
    assert costs is not None and (costs.draft, costs.verify) == (pytest.approx(0.2), pytest.approx(1.1))
    assert summaries["a"]["x"].predicted_speedup == pytest.approx(3 / 1.3)
    assert summaries["b"]["x"].predicted_speedup == pytest.approx(2 / 1.3)
    assert summaries["a"]["x"].decode_speedup == pytest.approx(2.0)
    assert summaries["overall"][PLAIN].costs == Costs(0.0, 1.0)
    assert summaries["overall"][PLAIN].predicted_speedup == 1.0


def test_the_baseline_has_no_prediction(capsys):
    rows = [
        measured("a", "1", PLAIN, 1.2, 12, 0.0, 1.2),
        Measurement("a", "1", "transformers", 1.5, None, 12, 12, True),
    ]
    summaries = summarise_tasks(rows)
    assert summaries["a"]["transformers"].predicted_speedup is None
    show_benchmark(summaries, {"target": "t"})
    assert "none 0.000 + 1.000" in " ".join(capsys.readouterr().out.split())


def test_the_command_prints_and_saves_predictions(tiny_target_dir: Path, tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "prompt": "the cat sat on the mat and the cat sat on", "category": "cats"}))
    options = ["--target", tiny_target_dir, "--prompts", prompts, "--drafters", "ngram,truncated:1", "--max-new-tokens", 24]
    output = tmp_path / "bench.jsonl"
    result = CliRunner().invoke(app, ["bench", *map(str, options), "--no-baseline", "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "predicted" in result.output and "costs of a step" in " ".join(result.output.split())
    overall = summarise_tasks([measurement_of(row) for row in read_record(output).rows])["overall"]
    for mode in ("none", "ngram", "truncated:1"):
        summary = overall[mode]
        assert summary.num_identical == 1 and summary.costs is not None
        step_cost = summary.costs.draft + summary.costs.verify
        assert summary.predicted_speedup == pytest.approx(summary.acceptance_length / step_cost)


@pytest.fixture
def bench(tiny_target_dir: Path, tmp_path: Path):
    """Runs `bench` on six short prompts of two tasks."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"id": f"{task}-{number}", "prompt": f"the {task} sat on {number}", "category": task}
        for task in ("cat", "dog")
        for number in range(3)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*args: object, code: int = 0):
        options = [
            "--target",
            tiny_target_dir,
            "--prompts",
            prompts,
            "--drafters",
            "ngram",
            "--max-new-tokens",
            4,
            "--no-baseline",
            *args,
        ]
        result = CliRunner().invoke(app, ["bench", *map(str, options)])
        assert result.exit_code == code, result.output
        return result

    return run


def test_every_measurement_is_written_at_once_and_kept(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C in the fourth prompt: the table of three is shown, and the run goes on with the fourth."""
    output = tmp_path / "bench.jsonl"
    answer, seen = benchmark._answer, []

    def interrupted(target, ids, drafter, settings):
        seen.append(settings.sampling.max_new_tokens)
        if seen.count(4) == 8:
            raise KeyboardInterrupt
        return answer(target, ids, drafter, settings)

    with monkeypatch.context() as patch:
        patch.setattr(benchmark, "_answer", interrupted)
        result = bench("--output", output, code=130)
    # One in the middle of being answered is left out, because ratios need all modes.
    assert [row["id"] for row in read_record(output).rows] == ["cat-0"] * 2 + ["cat-1"] * 2 + ["cat-2"] * 2
    assert "cat" in result.stdout and "dog" not in result.stdout and "overall" in result.stdout
    kept = output.read_text()
    assert "pass --resume to continue it, or --overwrite" in bench("--output", output, code=1).stderr
    assert "3 prompts, 2 answers each, of at most 4 tokens: about" in bench("--output", output, "--resume").stderr
    assert output.read_text().startswith(kept)
    assert len(read_record(output).rows) == 12
    complete = output.read_text()
    # Nothing is left to measure, so nothing is loaded.
    monkeypatch.setattr("selfspec.cli.bench.load_for_bench", None)
    assert bench("--output", output, "--resume").stdout.count("ngram") >= 3
    assert output.read_text() == complete


def test_a_resumed_run_must_be_the_same(bench, tmp_path: Path):
    output = tmp_path / "bench.jsonl"
    bench("--output", output, "--quick")
    assert {row["id"] for row in read_record(output).rows} == {"cat-0", "dog-0"}
    stderr = bench("--output", output, "--resume", "--max-new-tokens", 5, code=1).stderr
    assert "max_new_tokens 4, and this run has 5" in stderr
    first, *rest = output.read_text().splitlines(keepends=True)
    record = json.loads(first)
    record["environment"]["threads"] = 99
    output.write_text(json.dumps(record) + "\n" + "".join(rest))
    assert "threads 99, and this run has" in bench("--output", output, "--resume", code=1).stderr
    # The run may become larger.
    output.write_text(first + "".join(rest))
    bench("--output", output, "--resume")
    assert len(read_record(output).rows) == 12


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--output", "/nowhere/bench.jsonl"], "/nowhere is not a directory"),
        (["--plot", "bench.pdf"], "let it end in .png or .svg"),
        (["--plot", "/nowhere/bench.png"], "/nowhere is not a directory"),
        (["--resume"], "concern the file of --output"),
        (["--tasks", "bird"], "--tasks 'bird' is not among the prompts' categories: use cat, dog"),
        (["--prompts", "absent.jsonl"], "cannot read absent.jsonl"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(bench, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str):
    if "--plot" in args:
        pytest.importorskip("matplotlib")
    monkeypatch.setattr("selfspec.cli.bench.load_for_bench", None)
    stderr = bench(*args, code=1).stderr
    assert message in stderr and len(stderr.splitlines()) == 1


def test_a_picture_without_matplotlib_is_refused_first(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("selfspec.cli.bench.load_for_bench", None)
    assert "pip install 'selfspec[plots]'" in bench("--plot", tmp_path / "bench.png", code=1).stderr


def test_tasks_choose_categories(bench, tmp_path: Path):
    output = tmp_path / "bench.jsonl"
    bench("--output", output, "--tasks", "dog", "--per-task", 2)
    assert {row["id"] for row in read_record(output).rows} == {"dog-0", "dog-1"}
    mt_bench = [row for row in read_benchmark("spec_bench") if row.category == "mt_bench"]
    assert len(mt_bench) == 80


def test_the_table_fits_into_80_columns(capsys):
    rows = [
        measured("math_reasoning", "1", mode, 1.2, passes, 0.0, 1.2)
        for mode, passes in ((PLAIN, 12), ("early_exit", 4), ("transformers", 12))
    ]
    show_benchmark(summarise_tasks(rows), {"target": "t"})
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    [heading] = [line for line in shown.splitlines() if "transformers" in line and "drafter" in line]
    assert "acceptance" in shown and "…" not in shown
