"""EAGLE: one decoder layer that continues the target's hidden states.

EAGLE-3 (https://arxiv.org/abs/2503.01840), `EagleHead`. Entry j of the head's sequence pairs the target's fused feature of
token j with the embedding of token j + 1 and predicts token j + 2. When the head drafts on, this output stands in for the
feature of token j + 1, which the target has not computed yet.

    fused_j = fc([fc_norm_0(low_j); fc_norm_1(middle_j); fc_norm_2(high_j)])
    x_j     = [input_layernorm(embed(token_{j+1})); hidden_norm(hidden_j)]        hidden_j = fused_j, or the last output
    h_j     = hidden_j + attention(x_j);   out_j = h_j + mlp(post_attention_layernorm(h_j))
    logits  = lm_head(norm(out_j))         over a draft vocabulary; target id = i + d2t[i]

The LM head is the head's own or, with `has_lm_head=False`, the rows of the draft vocabulary in the target's LM head; these
are frozen and not stored.

EAGLE-3.1 (https://arxiv.org/abs/2605.09992) added the norms of each feature before `fc` (`has_fc_norm`) and feeds the normed
output back (`feeds_normed`). The biases, the norms of queries and keys, and the norm over all features come from other
trainers and exist for their checkpoints; new heads have none of them.

EAGLE-1 (https://arxiv.org/abs/2401.15077), `Eagle1Head`. Entry j pairs the target's last hidden state (after the final
norm) of token j with the embedding of token j + 1. Its output estimates the last hidden state of token j + 1, which the
target's own LM head turns into logits:

    x_j = fc([embed(token_{j+1}); hidden_j])        hidden_j = the target's, or the last output
    h_j = x_j + attention(x_j);   out_j = h_j + mlp(post_attention_layernorm(h_j))

There is no input norm and no final norm. Parameter names are those of the public checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn

from selfspec.heads.base import DraftHead, HeadConfig

# (queries [B, H, N, D], keys [B, G, N, D], values [B, G, N, D]) -> [B, N, H, D]. It also knows the keys of earlier entries.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Rows [n, E] of an LM head's weight from their numbers [n].
LookUp = Callable[[torch.Tensor], torch.Tensor]

# Rotary scalings whose frequencies do not depend on the length of the text.
ROPE_SCALINGS = ("linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class Eagle1Config(HeadConfig):
    """The shape of the decoder layer, which need not be the target's.

    Args:
        rope_scaling: transformers' `rope_parameters` without the theta; None for plain rotary embeddings.
        has_fc_bias, has_qkv_bias, has_o_bias: biases of `fc`, of the query, key and value projections, and of the output
            projection.
        has_qk_norm: norms of each query and key head, as in Qwen3.
    """

    head_type: ClassVar[str] = "eagle1"
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-5
    has_fc_bias: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads}: use a multiple of num_kv_heads={self.num_kv_heads}")
        kind = (self.rope_scaling or {}).get("rope_type", "none")
        if self.rope_scaling is not None and kind not in ROPE_SCALINGS:
            raise ValueError(f"rope_scaling has rope_type {kind!r}: use one of {', '.join(ROPE_SCALINGS)}")

    @staticmethod
    def layer_shape(config: Any) -> dict[str, Any]:
        """The shape of the target's own layers, from its transformers text config, and its rotary schedule.

        A target whose layers alternate between two schedules gives the one of its full attention. One whose schedule depends
        on the text's length gives the plain one.
        """
        names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
        inner = next((size for name in names if (size := getattr(config, name, None))), 4 * config.hidden_size)
        num_heads = config.num_attention_heads
        rope = dict(getattr(config, "rope_parameters", None) or {})
        if isinstance(rope.get("full_attention"), dict):
            rope = dict(rope["full_attention"])
        theta, kind = float(rope.pop("rope_theta", 10000.0)), rope.get("rope_type", "default")
        scaling = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
        return {
            "intermediate_size": inner,
            "num_heads": num_heads,
            "num_kv_heads": getattr(config, "num_key_value_heads", None) or num_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            "rope_theta": theta,
            "rope_scaling": scaling if kind in ROPE_SCALINGS else None,
            "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-5),
        }


@dataclass(frozen=True, kw_only=True)
class EagleConfig(Eagle1Config):
    """Args:
    feature_layers: the hidden states that are fused, in transformers' numbering (k: entering layer k).
    draft_vocab_size: number of tokens that the head can draft; the target's vocabulary size for all of them.
    has_lm_head: the head has its own LM head, as all public checkpoints do; otherwise it drafts with the target's rows.
    has_fc_norm, feeds_normed: EAGLE-3.1's norms.
    has_input_norm: one norm over the concatenated features before `fc`, as in NVIDIA's gpt-oss heads.
    norm_before_residual: the residual branch carries the normed hidden state.
    """

    head_type: ClassVar[str] = "eagle"
    feature_layers: tuple[int, ...]
    draft_vocab_size: int
    has_lm_head: bool = True
    has_fc_norm: bool = True
    feeds_normed: bool = True
    has_input_norm: bool = False
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        L = self.target.num_layers
        if not self.feature_layers or len(set(self.feature_layers)) < len(self.feature_layers):
            raise ValueError(f"feature_layers={self.feature_layers} must name at least one layer, none twice")
        if not all(0 <= k <= L for k in self.feature_layers):
            raise ValueError(f"feature_layers={self.feature_layers}: {self.target.name} has hidden states 0 to {L}")
        if not 1 <= self.draft_vocab_size <= self.target.vocab_size:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size}: use 1 to {self.target.vocab_size}")

    @staticmethod
    def default_feature_layers(num_layers: int) -> tuple[int, ...]:
        """Hidden states entering layers 2, n // 2 and n - 3; in a shallow target, the nearest that exist."""
        wanted = (2, num_layers // 2, num_layers - 3)
        return tuple(sorted({min(max(k, 0), num_layers) for k in wanted}))


class EagleAttention(nn.Module):
    """Rotary attention from `input_size` to the hidden size."""

    def __init__(self, config: Eagle1Config, input_size: int) -> None:
        super().__init__()
        E, H, G, D = config.target.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = H, G, D
        self.q_proj = nn.Linear(input_size, H * D, bias=config.has_qkv_bias)
        self.k_proj = nn.Linear(input_size, G * D, bias=config.has_qkv_bias)
        self.v_proj = nn.Linear(input_size, G * D, bias=config.has_qkv_bias)
        self.o_proj = nn.Linear(H * D, E, bias=config.has_o_bias)
        self.q_norm = nn.RMSNorm(D, config.rms_norm_eps) if config.has_qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(D, config.rms_norm_eps) if config.has_qk_norm else nn.Identity()
        inv_freq, self.rotary_factor = _rotary(config)
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Frequencies stay in float32. Rounded to bfloat16, they would be off by radians a thousand tokens on.
        inv_freq = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = inv_freq.to(self.inv_freq.device)
        return self

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[B, N, E] from x [B, N, input_size] and positions [B, N]."""
        B, N, _ = x.shape
        query = self.q_norm(self.q_proj(x).view(B, N, self.num_heads, self.head_dim)).transpose(1, 2)
        key = self.k_norm(self.k_proj(x).view(B, N, self.num_kv_heads, self.head_dim)).transpose(1, 2)
        value = self.v_proj(x).view(B, N, self.num_kv_heads, self.head_dim).transpose(1, 2)
        angles = positions[:, None, :, None].float() * self.inv_freq  # [B, 1, N, D / 2]
        cos, sin = ((self.rotary_factor * part).to(x.dtype) for part in (angles.cos(), angles.sin()))
        out = attend(_rotate(query, cos, sin), _rotate(key, cos, sin), value)
        return self.o_proj(out.reshape(B, N, -1))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding with the two halves of the head dimension as pairs (https://arxiv.org/abs/2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _rotary(config: Eagle1Config) -> tuple[torch.Tensor, float]:
    """Rotary frequencies [D / 2], and the factor that YaRN puts on cosine and sine."""
    D = config.head_dim
    if config.rope_scaling is None:
        return config.rope_theta ** -(torch.arange(0, D, 2, dtype=torch.float32) / D), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # Any maximum will do, because these scalings read only the length that they were made for.
    shape = LlamaConfig(
        head_dim=D,
        max_position_embeddings=1 << 30,
        rope_parameters={"rope_theta": config.rope_theta, **config.rope_scaling},
    )
    # These functions read values from tensors, which the meta device would not allow if the head is built on it.
    with torch.device("cpu"):
        return ROPE_INIT_FUNCTIONS[config.rope_scaling["rope_type"]](shape, torch.device("cpu"))


class EagleMLP(nn.Module):
    """The gated MLP of Llama."""

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        E, F_ = config.target.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(E, F_, bias=False)
        self.up_proj = nn.Linear(E, F_, bias=False)
        self.down_proj = nn.Linear(F_, E, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., E] from x [..., E]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """EAGLE-3's decoder layer. Its attention reads [embedding; hidden], which is twice the hidden size."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        E, eps = config.target.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = EagleAttention(config, 2 * E)
        self.mlp = EagleMLP(config)
        self.input_layernorm = nn.RMSNorm(E, eps)
        self.hidden_norm = nn.RMSNorm(E, eps)
        self.post_attention_layernorm = nn.RMSNorm(E, eps)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[B, N, E] from hidden and embedded [B, N, E] and positions [B, N]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        hidden = residual + self.self_attn(x, positions, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle1Layer(nn.Module):
    """EAGLE-1's decoder layer, which has no input norm."""

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        E = config.target.hidden_size
        self.self_attn = EagleAttention(config, E)
        self.mlp = EagleMLP(config)
        self.post_attention_layernorm = nn.RMSNorm(E, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[B, N, E] from x [B, N, E] and positions [B, N]."""
        hidden = x + self.self_attn(x, positions, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(DraftHead):
    """EAGLE-3's head. It reads fused features or its own outputs; the caller brings attention and embeddings."""

    config_class = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        E, eps = config.target.hidden_size, config.rms_norm_eps
        num_features = len(config.feature_layers)
        self.features = config.feature_layers
        self.fc_norm = nn.ModuleList(nn.RMSNorm(E, eps) for _ in range(num_features if config.has_fc_norm else 0))
        self.input_norm = nn.RMSNorm(num_features * E, eps) if config.has_input_norm else nn.Identity()
        self.fc = nn.Linear(num_features * E, E, bias=config.has_fc_bias)
        self.midlayer = EagleLayer(config)
        self.norm = nn.RMSNorm(E, eps)
        self.lm_head = nn.Linear(E, config.draft_vocab_size, bias=False) if config.has_lm_head else None
        self.d2t: torch.Tensor
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def initialise(self, model: Any, draft_ids: torch.Tensor | None = None) -> None:
        """Copy the target's final norm and, where the head has its own, LM head; fix the draft vocabulary.

        Args:
            draft_ids: [draft_vocab_size] int64, ascending: the target ids that the head can draft. None if it drafts all.
        """
        size = self.config.draft_vocab_size
        if draft_ids is None:
            if size != self.config.target.vocab_size:
                raise ValueError(f"draft_vocab_size={size} is only a part of the vocabulary, so draft_ids must say which")
            draft_ids = torch.arange(size)
        self.d2t.copy_(draft_ids - torch.arange(size))
        if self.lm_head is not None:
            self.lm_head.weight.data.copy_(model.get_output_embeddings().weight.detach()[draft_ids.to(model.device)])
        final_norm = getattr(model.base_model, "norm", None)
        if final_norm is not None and getattr(final_norm, "weight", None) is not None:
            self.norm.weight.data.copy_(final_norm.weight.detach())

    @property
    def draft_ids(self) -> torch.Tensor:
        """[draft_vocab_size] int64, the target id of every draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def output_layer(self, lm_head: Any, look_up: LookUp | None = None) -> nn.Module:
        """The module that turns `normed` [..., E] into logits [..., draft_vocab_size].

        It is the head's own LM head, or a copy of the target's rows.

        Args:
            look_up: gives rows of the LM head's weight, where the caller need not make the whole weight for it.
        """
        if self.lm_head is not None:
            return self.lm_head
        if look_up is None:
            whole = lm_head.weight.detach()
            weight = whole[self.draft_ids.to(whole.device)]
        else:
            weight = look_up(self.draft_ids)
        bias = getattr(lm_head, "bias", None)
        layer = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta").requires_grad_(False)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach()[self.draft_ids.to(bias.device)], requires_grad=False)
        return layer

    def fuse(self, features: list[torch.Tensor]) -> torch.Tensor:
        """Fuse the feature layers' hidden states, [B, N, E] each, into one [B, N, E]."""
        if self.fc_norm:
            features = [norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True)]
        return self.fc(self.input_norm(torch.cat(features, dim=-1)))

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the layer over N entries.

        Args:
            hidden: [B, N, E], fused features, or the `fed` output of the entries before.
            embedded: [B, N, E], the embedding of each entry's next token.
            positions: [B, N] int64.

        Returns:
            `normed` for the output layer and `fed` for the next pass, both [B, N, E].
        """
        out = self.midlayer(hidden, embedded, positions, attend)
        normed = self.norm(out)
        return normed, normed if self.config.feeds_normed else out


class Eagle1Head(DraftHead):
    """EAGLE-1's head, with the same methods as `EagleHead`."""

    config_class = Eagle1Config
    config: Eagle1Config
    features = (-1,)

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__(config)
        E = config.target.hidden_size
        self.fc = nn.Linear(2 * E, E, bias=config.has_fc_bias)
        self.layers = nn.ModuleList([Eagle1Layer(config)])

    def initialise(self, model: Any) -> None:
        """Make `fc` pass the feature on. The first draft's logits then start as the target's last ones."""
        E = self.config.target.hidden_size
        self.fc.weight.data.copy_(torch.cat([torch.zeros(E, E), torch.eye(E)], dim=1))
        if self.fc.bias is not None:
            self.fc.bias.data.zero_()

    @property
    def draft_ids(self) -> torch.Tensor:
        """[V] int64: the head drafts the whole vocabulary."""
        return torch.arange(self.config.target.vocab_size, device=self.fc.weight.device)

    def output_layer(self, lm_head: nn.Module, look_up: LookUp | None = None) -> nn.Module:
        """The target's LM head, which turns [..., E] into [..., V]."""
        return lm_head

    def fuse(self, features: list[torch.Tensor]) -> torch.Tensor:
        """The one feature [B, N, E] that the head reads, unchanged."""
        return features[0]

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `EagleHead.forward`, with the same shapes. Both results are the estimated feature [B, N, E]."""
        out = self.layers[0](self.fc(torch.cat([embedded, hidden], dim=-1)), positions, attend)
        return out, out
