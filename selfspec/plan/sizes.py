"""How large models and drafters are, and what a pass of each reads and computes, from their configurations alone.

Of a checkpoint only the headers of its safetensors files are read, so it need not fit into memory. A pass takes the time of
its roofline (what it reads over the bandwidth, or what it computes over the peak) and of its launches.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_local_safetensors_metadata, get_safetensors_metadata
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from selfspec.cache.kv import KVShape
from selfspec.drafters.names import HEADS, KINDS, STUDENT_SHAPE
from selfspec.drafters.shipped import is_head
from selfspec.drafters.specs import BEST
from selfspec.files import shipped_heads
from selfspec.heads.base import CONFIG_NAME, DraftHead, find_head, read_config
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.heads.early_exit import EarlyExitHead
from selfspec.heads.medusa import MedusaHead
from selfspec.loop.drafter import DefaultShape
from selfspec.model.load import QUANTIZED, check_family, load_config, resolve_dtype
from selfspec.plan.accelerators import Card
from selfspec.plan.formulas import TreeGain, distinct_experts, pass_seconds

logger = logging.getLogger(__name__)

# For linear layers that loading quantises. int4 includes a bfloat16 scale and zero point for every 128 weights.
BYTES_PER_WEIGHT = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 128}
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
# Embedding, last norm, LM head and choice of tokens are launched as often as so many layers.
OTHER_LAYERS = 2


@dataclass(frozen=True)
class PassSize:
    """What one forward pass reads and computes.

    Attributes:
        num_parameters: parameters that every pass reads.
        num_expert_parameters: parameters of all experts together; a token uses `num_experts_per_token` of the `num_experts`
            in a layer.
        num_layers: decoder layers, each with its launches.
        num_heads: query heads of a layer.
        kv_shape: what a pass reads of each earlier token; None without attention.
    """

    num_parameters: int
    bytes_per_parameter: float
    num_expert_parameters: int = 0
    num_experts: int = 1
    num_experts_per_token: int = 1
    num_layers: int = 0
    num_heads: int = 0
    kv_shape: KVShape | None = None
    bytes_per_value: int = 2

    def seconds(self, card: Card, *, num_rows: int, num_nodes: int, num_tokens: int) -> float:
        """The time of a pass over B rows, each of N nodes after a prefix of T tokens: its roofline and its launches."""
        roofline = self.roofline_seconds(card, num_rows=num_rows, num_nodes=num_nodes, num_tokens=num_tokens)
        return roofline + self.launch_seconds(card)

    def launch_seconds(self, card: Card) -> float:
        """What launching adds, because every kernel fills and empties the memory's pipeline again."""
        return (self.num_layers + OTHER_LAYERS) * card.layer_seconds

    def roofline_seconds(self, card: Card, *, num_rows: int, num_nodes: int, num_tokens: int) -> float:
        """The time of what a pass reads, or of what it computes, whichever is longer."""
        B, N, T = num_rows, num_nodes, num_tokens
        read_share = distinct_experts(self.num_experts, self.num_experts_per_token, B * N) / self.num_experts
        used_share = self.num_experts_per_token / self.num_experts
        num_bytes = self.bytes_per_parameter * (self.num_parameters + read_share * self.num_expert_parameters)
        num_flops = 2 * B * N * (self.num_parameters + used_share * self.num_expert_parameters)
        if self.kv_shape is not None:
            shape = self.kv_shape
            num_bytes += B * T * shape.num_values_per_token * self.bytes_per_value
            num_flops += 2 * B * N * T * shape.num_layers * self.num_heads * (shape.key_dim + shape.value_dim)
        return pass_seconds(num_bytes, num_flops, bandwidth=card.bandwidth, peak=card.peak)


