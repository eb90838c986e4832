"""The attention of prefill and verify, a function that is registered with transformers' AttentionInterface.

Modeling files pass our keyword argument `tree_pass` on to it. It then stores the pass's keys and values in the paged cache
and attends to them there. With `text_pass` it keeps the texts of a packed row apart. With neither it is ordinary attention.

Invariant: a node attends to its row's prefix, its ancestors and itself, a packed token to its own text up to itself, and
both to nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from selfspec.cache.kv import KVCache
from selfspec.kernels.linear import NormedRows
from selfspec.kernels.tree_attention import tree_attention
from selfspec.kernels.tree_layout import TreeLayout

ATTENTION_NAME = "selfspec"


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer's attention needs besides queries, keys and values."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass
class TreePass:
    """What the attention function needs during one forward. Without a cache it collects each layer's shapes and options.

    Attributes:
        layout, chunks: of the pass's tree nodes and, after them, of its prompt tokens; None where there are none.
    """

    cache: KVCache | None = None
    layout: TreeLayout | None = None
    chunks: TreeLayout | None = None
    write_slots: torch.Tensor | None = None
    # What a fused layer leaves for the next one.
    normed: NormedRows | None = None
    # The rotary cosines and sines in the form that layers on a CPU share.
    angles: tuple[torch.Tensor, torch.Tensor] | None = None
    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    options: dict[int, AttentionOptions] = field(default_factory=dict)
    num_calls: int = 0

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Attention [B, N, H, Dv] of queries [B, H, N, D] over a layer's pools [num_slots, G, D] and [num_slots, G, Dv]."""
        settings = (options.scaling, options.sliding_window, options.softcap, options.sinks)
        if self.layout is None or self.chunks is None:
            layout = self.layout or self.chunks
            assert layout is not None
            return tree_attention(query, keys, values, layout, *settings)
        num_nodes = self.layout.depths.shape[1]
        out = query.new_empty(1, query.shape[2], query.shape[1], values.shape[2])
        for layout, part in ((self.layout, slice(0, num_nodes)), (self.chunks, slice(num_nodes, None))):
            tree_attention(query[:, :, part], keys, values, layout, *settings, out=out[:, part])
        return out


class TextPass:
    """What the attention function needs during one forward over packed rows, in training.

    Args:
        position_ids: [B, T], starting over where a new text begins.
    """

    def __init__(self, position_ids: torch.Tensor) -> None:
        self.texts = (position_ids == 0).cumsum(1)
        self._masks: dict[int | None, torch.Tensor] = {}

    def mask(self, sliding_window: int | None) -> torch.Tensor:
        """[B, 1, T, T] true where a token may see another: in its own text, not after it, and within the window."""
        if sliding_window not in self._masks:
            T = self.texts.shape[1]
            near = torch.ones(T, T, dtype=torch.bool, device=self.texts.device).tril()
            if sliding_window is not None:
                near = near.triu(1 - sliding_window)
            self._masks[sliding_window] = (near & (self.texts[:, :, None] == self.texts[:, None]))[:, None]
        return self._masks[sliding_window]


def text_options(position_ids: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments for a model's forward over packed rows, by whose positions [B, T] their texts are told apart.

    The attention function has the mask. Not every modeling file's own mask keeps packed texts apart.
    """
    # A ready-made mask, because the model would otherwise build its own.
    no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=position_ids.device)
    return {"attention_mask": no_mask, "text_pass": TextPass(position_ids)}


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    tree_pass: TreePass | None = None,
    text_pass: TextPass | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention: queries [B, H, N, D], keys and values [B, G, N, D]; returns [B, N, H, Dv]."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if position_bias is not None:
        raise ValueError(f"{module.config.model_type} adds a position bias to its attention, which selfspec does not serve")
    if tree_pass is None or tree_pass.cache is None:
        if tree_pass is not None:
            tree_pass.num_calls += 1
            tree_pass.shapes[module.layer_idx] = (key.shape[1], key.shape[3], value.shape[3])
            tree_pass.options[module.layer_idx] = AttentionOptions(scaling, sliding_window, softcap, s_aux)
            attention_mask = None
        if text_pass is not None:
            attention_mask = text_pass.mask(sliding_window)
        return _plain_attention(query, key, value, attention_mask, scaling, softcap, s_aux), None
    cache, layer = tree_pass.cache, module.layer_idx
    assert tree_pass.write_slots is not None
    keys, values = cache.keys[layer], cache.values[layer]
    keys.index_copy_(0, tree_pass.write_slots, key.transpose(1, 2).flatten(0, 1).to(keys.dtype))
    values.index_copy_(0, tree_pass.write_slots, value.transpose(1, 2).flatten(0, 1).to(values.dtype))
    return tree_pass.attend(query, keys, values, AttentionOptions(scaling, sliding_window, softcap, s_aux)), None


def _plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Ordinary attention outside tree passes, causal where no mask is given: shapes as in `_attention`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    N, S = query.shape[2], key.shape[2]
    if softcap is None and sinks is None:
        is_causal = mask is None and N == S
        if mask is None and N < S:
            mask = torch.ones(N, S, dtype=torch.bool, device=query.device).tril(S - N)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, scale=scaling)
        return out.transpose(1, 2).contiguous()
    scores = (query @ key.transpose(2, 3)).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(N, S, dtype=torch.bool, device=scores.device).tril(S - N)
    # Not with infinity, because a row of padding sees nothing, and the others must not get its NaN.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    probs = scores.softmax(-1)[..., :S].to(value.dtype)
    return (probs @ value).transpose(1, 2).contiguous()


def register() -> None:
    """Make the function known to transformers, whose models then run with it when told its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
