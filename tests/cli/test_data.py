"""`selfspec data` at a terminal: what cannot be done is told at once, and work that was cut goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support_cli import KILLER, ROOT
from typer.testing import CliRunner

from selfspec import Target
from selfspec.cli.main import app

WORDS = ["cat", "dog", "hat", "mat", "rat", "bat"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, arguments)], env={"COLUMNS": "160"})


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps({"turns": [f"tell me of the {word}"]}) + "\n" for word in WORDS))
    return file


@pytest.fixture
def prepare(log: Path, tmp_path: Path, tiny_target_dir: Path) -> list[object]:
    pytest.importorskip("datasketch", reason="cleaning needs datasketch: pip install 'selfspec[train]'")
    options = ["--target", tiny_target_dir, "--held-out", 0, "--max-new-tokens", 6, "--batch-size", 2]
    return ["prepare", log, "--output-dir", tmp_path / "data", *options]


def answered(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]


def test_prepare_makes_data_from_anywhere(prepare: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*prepare)
    assert result.exit_code == 0, result.output
    assert "6 answers of at most 6 tokens: 0:" in result.stderr and "MiB at most" in result.stderr
    assert f"{tmp_path / 'data'}: 6 samples, " in result.stdout
    assert len(answered(tmp_path)) == 6 and (tmp_path / "data" / "report.json").exists()


def test_answers_of_this_target_may_be_kept(prepare: list[object], log: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "the cat sat"}]
    log.write_text(json.dumps({"messages": messages}) + "\n")
    result = run(*prepare, "--keep-answers")
    assert result.exit_code == 0, result.output
    assert [row["messages"] for row in answered(tmp_path)] == [messages]
    mixed = run(*prepare)
    assert mixed.exit_code == 1 and "was begun with another keep_answers" in mixed.output


@pytest.mark.parametrize("command", ["prepare", "regenerate"])
def test_a_killed_command_goes_on(command: str, prepare: list[object], log: Path, tmp_path: Path) -> None:
    arguments = prepare
    if command == "regenerate":
        (tmp_path / "data").mkdir()
        dropped = ("--held-out", 0)
        options = [part for part in prepare[4:] if part not in dropped]
        arguments = ["regenerate", log, "--output", tmp_path / "data" / "train.jsonl", "--resume", *options]
    words = [sys.executable, "-c", KILLER, "selfspec.traffic.prompt_files", "OutputWriter.write", "data"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([*words, *map(str, arguments)], env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    kept = answered(tmp_path)
    assert len(kept) == 2
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert answered(tmp_path)[:2] == kept and len(answered(tmp_path)) == 6
    again = run(*arguments)
    assert again.exit_code == 0 and len(answered(tmp_path)) == 6


def test_what_cannot_be_is_told_before_anything_is_loaded(
    log: Path, tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "from_pretrained", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    target = ("--target", tiny_target_dir)
    for arguments, sentence in (
        (("inspect", "logs/"), "cannot read logs/: there is no such file or folder"),
        (("inspect", tmp_path / "logs"), "there is no such file or folder"),
        (("regenerate", "empty.jsonl", "--output", "out.jsonl", *target), "no conversation is left to train on"),
        (("prompts", "--number", 3, "--output", "out.jsonl", *target), "greedy decoding would write the same prompt"),
        (("prepare", "logs/", "--output-dir", "data", *target), "cannot read logs/: there is no such file or folder"),
    ):
        result = run(*arguments)
        assert result.exit_code == 1, result.output
        assert sentence in " ".join(result.output.split())
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == ["empty.jsonl", "log.jsonl"]


def test_greedy_prompts_are_refused_without_torch(tmp_path: Path) -> None:
    """In a process of its own: importing torch takes longer than reading the sentence."""
    script = (
        "import sys; sys.modules['torch'] = None; from selfspec.cli.main import app; "
        f"app(['data', 'prompts', '--number', '3', '--output', {str(tmp_path / 'out.jsonl')!r}])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1
    assert "greedy decoding would write the same prompt every time: pass a --temperature above 0" in result.stderr


def test_prompts_of_which_none_can_be_used_are_an_error(tmp_path: Path, tiny_target_dir: Path) -> None:
    options = ["--target", tiny_target_dir, "--temperature", 1, "--seed", 0, "--max-new-tokens", 1]
    result = run("prompts", "--number", 3, "--output", tmp_path / "out.jsonl", *options)
    assert result.exit_code == 1
    assert "no prompt can be used (3 cut by max_new_tokens): raise --max-new-tokens" in " ".join(result.output.split())


def test_clean_without_its_package_writes_nothing(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    result = run("clean", log, "--output-dir", tmp_path / "clean")
    assert result.exit_code == 1
    assert "finding near-duplicates needs datasketch: pip install 'selfspec[train]'" in " ".join(result.output.split())
    assert not (tmp_path / "clean").exists()
