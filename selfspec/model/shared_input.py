"""Linear layers that read the same input, such as queries, keys and values, and are computed as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from selfspec.model.memory import Releases

# Sibling layers that read the same input.
MERGED_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class SharedInput:
    """The outputs of several layers, which one call computes.

    The first layer that is called with an input computes the output of all; the others return their slices if they are
    called with the same tensor object. Slices are dropped when they are taken, or when another input comes.

    Args:
        sizes: the number of outputs of each layer.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._input: torch.Tensor | None = None
        self._slices: dict[int, torch.Tensor] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of all layers side by side, [..., sum of sizes] from x [..., in]."""
        raise NotImplementedError

    def take(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Layer `index`'s output [..., out] for x [..., in], a slice of the merged output's last dimension."""
        if x is not self._input or index not in self._slices:
            self._input, self._slices = x, dict(enumerate(self(x).split(self.sizes, dim=-1)))
        out = self._slices.pop(index)
        if not self._slices:
            self._input = None
        return out


class MergedLayers(SharedInput):
    """Layers on a CPU whose weights are one layer's, `whole`, which may then have any form."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__([linear.out_features for linear in linears])
        self.holder = nn.ModuleDict({"whole": _joined(linears)})

    @property
    def whole(self) -> Any:
        return self.holder["whole"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.whole(x))


class MergedLayer(nn.Module):
    """One of several layers that are computed as one. `weight` gives its plain weight [out, in] back."""

    def __init__(self, merged: MergedLayers, index: int) -> None:
        super().__init__()
        self.merged = merged
        # Registered, so that whoever walks through the modules finds the weight.
        self.holder = merged.holder
        self.index = index
        self.in_features, self.out_features = merged.whole.in_features, merged.sizes[index]

    @property
    def weight(self) -> torch.Tensor:
        return self._part(self.merged.whole.weight)

    @property
    def bias(self) -> torch.Tensor | None:
        bias = self.merged.whole.bias
        return None if bias is None else self._part(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.merged.take(x, self.index)

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.split(self.merged.sizes)[self.index]


def merge_layers(model: nn.Module) -> None:
    """Merge every group of plain float32 layers on the CPU that read the same input, in place."""
    releases = Releases()
    # Not all modules, because a list of the layers themselves would keep every plain weight until the last is merged.
    parents = [module for module in model.modules() if any(set(names) <= set(module._modules) for names in MERGED_NAMES)]
    for parent in parents:
        for names in MERGED_NAMES:
            layers = [parent._modules.get(name) for name in names]
            linears: list[Any] = [layer for layer in layers if layer is not None and is_plain(layer)]
            if len(linears) < len(names) or len({(each.in_features, each.bias is None) for each in linears}) > 1:
                continue
            merged = MergedLayers(linears)
            for index, name in enumerate(names):
                setattr(parent, name, MergedLayer(merged, index))
            del layers, linears
            releases.note(merged.whole.weight.nbytes)


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a float32 `nn.Linear` on the CPU, without hooks."""
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    weight = module.weight.data
    return type(weight) is torch.Tensor and weight.device.type == "cpu" and weight.dtype == torch.float32


def _joined(linears: Sequence[nn.Linear]) -> nn.Linear:
    weight = torch.cat([linear.weight.detach() for linear in linears])
    layer = nn.Linear(weight.shape[1], len(weight), bias=linears[0].bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        layer.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
    return layer
