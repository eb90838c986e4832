"""Early exit: the target's first layers, a few trained blocks and the target's LM head draft.

The hidden state entering layer E at position t, which verification needs anyway, goes through the blocks and a final norm
and predicts token t + 1. (https://arxiv.org/abs/2404.16710 exits early from the target itself. Its layers would have to be
trained for that, and the target is frozen here.) Blocks are decoder layers of the target's own kind and start as copies of
its layers. With `lora_rank` the first E layers are adapted too, by LoRA (https://arxiv.org/abs/2106.09685) through PEFT.
They then compute other keys and values than the target, so the draft needs its own cache.

With E = 0 only the target's embedding and LM head take part. This is a distilled draft model.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn

from selfspec.heads.base import DraftHead, HeadConfig
from selfspec.model.layers import Resume, decoder_layers, final_norm, new_layers, number_layers, with_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class EarlyExitConfig(HeadConfig):
    """Args:
    exit_layer: E, the number of the target's layers before the blocks.
    blocks: for each block, the layer of the target that it starts as a copy of.
    lora_rank, lora_alpha: LoRA on every linear layer of the first E layers; rank 0 means no LoRA.
    layer_config: the target's text config, from which transformers builds the blocks.
    """

    head_type: ClassVar[str] = "early_exit"
    exit_layer: int
    blocks: tuple[int, ...]
    lora_rank: int = 0
    lora_alpha: float = 32.0
    layer_config: dict[str, Any]

    def __post_init__(self) -> None:
        L = self.target.num_layers
        if not 1 <= self.exit_layer < L:
            raise ValueError(f"exit_layer={self.exit_layer}: {self.target.name} has {L} layers, so use 1 to {L - 1}")
        self._check_blocks()
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank={self.lora_rank}: use 0 (none) or a positive rank")

    def _check_blocks(self) -> None:
        L = self.target.num_layers
        if not all(0 <= index < L for index in self.blocks):
            raise ValueError(f"blocks={self.blocks}: {self.target.name} has layers 0 to {L - 1}")


@dataclass(frozen=True, kw_only=True)
class DistilledDraftConfig(EarlyExitConfig):
    """The config of a distilled draft, which has no layer of the target before the blocks."""

    head_type: ClassVar[str] = "draft_model"
    exit_layer: int = 0

    def __post_init__(self) -> None:
        if self.exit_layer or self.lora_rank or not self.blocks:
            raise ValueError("a distilled draft has blocks, and neither an exit layer nor LoRA: early_exit heads have these")
        self._check_blocks()


class EarlyExitHead(DraftHead):
    """Blocks, a final norm and, with LoRA, adapters. `student` joins them to the target."""

    config_class = EarlyExitConfig
    config: EarlyExitConfig

    def __init__(self, config: EarlyExitConfig) -> None:
        super().__init__(config)
        self.features = () if config.lora_rank or not config.exit_layer else (config.exit_layer,)
        self.layers, self.norm = new_layers(config.layer_config, config.blocks)
        # The target's own weights are on the meta device until a target lends them, and are no part of the head's state.
        self.adapted = nn.ModuleList()
        if config.lora_rank:
            with torch.device("meta"):
                skeleton, _ = new_layers(config.layer_config, range(config.exit_layer))
            self.adapted = _with_lora(skeleton, config)
        self.register_state_dict_post_hook(_leave_out_borrowed)
        self.register_load_state_dict_post_hook(_expect_no_borrowed)

    @classmethod
    def for_target(cls, identity: Any, model: PreTrainedModel, **shape: Any) -> Self:
        """A new head of this shape, with blocks and norm copied from the target."""
        # Through JSON, as it will be read again: keys become strings.
        record = json.loads(model.config.get_text_config().to_json_string(use_diff=False))
        # The target's place on this machine is no part of its shape.
        record.pop("_name_or_path", None)
        head = cls(cls.config_class(target=identity, layer_config=record, **shape))
        head.initialise(model)
        return head

    def initialise(self, model: PreTrainedModel) -> None:
        layers = decoder_layers(model)[1]
        for block, index in zip(self.layers, self.config.blocks, strict=True):
            block.load_state_dict(layers[index].state_dict())
        self.norm.load_state_dict(final_norm(model)[1].state_dict())

    def student(self, model: PreTrainedModel) -> PreTrainedModel:
        """The draft as a model: the layers before the blocks, the blocks, the head's norm and the target's LM head.

        Without LoRA its first layer is a `Resume`, to which the caller must give the hidden states entering layer E.
        """
        E, like = self.config.exit_layer, list(self.config.blocks)
        before: list[nn.Module] = []
        if self.adapted:
            self._borrow(model)
            before, like = list(self.adapted), [*range(E), *like]
        number_layers([*before, *self.layers])
        if E and not before:
            before, like = [Resume(decoder_layers(model)[1][E - 1])], [E - 1, *like]
        student = with_layers(model, [*before, *self.layers], like, self.norm)
        for module in [*self.layers.modules(), *self.adapted.modules()]:
            if getattr(module, "config", None) is not None:
                module.config = student.config.get_text_config()
        return student

    def merged(self, model: PreTrainedModel) -> PreTrainedModel:
        """`student` with the LoRA adapters merged into copies of the layers, an ordinary model for serving."""
        twin = copy.deepcopy(self)
        student = twin.student(model)
        twin.adapted = nn.ModuleList(_merge(copy.deepcopy(layer)) for layer in twin.adapted)
        stack = decoder_layers(student)[1]
        for index, layer in enumerate(twin.adapted):
            stack[index] = layer
        return student

    def _borrow(self, model: PreTrainedModel) -> None:
        """Let the adapted layers share the target's weights, without a copy."""
        layers = decoder_layers(model)[1]
        for adapted, layer in zip(self.adapted, layers, strict=False):
            for name, module in adapted.named_modules():
                if name.startswith("lora_") or ".lora_" in name:
                    continue
                source = layer.get_submodule(name.replace(".base_layer", ""))
                for key, value in list(module.named_parameters(recurse=False)):
                    if value.is_meta:
                        setattr(module, key, nn.Parameter(getattr(source, key).detach(), requires_grad=False))
                for key, value in list(module.named_buffers(recurse=False)):
                    if value.is_meta:
                        setattr(module, key, getattr(source, key))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        return super()._apply(lambda tensor: tensor if tensor.is_meta else fn(tensor), recurse)


