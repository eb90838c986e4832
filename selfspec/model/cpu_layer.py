"""A decoder layer's forward in a pass of prefill or verify on a CPU, in as few operations as torch has for it.

The counterpart of `selfspec.model.fused_layer`, for float32 layers of the same common kind whose linear layers are merged.
A pass over a few rows takes a few hundred microseconds a layer, of which the modeling file's small operations would be a
third.

Invariant: the results are those of the modeling file's own forward up to rounding, which `selfspec.model.checks` compares.
Outside tree passes that forward runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from selfspec.model.attention import AttentionOptions, TreePass
from selfspec.model.fuse import GATED_MLP_NAMES, eps_of, is_rms_norm, rms_norm_rule
from selfspec.model.fused_layer import norms_of_common, replace_forwards
from selfspec.model.shared_input import MergedLayer

# From [..., E] to [..., E].
NormFunction = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def speed_up_layers(layers: list[nn.Module], options: dict[int, AttentionOptions]) -> Callable[[], None] | None:
    """Give the layers the short forward, in place.

    Args:
        options: what each layer passes to the attention function.

    Returns:
        A function that undoes it; None where a layer is not of the common kind, and nothing has changed.
    """
    if not all(_is_common(layer) for layer in layers):
        return None
    return replace_forwards(layers, [_forward_of(layer, options[number]) for number, layer in enumerate(layers)])


def _is_common(layer: nn.Module) -> bool:
    norms = norms_of_common(layer)
    if norms is None:
        return False
    parts: Any = layer._modules
    attention, mlp = parts["self_attn"], parts["mlp"]
    if set(mlp._modules) != GATED_MLP_NAMES:
        return False
    if getattr(layer, "residual_multiplier", 1.0) != 1.0 or not getattr(attention, "use_rope", True):
        # As in Granite and in some layers of SmolLM3.
        return False
    groups = [[getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")], [mlp.gate_proj, mlp.up_proj]]
    x = torch.linspace(-3.0, 3.0, 7)
    return (
        all(isinstance(each, MergedLayer) and each.merged is group[0].merged for group in groups for each in group)
        and torch.equal(mlp.act_fn(x), F.silu(x))
        and all(_norm_of(norm) is not None for norm in norms)
    )


def _norm_of(norm: Any) -> NormFunction | None:
    """A modeling file's RMSNorm as one call of torch; None where it is another kind of norm."""
    if not is_rms_norm(norm) or norm.weight.dtype != torch.float32:
        return None
    rule = rms_norm_rule(norm, torch.float32)
    if rule is None:
        return None
    weight, eps, shape = norm.weight.detach() + rule.get("offset", 0.0), eps_of(norm), norm.weight.shape
    return lambda x: F.rms_norm(x, shape, weight, eps)


def _forward_of(layer: Any, options: AttentionOptions) -> Callable[..., Any]:
    """A forward from [B, N, E] to [B, N, E] for tree passes; other calls go to the layer's own forward."""
    original = layer.forward
    attention, mlp = layer.self_attn, layer.mlp
    qkv_proj, o_proj = attention.q_proj.merged, attention.o_proj
    gate_up_proj, down_proj = mlp.gate_proj.merged, mlp.down_proj
    norm, post_attention_norm = _norm_of(layer.input_layernorm), _norm_of(layer.post_attention_layernorm)
    assert norm is not None and post_attention_norm is not None
    head_norms: list[Any] = [_norm_of(getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)]

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tree_pass: TreePass | None = kwargs.get("tree_pass")
        embeddings = kwargs.get("position_embeddings")
        if args or embeddings is None or tree_pass is None or tree_pass.cache is None:
            return original(hidden_states, *args, **kwargs)
        cache, slots = tree_pass.cache, tree_pass.write_slots
        assert slots is not None
        keys, values = cache.keys[attention.layer_idx], cache.values[attention.layer_idx]
        cos, sin = embeddings
        G, D = keys.shape[1:]
        if cos.shape[-1] != D or keys.shape != values.shape:
            return original(hidden_states, *args, **kwargs)
        if tree_pass.angles is None:
            # Where halves trade places, the first one's sine is negative.
            first, second = sin.chunk(2, dim=-1)
            tree_pass.angles = cos[:, :, None], torch.cat([-first, second], dim=-1)[:, :, None]
        heads = qkv_proj(norm(hidden_states)).unflatten(2, (-1, D))  # [B, N, H + 2 G, D]
        turning = heads[:, :, :-G]
        if head_norms:
            parts = turning.split([turning.shape[2] - G, G], dim=2)
            turning = torch.cat([norm_heads(x) for norm_heads, x in zip(head_norms, parts, strict=True)], dim=2)
        cos, signed_sin = tree_pass.angles
        turned = (turning * cos).addcmul_(turning.roll(D // 2, -1), signed_sin)
        keys.index_copy_(0, slots, turned[:, :, -G:].flatten(0, 1))
        values.index_copy_(0, slots, heads[:, :, -G:].flatten(0, 1))
        query = turned[:, :, :-G].transpose(1, 2)
        attended = tree_pass.attend(query, keys, values, options).flatten(2)
        hidden = o_proj(attended).add_(hidden_states)
        gate, up = gate_up_proj(post_attention_norm(hidden)).chunk(2, dim=-1)
        return down_proj(F.silu(gate).mul_(up)).add_(hidden)

    return forward
