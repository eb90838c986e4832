"""What is checked on every model before it may prefill and verify.

Invariant: a model that passes gives the same logits in a tree pass as in its plain forward.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from selfspec.cache.blocks import CacheRow
from selfspec.cache.kv import KVShape
from selfspec.model.attention import ATTENTION_NAME, TreePass, register
from selfspec.model.cpu_layer import speed_up_layers
from selfspec.model.fused_layer import fuse_layers
from selfspec.model.layers import decoder_layers
from selfspec.model.load import check_family
from selfspec.tree import from_parents

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from selfspec.model.target import Target

logger = logging.getLogger(__name__)


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model whose family or device cannot be served.

    Raises:
        ValueError: one sentence that names the family or the devices.
    """
    check_family(model.config)
    kind = model.config.model_type
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{kind} keeps a recurrent state instead of a KV cache: selfspec serves attention models only")
    if not model._can_set_attn_implementation():
        raise ValueError(f"{kind} does not follow transformers' attention interface, so its attention cannot be served")
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise ValueError(
            f"the model's weights are on {' and '.join(devices)}: selfspec keeps one KV cache on one device: "
            'load them there whole, with device_map={"": DEVICE} or none'
        )


@torch.inference_mode()
def adopt(target: Target) -> tuple[KVShape, int]:
    """Switch a target's attention to selfspec's, and check a tree pass against the model's plain forward.

    Layers of the common kind also get fused passes, if those give the same logits.

    Returns:
        What one token stores, and the number of logits V.

    Raises:
        ValueError: the attention cannot be served; the sentence names the family.
    """
    model, kind, num_layers = target.model, target.model.config.model_type, target.config.num_hidden_layers
    limit = min(target.config.vocab_size, 64)
    tokens = (torch.arange(6, device=target.device) * 7 + 3) % limit
    # Long enough that a layer without positions differs from one with them.
    prefix = (torch.arange(min(96, target.context_length // 2), device=target.device) * 11 + 5) % limit
    # Eager attention is the modeling file's own formula; older transformers' sdpa leaves out soft-caps.
    model.set_attn_implementation("eager")
    texts = (tokens, torch.cat([prefix, tokens[3:]]))
    plain, plain_far = (model(input_ids=ids[None], use_cache=False).logits[0, -3:].float() for ids in texts)
    register()
    model.set_attn_implementation(ATTENTION_NAME)
    probe = _probe(target, tokens)
    shapes = set(probe.shapes.values())
    if sorted(probe.shapes) != list(range(num_layers)):
        raise ValueError(f"{kind} {_odd_layers(probe, num_layers)}, so it cannot be served")
    if len(shapes) != 1:
        raise ValueError(f"{kind} has key-value states of several shapes ({sorted(shapes)}), which selfspec does not serve")
    target.kv_shape = KVShape(num_layers, *shapes.pop())
    _check_windows(target, probe)

    # The root, its child, a sibling that no other node may see, and the child's child.
    nodes = torch.stack([tokens[3], tokens[4], (tokens[5] + 1) % limit, tokens[5]])[None]
    tree = from_parents(nodes, torch.tensor([[-1, 0, 0, 1]], device=target.device))

    def served(prefix: torch.Tensor) -> torch.Tensor:
        cache, row = target.new_cache(), CacheRow()
        target.prefill(prefix, row, cache)
        return target.verify(tree, [row], cache).logits[0, [0, 1, 3]].float()

    own = served(prefix)
    gap = max(_gap(served(tokens[:3]), plain), _gap(own, plain_far))
    # Float32 agrees to about 1e-6. Low precision rounds differently along two paths, and experts may switch.
    if not gap < (1e-3 if target.dtype == torch.float32 else 0.2):
        raise ValueError(
            f"{kind} gives different logits in a tree pass and in a plain one (relative gap {gap:.2g}): it cannot be served"
        )
    layers = list(decoder_layers(model)[1])
    if (undo := fuse_layers(layers, probe.options) or speed_up_layers(layers, probe.options)) is not None:
        # Fused layers round at other places. How far this model lets rounding grow shows in the gap to `plain_far`.
        most = 1e-4 if target.dtype == torch.float32 else max(0.02, 2 * _gap(own, plain_far))
        if not (gap := _gap(served(prefix), own)) < most:
            undo()
            logger.warning("%s: fused layers give other logits (relative gap %.2g), so its own layers run", kind, gap)
    return target.kv_shape, plain.shape[-1]


def _odd_layers(probe: TreePass, num_layers: int) -> str:
    """What is odd about a model whose attention was not called once for each layer that its configuration counts."""
    num_seen = len(probe.shapes)
    if probe.num_calls > num_seen > 0:
        return f"attends {probe.num_calls} times for each token in {num_seen} layers, which it runs again and again"
    if num_seen > num_layers:
        return f"has {num_seen} layers of attention, although its configuration counts {num_layers}"
    return f"routes {num_seen} of {num_layers} layers through the attention interface"


def _check_windows(target: Target, probe: TreePass) -> None:
    """Refuse a family that keeps its sliding window to the mask it builds: selfspec builds masks of its own.

    Raises:
        ValueError: the sentence names the family.
    """
    config = target.config
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", None) is False or window >= target.context_length:
        return
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * len(probe.options)
    for layer, options in probe.options.items():
        if types[layer] == "sliding_attention" and options.sliding_window is None:
            raise ValueError(
                f"{config.model_type} applies its sliding window of {window} tokens in its mask alone, which selfspec does "
                "not read: it cannot be served with this window"
            )


def fixed_context(config: PretrainedConfig) -> tuple[int | None, str]:
    """The longest context within which a model's rotary table stays the same, and the kind of table; None for any length.

    `longrope` and `dynamic` choose the table by the longest text in a pass, so beyond that length a row's tokens would
    depend on its neighbours.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for table in tables:
        kind = table.get("rope_type")
        if kind in ("longrope", "dynamic"):
            original = table.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            return int(original or config.max_position_embeddings), kind
    return None, ""


def _probe(target: Target, tokens: torch.Tensor) -> TreePass:
    """What each layer passes to the attention function, from a pass over tokens [T]."""
    probe = TreePass()
    target.model(
        input_ids=tokens[None],
        position_ids=torch.arange(len(tokens), device=target.device)[None],
        attention_mask=target.mask,
        use_cache=False,
        tree_pass=probe,
    )
    return probe


def _gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The norm of the difference of two tensors of one shape, relative to the second's norm."""
    return float((ours - theirs).norm() / theirs.norm())
