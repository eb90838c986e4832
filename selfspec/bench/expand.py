"""Expansion: a Llama's weights inside a larger model, which writes the same text at the cost of a model of its size.

The hidden state of the expanded model holds the original's in its first columns and zeros in all others. Weights that read
the zero columns may be anything (they are random, as in a large model); weights that would write them are zero:

    RMSNorm       weight * sqrt(h / H), eps * h / H: the mean is now over H columns, of which h are used
    layers        the added layers have zero o_proj and down_proj; the real layers are spread evenly among them
    heads         as many queries per key-value head as before; the outputs of added heads meet zero columns of o_proj
    head_dim      with r = D / d, rotary pair i moves to pair r * i, which turns at the frequency that pair i had;
                  queries * sqrt(r), because scores are divided by the root of the head size
    intermediate  the outputs of added units meet zero columns of down_proj

The vocabulary keeps its size. An LM head without a bias cannot give an added row a logit below all others, so added rows
would take part in sampling. The LM head is untied from the embedding, as in most 8B models.

Every figure measured on an expanded model must say "expanded": its cost is the large shape's, its text the small model's.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from selfspec.drafters import Drafter, drafter_of, load_drafter
from selfspec.drafters.names import KINDS
from selfspec.drafters.shipped import best_drafter, identity, load_head
from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import EagleHead
from selfspec.heads.medusa import MedusaHead
from selfspec.model.load import lay_out
from selfspec.model.target import Target

# The standard deviation of the random weights, about that of a large model's.
NOISE = 0.02
SEED = 0
# No rows at all.
NONE = slice(0)
# How far the logits may be from the original's. float32 agrees to about 1e-6; low precision rounds the scaled weights again.
TOLERANCE = {torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 0.2


@dataclass(frozen=True)
class ExpandedShape:
    """The shape to expand to. A step of the default reads as many weights as one of an 8B Llama (7.5e9 parameters).

    Attributes:
        context_length: positions it accepts. Beyond the original's own positions the text makes no sense.
    """

    hidden_size: int = 3840
    num_layers: int = 32
    intermediate_size: int = 16384
    head_dim: int = 128
    context_length: int = 32768

    @classmethod
    def parse(cls, text: str) -> ExpandedShape:
        """Read `8b`, or HIDDENxLAYERSxINTERMEDIATExHEAD_DIM as in 3840x32x16384x128."""
        if text == "8b":
            return cls()
        if not re.fullmatch(r"\d+(x\d+){3}", text):
            raise ValueError(f"shape {text!r} is not known: use 8b or HIDDENxLAYERSxINTERMEDIATExHEAD_DIM")
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.hidden_size}x{self.num_layers}x{self.intermediate_size}x{self.head_dim}"


def serve_expanded(target: Target, model: PreTrainedModel, shape: ExpandedShape) -> Target:
    """Make a target of the `model` that `expand` returned for `target`: laid out for decoding, as loading does.

    Raises:
        ValueError: its logits differ from the original's.
    """
    lay_out(model)
    expanded = Target(model, target.tokenizer, name=f"{Path(target.name).name} expanded to {shape}")
    gap = logit_gap(target, expanded)
    if not gap < TOLERANCE.get(target.dtype, LOW_PRECISION_TOLERANCE):
        raise ValueError(f"{expanded.name} gives other logits than the original (relative gap {gap:.2g})")
    return expanded


@torch.inference_mode()
def logit_gap(target: Target, expanded: Target) -> float:
    """Distance between the two targets' logits [1, 64, V] for arbitrary tokens, relative to the norm of the original's."""
    ids = (torch.arange(64, device=target.device)[None] * 997 + 3) % target.vocab_size
    theirs, ours = (each.model(ids, use_cache=False).logits.float() for each in (target, expanded))
    return float((ours - theirs).norm() / theirs.norm())


@torch.no_grad()
def expand(model: PreTrainedModel, shape: ExpandedShape) -> PreTrainedModel:
    """A model of `shape` with the same logits up to rounding. It is filled weight by weight on the model's own device.

    Raises:
        ValueError: the model is not a plain Llama, or the shape is too small for it.
    """
    old = model.config
    _check(old, shape)
    fill = _Fill(old.hidden_size, shape, model.device, model.dtype)
    config = _expanded_config(old, shape, fill.ratio)
    with torch.device("meta"):
        new = AutoModelForCausalLM.from_config(config, dtype=fill.dtype, attn_implementation="sdpa")
    new.model.rotary_emb = type(new.model.rotary_emb)(config=config).to(fill.device)

    vocabulary = torch.arange(old.vocab_size)
    fill.linear(new.model.embed_tokens, model.model.embed_tokens, vocabulary, fill.hidden(), noise=NONE)
    fill.linear(new.lm_head, model.get_output_embeddings(), vocabulary, fill.hidden())
    fill.norm(new.model.norm, model.model.norm)
    real = dict(zip(layer_positions(old.num_hidden_layers, shape.num_layers), model.model.layers, strict=True))
    for index, layer in enumerate(new.model.layers):
        # An added layer copies the last real one, except for the two matrices that write to the hidden state.
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


def _expanded_config(old: Any, shape: ExpandedShape, ratio: float) -> Any:
    config = copy.deepcopy(old)
    num_heads = shape.hidden_size // shape.head_dim
    changes = {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "intermediate_size": shape.intermediate_size,
        "head_dim": shape.head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads * old.num_key_value_heads // old.num_attention_heads,
        "rms_norm_eps": old.rms_norm_eps * ratio,
        "max_position_embeddings": max(shape.context_length, old.max_position_embeddings),
        "tie_word_embeddings": False,
    }
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def layer_positions(num_layers: int, num_expanded: int) -> list[int]:
    """The expanded model's indices of the original's layers."""
    return [index * num_expanded // num_layers for index in range(num_layers)]


def expanded_feature(feature: int, num_layers: int, num_expanded: int) -> int:
    """The expanded model's number for a hidden state of the original (k: entering layer k; -1: after the norm)."""
    if feature < 0:
        return feature
    return num_expanded if feature == num_layers else layer_positions(num_layers, num_expanded)[feature]


