"""A checkpoint that is not whole, not sound or not this target's stops the import, and the sentence names what is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_target

from selfspec import Target
from selfspec.drafters.shipped import identity
from selfspec.heads.eagle import EagleHead
from selfspec.heads.medusa import MedusaHead
from selfspec.interop import Conventions, export_head, import_head

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def eagle_folder(make_eagle: Callable[..., EagleHead], target: Target, tmp_path: Path) -> Path:
    make_eagle().save_pretrained(tmp_path / "head")
    export_head(str(tmp_path / "head"), target, "sglang", tmp_path / "c")
    return tmp_path / "c"


def change(folder: Path, tensors: Tensors | None = None, *, without: str = "", **config: Any) -> None:
    state = {name: value for name, value in load_file(folder / "model.safetensors").items() if name != without}
    save_file({**state, **(tensors or {})}, folder / "model.safetensors")
    record = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**record, **config}))


EVERY_TENSOR = (
    "fc.weight",
    "lm_head.weight",
    "d2t",
    "norm.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.mlp.down_proj.weight",
    "midlayer.input_layernorm.weight",
    "fc_norm.2.weight",
)


@pytest.mark.parametrize("name", EVERY_TENSOR)
def test_a_missing_tensor_is_named(name: str, eagle_folder: Path, target: Target) -> None:
    """[H11] engines load without it, and accept nothing."""
    change(eagle_folder, without=name)
    with pytest.raises(ValueError, match=f"{name} is missing"):
        import_head(str(eagle_folder), target)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (
            {"midlayer.self_attn.rope.weight": torch.ones(3)},
            r"self_attn\.rope\.weight has no place in the head",
        ),
        ({"fc.weight": torch.randn(32, 64)}, r"fc\.weight is \[32, 64\] and should be \[32, 96\]"),
        ({"fc.weight": torch.full((32, 96), torch.nan)}, r"fc\.weight holds values that are not finite"),
        ({"fc.weight": torch.zeros(32, 96)}, r"fc\.weight is all zeros"),
        ({"fc.weight": torch.ones(32, 96)}, r"fc\.weight holds one value throughout"),
        ({"fc.weight": torch.randn(32, 96) * 1e20}, r"fc\.weight looks like memory that was never written to"),
        ({"fc.weight": torch.randn(32, 96) * 1e-36}, r"fc\.weight looks like memory that was never written to"),
        ({"norm.weight": torch.zeros(32)}, r"norm\.weight is all zeros"),
        ({"layers.0.hidden_norm.weight": torch.ones(32)}, r"hidden_norm\.weight is also there under another name"),
        ({"embed_tokens.weight": torch.randn(61, 32)}, r"embed_tokens\.weight is not llama's embedding"),
        ({"d2t": torch.zeros(19, dtype=torch.int64)}, "d2t has 19 entries and lm_head.weight 20 rows"),
        ({"d2t": torch.arange(20) * 2 + 30}, "d2t does not map to as many target tokens"),
        ({"d2t": -torch.arange(20)}, "d2t does not map to as many target tokens"),
        ({"d2t": torch.zeros(20, dtype=torch.int64)}, "t2d and d2t name different tokens"),
    ],
)
def test_an_unsound_tensor_is_named(tensors: Tensors, reason: str, eagle_folder: Path, target: Target) -> None:
    change(eagle_folder, tensors)
    with pytest.raises(ValueError, match=reason):
        import_head(str(eagle_folder), target)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, which selfspec's EAGLE heads don't have"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"hidden_size": 64}, "hidden_size is 64, but llama's is 32"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64, but llama's is 32"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "does not say original_max_position_embeddings"),
        ({"fc_norm": False}, r"fc_norm is False in the config, but fc_norm\.0\.weight is there"),
        ({"norm_before_fc": True}, r"norm_before_fc is True in the config, but input_norm\.weight is missing"),
        ({"draft_vocab_size": 30}, "draft_vocab_size is 30, and lm_head.weight has 20 rows"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash', and selfspec reads eagle3"),
        ({"head_type": "eagle"}, "this is a selfspec head already"),
    ],
)
def test_what_the_config_says_beyond_us_is_named(
    config: dict[str, Any], reason: str, eagle_folder: Path, target: Target
) -> None:
    change(eagle_folder, **config)
    with pytest.raises(ValueError, match=reason):
        import_head(str(eagle_folder), target)


def test_lm_heads_that_engines_share_are_the_targets_rows(eagle_folder: Path, target: Target) -> None:
    """A config without draft_vocab_size leaves the LM head to the target, one with tied embeddings to the embedding."""
    for name in ("d2t", "t2d", "lm_head.weight"):
        change(eagle_folder, without=name, draft_vocab_size=None)
    for tie, module in ((False, target.model.get_output_embeddings()), (True, target.model.get_input_embeddings())):
        change(eagle_folder, tie_word_embeddings=tie)
        head = import_head(str(eagle_folder), target)
        assert isinstance(head, EagleHead) and head.config.draft_vocab_size == target.vocab_size
        output = target.model.get_output_embeddings()
        assert head.config.has_lm_head is (module is not output)
        assert torch.equal(head.output_layer(output).weight, module.weight) and not head.d2t.any()


def test_a_pickle_is_read_as_weights_alone(eagle_folder: Path, target: Target, tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'owned'}",)

    state = load_file(eagle_folder / "model.safetensors")
    (eagle_folder / "model.safetensors").unlink()
    torch.save(state, eagle_folder / "pytorch_model.bin")
    # Other pickles in the folder are not opened.
    torch.save(Attack(), eagle_folder / "training_args.bin")
    assert isinstance(import_head(str(eagle_folder), target), EagleHead)
    torch.save({**state, "extra": Attack()}, eagle_folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: this pickle could not be read as weights alone") as caught:
        import_head(str(eagle_folder), target)
    assert str(caught.value).endswith("(it holds objects that are no tensors): fetch a checkpoint in safetensors")
    torch.save({"step": 3, **state}, eagle_folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="it holds something other than named tensors"):
        import_head(str(eagle_folder), target)
    assert not (tmp_path / "owned").exists()


def test_a_head_of_ours_is_never_a_pickle(make_eagle: Callable[..., EagleHead], tmp_path: Path) -> None:
    head = make_eagle()
    head.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(head.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        EagleHead.from_pretrained(tmp_path)


def test_medusa_refusals(make_medusa: Callable[..., MedusaHead], target: Target, tmp_path: Path) -> None:
    make_medusa().save_pretrained(tmp_path / "head")
    export_head(str(tmp_path / "head"), target, "medusa", tmp_path / "c")
    (tmp_path / "c" / "medusa_lm_head.safetensors").rename(tmp_path / "c" / "model.safetensors")
    sound = load_file(tmp_path / "c" / "model.safetensors")
    for tensors, config, reason in (
        ({}, {"medusa_num_heads": 5}, "medusa_num_heads is 5 in the config, but there are the weights of 3"),
        ({}, {"medusa_num_layers": 2}, "medusa_num_layers is 2 in the config, but there are the weights of 1"),
        ({"token_map": torch.arange(9)}, {}, "drafts a part of the vocabulary"),
        ({"1.0.linear.bias": None}, {}, r"heads\.1\.0\.linear\.bias is missing"),
        ({"0.1.weight": None}, {}, "original_lm_head is true, but there is not just one LM head"),
        ({"0.1.weight": torch.randn(61, 32)}, {}, "serves all heads and is not llama's LM head"),
        ({}, {"original_lm_head": False}, r"outputs\.1\.weight is missing"),
    ):
        state = {name: value for name, value in {**sound, **tensors}.items() if value is not None}
        save_file(state, tmp_path / "c" / "model.safetensors")
        record = json.loads((tmp_path / "c" / "config.json").read_text())
        (tmp_path / "c" / "config.json").write_text(json.dumps({**record, **config}))
        with pytest.raises(ValueError, match=reason):
            import_head(str(tmp_path / "c"), target)
        (tmp_path / "c" / "config.json").write_text(json.dumps(record))


def test_a_config_without_layers_is_told_where_the_usual_ones_are_not_three(
    make_eagle: Callable[..., EagleHead], tmp_path: Path
) -> None:
    """On a target of six layers two of them are one; which layers the head was trained on, only the caller can say."""
    small = tiny_target("llama", num_hidden_layers=6, layer_types=None)
    EagleHead(replace(make_eagle().config, target=identity(small))).save_pretrained(tmp_path / "head")
    export_head(str(tmp_path / "head"), small, "vllm", tmp_path / "c")
    change(tmp_path / "c", eagle_aux_hidden_state_layer_ids=None)
    with pytest.raises(ValueError, match=r"the usual ones, \(2, 3, 3\), are not three layers of llama.*: pass --feature"):
        import_head(str(tmp_path / "c"), small)
    head = import_head(str(tmp_path / "c"), small, Conventions(feature_layers=(2, 4, 5)))
    assert isinstance(head, EagleHead) and head.config.feature_layers == (2, 4, 5)


def test_many_faults_are_told_by_the_first_few(eagle_folder: Path, target: Target) -> None:
    change(eagle_folder, {f"tower.{i}.weight": torch.randn(2, 2) for i in range(40)})
    with pytest.raises(ValueError, match="; and 37 more$"):
        import_head(str(eagle_folder), target)


def test_folders_without_a_checkpoint(target: Target, tmp_path: Path) -> None:
    for config, reason in (
        (None, "config.json cannot be read"),
        ("[]", "holds no JSON object"),
        ("{}", "there are no weights"),
    ):
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        with pytest.raises(ValueError, match=reason):
            import_head(str(tmp_path), target)
    save_file({"tower.weight": torch.randn(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match="no Medusa heads, EAGLE heads or model that selfspec knows; its tensors are tower.weight"
    ):
        import_head(str(tmp_path), target)
    save_file({"tower.weight": torch.randn(2, 2)}, tmp_path / "more.safetensors")
    with pytest.raises(ValueError, match=r"tower\.weight is in more\.safetensors|tower\.weight is in model\.safetensors"):
        import_head(str(tmp_path), target)
    (tmp_path / "more.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="the file is damaged"):
        import_head(str(tmp_path), target)
    with pytest.raises(ValueError, match="no such folder"):
        import_head(str(tmp_path / "nowhere"), target)


def test_an_export_is_checked_against_the_target(make_eagle: Callable[..., EagleHead], tmp_path: Path) -> None:
    make_eagle().save_pretrained(tmp_path / "head")
    other = tiny_target("llama", seed=4, num_hidden_layers=8, layer_types=None)
    with pytest.raises(ValueError, match="embedding weights differ"):
        export_head(str(tmp_path / "head"), other, "vllm", tmp_path / "out")
