"""The draft pass of an EAGLE-3 head in as few kernels as its dependencies allow, like `selfspec.model.fused_layer`.

Where `fuse` has merged a head's layers, and the head is of the common kind, a pass over one depth of the tree takes fifteen
launches. Attention reads each node's path, which is its parent's path and one entry more, so no ancestor mask is made. Like
the kernels, this is for the few rows of decoding; larger batches, and float32 on a GPU, use the head's own forward.

Invariant: the logits are those of the head's own forward up to rounding, which `EagleDrafter` checks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from selfspec.cache.kv import KVCache, Places, SideLayer
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.kernels.jit import is_compiled_for
from selfspec.kernels.linear import linear, linear_before_norm, normed_gated_linear, normed_linear
from selfspec.kernels.rms_norm import rms_norm
from selfspec.kernels.rotary import rotary_store
from selfspec.kernels.slots import slots_of
from selfspec.kernels.tree_attention import tree_attention
from selfspec.kernels.tree_layout import TreeLayout
from selfspec.model.fuse import FusedLinear, FusedRMSNorm, MergedLinear, norm_of


class EaglePass:
    """A head's layer and its output layer, over entries with given hidden states.

    Args:
        head, output: fused modules for which `is_common` is true.
    """

    def __init__(self, head: EagleHead, output: Any, embed: nn.Module) -> None:
        layer: Any = head.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        self._embed = embed
        self._output = output
        self._qkv, self._o = attention.q_proj.merged, attention.o_proj
        self._gate_up, self._down = mlp.gate_proj.merged, mlp.down_proj
        self._input_norms = layer.input_layernorm, layer.hidden_norm
        self._post_norm, self._final_norm = norm_of(layer.post_attention_layernorm), norm_of(head.norm)
        self._inv_freq, self._rotary_factor = attention.inv_freq, attention.rotary_factor
        self._scaling = attention.head_dim**-0.5
        self._query_size = head.config.num_heads * attention.head_dim
        self._feeds_normed = head.config.feeds_normed

    @staticmethod
    def is_common(head: EagleHead | Eagle1Head, output: nn.Module) -> bool:
        """Whether the pass can run this head: all its parts are fused and of the kinds that the pass knows."""
        if not isinstance(head, EagleHead) or head.config.has_qk_norm or head.config.norm_before_residual:
            return False
        if head.norm.weight.dtype == torch.float32 and is_compiled_for(head.norm.weight):
            return False
        layer = head.midlayer
        merged = [getattr(layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj")]
        norms = (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, head.norm)
        others = (layer.self_attn.o_proj, layer.mlp.down_proj, output)
        return (
            all(isinstance(each, MergedLinear) for each in (*merged, layer.mlp.gate_proj, layer.mlp.up_proj))
            and all(type(each) is FusedLinear for each in others)
            and all(isinstance(norm, FusedRMSNorm) for norm in norms)
        )

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotary cosines and sines, [A, N, D] each, of positions [A, N]."""
        angles = (positions[:, :, None].float() * self._inv_freq).repeat(1, 1, 2)
        cos, sin = ((self._rotary_factor * part).to(dtype) for part in (angles.cos(), angles.sin()))
        return cos, sin

    def __call__(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        layout: TreeLayout,
        slots: torch.Tensor,
        side: SideLayer,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enter N entries per row.

        Args:
            hidden: [A, N, E] fused features, or states that were fed back.
            tokens: [A, N], whose embeddings are paired with the hidden states.
            angles: cosines and sines [A, N, D], see `angles`.
            slots: [A * N], where the entries' keys and values go in the head's layer `side`.

        Returns:
            The output layer's products [A, N, V], and the states to feed back [A, N, E].
        """
        keys, values = side.keys, side.values
        qkv = linear(self._inputs(hidden, tokens), self._qkv.weight, self._qkv.bias)
        query = rotary_store(qkv, *angles, slots, keys, values)
        attended = tree_attention(query.transpose(1, 2), keys, values, layout, self._scaling).flatten(2)
        normed = linear_before_norm(attended, self._o.weight, self._o.bias, hidden, self._post_norm)
        activated = normed_gated_linear(normed, self._gate_up.weight, self._gate_up.bias)
        normed = linear_before_norm(activated, self._down.weight, self._down.bias, normed.hidden, self._final_norm)
        logits = normed_linear(normed, self._output.weight, self._output.bias)
        return logits, normed.finish() if self._feeds_normed else normed.hidden

    def store(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        side: SideLayer,
    ) -> None:
        """Store the keys and values of entries, whose outputs nobody wants; arguments as above."""
        bias = None if self._qkv.bias is None else self._qkv.bias[self._query_size :]
        kv = linear(self._inputs(hidden, tokens), self._qkv.weight[self._query_size :], bias)
        rotary_store(kv, *angles, slots, side.keys, side.values)

    def _inputs(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """What attention reads: the normed embeddings and hidden states, [A, N, 2 * E]."""
        A, N, E = hidden.shape
        both = hidden.new_empty(A, N, 2 * E)
        for norm, x, out in zip(self._input_norms, (self._embed(tokens), hidden), both.split(E, dim=2), strict=True):
            rms_norm(x, norm.weight, norm.eps, out=out, **norm.rule)
        return both


class Growth:
    """The passes over a tree's layers, from the first to the last.

    Args:
        side: the head's layer in the cache.
        places: where the rows lie; the tree's nodes are scratch entries after their prefixes.
        last: [A, 1, E], the state that the last entry before the tree feeds to the first layer.
        depth, width: of the tree.
    """

    def __init__(
        self,
        eagle: EaglePass,
        cache: KVCache,
        side: SideLayer,
        places: Places,
        last: torch.Tensor,
        *,
        depth: int,
        width: int,
    ) -> None:
        self._eagle = eagle
        self._side = side
        self._block_size = cache.block_size
        self._places = places
        self._fed = last
        self._depth = depth
        device = last.device
        A = len(last)
        at = torch.arange(depth, device=device)
        self._depths = at[:, None, None].expand(depth, A, width).contiguous()
        self._cos, self._sin = eagle.angles(places.lengths[:, None] + at, last.dtype)
        nodes = torch.arange(depth * width, device=device)
        self._slots = slots_of(places.block_tables, places.lengths[:, None] + nodes, cache.block_size)
        self._paths = self._slots.new_zeros(A, 1, depth)
        self._at = self._num_nodes = 0

    def __call__(self, tokens: torch.Tensor, parent: torch.Tensor) -> torch.Tensor:
        """The output layer's products [A, W, V] at the newest layer, whose tokens and parents are [A, W] (`LayerPass`)."""
        W, at = tokens.shape[1], self._at
        own = self._slots[:, self._num_nodes : self._num_nodes + W]
        # A node's path is its parent's path and itself.
        self._paths = self._paths.gather(1, parent[:, :, None].expand(-1, -1, self._depth))
        self._paths[:, :, at] = own
        layout = TreeLayout(
            self._places.block_tables,
            self._places.lengths,
            None if self._places.rows is None else [row.length for row in self._places.rows],
            self._depths[at, :, :W],
            None,
            self._block_size,
            max_depth=at,
            paths=self._paths,
        )
        hidden = self._fed.gather(1, parent[:, :, None].expand(-1, -1, self._fed.shape[2]))
        angles = self._cos[:, at, None].expand(-1, W, -1), self._sin[:, at, None].expand(-1, W, -1)
        logits, self._fed = self._eagle(hidden, tokens, angles, layout, own.reshape(-1), self._side)
        self._at, self._num_nodes = at + 1, self._num_nodes + W
        return logits
