"""`selfspec train`: from a log to a head that is served, in one command, which may be killed at any time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from support_cli import KILLER, ROOT
from typer.testing import CliRunner

from selfspec import SamplingParams, Target, generate, load_drafter
from selfspec.cli import train as train_command
from selfspec.cli.main import app
from selfspec.config import TargetOptions
from selfspec.drafters.shipped import identity
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.traffic.prepare import WritingOptions

pytest.importorskip("accelerate", reason="training needs accelerate: pip install 'selfspec[train]'")
pytest.importorskip("datasketch", reason="cleaning needs datasketch: pip install 'selfspec[train]'")

WORDS = ["cat", "dog", "hat", "mat", "rat", "bat", "one", "two", "three", "four", "five", "six"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Conversations without answers to use, as a log has them."""
    file = tmp_path / "log.jsonl"
    rows = [{"turns": [f"tell me of the {word} and the {other}"]} for word in WORDS for other in WORDS if word != other]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:60]))
    return file


@pytest.fixture
def arguments(log: Path, tiny_target_dir: Path, tmp_path: Path) -> Callable[..., list[str]]:
    def make(*more: object) -> list[str]:
        command = ["train", log, "--target", tiny_target_dir, "--output", tmp_path / "run", "--device", "cpu"]
        return [str(part) for part in (*command, "--max-new-tokens", 8, "--minutes", 0.05, "--similarity", 1, *more)]

    return make


def run(arguments: list[str]) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})


@pytest.mark.parametrize("head", ["eagle", "medusa", "early_exit", "draft"])
def test_a_log_becomes_a_head_that_is_served(
    head: str, arguments: Callable[..., list[str]], tiny_target_dir: Path, tmp_path: Path
) -> None:
    result = run(arguments("--head", head))
    assert result.exit_code == 0, result.output
    [line] = [line for line in result.stdout.splitlines() if line.startswith("serve it: ")]
    name = {"draft": "draft_model"}.get(head, head)
    assert line == f"serve it: selfspec serve --target {tiny_target_dir} --drafter {name}:{tmp_path / 'run' / 'head'}"
    target = Target.from_pretrained(tiny_target_dir)
    drafter = load_drafter(line.rpartition(" ")[2], target)
    sampling = SamplingParams(max_new_tokens=16)
    expected = generate(target, ["the dog"], sampling=sampling)[0].token_ids
    assert generate(target, ["the dog"], drafter=drafter, sampling=sampling)[0].token_ids == expected
    # What is to come is told, in time, disk and memory, before each stage.
    assert "answers of at most 8 tokens: 0:" in result.stderr and "MiB at most" in result.stderr
    assert "2 of 3: training the" in result.stderr and " GiB" in result.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [row["name"] for row in record["compared"]] == ["none", "ngram", "the new head", "transformers"]
    assert all(row["is_identical"] for row in record["compared"])
    card = (tmp_path / "run" / "head" / "README.md").read_text()
    assert "## Speed" in card and "| the new head |" in card and "(curves.svg)" in card
    assert "<polyline" in (tmp_path / "run" / "head" / "curves.svg").read_text()
    if head != "eagle":
        return
    # The same command again shows the same, and trains nothing.
    before = (tmp_path / "run" / "head" / "model.safetensors").stat().st_mtime_ns
    again = run(arguments("--head", head))
    assert again.exit_code == 0 and again.stdout.splitlines()[-3:] == result.stdout.splitlines()[-3:]
    assert (tmp_path / "run" / "head" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("selfspec.traffic.prompt_files", "OutputWriter.write"),
        ("selfspec.train.loop", "HeadTrainer._save_checkpoint"),
    ],
    ids=["while answering", "while training"],
)
def test_a_killed_run_goes_on_with_the_same_command(
    module: str, name: str, arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", KILLER, module, name, *arguments("--head", "medusa", "--batch-size", 2)]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    kept = (tmp_path / "run" / "data" / "train.jsonl").read_bytes()
    assert kept.count(b"\n") >= 2
    checkpoints = list((tmp_path / "run").glob("checkpoint-*"))
    assert bool(checkpoints) == (module == "selfspec.train.loop")
    result = run(arguments("--head", "medusa", "--batch-size", 2))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run" / "data" / "train.jsonl").read_bytes().startswith(kept)
    assert (tmp_path / "run" / "head" / "model.safetensors").exists()
    losses = json.loads((tmp_path / "run" / "run.json").read_text())["losses"]
    steps = [entry["step"] for entry in losses]
    assert steps == sorted(set(steps)), "no step is trained twice"


def test_a_head_starts_from_one_that_is_trained(
    arguments: Callable[..., list[str]], tiny_target_dir: Path, tmp_path: Path
) -> None:
    """It has that head's shape, and its weights, but for what a gentle training moves."""
    target = Target.from_pretrained(tiny_target_dir)
    start = MedusaHead(MedusaConfig(target=identity(target), num_heads=3, num_blocks=1, has_root_input=True))
    for parameter in start.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    start.save_pretrained(tmp_path / "first")
    result = run(arguments("--head", "medusa", "--start-from", tmp_path / "first"))
    assert result.exit_code == 0, result.output
    trained = MedusaHead.from_pretrained(tmp_path / "run" / "head", dtype=torch.float32).state_dict()
    assert all((trained[name] - value).abs().max() < 0.02 for name, value in start.state_dict().items())
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["settings"]["data"]["init_head"] == str(tmp_path / "first")
    assert [row["name"] for row in record["compared"]][2:4] == ["the head before", "the new head"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--head", "eagel"], "--head 'eagel' cannot be trained: use eagle, medusa, early_exit, draft"),
        (["--minutes", "0"], "--minutes 0 is not allowed: use a number above 0"),
        (["--revision", "main"], "--revision cannot be trained with: download that revision"),
        (["--dtype", "int8"], "--dtype int8 cannot be trained with: use auto, float32, bfloat16, float16"),
        (["--start-from", "nowhere"], "--start-from nowhere: no such folder: use auto, none"),
        (["--output", "LOG"], "is a file: choose another --output"),
        (["--output", "TAKEN"], "is not empty, and no training of this command: choose another --output"),
    ],
)
def test_a_wrong_request_is_one_sentence_before_anything_is_loaded(
    more: list[str],
    sentence: str,
    arguments: Callable[..., list[str]],
    log: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Target, "from_pretrained", None)
    places = {"LOG": str(log), "TAKEN": str(tmp_path)}
    result = run(arguments(*(places.get(word, word) for word in more)))
    assert result.exit_code == 1
    assert sentence in " ".join(result.output.split())
    assert not (tmp_path / "run").exists()