class DistilledDraft(EarlyExitHead):
    """A draft model of a few layers with the target's embedding and LM head."""

    config_class = DistilledDraftConfig


def _is_borrowed(name: str) -> bool:
    return re.search(r"(^|\.)adapted\.", name) is not None and ".lora_" not in name


def _leave_out_borrowed(head: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: Any) -> None:
    for name in [name for name in state if _is_borrowed(name)]:
        del state[name]


def _expect_no_borrowed(head: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [name for name in keys.missing_keys if not _is_borrowed(name)]


def _with_lora(layers: nn.ModuleList, config: EarlyExitConfig) -> nn.ModuleList:
    """Add LoRA to every linear layer. Its matrices are on the CPU, and B is zero, so the layers start as the target's."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("an early-exit head with LoRA needs peft: pip install 'selfspec[train]'") from error
    names = sorted({name.rsplit(".", 1)[-1] for name, module in layers.named_modules() if type(module) is nn.Linear})
    if not names:
        raise ValueError(f"{config.target.model_type} has no plain linear layers for LoRA: use lora_rank=0")
    lora = LoraConfig(r=config.lora_rank, lora_alpha=int(config.lora_alpha), target_modules=names, lora_dropout=0.0)
    inject_adapter_in_model(lora, layers)
    for name, module in layers.named_modules():
        if type(module) is nn.Linear and ".lora_" in name:
            module.to_empty(device="cpu")
            nn.init.zeros_(module.weight) if ".lora_B" in name else nn.init.kaiming_uniform_(module.weight, a=5**0.5)
            module.requires_grad_(True)
    for name, parameter in layers.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return layers


def _merge(layer: nn.Module) -> nn.Module:
    """Replace every LoRA layer within `layer`, in place, by a linear layer with the adapter added to its weight."""
    from peft.tuners.lora import LoraLayer

    for module in list(layer.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LoraLayer):
                child.merge()
                setattr(module, name, child.get_base_layer())
    return layer.requires_grad_(False)