@dataclass(frozen=True)
class ModelSize:
    """A model as its configuration describes it.

    Attributes:
        weight_bytes: bytes of all weights in the dtype they are served in.
        weights_from: where that number comes from, in words.
        forward: a pass of the whole model, without an embedding that is not also the LM head, because it is only looked up.
        num_output_parameters: parameters of the LM head.
        context_length: the most tokens a sequence may have.
    """

    name: str
    dtype: torch.dtype
    weight_bytes: int
    weights_from: str
    forward: PassSize
    num_output_parameters: int
    config: PretrainedConfig
    kv_shape: KVShape
    context_length: int

    @classmethod
    def of(cls, source: str | Path, *, revision: str | None = None, dtype: str = "auto") -> ModelSize:
        """The size of a model in a folder or on the Hub. Only its configuration and headers are read.

        Raises:
            ValueError: there is no model, or selfspec does not serve it.
        """
        config = load_config(source, revision)
        check_family(config)
        served = resolve_dtype("auto" if dtype in QUANTIZED else dtype, config, torch.device("cuda"))
        text = config.get_text_config()
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        num_parameters = sum(p.numel() for p in skeleton.parameters())
        embedding, output = skeleton.get_input_embeddings().weight, skeleton.get_output_embeddings().weight
        num_experts = sum(p.numel() for name, p in skeleton.named_parameters() if ".experts." in name)
        num_looked_up = 0 if embedding is output else embedding.numel()
        weight_bytes, weights_from = stored_bytes(source, revision, served.itemsize), "safetensors header"
        if weight_bytes is None:
            weight_bytes, weights_from = num_parameters * served.itemsize, "configuration"
        if dtype in QUANTIZED:
            saved = served.itemsize - BYTES_PER_WEIGHT[dtype]
            weight_bytes -= round(saved * _num_linear(skeleton))
        shape = kv_shape_of(config)
        forward = PassSize(
            num_parameters - num_looked_up - num_experts,
            (weight_bytes - num_looked_up * served.itemsize) / (num_parameters - num_looked_up),
            num_experts,
            _first(text, "num_experts", "num_local_experts", "n_routed_experts") if num_experts else 1,
            text.num_experts_per_tok if num_experts else 1,
            shape.num_layers,
            text.num_attention_heads,
            shape,
            served.itemsize,
        )
        limit = getattr(text, "max_position_embeddings", None) or 1 << 30
        return cls(str(source), served, weight_bytes, weights_from, forward, output.numel(), config, shape, limit)

    def first_layers(self, num_layers: int) -> PassSize:
        """A pass of the first `num_layers` layers and the LM head."""
        share = num_layers / self.kv_shape.num_layers
        in_layers = self.forward.num_parameters - self.num_output_parameters
        return replace(
            self.forward,
            num_parameters=round(share * in_layers) + self.num_output_parameters,
            num_expert_parameters=round(share * self.forward.num_expert_parameters),
            num_layers=num_layers,
            kv_shape=replace(self.kv_shape, num_layers=num_layers),
        )


@dataclass(frozen=True)
class DraftSize:
    """A drafter as its configuration describes it.

    Attributes:
        weight_bytes: bytes of the weights that it adds to the target's.
        forward: one of its passes; None if drafting takes no pass.
        is_one_pass: one pass drafts all depths, as Medusa's does; otherwise each depth takes a pass.
        depth, num_nodes: its default depth on a GPU, and the most nodes of its default candidate tree, root included.
        kv_bytes_per_token: bytes per token in a KV cache of its own.
        feature_bytes_per_token: bytes of the target's hidden states that a cache which shares prompts keeps for it with
            their blocks.
        is_second_target: it is a model of its own, with CUDA graphs of its own.
        is_depth_limit: it cannot draft deeper than `depth`.
        card: the text of its model card.
    """

    name: str
    weight_bytes: int = 0
    forward: PassSize | None = None
    is_one_pass: bool = False
    depth: int = 1
    num_nodes: int = 2
    kv_bytes_per_token: int = 0
    feature_bytes_per_token: int = 0
    is_second_target: bool = False
    is_depth_limit: bool = False
    card: str = ""

    def seconds(self, card: Card, tree: TreeGain, *, num_rows: int, num_tokens: int) -> float:
        """Seconds of all drafting in one step with this tree, after prefixes of `num_tokens`."""
        if self.forward is None or tree.depth == 0:
            return 0.0
        if self.is_one_pass:
            return self.forward.seconds(card, num_rows=num_rows, num_nodes=tree.depth, num_tokens=num_tokens)
        width = max(1, round((tree.num_nodes - 1) / tree.depth))
        return tree.depth * self.forward.seconds(card, num_rows=num_rows, num_nodes=width, num_tokens=num_tokens)


