"""Throughput with many streams: pairs over the same prompts, the same tokens, and a table and a file of them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfspec import SamplingParams, Target
from selfspec.bench.prompts import mixed, read_benchmark
from selfspec.bench.records import read_record
from selfspec.bench.throughput import (
    ThroughputRun,
    ThroughputSettings,
    measure_throughput,
    run_of,
    summarise_throughput,
)
from selfspec.cli.main import app
from selfspec.drafters import NgramDrafter


def test_both_modes_answer_the_same_prompts(tiny_target_dir: Path) -> None:
    target = Target.from_pretrained(tiny_target_dir, device="cpu")
    prompts = [target.encode(f"the cat sat {number}") for number in range(24)]
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    settings = ThroughputSettings(streams=(1, 3), num_repeats=2, rounds=2, sampling=sampling)
    runs = measure_throughput(target, NgramDrafter(4), prompts, settings)
    assert [(r.num_streams, r.repeat) for r in runs[::2]] == [(1, 1), (1, 2), (3, 1), (3, 2)]
    # The order of a pair alternates.
    assert [r.mode for r in runs] == ["ngram", "none", "none", "ngram"] * 2
    assert all(r.is_identical and r.seconds > 0 for r in runs)
    # Until one of the last answers ends, and no longer.
    assert all(12 * 2 * r.num_streams - 12 * (r.num_streams - 1) <= r.num_tokens <= 12 * 2 * r.num_streams for r in runs)
    assert all(r.acceptance_length == 1 for r in runs if r.mode == "none")
    with pytest.raises(ValueError, match="18 prompts are needed, and there are 10: give more"):
        measure_throughput(target, NgramDrafter(4), prompts[:10], settings)


def test_ratios_are_taken_within_pairs() -> None:
    """The machine slows down threefold between the repeats, and both modes with it."""
    seconds = {1: {"none": 1.0, "eagle": 0.5}, 2: {"none": 3.0, "eagle": 1.5}, 3: {"none": 3.0, "eagle": 6.0}}
    runs = [
        ThroughputRun(8, repeat, mode, s, 60, 1.0 if mode == "none" else 3.0, repeat != 3 or mode == "none")
        for repeat, of in seconds.items()
        for mode, s in of.items()
    ]
    [entry] = summarise_throughput(runs)
    assert (entry.ratio, entry.worst_ratio, entry.acceptance_length, entry.num_identical) == (2.0, 0.5, 3.0, 2)
    assert (entry.plain_tokens_per_second, entry.tokens_per_second) == (20.0, 40.0)


def test_the_command_prints_a_table_and_writes_a_file(tiny_target_dir: Path, tmp_path: Path) -> None:
    args = [
        "bench-engine",
        "--target",
        tiny_target_dir,
        "--streams",
        "1,2",
        "--repeats",
        2,
        "--rounds",
        2,
        "--max-new-tokens",
        8,
    ]
    output = tmp_path / "out.jsonl"
    result = CliRunner().invoke(app, [str(a) for a in [*args, "--output", output]])
    assert result.exit_code == 0, result.output
    assert "plain" in result.output and "2/2" in result.output
    runs = [run_of(row) for row in read_record(output).rows]
    assert [entry.num_streams for entry in summarise_throughput(runs)] == [1, 2] and len(runs) == 8
    # A pair is missing, so it alone is measured after a first pair that does not count.
    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:-2]))
    result = CliRunner().invoke(app, [str(a) for a in [*args, "--output", output, "--resume"]])
    assert result.exit_code == 0, result.output
    again = output.read_text().splitlines(keepends=True)
    assert again[:-2] == lines[:-2] and len(again) == len(lines)


def test_an_expanded_target_is_measured_with_its_own_drafters(tiny_target_dir: Path, tmp_path: Path) -> None:
    args = ["bench-engine", "--target", tiny_target_dir, "--expand", "256x4x512x32", "--drafter", "truncated:3"]
    args += ["--streams", "2", "--repeats", 1, "--rounds", 2, "--max-new-tokens", 6, "--output", tmp_path / "out.json"]
    # The tiny tokenizer makes thousands of tokens of a benchmark's prompt.
    rows = [{"id": str(number), "prompt": f"the cat sat {number}", "category": "cats"} for number in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args += ["--prompts", tmp_path / "prompts.jsonl"]
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == 0, result.output
    assert "Every figure is of an expanded model" in result.output and "1/1" in result.output
    assert "expanded to 256x4x512x32" in read_record(tmp_path / "out.json").environment["target"]


def test_every_part_of_a_benchmark_has_all_tasks() -> None:
    rows = mixed(read_benchmark("spec_bench"))
    assert rows == mixed(read_benchmark("spec_bench")) and len({row.id for row in rows}) == 480
    assert all(len({row.category for row in rows[start : start + 24]}) == 6 for start in range(0, 480, 24))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--streams", "1,x"], "--streams '1,x' is not a list of whole numbers"),
        (["--drafter", "none"], "--drafter none is not one drafter to compare with plain decoding"),
        (["--drafter", "ngram,truncated:1"], "drafter 'ngram,truncated:1' is not known"),
        (["--expand", "256x4x512x32", "--drafter", "early_exit"], "drafter 'early_exit' cannot be expanded"),
        (["--streams", "999"], "prompts are needed, and there are"),
    ],
)
def test_mistakes_take_one_line(tiny_target_dir: Path, args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench-engine", "--target", str(tiny_target_dir), *args])
    assert result.exit_code == 1 and message in result.stderr and len(result.stderr.splitlines()) == 1
