"""A decoder layer's forward in a pass of prefill or verify, in as few kernels as its dependencies allow.

A fused model's layer may be of the common kind: norm, attention with rotary embedding, norm, gated MLP, each branch added to
its input. A tree pass then runs it in seven launches: queries, keys and values; rotation (and norms of queries and keys,
where there are any) and storing; attention, in two; the projection with its addition; gate and up with the activation; the
projection with its addition. A norm begins in the kernel before it and is finished by the kernel after it.

Invariant: the results are those of the modeling file's own forward up to rounding, which `selfspec.model.checks` compares.
Outside tree passes that forward runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from selfspec.kernels.linear import Norm, begin_norm, linear, linear_before_norm, normed_gated_linear, normed_linear
from selfspec.kernels.rotary import rotary_store
from selfspec.model.attention import AttentionOptions, TreePass
from selfspec.model.fuse import FusedGatedMLP, FusedLinear, FusedRMSNorm, norm_of

logger = logging.getLogger(__name__)

LAYER_NAMES = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_NAMES = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORM_NAMES = {"q_norm", "k_norm"}


def fuse_layers(layers: list[nn.Module], options: dict[int, AttentionOptions]) -> Callable[[], None] | None:
    """Give the layers the fused forward, in place.

    Args:
        options: what each layer passes to the attention function.

    Returns:
        A function that undoes it; None where a layer is not of the common kind, and nothing has changed.
    """
    if not all(_is_common(layer) for layer in layers):
        return None
    norms = [norm_of(layer.input_layernorm) for layer in layers]
    after: list[Any] = [*norms[1:], None]
    return replace_forwards(
        layers,
        [_forward_of(layer, options[i], norms[i], after[i]) for i, layer in enumerate(layers)],
    )


def replace_forwards(layers: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Callable[[], None]:
    """Give each layer a forward of its own, in place; returns a function that undoes it."""
    for layer, forward in zip(layers, forwards, strict=True):
        layer.forward = MethodType(forward, layer)

    def undo() -> None:
        for layer in layers:
            del layer.forward

    return undo


def norms_of_common(layer: nn.Module) -> list[nn.Module] | None:
    """The norms of a layer with the common parts; None for another one, or one whose forward was replaced already.

    The latter happens where two targets share layers.
    """
    parts: Any = layer._modules
    if "forward" in layer.__dict__ or set(parts) != LAYER_NAMES:
        return None
    attention = parts["self_attn"]._modules
    head_norms = sorted(set(attention) & HEAD_NORM_NAMES)
    if set(attention) - set(head_norms) != ATTENTION_NAMES or len(head_norms) not in (0, len(HEAD_NORM_NAMES)):
        return None
    return [parts["input_layernorm"], parts["post_attention_layernorm"], *(attention[name] for name in head_norms)]


def _is_common(layer: nn.Module) -> bool:
    norms = norms_of_common(layer)
    if norms is None:
        return False
    parts: Any = layer._modules
    attention, mlp = parts["self_attn"]._modules, parts["mlp"]
    merged = [getattr(attention[name], "merged", None) for name in ("q_proj", "k_proj", "v_proj")]
    return (
        merged[0] is not None
        and all(each is merged[0] for each in merged)
        and type(attention["o_proj"]) is FusedLinear
        and isinstance(mlp, FusedGatedMLP)
        and type(mlp.down_proj) is FusedLinear
        and all(isinstance(norm, FusedRMSNorm) for norm in norms)
    )


def _forward_of(layer: Any, options: AttentionOptions, norm: Norm, next_norm: Norm | None) -> Callable[..., Any]:
    """A forward from [B, N, E] to [B, N, E] for tree passes; other calls go to the layer's own forward.

    Args:
        norm, next_norm: the first norm of this layer and of the next one.
    """
    original = layer.forward
    attention, mlp = layer.self_attn, layer.mlp
    qkv_proj, o_proj = attention.q_proj.merged, attention.o_proj
    gate_up_proj, down_proj = mlp.gate_proj.merged, mlp.down_proj
    post_attention_norm = norm_of(layer.post_attention_layernorm)
    head_norms = None
    if hasattr(attention, "q_norm"):
        head_norms = norm_of(attention.q_norm), norm_of(attention.k_norm)

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tree_pass: TreePass | None = kwargs.get("tree_pass")
        embeddings = kwargs.get("position_embeddings")
        if args or embeddings is None or tree_pass is None or tree_pass.cache is None:
            return original(hidden_states, *args, **kwargs)
        cache, slots = tree_pass.cache, tree_pass.write_slots
        assert slots is not None
        keys, values = cache.keys[attention.layer_idx], cache.values[attention.layer_idx]
        cos, sin = embeddings
        if cos.shape[-1] != keys.shape[-1] or keys.shape != values.shape:
            return original(hidden_states, *args, **kwargs)
        normed = tree_pass.normed
        if normed is None or normed.hidden is not hidden_states:
            normed = begin_norm(hidden_states, norm)
        qkv = normed_linear(normed, qkv_proj.weight, qkv_proj.bias)
        query = rotary_store(qkv, cos, sin, slots, keys, values, head_norms)
        attended = tree_pass.attend(query.transpose(1, 2), keys, values, options)
        normed = linear_before_norm(attended.flatten(2), o_proj.weight, o_proj.bias, hidden_states, post_attention_norm)
        activated = normed_gated_linear(normed, gate_up_proj.weight, gate_up_proj.bias)
        if next_norm is None:
            return linear(activated, down_proj.weight, down_proj.bias, normed.hidden)
        tree_pass.normed = linear_before_norm(activated, down_proj.weight, down_proj.bias, normed.hidden, next_norm)
        return tree_pass.normed.hidden

    return forward
