"""Export, then import: the same tensors bit for bit, the same config, the same logits; or a refusal that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from selfspec import SamplingParams, Target, generate
from selfspec.drafters import load_drafter
from selfspec.drafters.shipped import identity
from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.heads.early_exit import DistilledDraft, EarlyExitHead
from selfspec.heads.medusa import MedusaHead
from selfspec.interop import export_head, import_head
from selfspec.model.target import FINAL
from selfspec.train.unrolled import unrolled_attention

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

EVERYWHERE = ("vllm", "sglang", "speculators")
VLLM = ("vllm", "speculators")

# Flags of an EAGLE-3 head, the formats that have them, and what the others say.
EAGLE3_CASES: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "3.1": ({}, EVERYWHERE, ""),
    "3.0": ({"has_fc_norm": False, "feeds_normed": False}, EVERYWHERE, ""),
    "fc-norm-alone": ({"feeds_normed": False}, EVERYWHERE, ""),
    "targets-lm-head": ({"has_lm_head": False}, EVERYWHERE, ""),
    "all-tokens": ({"draft_vocab_size": 61}, EVERYWHERE, ""),
    "input-norm": ({"has_fc_norm": False, "has_input_norm": True}, EVERYWHERE, ""),
    "both-norms": ({"has_input_norm": True}, (), "both has_fc_norm and has_input_norm"),
    "two-features": ({"feature_layers": (1, 6)}, EVERYWHERE, ""),
    "features-at-the-ends": ({"feature_layers": (0, 4, 8)}, VLLM, "reach beyond those it can read, 1 to 7"),
    "features-unordered": ({"feature_layers": (5, 2, 4)}, (), "do not ascend"),
    "norm-before-residual": ({"norm_before_residual": True}, VLLM, "norm_before_residual"),
    "qk-norm": ({"has_qk_norm": True}, VLLM, "has_qk_norm"),
    "qkv-bias": ({"has_qkv_bias": True}, VLLM, "biases in its attention"),
    "o-bias": ({"has_o_bias": True}, VLLM, "biases in its attention"),
    "all-attention-biases": ({"has_qkv_bias": True, "has_o_bias": True}, VLLM, "biases in its attention"),
    "fc-bias": ({"has_fc_bias": True}, (), "has_fc_bias"),
    "theta": ({"rope_theta": 500000.0, "rms_norm_eps": 1e-6}, EVERYWHERE, ""),
    "llama3-rope": ({"rope_scaling": LLAMA3}, EVERYWHERE, ""),
    "yarn-rope": ({"rope_scaling": YARN}, EVERYWHERE, ""),
    "linear-rope": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, EVERYWHERE, ""),
}
MEDUSA_CASES: list[dict[str, Any]] = [
    {},
    {"num_blocks": 2},
    {"num_heads": 1},
    {"has_output_layer": True},
    {"has_output_layer": True, "num_blocks": 2},
    {"has_output_layer": True, "num_heads": 1},
]


def logits(head: DraftHead, target: Target) -> list[torch.Tensor]:
    """Two drafts from every position of a text."""
    ids = torch.arange(3, 23)[None]
    positions = torch.arange(20)[None]
    states = target.hidden_states(ids, positions, (*head.features, FINAL))
    features = [states[k] for k in head.features]
    embed, lm_head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    if isinstance(head, MedusaHead):
        return [head(features[0], embed(ids), lm_head, head.config.num_heads)]
    assert isinstance(head, EagleHead | Eagle1Head)
    attend = unrolled_attention(positions, head.config.head_dim**-0.5, 2)
    hidden, outputs = head.fuse(features), []
    for step in range(2):
        normed, hidden = head(hidden, embed(ids.roll(-1 - step, 1)), positions + step, attend)
        outputs.append(head.output_layer(lm_head)(normed))
    return outputs


def there_and_back(head: DraftHead, target: Target, engine: str, folder: Path) -> DraftHead:
    head.save_pretrained(folder / "head")
    export_head(str(folder / "head"), target, engine, folder / engine)
    again = import_head(str(folder / engine), target)
    assert again is not None
    again.save_pretrained(folder / "again")
    return type(head).from_pretrained(folder / "again")


def check_same(again: DraftHead, head: DraftHead, target: Target) -> None:
    assert again.config == head.config
    state = again.state_dict()
    assert state.keys() == head.state_dict().keys()
    for name, value in head.state_dict().items():
        assert state[name].dtype == value.dtype and torch.equal(state[name], value), name
    for ours, theirs in zip(logits(again.float(), target), logits(head.float(), target), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("engine", EVERYWHERE)
@pytest.mark.parametrize("case", EAGLE3_CASES)
def test_eagle3(case: str, engine: str, make_eagle: Callable[..., EagleHead], target: Target, tmp_path: Path) -> None:
    changes, formats, reason = EAGLE3_CASES[case]
    head = make_eagle(**changes)
    if engine in formats:
        check_same(there_and_back(head, target, engine, tmp_path), head, target)
    else:
        with pytest.raises(ValueError, match=f"{engine} cannot express this head: .*({reason})"):
            there_and_back(head, target, engine, tmp_path)
        assert not (tmp_path / engine).exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", EVERYWHERE)
def test_eagle3_keeps_its_dtype(
    engine: str, dtype: torch.dtype, make_eagle: Callable[..., EagleHead], target: Target, tmp_path: Path
) -> None:
    head = make_eagle(dtype)
    check_same(there_and_back(head, target, engine, tmp_path), head, target)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("changes", [{}, {"has_qkv_bias": True}, {"has_fc_bias": True}, {"rope_scaling": LLAMA3}])
def test_eagle1(
    engine: str, changes: dict[str, Any], make_eagle1: Callable[..., Eagle1Head], target: Target, tmp_path: Path
) -> None:
    head = make_eagle1(**changes)
    if engine == "vllm" and head.config.has_fc_bias:
        with pytest.raises(ValueError, match="vllm cannot express this head: it has has_fc_bias"):
            there_and_back(head, target, engine, tmp_path)
        return
    check_same(there_and_back(head, target, engine, tmp_path), head, target)


@pytest.mark.parametrize("engine", ["medusa", "vllm"])
@pytest.mark.parametrize("changes", MEDUSA_CASES)
def test_medusa(
    engine: str, changes: dict[str, Any], make_medusa: Callable[..., MedusaHead], target: Target, tmp_path: Path
) -> None:
    head = make_medusa(**changes)
    check_same(there_and_back(head, target, engine, tmp_path), head, target)


def test_a_draft_model_becomes_an_ordinary_model(tiny_target_dir: Path, tmp_path: Path) -> None:
    target = Target.from_pretrained(tiny_target_dir, use_packing=False)
    head = DistilledDraft.for_target(identity(target), target.model, blocks=(1,))
    torch.nn.init.normal_(head.norm.weight, 1.0, 0.2)
    head.save_pretrained(tmp_path / "head")
    [command] = export_head(str(tmp_path / "head"), target, "vllm", tmp_path / "model")
    assert '"method": "draft_model"' in command
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(model(ids).logits, head.student(target.model)(ids).logits)
    # It serves as it is, and an import says so.
    assert import_head(str(tmp_path / "model"), target) is None
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    drafter = load_drafter(f"draft_model:{tmp_path / 'model'}", target)
    [answer] = generate(target, ["the cat"], drafter=drafter, sampling=sampling)
    assert answer.token_ids == generate(target, ["the cat"], sampling=sampling)[0].token_ids


def test_what_no_engine_has_is_refused_by_name(
    target: Target,
    make_medusa: Callable[..., MedusaHead],
    make_eagle: Callable[..., EagleHead],
    make_eagle1: Callable[..., Eagle1Head],
    tmp_path: Path,
) -> None:
    heads = {
        "root": make_medusa(has_root_input=True),
        "early": EarlyExitHead.for_target(identity(target), target.model, exit_layer=2, blocks=(2,)),
        "draft": DistilledDraft.for_target(identity(target), target.model, blocks=(0,)),
        "eagle": make_eagle(),
        "eagle1": make_eagle1(),
    }
    for name, head in heads.items():
        head.save_pretrained(tmp_path / name)
    for name, engine, reason in (
        ("root", "medusa", "medusa cannot express this head: it has_root_input"),
        ("root", "sglang", "sglang has no medusa heads: export to medusa or vllm, or serve it with selfspec"),
        ("early", "vllm", "vllm has no early_exit heads, nor has any other format: serve it with selfspec"),
        ("draft", "speculators", "speculators has no draft models: export to vllm or sglang"),
        ("eagle", "medusa", "medusa has no eagle heads: export to vllm, sglang or speculators, or serve it with selfspec"),
        ("eagle1", "speculators", "speculators has no EAGLE-1 heads: export to vllm or sglang"),
        ("eagle", "tgi", "format 'tgi' is not known: use vllm, sglang, speculators, medusa"),
    ):
        with pytest.raises(ValueError, match=reason):
            export_head(str(tmp_path / name), target, engine, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_an_export_names_its_method_and_leaves_full_folders_alone(
    make_eagle: Callable[..., EagleHead], target: Target, tmp_path: Path
) -> None:
    """[H9] vLLM would guess the method from the path."""
    make_eagle().save_pretrained(tmp_path / "head")
    [command] = export_head(str(tmp_path / "head"), target, "vllm", tmp_path / "out put")
    settings = command.split("--speculative-config ")[1].strip("'")
    assert json.loads(settings) == {"method": "eagle3", "model": str(tmp_path / "out put"), "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match="out put is not empty: name a new directory"):
        export_head(str(tmp_path / "head"), target, "vllm", tmp_path / "out put")
    [command] = export_head(str(tmp_path / "head"), target, "sglang", tmp_path / "sglang")
    assert "--speculative-algorithm EAGLE3" in command and f"--speculative-draft-model-path {tmp_path / 'sglang'}" in command
