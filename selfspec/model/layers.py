"""Cut a transformers model's stack of decoder layers, for draft models and early exit, or build new layers like its own.

Invariant: the given model does not change. Copies are shallow: modules on the path from the model to its stack are cloned,
and everything else is shared.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Module = TypeVar("Module", bound=nn.Module)
# What a module keeps its hooks in.
HOOK_DICTS = tuple(name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict))


class Resume(nn.Module):
    """Replaces a model's first layers: returns the hidden states that they had computed, and ignores its input.

    The states [B, N, E] are the keyword argument `resume_from` of the model's forward, which modeling files pass down.

    Args:
        layer: one of the replaced layers, because the model's forward may ask for its type.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, *args: Any, resume_from: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return resume_from


def decoder_layers(model: PreTrainedModel) -> tuple[list[str], nn.ModuleList]:
    """The attribute path to the stack of decoder layers, and the stack.

    In a model of several towers it is the stack in transformers' `get_decoder()`, the text's.

    Raises:
        ValueError: no stack was found.
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
    """The name of the norm after the last layer, and the norm: the stack's last sibling whose weight is a vector.

    Raises:
        ValueError: no norm was found.
    """
    path, _ = decoder_layers(model)
    parent = model.get_submodule(".".join(path[:-1]))
    norms = [(name, child) for name, child in parent.named_children() if _is_norm(child)]
    if not norms:
        raise ValueError(f"{model.config.model_type}: no norm was found after the decoder layers")
    return norms[-1]


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 1


def private_copy(module: Module) -> Module:
    """A copy of a module whose parameters and buffers share the given one's memory.

    Moving the copy or replacing its layers does not change the given module; writing into its tensors does.
    """
    shared: dict[int, Any] = {id(each): nn.Parameter(each.detach(), requires_grad=False) for each in module.parameters()}
    shared |= {id(each): each.detach() for each in module.buffers()}
    return copy.deepcopy(module, shared)


def with_layers(
    model: PreTrainedModel, layers: Sequence[nn.Module], like: Sequence[int], norm: nn.Module | None = None
) -> PreTrainedModel:
    """The model with another stack, and another final norm if one is given; embedding, LM head and the rest are shared.

    Args:
        like: for each of `layers`, the index of the model's layer with the same type (full or sliding attention).

    Raises:
        ValueError: the model cannot run with another number of layers.
    """
    path, _ = decoder_layers(model)
    config = copy.deepcopy(model.config)
    text_config = config.get_text_config()
    if getattr(text_config, "hidden_size_per_layer_input", 0) and len(layers) != text_config.num_hidden_layers:
        raise ValueError(
            f"{config.model_type} computes an input for each of its {text_config.num_hidden_layers} layers at once, so "
            "fewer of them cannot run alone: use another drafter"
        )
    types = getattr(text_config, "layer_types", None)
    text_config.num_hidden_layers = len(layers)
    if types:
        text_config.layer_types = [types[index] for index in like]

    def clone(module: Any) -> Any:
        twin = copy.copy(module)
        # Copy the dicts, because a hook on the twin must not be a hook on the model.
        for name in ("_modules", "_parameters", "_buffers", *HOOK_DICTS):
            twin.__dict__[name] = copy.copy(module.__dict__[name])
        if hasattr(twin, "config"):
            # A wrapper around a text model has a configuration of its own.
            twin.config = config if module.config is model.config else text_config
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
    """New decoder layers and a final norm with the shapes of a model's, but without its weights.

    Args:
        record: `config.to_dict()` of the model's text config.
        like: for each new layer, the index of the model's layer of the same kind (dense or experts, full or sliding
            attention).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**record)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    kinds = decoder_layers(skeleton)[1]
    layers = nn.ModuleList(type(kinds[index])(config, layer_idx=index) for index in like)
    # The caller's default device, which may be meta.
    device = torch.empty(0).device
    return layers, copy.deepcopy(final_norm(skeleton)[1]).to_empty(device=device)


def number_layers(layers: Sequence[nn.Module]) -> None:
    """Give every layer its index, by which it stores its keys and values in the cache."""
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if getattr(module, "layer_idx", None) is not None:
                setattr(module, "layer_idx", index)  # noqa: B010  (a module's attribute has no type)