def test_other_logs_that_are_absent_or_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_target_dir: Path) -> None:
    monkeypatch.setattr(Target, "from_pretrained", None)
    monkeypatch.chdir(tmp_path)
    common = ["--target", str(tiny_target_dir), "--device", "cpu"]
    absent = run(["train", "logs/", *common])
    assert absent.exit_code == 1 and "cannot read logs/: there is no such file or folder" in absent.output
    (tmp_path / "empty.jsonl").write_text("")
    empty = run(["train", "empty.jsonl", *common])
    assert empty.exit_code == 1 and "no conversation is left to train on (none was found)" in empty.output


def test_a_folder_of_another_request_is_refused(tmp_path: Path) -> None:
    request: dict[str, Any] = {"head": "eagle", "minutes": 10.0}
    train_command.open_output(tmp_path / "run", request, overwrite=False)
    train_command.open_output(tmp_path / "run", request, overwrite=False)
    with pytest.raises(ValueError, match="was begun with another minutes: choose another --output, or pass --overwrite"):
        train_command.open_output(tmp_path / "run", {**request, "minutes": 5.0}, overwrite=False)
    (tmp_path / "run" / "data").mkdir()
    train_command.open_output(tmp_path / "run", {**request, "minutes": 5.0}, overwrite=True)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["request.json"]


def test_a_head_that_became_no_better_is_told(tmp_path: Path) -> None:
    from selfspec.cli.train_stages import BEFORE, NEW, Training

    training = Training("medusa", tmp_path, 1, "none", TargetOptions(), WritingOptions())
    (tmp_path / "choices.json").write_text(json.dumps({"start": "heads/first"}))
    for before, is_worse in ((1.5, False), (2.5, True)):
        compared = [{"name": BEFORE, "acceptance_length": before}, {"name": NEW, "acceptance_length": 2.0}]
        (tmp_path / "run.json").write_text(json.dumps({"compared": compared}))
        lines = training.next_lines()
        assert is_worse == any("no better than the one it started from" in line for line in lines)
        assert lines[-2] == f"serve it: selfspec serve --drafter medusa:{tmp_path / 'head'}"
    assert "(2.00 tokens a pass, not 2.50): serve that one, heads/first, or" in lines[0]
