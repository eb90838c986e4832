"""A head for a target with a LoRA adapter: it learns what the adapted target says, and it says what it was trained with."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from selfspec import SamplingParams, Target, generate, load_drafter
from selfspec.heads.medusa import MedusaHead

pytest.importorskip("accelerate", reason="training needs accelerate: pip install 'selfspec[train]'")
peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'selfspec[lora]'")

Recipe = Callable[[str], ModuleType]
Flags = Callable[..., list[str]]


@pytest.fixture
def adapter(tiny_target_dir: Path, tmp_path: Path) -> Path:
    """One that changes every answer."""
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_target_dir), lora)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def head(adapter: Path, recipe: Recipe, flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    arguments = flags(tmp_path / "run", adapter=adapter)
    monkeypatch.setattr(sys, "argv", ["recipes/train_medusa.py", *arguments])
    recipe("medusa").main(arguments)
    return tmp_path / "run" / "head"


def test_the_head_learns_what_the_adapted_target_says(head: Path, recipe: Recipe, flags: Flags, tmp_path: Path) -> None:
    recipe("medusa").main(flags(tmp_path / "plain"))
    with_adapter, without = (load_file(directory / "model.safetensors") for directory in (head, tmp_path / "plain" / "head"))
    assert not torch.equal(with_adapter["heads.0.0.linear.weight"], without["heads.0.0.linear.weight"])


def test_config_card_and_record_name_the_adapter(head: Path, adapter: Path) -> None:
    target = json.loads((head / "config.json").read_text())["target"]
    assert target["adapter"] == "adapter" and len(target["adapter_hash"]) == 16
    card = ModelCard.load(head / "README.md")
    assert "head for tiny-target0 with adapter" in card.text and "--adapter adapter --drafter medusa:" in card.text
    assert str(adapter.parent) not in card.content
    assert json.loads((head.parent / "run.json").read_text())["settings"]["data"]["adapter"] == str(adapter)


def test_serving_it_otherwise_warns_in_one_sentence(
    head: Path, adapter: Path, tiny_target_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    renamed, retrained = tmp_path / "renamed", tmp_path / "retrained"
    shutil.copytree(adapter, renamed)
    shutil.copytree(adapter, retrained)
    weights = {name: weight * 1.5 for name, weight in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(weights, retrained / "adapter_model.safetensors", metadata={"format": "pt"})
    sentences = {
        None: "loaded without an adapter",
        adapter: None,
        renamed: None,
        retrained: "loaded with adapter retrained",
    }
    for source, expected in sentences.items():
        target = Target.from_pretrained(tiny_target_dir, adapter=source)
        caplog.clear()
        drafter = load_drafter(f"medusa:{head}", target)
        said = [line for line in caplog.messages if line.startswith("head ")]
        sentence = (
            f"head head: it was trained with adapter adapter, and the target is {expected}, so fewer of its drafts may be "
            "accepted: load the target with --adapter adapter"
        )
        assert said == ([] if expected is None else [sentence])
        sampling = SamplingParams(max_new_tokens=12)
        plain = generate(target, ["the dog"], sampling=sampling)[0].token_ids
        assert generate(target, ["the dog"], drafter=drafter, sampling=sampling)[0].token_ids == plain


def test_a_run_goes_on_with_its_own_adapter_alone(
    head: Path, adapter: Path, recipe: Recipe, flags: Flags, tmp_path: Path
) -> None:
    output = head.parent
    with pytest.raises(
        ValueError, match=r"was begun with adapter adapter, and this run is without an adapter: choose another"
    ):
        recipe("medusa").main(flags(output))
    moved = tmp_path / "moved"
    shutil.copytree(adapter, moved)
    before = load_file(head / "model.safetensors")
    recipe("medusa").main(flags(output, adapter=moved))
    after = MedusaHead.from_pretrained(head).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_features_of_the_plain_target_are_not_those_of_the_adapted_one(
    adapter: Path, recipe: Recipe, flags: Flags, tmp_path: Path
) -> None:
    features = tmp_path / "features"
    recipe("medusa").main(flags(tmp_path / "plain", features_dir=features))
    with pytest.raises(ValueError, match="holds features of other target: choose another folder"):
        recipe("medusa").main(flags(tmp_path / "run", adapter=adapter, features_dir=features))
