"""The three commands, from a foreign folder to another engine's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from selfspec import Target
from selfspec.cli.heads import app
from selfspec.drafters.shipped import identity
from selfspec.heads.eagle import EagleConfig, EagleHead
from selfspec.heads.medusa import MedusaConfig, MedusaHead


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def head(tiny_target_dir: Path, tmp_path: Path) -> Path:
    target = Target.from_pretrained(tiny_target_dir)
    medusa = MedusaHead(MedusaConfig(target=identity(target), num_heads=2))
    for parameter in medusa.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    medusa.save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def test_export_import_verify(head: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    target = ("--target", tiny_target_dir)
    result = run("export", head, "--format", "medusa", "--output", tmp_path / "medusa", *target)
    assert result.exit_code == 0, result.output
    assert f"vllm serve {tiny_target_dir} --speculative-config " in result.output
    assert "text-generation-launcher --model-id" in result.output
    result = run("import", tmp_path / "medusa", "--output", tmp_path / "again", *target)
    assert result.exit_code == 0, result.output
    assert "medusa head of 2,112 parameters" in result.output and "selfspec verify-head" in result.output
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["config.json", "model.safetensors"]
    result = run("verify-head", tmp_path / "again", *target, "--num-prompts", 4, "--max-new-tokens", 24)
    assert result.exit_code == 1
    assert "as it is" in result.output and "heads one position on" in result.output
    # One rate for each of the two heads, and progress without a terminal.
    [served] = [line for line in result.output.splitlines() if line.startswith("served: ")]
    assert len(served.rpartition(": ")[2].split()) == 2
    assert "drafting the answers to 4 prompts" in result.stderr
    assert "reading the head in 2 ways: 1, as it is" in result.stderr
    assert "selfspec: position 1 has " in result.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("export", "HEAD", "--format", "sglang", "--output", "out"), "sglang has no medusa heads"),
        (("import", "HEAD", "--output", "out"), "this is a selfspec head already"),
        (("import", "HEAD", "--output", "HEAD"), "is not empty: name a new directory"),
        (("import", "HEAD", "--output", "out", "--feature-layers", "2;4"), "is not a list of whole numbers such as 2,16,29"),
        (("verify-head", "nowhere"), "nowhere: no such folder"),
    ],
)
def test_errors_are_one_sentence(
    arguments: tuple[str, ...],
    reason: str,
    head: Path,
    tiny_target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*(str(head) if argument == "HEAD" else argument for argument in arguments), "--target", tiny_target_dir)
    assert result.exit_code == 1
    assert reason in result.output and result.output.count("selfspec: ") == 1
    assert not Path("out").exists()


def test_a_draft_model_needs_no_import(tiny_target_dir: Path, tmp_path: Path) -> None:
    result = run("import", tiny_target_dir, "--output", tmp_path / "out", "--target", tiny_target_dir)
    assert result.exit_code == 0, result.output
    assert f"--drafter draft_model:{tiny_target_dir}" in result.output and not (tmp_path / "out").exists()


def test_conventions_can_be_given(tiny_target_dir: Path, tmp_path: Path) -> None:
    target = Target.from_pretrained(tiny_target_dir)
    shape = {"intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    config = EagleConfig(
        target=identity(target),
        feature_layers=(0, 1),
        draft_vocab_size=target.vocab_size,
        norm_before_residual=True,
        **shape,
    )
    EagleHead(config).save_pretrained(tmp_path / "head")
    arguments = ("--output", tmp_path / "x", "--target", tiny_target_dir)
    assert run("export", tmp_path / "head", "--format", "vllm", *arguments).exit_code == 0
    options = ("--feature-layers", "1,2", "--no-norm-before-residual")
    result = run("import", tmp_path / "x", "--output", tmp_path / "y", "--target", tiny_target_dir, *options)
    assert result.exit_code == 0, result.output
    imported = EagleHead.from_pretrained(tmp_path / "y").config
    assert imported.feature_layers == (1, 2) and not imported.norm_before_residual
