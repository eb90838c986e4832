"""The recipes as a user runs them: a few steps on a tiny target, and a head that serving loads."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import TrainingArguments
from transformers.utils import logging as transformers_logging

from selfspec import SamplingParams, Target, generate, load_drafter

pytest.importorskip("accelerate", reason="training needs accelerate: pip install 'selfspec[train]'")

ROOT = Path(__file__).resolve().parents[2]
Recipe = Callable[[str], ModuleType]
Flags = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("kind", "shape", "drafter_name"),
    [
        ("medusa", "", "medusa"),
        ("eagle", "--feature_layers 0 1 2 --draft_vocab_size 64", "eagle"),
        ("eagle", "--feature_layers 0 2 --draft_vocab_size 64 --train_lm_head", "eagle"),
        ("eagle", "--version 1", "eagle"),
        ("early_exit", "--exit_layer 1", "early_exit"),
        ("early_exit", "--exit_layer 1 --lora_rank 2 --blocks 0", "early_exit"),
        ("draft", "--blocks 0 --save_model true", "draft_model"),
    ],
)
def test_a_recipe_trains_a_head_that_serving_loads(
    kind: str, shape: str, drafter_name: str, recipe: Recipe, flags: Flags, tiny_target_dir: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    final = recipe(kind).main([*flags(output), *shape.split()])
    assert final["acceptance_length"] >= 1
    history = json.loads((output / "run.json").read_text())["history"]
    assert [entry["step"] for entry in history] == [2, 4]
    target = Target.from_pretrained(tiny_target_dir)
    drafter = load_drafter(f"{drafter_name}:{output / 'head'}", target)
    sampling = SamplingParams(max_new_tokens=16)
    expected = generate(target, ["the dog"], sampling=sampling)[0].token_ids
    assert generate(target, ["the dog"], drafter=drafter, sampling=sampling)[0].token_ids == expected
    # The same command again finds its work done and changes nothing.
    before = (output / "head" / "model.safetensors").read_bytes()
    recipe(kind).main([*flags(output), *shape.split()])
    assert (output / "head" / "model.safetensors").read_bytes() == before
    assert json.loads((output / "run.json").read_text())["history"] == history
    if kind == "draft":
        # A whole model drafts the same tokens as the layers with the target's embedding.
        whole = load_drafter(f"draft_model:{output / 'model'}", target, width=3, num_nodes=12)
        passes = [
            generate(target, ["the dog"], drafter=each, sampling=sampling, use_cost_guard=False)[0].num_target_passes
            for each in (drafter, whole)
        ]
        assert passes[0] == passes[1]


def test_features_on_disk_train_the_head_that_features_online_do(recipe: Recipe, flags: Flags, tmp_path: Path) -> None:
    """Up to the rounding of storage. The second run finds the features there."""
    losses = []
    for name in ("online", "first", "second"):
        features = [] if name == "online" else [f"--features_dir={tmp_path / 'features'}"]
        recipe("medusa").main([*flags(tmp_path / name), *features])
        losses.append(json.loads((tmp_path / name / "run.json").read_text())["metrics"]["train_loss"])
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-3)


def test_a_yaml_file_and_flags_that_override_it(recipe: Recipe, flags: Flags, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    lines = [flag.removeprefix("--").replace("=", ": ", 1) for flag in flags(tmp_path / "run")]
    config.write_text("\n".join(lines) + "\nnum_heads: 2\n")
    recipe("medusa").main([str(config), "--num_heads=3", "--max_steps=1"])
    assert json.loads((tmp_path / "run" / "head" / "config.json").read_text())["num_heads"] == 3


def test_fewer_rows_than_a_batch_is_one_sentence(recipe: Recipe, flags: Flags, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fewer than the 1000 of one step"):
        recipe("medusa").main(flags(tmp_path / "run", gradient_accumulation_steps=500))
    assert not (tmp_path / "run").exists()


def test_a_target_without_a_chat_template_is_one_sentence(
    recipe: Recipe, flags: Flags, tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, template = tmp_path / "plain", tmp_path / "template.jinja"
    shutil.copytree(tiny_target_dir, plain)
    (plain / "chat_template.jinja").rename(template)
    with monkeypatch.context() as patch:
        # The error comes before the weights are read.
        patch.setattr(Target, "from_pretrained", None)
        with pytest.raises(ValueError, match="has no chat template: give it one with --chat.template FILE"):
            recipe("medusa").main(flags(tmp_path / "run", target=plain))
    recipe("medusa").main(flags(tmp_path / "run", target=plain, chat_template=template, max_steps=1))
    assert (tmp_path / "run" / "head" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "extra", "sentence"),
    [
        ({"train_file": "absent.jsonl"}, [], r"^train_file=absent.jsonl does not exist: check the spelling$"),
        ({"final_eval_file": "absent.jsonl"}, [], r"^final_eval_file=absent.jsonl does not exist: check the spelling$"),
        ({"shard_target": True}, [], r"^shard_target needs several processes: start the recipe with accelerate launch"),
        ({}, ["--feature_layers", "0", "9"], r"^feature_layers=\(0, 9\): tiny-target0 has hidden states 0 to 2$"),
        ({}, ["--feature_layers", "1", "1"], r"^feature_layers=\(1, 1\) must name at least one layer, none twice$"),
    ],
)
def test_a_setting_that_cannot_be_is_one_sentence(
    changes: dict[str, Any], extra: list[str], sentence: str, recipe: Recipe, flags: Flags, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        recipe("eagle").main([*flags(tmp_path / "run", **changes), *extra])
    assert not (tmp_path / "run").exists()


def test_several_gpus_without_a_launcher_are_one_sentence(
    recipe: Recipe, flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="^2 GPUs are visible to one process: start the recipe with accelerate launch"):
        recipe("medusa").main(flags(tmp_path / "run"))


def test_no_answer_to_train_on_is_one_sentence(recipe: Recipe, flags: Flags, data: Path, tmp_path: Path) -> None:
    data.write_text(json.dumps({"id": "a", "messages": [{"role": "user", "content": "say it"}]}) + "\n")
    with pytest.raises(ValueError, match=r"^no conversation has an assistant token to train on: "):
        recipe("medusa").main(flags(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_terminal_sees_the_progress(
    recipe: Recipe, flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a process of its own: what ran before may have silenced transformers.
    transformers_logging.set_verbosity_warning()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    recipe("medusa").main([flag for flag in flags(tmp_path / "run") if "disable_tqdm" not in flag])
    assert "4/4 [" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_accelerate_knows_every_key_of_the_launch_files(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(ROOT / "recipes" / "configs" / "accelerate" / f"{name}.yaml"))
    assert config.num_processes == 2 and config.distributed_type == {"ddp": "MULTI_GPU", "fsdp": "FSDP"}[name]
    known = vars(launch_command_parser().parse_args(["script.py"]))
    assert set(config.fsdp_config) <= set(known) and bool(config.fsdp_config) == (name == "fsdp")
