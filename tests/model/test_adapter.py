"""A LoRA adapter at load: the target is then PEFT's own model, heads still fit, and what does not fit is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from selfspec import SamplingParams, Target, generate
from selfspec.cli.main import app
from selfspec.drafters import NgramDrafter
from selfspec.drafters.shipped import identity, load_head
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.model.packed_linear import PackedLinear

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'selfspec[lora]'")

PROMPTS = ["the cat sat", "one two three"]
SAMPLING = SamplingParams(max_new_tokens=24, min_new_tokens=24)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def adapter(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that changes every answer: on attention and MLP, with weights far from their start at zero."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, lora)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    directory = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(directory)
    return directory


@pytest.fixture
def head(tiny_target_dir: Path, tmp_path: Path) -> Path:
    """Trained, as its fingerprints say, for the target without an adapter."""
    torch.manual_seed(0)
    target = Target.from_pretrained(tiny_target_dir, device="cpu")
    medusa = MedusaHead(MedusaConfig(target=identity(target), num_heads=2))
    for parameter in medusa.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    medusa.save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def changed(adapter: Path, directory: Path, **changes: object) -> Path:
    """A copy of an adapter with other values in its config."""
    directory.mkdir()
    for file in adapter.glob("*.safetensors"):
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((adapter / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return directory


def test_the_target_is_then_pefts_own_model(tiny_target_dir: Path, adapter: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = Target.from_pretrained(tiny_target_dir, device="cpu")
    target = Target.from_pretrained(tiny_target_dir, device="cpu", adapter=adapter)
    assert not caplog.records
    assert any(isinstance(module, PackedLinear) for module in target.model.modules())
    assert not any("lora" in name for name, _ in target.model.named_modules())
    reference = peft.AutoPeftModelForCausalLM.from_pretrained(adapter).eval()
    for prompt in PROMPTS:
        ids = torch.tensor([target.encode(prompt)])
        expected = reference.generate(input_ids=ids, max_new_tokens=24, min_new_tokens=24, do_sample=False)[0].tolist()
        [drafted] = generate(target, [prompt], drafter=NgramDrafter(4), sampling=SAMPLING)
        assert drafted.token_ids == expected[ids.shape[1] :]
        assert drafted.token_ids != generate(plain, [prompt], sampling=SAMPLING)[0].token_ids
    assert torch.equal(plain.model.lm_head.weight, target.model.lm_head.weight)


def test_heads_fit_and_their_acceptance_is_in_doubt(
    tiny_target_dir: Path, adapter: Path, head: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = Target.from_pretrained(tiny_target_dir, device="cpu", adapter=adapter)
    load_head(head, target, drafter="medusa")
    [record] = caplog.records
    assert f"was measured without adapter {adapter}" in record.getMessage()


def test_verify_head_shows_acceptance_with_and_without(tiny_target_dir: Path, adapter: Path, head: Path) -> None:
    args = ["verify-head", head, "--target", tiny_target_dir, "--num-prompts", 2, "--max-new-tokens", 24]
    plain = CliRunner().invoke(app, [str(a) for a in args]).output
    both = CliRunner().invoke(app, [str(a) for a in [*args, "--adapter", adapter]]).output
    [line] = [line for line in plain.splitlines() if line.startswith("served: ")]
    assert line.replace("served", "served without the adapter") in both.splitlines()
    assert "served with it: " in both


def test_the_baseline_of_transformers_has_the_adapter_too(tiny_target_dir: Path, adapter: Path) -> None:
    args = [
        "compare",
        "--target",
        tiny_target_dir,
        "--adapter",
        adapter,
        "--max-new-tokens",
        8,
        "--baseline",
        "transformers",
    ]
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == 0 and "differ" not in result.output, result.output


def refused(target: Path, adapter: Path | str) -> str:
    with pytest.raises(ValueError, match="adapter") as caught:
        Target.from_pretrained(target, device="cpu", adapter=adapter)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_adapters_of_other_models_are_named_with_both_sides(
    tiny_target_dir: Path, adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = changed(adapter, tmp_path / "elsewhere", base_model_name_or_path="org/other-model")
    Target.from_pretrained(tiny_target_dir, device="cpu", adapter=elsewhere)
    [record] = caplog.records
    assert f"made for org/other-model; its weights fit {tiny_target_dir}" in record.getMessage()

    wide = {name: torch.zeros(2 * w.shape[0], w.shape[1]) for name, w in load_file(elsewhere / WEIGHTS).items()}
    save_file(wide, elsewhere / WEIGHTS)
    message = refused(tiny_target_dir, elsewhere)
    assert "was made for org/other-model, and does not fit" in message and str(tiny_target_dir) in message
    assert "size mismatch" in message

    deep = {f"{name.replace('layers.1.', 'layers.7.')}": w for name, w in load_file(adapter / WEIGHTS).items()}
    save_file(deep, elsewhere / WEIGHTS)
    assert "is on one side only" in refused(tiny_target_dir, elsewhere)

    unknown = changed(adapter, tmp_path / "unknown", target_modules=["c_attn"], base_model_name_or_path="gpt2")
    assert "was made for gpt2, and does not fit" in refused(tiny_target_dir, unknown)


def test_a_resized_vocabulary_is_told_as_one(tiny_target_dir: Path, tmp_path: Path) -> None:
    """The adapter names the target rightly; what does not fit is the vocabulary that was resized for it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    rows = model.config.vocab_size + 3
    model.resize_token_embeddings(rows)
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM"
    )
    peft.get_peft_model(model, lora).save_pretrained(tmp_path)
    message = refused(tiny_target_dir, tmp_path)
    assert f"was trained on a vocabulary of {rows} tokens, but {tiny_target_dir} has {rows - 3}" in message


def test_a_pickled_adapter_is_not_opened(tiny_target_dir: Path, adapter: Path, tmp_path: Path) -> None:
    pickled = changed(adapter, tmp_path / "pickled")
    torch.save(load_file(adapter / WEIGHTS), pickled / "adapter_model.bin")
    (pickled / WEIGHTS).unlink()
    assert "it has no adapter_model.safetensors, the one file that is read" in refused(tiny_target_dir, pickled)


def test_what_is_no_adapter_is_named(tiny_target_dir: Path, adapter: Path, tmp_path: Path) -> None:
    assert "adapter nowhere/at-all cannot be read" in refused(tiny_target_dir, "nowhere/at-all")
    assert "cannot be read" in refused(tiny_target_dir, tiny_target_dir)
    damaged = changed(adapter, tmp_path / "damaged")
    (damaged / WEIGHTS).write_bytes(b"damaged")
    assert "cannot be read" in refused(tiny_target_dir, damaged)
    ia3 = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_target_dir),
        peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
    )
    ia3.save_pretrained(tmp_path / "ia3")
    assert "only LoRA can be merged" in refused(tiny_target_dir, tmp_path / "ia3")


def test_without_peft_the_remedy_is_named(tiny_target_dir: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "needs peft: pip install 'selfspec[lora]'" in refused(tiny_target_dir, adapter)