def draft_size(spec: str, target: ModelSize) -> DraftSize:
    """The size of the drafter that `NAME[:ARGUMENT]` names, for this target.

    Raises:
        ValueError: there is no such drafter or head, or the head was trained for another target.
    """
    if spec == "auto":
        spec = _best_drafter(target)
    name, _, argument = spec.partition(":")
    kind = KINDS.get(name)
    if name == "ngram":
        depth = int(argument) if argument.isdecimal() else 0
        return _with_shape(DraftSize(spec), KINDS[name].default_shape, depth=depth)
    if name == "truncated":
        L = target.kv_shape.num_layers
        if not argument.isdecimal() or not 1 <= int(argument) < L:
            raise ValueError(f"drafter {spec!r} is out of range: {target.name} has {L} layers, as in truncated:{L // 2}")
        forward = target.first_layers(int(argument))
        assert forward.kv_shape is not None
        kv_bytes = forward.kv_shape.bytes_per_token(target.dtype)
        size = DraftSize(spec, forward=forward, kv_bytes_per_token=kv_bytes, is_second_target=True)
        return _with_shape(size, KINDS[name].default_shape)
    if name == "draft_model" and argument and not is_head(argument):
        model = ModelSize.of(argument)
        kv_bytes = model.kv_shape.bytes_per_token(model.dtype)
        size = DraftSize(spec, model.weight_bytes, model.forward, kv_bytes_per_token=kv_bytes, is_second_target=True)
        return _with_shape(size, KINDS[name].default_shape)
    if kind is None or not kind.heads:
        heads = ", ".join(kind.name for kind in KINDS.values() if kind.heads)
        raise ValueError(f"drafter {spec!r} is not known: use ngram, truncated:LAYERS, or {heads}:PATH_OR_ID")
    return _head_size(spec, _head_folder(name, argument, target), target)


def _with_shape(size: DraftSize, default: DefaultShape | None, *, depth: int = 0) -> DraftSize:
    """The size with the depth and nodes that its kind has by default on a GPU; `depth` replaces the depth."""
    assert default is not None
    shape = default.on("cuda")
    depth = depth or shape.num_draft_tokens
    return replace(size, depth=depth, num_nodes=depth + 1 if shape.width == 1 else shape.num_nodes)


def _best_drafter(target: ModelSize) -> str:
    """What `auto` means for a target of this shape."""
    for drafter in BEST:
        try:
            _head_folder(drafter, "", target)
        except ValueError:
            continue
        return drafter
    return "ngram"


def _head_folder(drafter: str, source: str, target: ModelSize) -> Path:
    if source:
        return find_head(source, patterns=(CONFIG_NAME, "README.md"))
    for folder in shipped_heads():
        record = read_config(folder)
        if record["head_type"] in KINDS[drafter].head_types and not _misfits(record["target"], target):
            return folder
    raise ValueError(f"no shipped {drafter} head has the shape of {target.name}: name one as {drafter}:PATH_OR_HUB_ID")


def _misfits(record: dict[str, Any], target: ModelSize) -> str:
    """How a head's target differs from this one, in words. Loading the head compares the weights' fingerprints."""
    text = target.config.get_text_config()
    ours = {"hidden_size": text.hidden_size, "num_layers": target.kv_shape.num_layers}
    return ", ".join(f"{name} {record[name]} for {value}" for name, value in ours.items() if record[name] != value)


def _head_size(spec: str, folder: Path, target: ModelSize) -> DraftSize:
    record = read_config(folder)
    drafter, head_type = spec.partition(":")[0], record["head_type"]
    allowed = KINDS[drafter].head_types
    if head_type not in allowed:
        raise ValueError(f"{folder} is a {head_type} head: drafter {drafter} serves {' and '.join(allowed)}")
    if misfit := _misfits(record["target"], target):
        raise ValueError(f"{folder} was trained for {record['target']['name']}, and not for {target.name} ({misfit})")
    with torch.device("meta"):
        head = HEADS[head_type](HEADS[head_type].config_class.from_dict(record))
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    itemsize = target.dtype.itemsize
    size = DraftSize(spec, head.num_parameters * itemsize, card=text)
    if isinstance(head, MedusaHead):
        return _medusa_size(size, head, target)
    if isinstance(head, EagleHead | Eagle1Head):
        return _eagle_size(size, head, target)
    num_kept = len(head.features) * head.config.target.hidden_size
    size = replace(size, feature_bytes_per_token=num_kept * itemsize)
    if not isinstance(head, EarlyExitHead):
        raise ValueError(
            f"{folder} is a {head_type} head, whose cost selfspec plan does not know yet: leave the drafter out"
        )
    return _early_exit_size(size, head, target)


def _medusa_size(size: DraftSize, head: MedusaHead, target: ModelSize) -> DraftSize:
    config = head.config
    forward = PassSize(_with_output(head, target, has_own=config.has_output_layer), target.dtype.itemsize)
    size = replace(size, forward=forward, is_one_pass=True, is_depth_limit=True)
    return _with_shape(size, KINDS["medusa"].default_shape, depth=config.num_heads)


