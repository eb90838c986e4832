"""Expansion: a Llama's weights in a larger frame that says the same words and costs what a model of that size costs.

The hidden state of the expanded model is the original's in the first columns and zero in all others. What reads it may hold
anything in those columns (it is random, as a large model's weights are); what writes it is zero in those rows:

    RMSNorm       weight * sqrt(h / H), eps * h / H: the mean is over H columns now, h of them used
    layers        the added ones have zero o_proj and down_proj; the real ones are spread evenly among them
    heads         as many queries to a key-value head as before; the added heads' outputs meet zero columns of o_proj
    head_dim      rotary pair i moves to r * i, r times further apart in frequency, which is the frequency it had;
                  queries * sqrt(r), since scores are divided by the root of the head size
    intermediate  the added units meet zero columns of down_proj

The vocabulary stays as it is: an LM head without a bias cannot give an added row a logit below all others, so that rows to
fill up a larger vocabulary would take part in sampling. The LM head is untied from the embedding, as in most 8B models.

Every figure measured on an expanded model is to say "expanded": its cost is the large shape's, its words the small model's.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from selfspec.drafters import Drafter, drafter_of, load_drafter
from selfspec.drafters.shipped import identity, load_head
from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import EagleHead
from selfspec.heads.medusa import MedusaHead
from selfspec.model.load import lay_out
from selfspec.model.target import Target

# The spread of the random weights: a large model's, roughly.
NOISE = 0.02
# How far its logits may be from the original's: float32 agrees to about 1e-6, low precision rounds the scaled weights anew.
TOLERANCE = {torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 0.2
# The heads that can be expanded, and the drafters that need no weights of the target's shape.
EXPANDABLE = ("medusa", "eagle")
SHAPELESS = ("none", "ngram", "truncated")


@dataclass(frozen=True)
class Shape:
    """The frame to expand into. Its default reads as many weights a step as an 8B Llama (7.5e9 parameters).

    Attributes:
        context_length: positions it takes; the original's words end where the original's positions do.
    """

    hidden_size: int = 3840
    num_layers: int = 32
    intermediate_size: int = 16384
    head_dim: int = 128
    context_length: int = 32768

    @classmethod
    def parse(cls, text: str) -> Shape:
        """`8b`, or HIDDENxLAYERSxINTERMEDIATExHEAD_DIM as in 3840x32x16384x128."""
        if text == "8b":
            return cls()
        if not re.fullmatch(r"\d+(x\d+){3}", text):
            raise ValueError(f"shape {text!r} is not known: use 8b or HIDDENxLAYERSxINTERMEDIATExHEAD_DIM")
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.hidden_size}x{self.num_layers}x{self.intermediate_size}x{self.head_dim}"


def expand_target(target: Target, shape: Shape, *, seed: int = 0) -> Target:
    """The target in a larger frame, on its device and in its dtype, ready for decoding; its name says so.

    Raises:
        ValueError: not a plain Llama, the shape does not hold it, or its logits came out different.
    """
    return serve_expanded(target, expand(target.model, shape, device=target.device, dtype=target.dtype, seed=seed), shape)


def serve_expanded(target: Target, model: PreTrainedModel, shape: Shape) -> Target:
    """What `expand` made of a target's model as a target: packed like any that is loaded, and compared with the original."""
    lay_out(model)
    expanded = Target(model, target.tokenizer, name=f"{Path(target.name).name} expanded to {shape}")
    gap = logit_gap(target, expanded)
    if not gap < TOLERANCE.get(target.dtype, LOW_PRECISION_TOLERANCE):
        raise ValueError(f"{expanded.name} gives other logits than the original (relative gap {gap:.2g})")
    return expanded


@torch.inference_mode()
def logit_gap(target: Target, expanded: Target) -> float:
    """Distance of the two targets' logits over 64 arbitrary tokens, relative to the original's length."""
    ids = (torch.arange(64, device=target.device)[None] * 997 + 3) % target.vocab_size
    theirs, ours = (each.model(ids, use_cache=False).logits.float() for each in (target, expanded))
    return float((ours - theirs).norm() / theirs.norm())


