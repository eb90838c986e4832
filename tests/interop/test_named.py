"""Heads of the package by their short names, in the commands that take a head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from selfspec import Target, files
from selfspec.cli.heads import app
from selfspec.drafters.shipped import identity
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.interop.named import check_name, named_head, shipped_as


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


@pytest.fixture
def shipped_medusa(tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with heads of two targets, of which the second is the tests' own."""
    target = Target.from_pretrained(tiny_target_dir)
    for name in ("another", "tiny"):
        head = MedusaHead(MedusaConfig(target=identity(target), num_heads=2))
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        head.save_pretrained(tmp_path / "pretrained" / name / "medusa")
    config = tmp_path / "pretrained" / "another" / "medusa" / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 32', '"hidden_size": 48'))
    monkeypatch.setattr(files, "SHIPPED_HEADS", tmp_path / "pretrained")
    return tmp_path / "pretrained" / "tiny" / "medusa"


def test_a_name_means_the_head_that_fits(shipped_medusa: Path, tiny_target_dir: Path) -> None:
    target = Target.from_pretrained(tiny_target_dir)
    assert named_head("medusa", target) == named_head("tiny/medusa", target) == str(shipped_medusa)
    # Heads of another target are found by their whole names, and refused by what loads them.
    assert named_head("another/medusa", target) == str(shipped_medusa.parents[1] / "another" / "medusa")
    assert named_head("someone/head", target) == "someone/head"


def test_a_folder_of_that_name_comes_first(shipped_medusa: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped_as("medusa")
    (tmp_path / "medusa").mkdir()
    assert not shipped_as("medusa")


@pytest.mark.parametrize("name", ["medusae", "/nope", "./nope", "a/b/c", "nope/"])
def test_what_is_no_head_is_told_without_the_hub(name: str, shipped_medusa: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: no such folder, and no shipped head of this name \(medusa\): check"):
        check_name(name)
    check_name("someone/head")


def test_export_and_verify_know_shipped_heads_and_say_where_they_lie(
    shipped_medusa: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    exported = run("export", "medusa", "--format", "medusa", "--output", tmp_path / "out", "--target", tiny_target_dir)
    assert exported.exit_code == 0, exported.output
    assert f"medusa: the shipped head in {shipped_medusa}" in exported.output.replace("\n", "")
    options = ("--num-prompts", 2, "--max-new-tokens", 4, "--target", tiny_target_dir)
    verified = run("verify-head", "tiny/medusa", *options)
    assert f"tiny/medusa: the shipped head in {shipped_medusa}" in verified.output.replace("\n", "")
    assert "right at" in verified.output and "Served is what you get." in " ".join(verified.output.split())


def test_import_says_that_a_shipped_head_needs_none(shipped_medusa: Path, tmp_path: Path) -> None:
    result = run("import", "tiny/medusa", "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert f"tiny/medusa is a selfspec head already, in {shipped_medusa}" in " ".join(result.output.split())


def test_a_wrong_format_is_told_before_the_target_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "from_pretrained", None)
    result = run("export", "eagle", "--format", "gguf", "--output", tmp_path / "out")
    assert result.exit_code == 1 and "format 'gguf' is not known: use vllm, sglang, speculators, medusa" in result.output
