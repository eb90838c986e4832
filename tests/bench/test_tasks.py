"""The benchmark: every mode answers, and shows the cost model's prediction next to the measured speed-up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfspec.bench.tasks import PLAIN, Costs, Measurement, summarise_tasks
from selfspec.cli.display import show_benchmark
from selfspec.cli.main import app


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
    output = tmp_path / "bench.json"
    result = CliRunner().invoke(app, ["bench", *map(str, options), "--no-baseline", "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "dicted" in result.output and "costs of a step" in result.output
    overall = json.loads(output.read_text())["summary"]["overall"]
    for mode in ("none", "ngram", "truncated:1"):
        summary = overall[mode]
        assert summary["num_identical"] == 1
        step_cost = summary["costs"]["draft"] + summary["costs"]["verify"]
        assert summary["predicted_speedup"] == pytest.approx(summary["acceptance_length"] / step_cost)