@torch.no_grad()
def expand_head(head: DraftHead, target: Target) -> DraftHead:
    """Expand a head of the original for the expanded `target`: the same drafts at the larger shape's cost.

    The draft vocabulary keeps its size.

    Raises:
        ValueError: not an EAGLE-3 or Medusa head, or it has parts that cannot be expanded.
    """
    config = target.config
    shape = ExpandedShape(config.hidden_size, config.num_hidden_layers, config.intermediate_size, config.head_dim)
    fill = _Fill(head.config.target.hidden_size, shape, target.device, target.dtype)
    if (expand_kind := EXPANSIONS.get(type(head))) is None:
        raise ValueError(f"{head.config.head_type} heads cannot be expanded: use {' or '.join(_expandable())}")
    return expand_kind(head, target, fill).to(dtype=target.dtype).eval().requires_grad_(False)


def expanded_drafter(
    spec: str,
    source: Target,
    target: Target,
    *,
    num_draft_tokens: int | None = None,
    num_nodes: int | None = None,
    width: int | None = None,
) -> Drafter | None:
    """Load the drafter that `spec` names for the original target `source`, expanded to serve the expanded `target`."""
    if spec == "auto":
        spec = best_drafter(source)
    name, _, argument = spec.partition(":")
    # Kinds without heads have no weights of the target's shape.
    shapeless = [kind.name for kind in KINDS.values() if not kind.heads]
    if name in _expandable():
        head = expand_head(load_head(argument or None, source, drafter=name), target)
        given = {"num_draft_tokens": num_draft_tokens, "num_nodes": num_nodes, "width": width}
        shape: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        return drafter_of(head, target, name=spec, **shape)
    if name not in shapeless:
        raise ValueError(f"drafter {spec!r} cannot be expanded: use {', '.join(shapeless)}, {' or '.join(_expandable())}")
    return load_drafter(spec, target, num_draft_tokens=num_draft_tokens, num_nodes=num_nodes, width=width)


def _expandable() -> list[str]:
    """The kinds of drafters some of whose heads can be expanded."""
    return [kind.name for kind in KINDS.values() if EXPANSIONS.keys() & set(kind.heads)]


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
    fill.linear(new.fc, head.fc, fill.hidden(), features, noise=fill.used)
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
            # Rows without a source stay zero, because silu(0) = 0.
            fill.linear(new_block.get_submodule("linear"), block.get_submodule("linear"), hidden, hidden, noise=fill.used)
    for new_output, output in zip(new.outputs, head.outputs, strict=True):
        fill.linear(new_output, output, torch.arange(head.config.target.vocab_size), hidden)
    if new.root_norm is not None and head.root_norm is not None:
        fill.norm(new.root_norm, head.root_norm)
        # None means float32's eps, because the norm is computed in float32 whatever the dtype of the weights.
        eps = head.root_norm.eps
        new.root_norm.eps = (torch.finfo(torch.float32).eps if eps is None else eps) * fill.ratio
        fill.linear(new.root_proj, head.root_proj, hidden, hidden, noise=fill.used)
    return new


EXPANSIONS: dict[type[DraftHead], Callable[[Any, Target, _Fill], DraftHead]] = {
    EagleHead: _expand_eagle,
    MedusaHead: _expand_medusa,
}