def _eagle_size(size: DraftSize, head: EagleHead | Eagle1Head, target: ModelSize) -> DraftSize:
    config = head.config
    shape = KVShape(1, config.num_kv_heads, config.head_dim, config.head_dim)
    num_parameters = _with_output(head, target, has_own=isinstance(head, EagleHead))
    if isinstance(head, EagleHead) and not head.config.has_lm_head:
        # It drafts with a copy of some rows of the target's LM head.
        num_copied = head.config.draft_vocab_size * config.target.hidden_size
        num_parameters += num_copied
        size = replace(size, weight_bytes=size.weight_bytes + num_copied * target.dtype.itemsize)
    size = _with_shape(size, KINDS["eagle"].default_shape)
    return _with_layers(size, target, shape, num_layers=1, num_parameters=num_parameters, num_heads=config.num_heads)


def _early_exit_size(size: DraftSize, head: EarlyExitHead, target: ModelSize) -> DraftSize:
    config = head.config
    num_own_layers = len(config.blocks) + (config.exit_layer if config.lora_rank else 0)
    shape = replace(target.kv_shape, num_layers=num_own_layers)
    borrowed = target.first_layers(config.exit_layer).num_parameters
    if config.lora_rank:
        # Its first layers are copies of the target's with the adapter merged.
        num_copied = borrowed - target.num_output_parameters
        size = replace(size, weight_bytes=size.weight_bytes + num_copied * target.dtype.itemsize)
    is_second_target = not head.features
    size = replace(size, is_second_target=is_second_target)
    size = _with_shape(size, STUDENT_SHAPE if is_second_target else KINDS["early_exit"].default_shape)
    return _with_layers(
        size,
        target,
        shape,
        num_layers=config.exit_layer + len(config.blocks),
        num_parameters=head.num_parameters + borrowed,
        num_heads=target.forward.num_heads,
    )


def _with_layers(
    size: DraftSize, target: ModelSize, shape: KVShape, *, num_layers: int, num_parameters: int, num_heads: int
) -> DraftSize:
    """The size with a pass of `num_layers` layers, and with the KV cache of those whose keys are the drafter's own."""
    itemsize = target.dtype.itemsize
    forward = PassSize(
        num_parameters, itemsize, num_layers=num_layers, num_heads=num_heads, kv_shape=shape, bytes_per_value=itemsize
    )
    return replace(size, forward=forward, kv_bytes_per_token=shape.bytes_per_token(target.dtype))


def _with_output(head: DraftHead, target: ModelSize, *, has_own: bool) -> int:
    """Parameters that a pass of a head reads: its own, and the target's LM head if it has none."""
    return head.num_parameters + (0 if has_own else target.num_output_parameters)


def kv_shape_of(config: PretrainedConfig) -> KVShape:
    """What the KV cache stores of one token, by the configuration alone. A `Target` learns it from the model itself."""
    text = config.get_text_config()
    num_heads = text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):
        # Latent attention is cached after its expansion (https://arxiv.org/abs/2405.04434).
        return KVShape(text.num_hidden_layers, num_heads, text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    return KVShape(text.num_hidden_layers, getattr(text, "num_key_value_heads", None) or num_heads, head_dim, head_dim)


def _num_linear(model: nn.Module) -> int:
    """How many weights loading quantises: those of linear layers, except the LM head."""
    output = model.get_output_embeddings()  # type: ignore[operator]
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not output]
    return sum(layer.weight.numel() for layer in layers)


def stored_bytes(source: str | Path, revision: str | None, itemsize: int) -> int | None:
    """Bytes of a checkpoint's weights once loaded, from its safetensors headers; None if these cannot be read.

    Args:
        itemsize: bytes of a floating-point weight as it is served; quantised weights stay as they are stored.
    """
    try:
        if Path(source).is_dir():
            metadata = get_local_safetensors_metadata(source)
        else:
            metadata = get_safetensors_metadata(str(source), revision=revision)
    except Exception as error:
        # Another format, a damaged file or no network. The configuration says enough without the headers.
        logger.info("%s: no safetensors header to read (%s)", source, error)
        return None
    tensors = [tensor for file in metadata.files_metadata.values() for tensor in file.tensors.values()]
    return sum(
        tensor.parameter_count * itemsize
        if tensor.dtype in FLOAT_DTYPES
        else tensor.data_offsets[1] - tensor.data_offsets[0]
        for tensor in tensors
    )


def _first(config: Any, *names: str) -> int:
    """The first of these fields that a configuration has, because model families name the same thing differently."""
    return next(value for name in names if (value := getattr(config, name, None)))
