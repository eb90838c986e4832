"""Stacks of decoder layers cut from, and put together like, a transformers model, without a change to that model.

Copies are shallow: along the path from the model to its stack of layers everything is cloned, and shared elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Module = TypeVar("Module", bound=nn.Module)
# What a module keeps its hooks in.
HOOK_DICTS = tuple(name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict))


class Resume(nn.Module):
    """Stands in for a model's first layers: gives back the hidden states they had computed, whatever comes in.

    The states come as the keyword argument `resume_from` of the model's forward, which modeling files pass down.

    Args:
        layer: one of those it stands for; the model's forward may ask for its type.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, *args: Any, resume_from: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return resume_from


def decoder_layers(model: PreTrainedModel) -> tuple[list[str], nn.ModuleList]:
    """The attribute path to the stack of decoder layers, and the stack.

    A model of several towers has its text in the one that transformers calls its decoder.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder()
    inside = {id(module) for module in decoder.modules()} if isinstance(decoder, nn.Module) else set()
    stacks = [
        (name.split("."), module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    for name, module in stacks:
        if id(module) in inside:
            return name, module
    if stacks:
        return stacks[0]
    raise ValueError(f"{model.config.model_type}: no stack of {num_layers} decoder layers was found")


def final_norm(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """The norm behind the last layer and its name: the stack's last sibling that has a vector for weight."""
    path, _ = decoder_layers(model)
    parent = model.get_submodule(".".join(path[:-1]))
    norms = [(name, child) for name, child in parent.named_children() if _is_norm(child)]
    if not norms:
        raise ValueError(f"{model.config.model_type}: no norm was found behind the decoder layers")
    return norms[-1]


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 1


def private_copy(module: Module) -> Module:
    """A module of its own whose parameters and buffers share the given one's memory.

    What is done to the copy (moving it, replacing its layers) leaves the given module as it is; writing into its tensors
    would not.
    """
    shared: dict[int, Any] = {id(each): nn.Parameter(each.detach(), requires_grad=False) for each in module.parameters()}
    shared |= {id(each): each.detach() for each in module.buffers()}
    return copy.deepcopy(module, shared)


def with_layers(
    model: PreTrainedModel, layers: Sequence[nn.Module], like: Sequence[int], norm: nn.Module | None = None
) -> PreTrainedModel:
    """The model with another stack, and perhaps another final norm; embedding, LM head and the rest are shared.

    Args:
        like: for each of `layers`, the layer of `model` whose type (full or sliding attention) it has.
    """
    path, _ = decoder_layers(model)
    config = copy.deepcopy(model.config)
    text_config = config.get_text_config()
    types = getattr(text_config, "layer_types", None)
    text_config.num_hidden_layers = len(layers)
    if types:
        text_config.layer_types = [types[index] for index in like]

    def clone(module: Any) -> Any:
        twin = copy.copy(module)
        # Dicts of its own: a hook on a twin is no hook on the model.
        for name in ("_modules", "_parameters", "_buffers", *HOOK_DICTS):
            twin.__dict__[name] = copy.copy(module.__dict__[name])
        if hasattr(twin, "config"):
            twin.config = text_config
        return twin

    top = clone(model)
    top.config = config
    node = top
    for name in path[:-1]:
        setattr(node, name, clone(node.get_submodule(name)))
        node = node.get_submodule(name)
    setattr(node, path[-1], nn.ModuleList(layers))
    if norm is not None:
        setattr(node, final_norm(model)[0], norm)
    return top


def new_layers(record: dict[str, Any], like: Sequence[int]) -> tuple[nn.ModuleList, nn.Module]:
    """Decoder layers, and a final norm, with the shapes of a model's; their weights are yet to be filled in.

    Args:
        record: `config.to_dict()` of the model's text config.
        like: for each new layer, the model's layer that it has the kind of (dense or experts, full or sliding attention).
    """
    config = AutoConfig.for_model(**record)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    kinds = decoder_layers(skeleton)[1]
    layers = nn.ModuleList(type(kinds[index])(config, layer_idx=index) for index in like)
    # On the meta device only if the caller is there, too.
    device = torch.empty(0).device
    return layers, copy.deepcopy(final_norm(skeleton)[1]).to_empty(device=device)


def number_layers(layers: Sequence[nn.Module]) -> None:
    """Tell every layer its place, which is where it keeps its keys and values in the cache."""
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if getattr(module, "layer_idx", None) is not None:
                setattr(module, "layer_idx", index)  # noqa: B010  (a module's attribute has no type)