class _Fill:
    """Writes an original module's weights into the larger module of the same kind.

    Attributes:
        ratio: h / H, the share of the hidden columns that is used.
        used: the rows of a matrix that write these columns.
    """

    def __init__(self, hidden_size: int, shape: ExpandedShape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.ratio = hidden_size / shape.hidden_size
        self.used = slice(hidden_size)
        self._hidden_size = hidden_size
        self._generator = torch.Generator(device).manual_seed(SEED)

    def hidden(self, count: int = 1) -> torch.Tensor:
        """[count * h] the used columns of `count` hidden states side by side."""
        return (torch.arange(count)[:, None] * self.shape.hidden_size + torch.arange(self._hidden_size)).flatten()

    def norm(self, new: Any, old: Any, columns: torch.Tensor | None = None) -> None:
        # The other columns are multiplied by zeros.
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
        noise: slice = slice(None),
    ) -> None:
        """Put the old matrix [len(rows), len(columns)] and its bias at these rows and columns of the new ones.

        Args:
            noise: the rows of the new matrix whose other entries are random; those of all other rows are zero.
        """
        rows, columns = rows.to(self.device), columns.to(self.device)
        weight = torch.zeros(new.weight.shape, dtype=self.dtype, device=self.device)
        weight[noise].normal_(0, NOISE, generator=self._generator)
        weight[rows[:, None], columns] = self._scaled(old.weight, scale)
        new.weight = nn.Parameter(weight, requires_grad=False)
        if getattr(old, "bias", None) is not None:
            bias = torch.zeros(new.bias.shape, dtype=self.dtype, device=self.device)
            bias[rows] = self._scaled(old.bias, scale)
            new.bias = nn.Parameter(bias, requires_grad=False)

    def attention(
        self, new: Any, old: Any, num_heads: int, num_kv_heads: int, head_dim: int, columns: torch.Tensor | None = None
    ) -> None:
        """Expand an attention that has Llama's four projections. `columns` are the used columns of its input."""
        D = self.shape.head_dim
        columns = self.hidden() if columns is None else columns
        pairs = torch.arange(head_dim // 2) * (D // head_dim)
        rotary, plain = torch.cat([pairs, pairs + D // 2]), torch.arange(head_dim)

        def places(count: int, within: torch.Tensor) -> torch.Tensor:
            return (torch.arange(count)[:, None] * D + within).flatten()

        # Queries are zero in the dimensions in which keys are noise.
        queries = places(num_heads, rotary)
        self.linear(new.q_proj, old.q_proj, queries, columns, scale=(D / head_dim) ** 0.5, noise=slice(num_heads * D, None))
        self.linear(new.k_proj, old.k_proj, places(num_kv_heads, rotary), columns)
        self.linear(new.v_proj, old.v_proj, places(num_kv_heads, plain), columns)
        self.linear(new.o_proj, old.o_proj, self.hidden(), places(num_heads, plain), noise=NONE)

    def mlp(self, new: Any, old: Any) -> None:
        units = torch.arange(old.gate_proj.weight.shape[0])
        self.linear(new.gate_proj, old.gate_proj, units, self.hidden())
        self.linear(new.up_proj, old.up_proj, units, self.hidden())
        self.linear(new.down_proj, old.down_proj, self.hidden(), units, noise=NONE)

    def _scaled(self, values: torch.Tensor, scale: float) -> torch.Tensor:
        values = values.detach().to(self.device)
        return (values if scale == 1 else values.double() * scale).to(self.dtype)


def _check(config: Any, shape: ExpandedShape) -> None:
    kind = config.model_type
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if kind != "llama" or rope != "default" or config.attention_bias or config.mlp_bias:
        raise ValueError(f"{kind} with {rope} rotary embeddings cannot be expanded: only plain Llamas without biases can")
    for name in ("hidden_size", "num_hidden_layers", "intermediate_size"):
        size = shape.num_layers if name == "num_hidden_layers" else getattr(shape, name)
        if size < getattr(config, name):
            raise ValueError(f"shape {shape}: {name} must be at least the original's {getattr(config, name)}")
    _check_heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size, shape)


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int, intermediate_size: int, shape: ExpandedShape) -> None:
    group = num_heads // num_kv_heads
    if shape.head_dim % head_dim:
        raise ValueError(f"shape {shape}: head_dim must be a multiple of the original's {head_dim}")
    if shape.hidden_size % (shape.head_dim * group) or shape.hidden_size // shape.head_dim < num_heads:
        raise ValueError(
            f"shape {shape}: hidden_size must be a multiple of {group} heads of {shape.head_dim}, and hold {num_heads} heads"
        )
    if shape.intermediate_size < intermediate_size:
        raise ValueError(f"shape {shape}: intermediate_size must be at least the head's {intermediate_size}")