@torch.no_grad()
def expand(
    model: PreTrainedModel,
    shape: Shape,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """A model of `shape` with the same logits, up to rounding. It is filled in weight by weight where it will stay.

    Args:
        device, dtype: the model's own by default.
        seed: of the random weights.

    Raises:
        ValueError: not a plain Llama, or the shape does not hold it.
    """
    old = model.config
    _check(old, shape)
    fill = _Fill(old.hidden_size, shape, torch.device(device or model.device), dtype or model.dtype, seed)
    config = copy.deepcopy(old)
    num_heads = shape.hidden_size // shape.head_dim
    changes = {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "intermediate_size": shape.intermediate_size,
        "head_dim": shape.head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads * old.num_key_value_heads // old.num_attention_heads,
        "rms_norm_eps": old.rms_norm_eps * fill.ratio,
        "max_position_embeddings": max(shape.context_length, old.max_position_embeddings),
        "tie_word_embeddings": False,
    }
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        new = AutoModelForCausalLM.from_config(config, dtype=fill.dtype, attn_implementation="sdpa")
    new.model.rotary_emb = type(new.model.rotary_emb)(config=config).to(fill.device)

    vocabulary = torch.arange(old.vocab_size)
    fill.linear(new.model.embed_tokens, model.model.embed_tokens, vocabulary, fill.hidden(), is_random=False)
    fill.linear(new.lm_head, model.get_output_embeddings(), vocabulary, fill.hidden())
    fill.norm(new.model.norm, model.model.norm)
    real = dict(zip(layer_positions(old.num_hidden_layers, shape.num_layers), model.model.layers, strict=True))
    for index, layer in enumerate(new.model.layers):
        # An added layer's weights are those of the last real one, but for the two that write.
        is_real = index in real
        source = real[index] if is_real else model.model.layers[-1]
        fill.norm(layer.input_layernorm, source.input_layernorm)
        fill.norm(layer.post_attention_layernorm, source.post_attention_layernorm)
        fill.attention(layer.self_attn, source.self_attn, old.num_attention_heads, old.num_key_value_heads, old.head_dim)
        fill.mlp(layer.mlp, source.mlp)
        if not is_real:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    new.generation_config = copy.deepcopy(model.generation_config)
    assert not any(tensor.is_meta for tensor in [*new.parameters(), *new.buffers()])
    return new.eval().requires_grad_(False)


def layer_positions(num_layers: int, num_expanded: int) -> list[int]:
    """Where the original's layers stand among the expanded model's."""
    return [index * num_expanded // num_layers for index in range(num_layers)]


def expanded_feature(feature: int, num_layers: int, num_expanded: int) -> int:
    """The expanded model's number of one of the original's hidden states (k: entering layer k; -1: after the norm)."""
    if feature < 0:
        return feature
    return num_expanded if feature == num_layers else layer_positions(num_layers, num_expanded)[feature]


@torch.no_grad()
def expand_head(head: DraftHead, target: Target, *, seed: int = 0) -> DraftHead:
    """A head of the original target as one of the expanded target: the same drafts, at the larger shape's cost.

    The draft vocabulary stays the head's own.

    Raises:
        ValueError: not an EAGLE-3 or Medusa head, or one with parts whose expansion is not known.
    """
    config = target.config
    shape = Shape(config.hidden_size, config.num_hidden_layers, config.intermediate_size, config.head_dim)
    fill = _Fill(head.config.target.hidden_size, shape, target.device, target.dtype, seed)
    if isinstance(head, EagleHead):
        new: DraftHead = _expand_eagle(head, target, fill)
    elif isinstance(head, MedusaHead):
        new = _expand_medusa(head, target, fill)
    else:
        raise ValueError(f"{head.config.head_type} heads cannot be expanded: use {' or '.join(EXPANDABLE)}")
    return new.to(dtype=target.dtype).eval().requires_grad_(False)


def expanded_drafter(
    spec: str,
    source: Target,
    target: Target,
    *,
    num_draft_tokens: int | None = None,
    num_nodes: int | None = None,
    width: int | None = None,
) -> Drafter | None:
    """The drafter that `spec` names for the original target `source`, made to serve the expanded `target`."""
    name, _, argument = spec.partition(":")
    if name in EXPANDABLE:
        head = expand_head(load_head(argument or None, source, drafter=name), target)
        given = {"num_draft_tokens": num_draft_tokens, "num_nodes": num_nodes, "width": width}
        shape: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        return drafter_of(head, target, name=spec, **shape)
    if name not in SHAPELESS:
        raise ValueError(f"drafter {spec!r} cannot be expanded: use {', '.join(SHAPELESS)}, {' or '.join(EXPANDABLE)}")
    return load_drafter(spec, target, num_draft_tokens=num_draft_tokens, num_nodes=num_nodes, width=width)


def _expand_eagle(head: EagleHead, target: Target, fill: _Fill) -> EagleHead:
    config, shape = head.config, fill.shape
    if config.has_qk_norm or config.rope_scaling is not None:
        raise ValueError(f"{config.target.name}: EAGLE heads with a query norm or a rotary scaling cannot be expanded")
    _check_heads(config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size, shape)
    num_heads = shape.hidden_size // shape.head_dim
    layers = (config.target.num_layers, shape.num_layers)
    with fill.device:
        new = EagleHead(
            replace(
                config,
                target=identity(target),
                feature_layers=tuple(expanded_feature(k, *layers) for k in config.feature_layers),
                intermediate_size=shape.intermediate_size,
                num_heads=num_heads,
                num_kv_heads=num_heads * config.num_kv_heads // config.num_heads,
                head_dim=shape.head_dim,
                rms_norm_eps=config.rms_norm_eps * fill.ratio,
            )
        )
    features = fill.hidden(len(config.feature_layers))
    for new_norm, norm in zip(new.fc_norm, head.fc_norm, strict=True):
        fill.norm(new_norm, norm)
    if config.has_input_norm:
        fill.norm(new.input_norm, head.input_norm, features)
    fill.linear(new.fc, head.fc, fill.hidden(), features, writes_hidden=True)
    layer, source = new.midlayer, head.midlayer
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        fill.norm(layer.get_submodule(name), source.get_submodule(name))
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    fill.attention(layer.self_attn, source.self_attn, *heads, columns=fill.hidden(2))
    fill.mlp(layer.mlp, source.mlp)
    fill.norm(new.norm, head.norm)
    if new.lm_head is not None and head.lm_head is not None:
        fill.linear(new.lm_head, head.lm_head, torch.arange(config.draft_vocab_size), fill.hidden())
    new.d2t.copy_(head.d2t)
    return new


def _expand_medusa(head: MedusaHead, target: Target, fill: _Fill) -> MedusaHead:
    with fill.device:
        new = MedusaHead(replace(head.config, target=identity(target)))
    hidden = fill.hidden()
    for new_blocks, blocks in zip(new.heads, head.heads, strict=True):
        for new_block, block in zip(new_blocks.children(), blocks.children(), strict=True):
            # silu(0) = 0: the rows without a source stay zero.
            fill.linear(new_block.get_submodule("linear"), block.get_submodule("linear"), hidden, hidden, writes_hidden=True)
    for new_output, output in zip(new.outputs, head.outputs, strict=True):
        fill.linear(new_output, output, torch.arange(head.config.target.vocab_size), hidden)
    if new.root_norm is not None and head.root_norm is not None:
        fill.norm(new.root_norm, head.root_norm)
        # None is float32's, in which the norm is computed whatever the weights' type.
        eps = head.root_norm.eps
        new.root_norm.eps = (torch.finfo(torch.float32).eps if eps is None else eps) * fill.ratio
        fill.linear(new.root_proj, head.root_proj, hidden, hidden, writes_hidden=True)
    return new


class _Fill:
    """Writes an original module's weights into the larger module of the same kind.

    Attributes:
        ratio: h / H, the used part of the hidden columns.
    """

    def __init__(self, hidden_size: int, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.ratio = hidden_size / shape.hidden_size
        self._hidden_size = hidden_size
        self._generator = torch.Generator(device).manual_seed(seed)

    def hidden(self, count: int = 1) -> torch.Tensor:
        """The used columns of `count` hidden states side by side."""
        return (torch.arange(count)[:, None] * self.shape.hidden_size + torch.arange(self._hidden_size)).flatten()

    def norm(self, new: Any, old: Any, columns: torch.Tensor | None = None) -> None:
        # The other columns meet zeros.
        weight = torch.ones(new.weight.shape, dtype=self.dtype, device=self.device)
        columns = self.hidden() if columns is None else columns
        weight[columns.to(self.device)] = self._scaled(old.weight, self.ratio**0.5)
        new.weight = nn.Parameter(weight, requires_grad=False)

    def linear(
        self,
        new: Any,
        old: Any,
        rows: torch.Tensor,
        columns: torch.Tensor,
        *,
        scale: float = 1.0,
        is_random: bool = True,
        writes_hidden: bool = False,
        blank: slice = slice(0),
    ) -> None:
        """Put a matrix, and its bias, at these rows and columns.

        Args:
            is_random: the other entries are noise, else zero.
            writes_hidden: rows without a source write hidden columns that must stay zero.
            blank: rows that are zero wherever they have no source.
        """
        rows, columns = rows.to(self.device), columns.to(self.device)
        weight = torch.zeros(new.weight.shape, dtype=self.dtype, device=self.device)
        if is_random and writes_hidden:
            weight[: self._hidden_size].normal_(0, NOISE, generator=self._generator)
        elif is_random:
            weight.normal_(0, NOISE, generator=self._generator)
        weight[blank] = 0
        weight[rows[:, None], columns] = self._scaled(old.weight, scale)
        new.weight = nn.Parameter(weight, requires_grad=False)
        if getattr(old, "bias", None) is not None:
            bias = torch.zeros(new.bias.shape, dtype=self.dtype, device=self.device)
            bias[rows] = self._scaled(old.bias, scale)
            new.bias = nn.Parameter(bias, requires_grad=False)

    def attention(
        self, new: Any, old: Any, num_heads: int, num_kv_heads: int, head_dim: int, columns: torch.Tensor | None = None
    ) -> None:
        """Any attention with the four projections of Llama's; `columns` are those of its input."""
        D = self.shape.head_dim
        columns = self.hidden() if columns is None else columns
        pairs = torch.arange(head_dim // 2) * (D // head_dim)
        rotary, plain = torch.cat([pairs, pairs + D // 2]), torch.arange(head_dim)

        def places(count: int, within: torch.Tensor) -> torch.Tensor:
            return (torch.arange(count)[:, None] * D + within).flatten()

        # Queries are zero where keys may be anything.
        queries = places(num_heads, rotary)
        self.linear(new.q_proj, old.q_proj, queries, columns, scale=(D / head_dim) ** 0.5, blank=slice(num_heads * D))
        self.linear(new.k_proj, old.k_proj, places(num_kv_heads, rotary), columns)
        self.linear(new.v_proj, old.v_proj, places(num_kv_heads, plain), columns)
        self.linear(new.o_proj, old.o_proj, self.hidden(), places(num_heads, plain), is_random=False)

    def mlp(self, new: Any, old: Any) -> None:
        units = torch.arange(old.gate_proj.weight.shape[0])
        self.linear(new.gate_proj, old.gate_proj, units, self.hidden())
        self.linear(new.up_proj, old.up_proj, units, self.hidden())
        self.linear(new.down_proj, old.down_proj, self.hidden(), units, is_random=False)

    def _scaled(self, values: torch.Tensor, scale: float) -> torch.Tensor:
        values = values.detach().to(self.device)
        return (values if scale == 1 else values.double() * scale).to(self.dtype)


def _check(config: Any, shape: Shape) -> None:
    kind = config.model_type
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if kind != "llama" or rope != "default" or config.attention_bias or config.mlp_bias:
        raise ValueError(f"{kind} with {rope} rotary embeddings cannot be expanded: only plain Llamas without biases can")
    for name in ("hidden_size", "num_hidden_layers", "intermediate_size"):
        size = shape.num_layers if name == "num_hidden_layers" else getattr(shape, name)
        if size < getattr(config, name):
            raise ValueError(f"shape {shape}: {name} must be at least the original's {getattr(config, name)}")
    _check_heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size, shape)


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int, intermediate_size: int, shape: Shape) -> None:
    group = num_heads // num_kv_heads
    if shape.head_dim % head_dim:
        raise ValueError(f"shape {shape}: head_dim must be a multiple of the original's {head_dim}")
    if shape.hidden_size % (shape.head_dim * group) or shape.hidden_size // shape.head_dim < num_heads:
        raise ValueError(
            f"shape {shape}: hidden_size must be a multiple of {group} heads of {shape.head_dim}, and hold {num_heads} heads"
        )
    if shape.intermediate_size < intermediate_size:
        raise ValueError(f"shape {shape}: intermediate_size must be at least the head's {intermediate_size}")
