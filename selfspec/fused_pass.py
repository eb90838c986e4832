"""A decoder layer's forward in a tree pass, in as few kernels as there are dependencies.

Where a fused model's layer is the common one (norm, attention with rotary embedding, norm, gated MLP, each branch added to
its input), a tree pass runs it as norm, one layer for queries, keys and values, rotation and storing in one, attention,
projection with the addition in it, norm, gate and up in one, activation, projection with the addition in it. Whether it is
that layer shows by its results: they are compared with the modeling file's own. Outside tree passes that runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from selfspec.attention import AttentionOptions, TreePass
from selfspec.fusing import FusedGatedMLP, FusedLinear, FusedRMSNorm, MergedLinear
from selfspec.kernels.gated_activation import gated_silu
from selfspec.kernels.linear import linear
from selfspec.kernels.rotary import rotary_store
from selfspec.kernels.tree_attention import tree_attention

logger = logging.getLogger(__name__)

LAYER_NAMES = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_NAMES = {"q_proj", "k_proj", "v_proj", "o_proj"}


def fuse_layers(layers: list[nn.Module], options: dict[int, AttentionOptions]) -> Callable[[], None] | None:
    """Give the layers a tree pass of their own, in place; None where they are not of the common kind.

    Args:
        options: what each layer hands to the attention function.

    Returns:
        What takes it back.
    """
    if not all(_is_common(layer) for layer in layers):
        return None
    for number, layer in enumerate(layers):
        layer.forward = MethodType(_forward_of(layer.forward, options[number]), layer)

    def undo() -> None:
        for layer in layers:
            del layer.forward

    return undo


def _is_common(layer: nn.Module) -> bool:
    if "forward" in layer.__dict__:
        # It has one already: a target that shares its layers was first.
        return False
    parts = layer._modules
    if set(parts) != LAYER_NAMES or set(parts["self_attn"]._modules) != ATTENTION_NAMES:  # type: ignore[union-attr]
        return False
    attention = parts["self_attn"]._modules  # type: ignore[union-attr]
    merged = [getattr(attention[name], "merged", None) for name in ("q_proj", "k_proj", "v_proj")]
    norms = (parts["input_layernorm"], parts["post_attention_layernorm"])
    return (
        merged[0] is not None
        and all(each is merged[0] for each in merged)
        and type(attention["o_proj"]) is FusedLinear
        and isinstance(parts["mlp"], FusedGatedMLP)
        and type(parts["mlp"].down_proj) is FusedLinear
        and all(isinstance(norm, FusedRMSNorm) for norm in norms)
    )


def _forward_of(original: Callable[..., Any], options: AttentionOptions) -> Callable[..., Any]:
    """A layer's forward that knows tree passes. What it does not know goes to the original."""

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tree_pass: TreePass | None = kwargs.get("tree_pass")
        embeddings = kwargs.get("position_embeddings")
        if args or embeddings is None or tree_pass is None or tree_pass.cache is None:
            return original(hidden_states, *args, **kwargs)
        cache, layout, slots = tree_pass.cache, tree_pass.layout, tree_pass.write_slots
        assert layout is not None and slots is not None
        attention, mlp = self.self_attn, self.mlp
        keys, values = cache.keys[attention.layer_idx], cache.values[attention.layer_idx]
        cos, sin = embeddings
        if cos.shape[-1] != keys.shape[-1] or keys.shape != values.shape:
            return original(hidden_states, *args, **kwargs)
        first: MergedLinear = attention.q_proj
        qkv = first.merged(self.input_layernorm(hidden_states))
        query = rotary_store(qkv, cos, sin, slots, keys, values)
        attended = tree_attention(
            query.transpose(1, 2),
            keys,
            values,
            layout,
            options.scaling,
            options.sliding_window,
            options.softcap,
            options.sinks,
        )
        o_proj, down_proj = attention.o_proj, mlp.down_proj
        hidden = linear(attended.flatten(2), o_proj.weight, o_proj.bias, hidden_states)
        activated = gated_silu(mlp.gate_proj.merged(self.post_attention_layernorm(hidden)))
        return linear(activated, down_proj.weight, down_proj.bias, hidden)

    return forward
