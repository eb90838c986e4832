"""The runtime benchmark's arithmetic, on the tiny target; what it measures on a device is the device's affair."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from support import random_prompts, tiny_model, tiny_target
from typer.testing import CliRunner

from selfspec import SamplingParams, generate
from selfspec.bench.baseline import plain_twin
from selfspec.bench.plot_runtime import plot_runtime
from selfspec.bench.records import read_record
from selfspec.bench.report import RuntimeReport
from selfspec.bench.steps import (
    AnswerTime,
    Floor,
    Promise,
    StageTimes,
    StepTime,
    check_contexts,
    random_tree,
    read_floor,
    stage_times,
    step_times,
    weight_bytes,
)
from selfspec.bench.synthetic import SyntheticDrafter
from selfspec.bench.tasks import measurement_of, summarise_tasks
from selfspec.cli.main import app
from selfspec.drafters import NgramDrafter
from selfspec.model.half_linear import can_halve
from selfspec.model.linear_layout import HALF, PACKED, lay_out_linear_layers
from selfspec.model.packed_linear import can_pack
from selfspec.model.target import Target

PROMPTS = random_prompts(3, (3, 20), seed=8)


@pytest.mark.parametrize(("length", "num_nodes"), [(1, 5), (3, 3), (3, 16), (5, 16)])
def test_the_synthetic_drafter_has_the_acceptance_length_it_is_set_to(length: int, num_nodes: int) -> None:
    target = tiny_target()
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    expected = [c.token_ids for c in generate(target, PROMPTS, sampling=sampling)]
    answers = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)}
    drafter = SyntheticDrafter(answers, acceptance_length=length, num_nodes=num_nodes)
    got = generate(target, PROMPTS, drafter=drafter, sampling=sampling, batch_size=2, use_cost_guard=False)
    assert [c.token_ids for c in got] == expected
    assert {c.num_target_passes for c in got} == {30 // length}
    with pytest.raises(ValueError, match="num_nodes=2"):
        SyntheticDrafter(answers, acceptance_length=3, num_nodes=2)


def test_weight_bytes_leave_the_embedding_out_unless_it_is_the_lm_head() -> None:
    untied, tied = tiny_model("llama"), tiny_model("llama-tied")
    everything = sum(p.numel() * 4 for p in untied.parameters())
    table = untied.get_input_embeddings().weight.numel() * 4
    assert weight_bytes(untied) == weight_bytes(tied) == everything - table
    before = weight_bytes(untied)
    if can_pack():
        lay_out_linear_layers(untied, forms=[PACKED])
        assert weight_bytes(untied) == before


@pytest.mark.skipif(not can_halve(), reason="this torch build has no float16 weights for float32 products")
def test_weights_that_are_held_in_16_bits_count_half() -> None:
    model = tiny_model("llama").bfloat16().float()
    linears = sum(4 * module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    before = weight_bytes(model)
    lay_out_linear_layers(model, forms=[HALF])
    assert weight_bytes(model) == before - linears // 2


def test_steps_are_timed_for_every_context_and_size() -> None:
    target = tiny_target()
    steps, prefills = step_times(target, [8, 40], [1, 6], num_calls=2)
    assert [(step.context, step.num_nodes) for step in steps] == [(8, 1), (8, 6), (40, 1), (40, 6)]
    assert all(step.wall_seconds > 0 and step.device_seconds is None for step in steps)
    assert [(each.start, each.context) for each in prefills] == [(0, 8), (8, 40)]
    assert random_tree(target, 9).num_nodes == 9
    with pytest.raises(ValueError, match="takes 1 to 250"):
        check_contexts(target, [251], [6])


def test_stages_add_up_and_leave_the_text_alone() -> None:
    stages = stage_times(tiny_target(), PROMPTS[0], NgramDrafter(4), SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert stages.mode == "ngram" and stages.num_nodes >= 1
    assert stages.total == pytest.approx(stages.draft + stages.verify + stages.commit)
    assert min(stages.draft, stages.verify) > 0


def test_the_twin_shares_weights_and_nothing_else() -> None:
    target = tiny_target()
    twin = plain_twin(target.model)
    ours, theirs = list(target.model.parameters()), list(twin.parameters())
    assert all(a is b for a, b in zip(ours, theirs, strict=True))
    assert twin.config._attn_implementation == "sdpa" != target.model.config._attn_implementation
    ids = torch.tensor([PROMPTS[0]])
    plain = generate(target, PROMPTS[:1], sampling=SamplingParams(max_new_tokens=9, ignore_eos=True))[0].token_ids
    output = twin.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, min_new_tokens=9, do_sample=False)
    expected = Target(tiny_model("llama"))
    assert output.shape[1] - ids.shape[1] == len(plain) == 9
    assert generate(expected, PROMPTS[:1], sampling=SamplingParams(max_new_tokens=9, ignore_eos=True))[0].token_ids == plain


def test_rates_are_medians_over_prompts_against_plain_decoding(tmp_path: Path) -> None:
    report = RuntimeReport({"target": "t"}, floor=Floor(1e9, 2_000_000, 1000))
    report.answers = [
        AnswerTime("none", 0, 10, 10, 2.0, 0.1, True),
        AnswerTime("x", 0, 10, 4, 1.0, 0.05, True),
        AnswerTime("none", 1, 10, 10, 2.0, 0.1, True),
        AnswerTime("x", 1, 5, 1, 0.25, 0.025, False),
        AnswerTime("transformers", 0, 10, 10, 4.0, None, True),
    ]
    plain, drafted, baseline = report.modes
    assert (plain.total_speedup, plain.decode_speedup, plain.tokens_per_second) == (1.0, 1.0, 5.0)
    assert (drafted.total_speedup, drafted.decode_speedup, drafted.acceptance_length) == (3.0, 3.0, 3.0)
    assert (baseline.total_speedup, baseline.decode_speedup, baseline.num_prompts) == (0.5, None, 1)
    # Of the prompts that transformers has answered.
    assert [mode.baseline_speedup for mode in report.modes] == [2.0, 4.0, 1.0]
    report.save(tmp_path / "out.json")
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["floor"]["seconds"] == 0.002
    assert Floor(1e9, 2_000_000, 1000).seconds_at(1000) == 0.003
    assert [mode["mode"] for mode in record["modes"]] == ["none", "x", "transformers"]


@pytest.mark.gpu
def test_steps_on_a_device_have_a_host_gap() -> None:
    target = Target(tiny_model("llama").to("cuda", torch.bfloat16))
    steps, _ = step_times(target, [16], [1, 8], num_calls=3)
    assert all(step.device_seconds and step.host_gap_seconds is not None for step in steps)
    assert read_floor(target).copy_bytes_per_second > 1e11


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": i, "prompt": text} for i, text in enumerate(("the cat sat on the", "one two three one two"))]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def invoke(*args: object) -> str:
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_measures_an_expanded_target(
    tiny_target_dir: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out, trace = tmp_path / "out.json", tmp_path / "trace.json"
    shown = invoke(
        "bench-runtime",
        *("--target", tiny_target_dir, "--expand", "96x4x128x16", "--drafters", "truncated:2,ngram"),
        *("--contexts", "16,32", "--nodes", "1,4", "--repeats", 2, "--prompts", prompt_file, "--num-prompts", 2),
        *("--max-new-tokens", 12, "--acceptance-lengths", "2,3", "--synthetic-nodes", 4, "--baselines", "eager,static"),
        *("--json", out, "--plots", tmp_path / "plots", "--profile", trace),
    )
    assert "expanded to 96x4x128x16" in shown and "need matplotlib" in shown
    record = json.loads(out.read_text())
    assert "expanded" in record["environment"]["target"]
    assert len(record["steps"]) == 4 and record["steps"][0]["times_floor"] > 0
    modes = {mode["mode"]: mode for mode in record["modes"]}
    assert list(modes) == ["none", "truncated:2", "ngram", "transformers", "transformers, static cache"]
    assert all(mode["num_identical"] == mode["num_prompts"] for mode in modes.values())
    assert [each["set_length"] for each in record["promises"]] == [2, 3]
    assert all(each["promised"] > 0 and each["measured"] > 0 for each in record["promises"])
    assert [each["mode"] for each in record["stages"]] == ["none", "truncated:2", "ngram"]
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"draft", "verify", "commit"} <= names
    assert record["kernels"]


def test_bench_takes_an_expanded_target_too(tiny_target_dir: Path, prompt_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    shown = invoke(
        *("bench", "--target", tiny_target_dir, "--expand", "96x4x128x16", "--prompts", prompt_file),
        *("--max-new-tokens", 8, "--output", out),
    )
    assert "expanded to" in shown
    record = read_record(out)
    assert "expanded" in record.environment["target"]
    summary = summarise_tasks([measurement_of(row) for row in record.rows])["overall"]
    assert all(mode.num_identical == mode.num_prompts == 2 for mode in summary.values())
    assert "transformers" in summary


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--nodes", "1,x"], "whole numbers"),
        (["--repeats", "0"], "--repeats 0 is not allowed: use 1 or more"),
        (["--max-new-tokens", "1"], "--max-new-tokens 1 is not allowed: use 2 or more"),
        (["--baselines", "vllm"], "vllm is not known"),
        (["--acceptance-lengths", "9", "--synthetic-nodes", "4"], "--synthetic-nodes"),
        (["--json", "/nowhere/out.json"], "folder does not exist"),
        (["--contexts", "9999", "--drafters", "ngram"], "context 9999"),
        (["--expand", "70b"], "8b or"),
    ],
)
def test_wrong_settings_get_a_sentence(tiny_target_dir: Path, args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench-runtime", "--target", str(tiny_target_dir), *args])
    assert result.exit_code == 1 and message in result.output


def test_plots_are_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = RuntimeReport({"target": "t expanded to 1x1x1x1"}, floor=Floor(1e9, 2_000_000, 1000))
    report.steps = [StepTime(512, 1, 0.003, 0.002), StepTime(512, 8, 0.004, 0.003), StepTime(4096, 1, 0.005, None)]
    report.stages = [StageTimes("none", 9, 1, 0.0, 0.003, 0.001), StageTimes("x", 9, 8, 0.001, 0.004, 0.001)]
    report.answers = [AnswerTime("none", 0, 10, 10, 2.0, 0.1, True), AnswerTime("x", 0, 10, 4, 1.0, 0.05, True)]
    report.promises = [Promise(3, 16, 3.0, 2.5, 2.2), Promise(4, 16, 4.0, 3.5, 3.0)]
    files = plot_runtime(report, tmp_path / "plots")
    assert [file.name for file in files] == ["steps.png", "stages.png", "end_to_end.png", "promises.png"]
    assert all(file.stat().st_size > 1000 for file in files)
