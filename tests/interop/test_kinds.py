"""Published drafters that selfspec does not import are each refused by name, and none is taken for an EAGLE head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from selfspec import Target
from selfspec.heads.medusa import MedusaHead
from selfspec.interop import import_head

E, H, D, F, V, RANK = 32, 4, 8, 40, 61, 4
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": E,
    "intermediate_size": F,
    "num_attention_heads": H,
    "num_key_value_heads": 2,
    "head_dim": D,
    "vocab_size": V,
}


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def layers(count: int, prefix: str = "layers.") -> dict[str, torch.Tensor]:
    return {
        f"{prefix}{i}.{name}.weight": weight(*shape)
        for i in range(count)
        for name, shape in {
            "self_attn.q_proj": (H * D, E),
            "self_attn.k_proj": (2 * D, E),
            "self_attn.v_proj": (2 * D, E),
            "self_attn.o_proj": (E, H * D),
            "self_attn.q_norm": (D,),
            "self_attn.k_norm": (D,),
            "input_layernorm": (E,),
            "post_attention_layernorm": (E,),
            "mlp.gate_proj": (F, E),
            "mlp.up_proj": (F, E),
            "mlp.down_proj": (E, F),
        }.items()
    }


def block_drafter(count: int) -> dict[str, torch.Tensor]:
    """DFlash's layout, which DSpark extends: no embedding and no LM head."""
    return {**layers(count), "fc.weight": weight(E, 3 * E), "hidden_norm.weight": weight(E), "norm.weight": weight(E)}


MARKOV = {
    "markov_head.markov_w1.weight": weight(V, RANK),
    "markov_head.markov_w2.weight": weight(V, RANK),
    "confidence_head.proj.weight": weight(1, E),
}
DFLASH = {"block_size": 8, "num_target_layers": 8, "dflash_config": {"target_layer_ids": [1, 3, 5], "mask_token_id": 3}}
PEAGLE = {"midlayer.hidden_norm.weight": weight(E), "fc.weight": weight(E, 3 * E), "mask_hidden": weight(1, E)}

Checkpoint = tuple[dict[str, torch.Tensor], dict[str, Any], str]
OTHERS: dict[str, Checkpoint] = {
    "DFlash": (block_drafter(5), {"num_hidden_layers": 5, **DFLASH}, "it is a DFlash drafter"),
    "DFlash of one layer": (block_drafter(1), {"num_hidden_layers": 1, **DFLASH}, "it is a DFlash drafter"),
    "DFlash, by its tensors alone": (block_drafter(1), {"num_hidden_layers": 1}, "it is a DFlash drafter"),
    "DFlash, by its class alone": (
        {**layers(1), "fc.weight": weight(E, 2 * E)},
        {"num_hidden_layers": 1, "architectures": ["DFlashDraftModel"]},
        "it is a DFlash drafter",
    ),
    "DSpark": (
        {**block_drafter(2), **MARKOV},
        {"num_hidden_layers": 2, "architectures": ["Qwen3DSparkModel"], "markov_rank": RANK, **DFLASH},
        "it is a DSpark drafter",
    ),
    "DSpark, by its tensors alone": ({**block_drafter(1), **MARKOV}, {"num_hidden_layers": 1}, "it is a DSpark drafter"),
    "P-EAGLE": ({**layers(4), **PEAGLE}, {"num_hidden_layers": 4, "parallel_drafting": True}, "it is a P-EAGLE drafter"),
    "P-EAGLE of one layer": ({**layers(1), **PEAGLE}, {"num_hidden_layers": 1}, "it is a P-EAGLE drafter"),
    **{
        f"speculators' {kind}": (
            {**block_drafter(1), "embed_tokens.weight": weight(V, E)},
            {"speculators_model_type": kind, "transformer_layer_config": CONFIG},
            f"speculators_model_type is '{kind}', and selfspec reads eagle3",
        )
        for kind in ("dflash", "dspark", "peagle", "eagle", "mlp", "mtp", "independent")
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_of_drafter_is_refused_by_its_name(name: str, target: Target, tmp_path: Path) -> None:
    tensors, config, sentence = OTHERS[name]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    with pytest.raises(ValueError, match=sentence) as caught:
        import_head(str(tmp_path), target)
    assert "\n" not in str(caught.value)


def test_a_whole_model_with_its_medusa_heads_is_one_short_sentence(
    make_medusa: Callable[..., MedusaHead], target: Target, tmp_path: Path
) -> None:
    """As Medusa-2 is published: the model was trained together with the heads, whose tensors lie among its own."""
    heads = {f"medusa_head.{name.removeprefix('heads.')}": value for name, value in make_medusa().state_dict().items()}
    model = {**layers(8, "model.layers."), "model.embed_tokens.weight": weight(V, E), "lm_head.weight": weight(V, E)}
    save_file({**model, **heads}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 8, "medusa_num_heads": 3}))
    with pytest.raises(ValueError, match="a whole model that was trained together with its Medusa heads") as caught:
        import_head(str(tmp_path), target)
    assert len(str(caught.value)) < 300
