"""One test for each fact in which dialects differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from selfspec import Target
from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.heads.medusa import MedusaHead
from selfspec.interop import export_head, import_head
from selfspec.interop.facts import EAGLE3, default_features, features_of, layer_ids_of


def exported(head: DraftHead, target: Target, engine: str, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    head.save_pretrained(folder / "head")
    export_head(str(folder / "head"), target, engine, folder / engine)
    [weights] = (folder / engine).glob("*.safetensors")
    return json.loads((folder / engine / "config.json").read_text()), load_file(weights)


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_vllm_numbers_the_hidden_states_that_enter_layers(engine: str) -> None:
    """[H5]"""
    assert layer_ids_of((2, 16, 29), EAGLE3[engine], "llama", 32) == [2, 16, 29]
    assert features_of([2, 16, 29], EAGLE3[engine], "llama", 32) == (2, 16, 29)
    # The last layer's output is the state that would enter one more.
    assert layer_ids_of((0, 32), EAGLE3[engine], "llama", 32) == [0, 32]


def test_sglang_numbers_layer_outputs() -> None:
    """[H5]"""
    facts = EAGLE3["sglang"]
    assert layer_ids_of((2, 16, 29), facts, "llama", 32) == [1, 15, 28]
    assert features_of([1, 15, 28], facts, "llama", 32) == (2, 16, 29)
    for features in ((0, 4), (4, 32)):
        with pytest.raises(ValueError, match="reach beyond those it can read, 1 to 31"):
            layer_ids_of(features, facts, "llama", 32)


def test_sglang_numbers_inputs_for_some_targets_unless_the_first_is_one() -> None:
    """[H5]"""
    facts = EAGLE3["sglang"]
    assert layer_ids_of((2, 30, 58), facts, "deepseek_v3", 61) == [1, 29, 57]
    assert layer_ids_of((3, 30, 58), facts, "deepseek_v3", 61) == [3, 30, 58]
    for ids, features in (([1, 29, 57], (2, 30, 58)), ([3, 30, 58], (3, 30, 58))):
        assert features_of(ids, facts, "deepseek_v3", 61) == features
    with pytest.raises(ValueError, match="cannot be told to it for a deepseek_v3 target"):
        layer_ids_of((1, 30, 58), facts, "deepseek_v3", 61)


def test_sglang_reads_the_last_output_for_gpt_oss() -> None:
    """[H5]"""
    facts = EAGLE3["sglang"]
    assert features_of([2, 18, 36], facts, "gpt_oss", 36) == (2, 18, 36)
    assert features_of([1, 17, 32], facts, "gpt_oss", 36) == (2, 18, 33)
    ids = layer_ids_of((2, 18, 36), facts, "gpt_oss", 36)
    assert features_of(ids, facts, "gpt_oss", 36) == (2, 18, 36)


def test_a_config_without_layers_means_these() -> None:
    """[H5]"""
    assert default_features(32) == (2, 16, 29)


def test_layers_that_the_target_does_not_have_are_an_error(
    make_eagle: Callable[..., EagleHead], target: Target, tmp_path: Path
) -> None:
    """[H5] a shallow target must not give duplicate or negative layers."""
    config, _ = exported(make_eagle(feature_layers=(1, 6)), target, "vllm", tmp_path)
    for ids, reason in (([2, 4, 9], "has hidden states 0 to 8"), ([2, 2, 5], "none twice")):
        changed = {**config, "eagle_aux_hidden_state_layer_ids": ids}
        (tmp_path / "vllm" / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=reason):
            import_head(str(tmp_path / "vllm"), target)


@pytest.mark.parametrize("engine", EAGLE3)
def test_each_config_says_all_that_its_readers_would_otherwise_guess(
    engine: str, make_eagle: Callable[..., EagleHead], target: Target, tmp_path: Path
) -> None:
    """[H9] every flag is written, also the false ones, because defaults differ."""
    head = make_eagle(has_fc_norm=False, feeds_normed=False)
    config, tensors = exported(head, target, engine, tmp_path)
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert config[key] is False, key
    layer = config["transformer_layer_config"] if engine == "speculators" else config
    # Engines take three features for granted where nothing counts them.
    assert layer["num_aux_hidden_states"] == 3
    assert layer["rope_theta"] == head.config.rope_theta and layer["head_dim"] == 8
    assert layer["tie_word_embeddings"] is False
    # One key, two meanings: vLLM reads the config's own, SGLang only the one in eagle_config.
    assert ("eagle_config" in config) == (engine == "sglang")
    assert ("eagle_aux_hidden_state_layer_ids" in config) == (engine != "sglang")


def test_norm_before_residual_is_asked_for_where_readers_disagree(
    make_eagle: Callable[..., EagleHead], target: Target, tmp_path: Path
) -> None:
    """[H9] true to vLLM, false to the speculators package."""
    from selfspec.interop import Conventions

    config, _ = exported(make_eagle(), target, "speculators", tmp_path)
    del config["norm_before_residual"]
    (tmp_path / "speculators" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="pass --norm-before-residual or --no-norm-before-residual"):
        import_head(str(tmp_path / "speculators"), target)
    for value in (True, False):
        head = import_head(str(tmp_path / "speculators"), target, Conventions(norm_before_residual=value))
        assert isinstance(head, EagleHead) and head.config.norm_before_residual == value


@pytest.mark.parametrize("engine", EAGLE3)
def test_the_layers_tensors_have_the_dialects_name(
    engine: str, make_eagle: Callable[..., EagleHead], target: Target, tmp_path: Path
) -> None:
    _, tensors = exported(make_eagle(), target, engine, tmp_path)
    prefix = "layers.0." if engine == "speculators" else "midlayer."
    assert sum(name.startswith(prefix) for name in tensors) == 10
    assert {"fc_norm.0.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} < set(tensors)


@pytest.mark.parametrize("engine", EAGLE3)
def test_only_speculators_needs_the_embedding(
    engine: str, make_eagle: Callable[..., EagleHead], target: Target, tmp_path: Path
) -> None:
    """The package fills it from the target only where it finds NaN, and transformers leaves memory as it was."""
    _, tensors = exported(make_eagle(), target, engine, tmp_path)
    assert ("embed_tokens.weight" in tensors) == (engine == "speculators")
    if engine == "speculators":
        assert torch.equal(tensors["embed_tokens.weight"], target.model.get_input_embeddings().weight)


@pytest.mark.parametrize("engine", EAGLE3)
def test_d2t_is_an_offset_and_t2d_its_mask(
    engine: str, make_eagle: Callable[..., EagleHead], target: Target, tmp_path: Path
) -> None:
    """[H4]"""
    _, tensors = exported(make_eagle(), target, engine, tmp_path)
    assert tensors["d2t"].dtype == torch.int64 and tensors["d2t"].tolist() == list(range(0, 40, 2))
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].nonzero().flatten().tolist() == list(range(0, 60, 3))


@pytest.mark.parametrize("engine", EAGLE3)
def test_a_full_vocabulary_has_no_map(
    engine: str, make_eagle: Callable[..., EagleHead], target: Target, tmp_path: Path
) -> None:
    """[H4] vLLM stops at one."""
    head = make_eagle(draft_vocab_size=target.vocab_size)
    _, tensors = exported(head, target, engine, tmp_path)
    assert not {"d2t", "t2d"} & set(tensors)
    head.d2t[:2] = torch.tensor([1, -1])
    with pytest.raises(ValueError, match="d2t reorders a full vocabulary"):
        exported(head, target, engine, tmp_path / "again")


def test_sglang_wants_a_bias_on_the_fc_of_eagle_1_and_vllm_none(
    make_eagle1: Callable[..., Eagle1Head], target: Target, tmp_path: Path
) -> None:
    """[H7] and "bias": true would make both allocate attention biases."""
    config, tensors = exported(make_eagle1(), target, "sglang", tmp_path)
    assert torch.equal(tensors["fc.bias"], torch.zeros(32)) and "bias" not in config
    assert config["architectures"] == ["LlamaForCausalLMEagle"] and config["attention_bias"] is False
    config, tensors = exported(make_eagle1(), target, "vllm", tmp_path)
    assert "fc.bias" not in tensors and "bias" not in config
    assert config["architectures"] == ["EagleLlamaForCausalLM"]
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(tensors)


def test_attention_biases_come_all_or_not_at_all(
    make_eagle1: Callable[..., Eagle1Head], target: Target, tmp_path: Path
) -> None:
    """[H7] an engine allocates four: one that is not written is uninitialised memory."""
    config, tensors = exported(make_eagle1(has_qkv_bias=True), target, "vllm", tmp_path)
    assert config["attention_bias"] is True
    assert torch.equal(tensors["layers.0.self_attn.o_proj.bias"], torch.zeros(32))


@pytest.mark.parametrize("has_output_layer", [False, True])
def test_medusa_has_one_folder_for_vllm_and_tgi(
    has_output_layer: bool, make_medusa: Callable[..., MedusaHead], target: Target, tmp_path: Path
) -> None:
    """[H8]"""
    config, tensors = exported(make_medusa(has_output_layer=has_output_layer), target, "medusa", tmp_path)
    assert (tmp_path / "medusa" / "medusa_lm_head.safetensors").is_file()
    assert config["medusa_fc_bias"] is True and config["original_lm_head"] is not has_output_layer
    assert (config["hidden_size"], config["vocab_size"]) == (32, target.vocab_size)
    # To TGI a config with architectures is none of Medusa's.
    assert "architectures" not in config
    # vLLM reads each of these as the number of heads.
    assert [key for key in config if "num" in key and "heads" in key] == ["medusa_num_heads"]
    assert [key for key in config if "num" in key and "layers" in key] == ["medusa_num_layers"]
    outputs = [name for name in tensors if name.endswith(".1.weight")]
    assert outputs == (["0.1.weight", "1.1.weight", "2.1.weight"] if has_output_layer else ["0.1.weight"])
    if not has_output_layer:
        assert torch.equal(tensors["0.1.weight"], target.model.get_output_embeddings().weight)


def test_medusa_of_vllm_has_no_biases_unless_it_says_so(target: Target, tmp_path: Path) -> None:
    """[H8]"""
    tensors = {"blocks.0.layers.0.weight": torch.randn(32, 32), "lm_heads.0.weight": torch.randn(target.vocab_size, 32)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_heads": 1, "num_hidden_layers": 1}))
    head = import_head(str(tmp_path), target)
    assert isinstance(head, MedusaHead) and not head.heads[0][0].linear.bias.any()  # type: ignore[index, union-attr]
    (tmp_path / "config.json").write_text(json.dumps({"medusa_fc_bias": True}))
    with pytest.raises(ValueError, match=r"heads\.0\.0\.linear\.bias is missing"):
        import_head(str(tmp_path), target)


def test_rotary_frequencies_keep_their_precision(make_eagle: Callable[..., EagleHead]) -> None:
    """A head in bfloat16 turns by the same angles as in float32."""
    head = make_eagle(rope_theta=500000.0)
    exact = head.midlayer.self_attn.inv_freq.clone()
    assert torch.equal(head.to(torch.bfloat16).midlayer.self_attn.inv_freq, exact)
    assert head.fc.weight.dtype == torch.bfloat16


def test_rope_parameters_are_right_where_rope_theta_differs(
    make_eagle: Callable[..., EagleHead], target: Target, tmp_path: Path
) -> None:
    """transformers 5 writes the real base to `rope_parameters`, and may leave a class's default in `rope_theta`."""
    config, _ = exported(make_eagle(rope_theta=5e5), target, "vllm", tmp_path)
    changed = {**config, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    (tmp_path / "vllm" / "config.json").write_text(json.dumps(changed))
    head = import_head(str(tmp_path / "vllm"), target)
    assert isinstance(head, EagleHead) and head.config.rope_theta == 5e5
