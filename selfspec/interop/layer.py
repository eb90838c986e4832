"""EAGLE's decoder layer as engines describe it: with the config of a Llama of one layer."""

from __future__ import annotations

from typing import Any

import torch

from selfspec.heads.base import TargetIdentity
from selfspec.heads.eagle import ROPE_SCALINGS, Eagle1Config
from selfspec.interop.files import Checkpoint, is_same_weight
from selfspec.model.target import Target

# Settings with which an engine's layer differs from ours, and the values with which it does not.
PLAIN: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1,),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "use_sliding_window": (False,),
    "quantization_config": (),
    "pard_token": (),
    "logit_scale": (1, 1.0),
    "add_para_norm": (False,),
}


def read_layer(config: dict[str, Any], prefix: str, checkpoint: Checkpoint, target: TargetIdentity) -> dict[str, Any]:
    """The fields of `Eagle1Config` that describe the layer.

    Args:
        config: the part of the checkpoint's config that describes the layer.
        prefix: the prefix of the layer's tensors in `checkpoint`.
    """
    for name, plain in PLAIN.items():
        if (value := config.get(name)) is not None and value not in plain:
            raise checkpoint.refuse(f"{name} is {value!r}, which selfspec's EAGLE heads don't have")
    hidden_size = config.get("hidden_size", target.hidden_size)
    for name, value in (("hidden_size", hidden_size), ("target_hidden_size", config.get("target_hidden_size"))):
        if value not in (None, target.hidden_size):
            raise checkpoint.refuse(f"{name} is {value}, but {target.name}'s is {target.hidden_size}: name its own target")
    for name in ("intermediate_size", "num_attention_heads"):
        if name not in config:
            raise checkpoint.refuse(f"the config does not say {name}")
    theta, scaling = _read_rope(config, checkpoint)
    num_heads = config["num_attention_heads"]
    attention = f"{prefix}self_attn."
    return {
        "intermediate_size": config["intermediate_size"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or hidden_size // num_heads,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "has_fc_bias": "fc.bias" in checkpoint.tensors,
        "has_qkv_bias": any(f"{attention}{part}_proj.bias" in checkpoint.tensors for part in "qkv"),
        "has_o_bias": f"{attention}o_proj.bias" in checkpoint.tensors,
        "has_qk_norm": f"{attention}q_norm.weight" in checkpoint.tensors,
    }


def write_layer(config: Eagle1Config, target: Target, dtype: torch.dtype) -> dict[str, Any]:
    """The layer's config, with keys that every version of transformers reads."""
    limit = getattr(target.config, "max_position_embeddings", None)
    return {
        "model_type": "qwen3" if config.has_qk_norm else "llama",
        "num_hidden_layers": 1,
        "hidden_size": config.target.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "attention_bias": config.has_qkv_bias or config.has_o_bias,
        "mlp_bias": False,
        "vocab_size": config.target.vocab_size,
        # Drafts have the target's positions.
        **({"max_position_embeddings": limit} if limit else {}),
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def take_embedding(state: dict[str, torch.Tensor], checkpoint: Checkpoint, target: Target) -> None:
    """Take the copy of the target's embedding [V, E] out of `state`. A different embedding is an error."""
    embedding = state.pop("embed_tokens.weight", None)
    if embedding is not None and not is_same_weight(target.model.get_input_embeddings().weight, embedding):
        raise checkpoint.refuse(
            f"embed_tokens.weight is not {target.name}'s embedding, which selfspec's EAGLE heads share: name the target it "
            "was trained for; a head that trained its own embedding cannot be imported"
        )


def without_zero_biases(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without biases that are all zeros, which some engines require and which change nothing."""
    tensors = {k: v for k, v in checkpoint.tensors.items() if not k.endswith(".bias") or bool(v.any())}
    return Checkpoint(checkpoint.source, checkpoint.config, tensors)


def with_all_biases(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The weights. If some attention biases are there, zeros stand for the others, because engines have all four or none."""
    attention = f"{prefix}self_attn."
    if not any(name.startswith(attention) and name.endswith(".bias") for name in state):
        return state
    zeros = {
        f"{attention}{part}_proj.bias": weight.new_zeros(weight.shape[0])
        for part in "qkvo"
        for weight in [state[f"{attention}{part}_proj.weight"]]
    }
    return {**zeros, **state}


def _read_rope(config: dict[str, Any], checkpoint: Checkpoint) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling. transformers 5 keeps both in `rope_parameters`, which wins over a different `rope_theta`."""
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    old_kind = scaling.pop("type", None)
    kind = scaling.pop("rope_type", None) or old_kind or "default"
    if kind in ("default", "mrope"):
        return theta, None
    if kind not in ROPE_SCALINGS:
        raise checkpoint.refuse(f"rope_type is {kind!r}, but selfspec's EAGLE heads know only {', '.join(ROPE_SCALINGS)}")
    if kind != "linear" and "original_max_position_embeddings" not in scaling:
        raise checkpoint.refuse(f"the config's {kind} scaling does not say original_max_position_embeddings")
    return theta, {"rope_type": kind, **scaling}
