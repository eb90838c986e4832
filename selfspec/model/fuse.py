"""Swap a loaded model's layers in place for ones that run our kernels, for prefill, draft and verify on CUDA.

On a CPU `selfspec.model.packed_linear` does this. A decoding pass multiplies a handful of rows by every weight, and the
kernels read weights near the memory's speed. Every plain linear layer and every RMSNorm is swapped. Linear layers that read
the same input are computed as one. An MLP gated by SiLU runs its activation in one kernel. Routers, experts and other norms
stay as they are.

Invariant: a row's bits do not depend on the other rows. torch does not promise this, because it chooses a kernel by the
number of rows.

Parameters keep their names, objects and ties; those of merged layers become views of one weight. For inference only. The
model must not be moved or cast afterwards.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from selfspec.kernels.gated_activation import gated_silu
from selfspec.kernels.jit import is_compiled_for
from selfspec.kernels.linear import linear
from selfspec.kernels.rms_norm import Norm, rms_norm
from selfspec.model.shared_input import MERGED_NAMES, SharedInput

logger = logging.getLogger(__name__)

GATED_MLP_NAMES = {"gate_proj", "up_proj", "down_proj", "act_fn"}
# Allowed relative difference of a layer's output: the rounding of a sum, and in an MLP of the values between two sums.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
# How modeling files write RMSNorm; see `rms_norm_reference`.
RMS_NORM_RULES: tuple[dict[str, Any], ...] = ({"is_rounded_first": True}, {}, {"offset": 1.0})


class FusedLinear(nn.Module):
    """An `nn.Linear` with the same parameters, run by `kernels.linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class MergedWeight(SharedInput):
    """The weights of several linear layers in one tensor; each layer's own weight becomes a view of it."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__([linear.out_features for linear in linears])
        self.weight = _merge([linear.weight for linear in linears])
        self.bias = None if linears[0].bias is None else _merge([linear.bias for linear in linears])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class MergedLinear(FusedLinear):
    """One layer of a merged weight."""

    def __init__(self, linear: nn.Linear, merged: MergedWeight, index: int) -> None:
        super().__init__(linear)
        self.merged = merged
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.merged.take(x, self.index)


class FusedRMSNorm(nn.Module):
    """A modeling file's RMSNorm with the same weight, run by `kernels.rms_norm`."""

    def __init__(self, norm: Any, rule: dict[str, Any]) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = self.variance_epsilon = eps_of(norm)
        self.rule = rule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, **self.rule)


def norm_of(module: Any) -> Norm:
    """A fused norm in the form that other kernels take."""
    return Norm.of(module.weight, module.eps, **module.rule)


class FusedGatedMLP(nn.Module):
    """A modeling file's MLP, `down(silu(gate(x)) * up(x))`, with the same layers."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(gated_silu(self.gate_proj.merged(x)))


def can_fuse(model: nn.Module) -> bool:
    """True where the model is on one CUDA device that has the matrix instructions of the kernels."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or not is_compiled_for(next(model.parameters())):
        return False
    return torch.cuda.get_device_capability(devices.pop()) >= (8, 0)


@torch.no_grad()
def fuse(model: nn.Module) -> None:
    """Swap the layers of `model`, in place.

    The first layer of each kind and size is compared with the original on random input. A kind that differs by more than
    rounding stays as it is, and a warning is logged. Without CUDA the layers run the kernels' twins.
    """
    verdicts: dict[Hashable, bool] = {}
    rules: dict[Hashable, dict[str, Any] | None] = {}
    dtype = next(model.parameters()).dtype
    for parent in list(model.modules()):
        for names in MERGED_NAMES:
            children = [parent._modules.get(name) for name in names]
            if _can_merge(children):
                _swap(parent, names, _merge_layers, verdicts)
        for name, child in list(parent.named_children()):
            if _is_plain_linear(child):
                _swap(parent, [name], lambda olds: [FusedLinear(*olds)], verdicts)
            elif is_rms_norm(child):
                kind = (*_kind(child), eps_of(child))
                if kind not in rules:
                    rules[kind] = rms_norm_rule(child, dtype)
                    if rules[kind] is None:
                        _log_refusal(type(child).__name__)
                if (rule := rules[kind]) is not None:
                    setattr(parent, name, FusedRMSNorm(child, rule))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_gated_mlp(child):
                _swap(parent, [name], lambda olds: [FusedGatedMLP(*olds)], verdicts)


def _swap(
    parent: nn.Module,
    names: Sequence[str],
    build: Callable[[Sequence[Any]], Sequence[nn.Module]],
    verdicts: dict[Hashable, bool],
) -> None:
    """Replace the parent's children by what `build` makes of them, unless the outputs of their kind differ."""
    olds = [parent.get_submodule(name) for name in names]
    kind = tuple(_kind(old) for old in olds)
    if not verdicts.get(kind, True):
        return
    news = build(olds)
    if kind not in verdicts:
        x = _random(3, next(olds[0].parameters()))
        pairs = [(new(x), old(x)) for new, old in zip(news, olds, strict=True)]
        is_right = all(_is_close(ours, theirs) for ours, theirs in pairs)
        # An output of only zeros, as of a layer that passes its input on, says nothing about the next layer.
        if not is_right or all(theirs.any() for _, theirs in pairs):
            verdicts[kind] = is_right
        if not is_right:
            _log_refusal(f"{', '.join(names)} of {type(parent).__name__}")
            return
    for name, new in zip(names, news, strict=True):
        setattr(parent, name, new)


def _is_close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return bool((ours - theirs).float().norm() <= TOLERANCES[theirs.dtype] * theirs.float().norm())


def _log_refusal(what: str) -> None:
    logger.warning("%s: the kernel's output differs by more than rounding, so the original stays", what)


def _random(num_rows: int, like: torch.Tensor) -> torch.Tensor:
    """Random input [num_rows, in] for a layer with the parameter `like` [..., in]."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(num_rows, like.shape[-1], generator=generator, dtype=like.dtype, device=like.device)


def _kind(module: nn.Module) -> tuple[Hashable, ...]:
    return type(module), *((name, weight.shape, weight.dtype) for name, weight in module.named_parameters())


def _is_plain_linear(module: nn.Module | None) -> bool:
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    # A quantized weight is a tensor of another class.
    return type(module.weight.data) is torch.Tensor and module.weight.is_contiguous() and module.weight.dtype in TOLERANCES


def _can_merge(children: Sequence[nn.Module | None]) -> bool:
    linears = [child for child in children if isinstance(child, nn.Linear) and _is_plain_linear(child)]
    layouts = {(child.in_features, child.weight.dtype, child.weight.device, child.bias is None) for child in linears}
    return len(linears) == len(children) and len(layouts) == 1


def _merge_layers(linears: Sequence[Any]) -> Sequence[nn.Module]:
    merged = MergedWeight(linears)
    return [MergedLinear(linear, merged, index) for index, linear in enumerate(linears)]


def _merge(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    merged = torch.cat([parameter.data for parameter in parameters])
    for parameter, view in zip(parameters, merged.split([len(p) for p in parameters]), strict=True):
        parameter.data = view
    return merged


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module looks like an RMSNorm; `rms_norm_rule` tells."""
    weight = module._parameters.get("weight")
    is_named_so = type(module).__name__.endswith("RMSNorm") and not module._forward_hooks
    return is_named_so and weight is not None and weight.ndim == 1 and isinstance(eps_of(module), float)


def eps_of(norm: Any) -> Any:
    """A modeling file's RMSNorm's eps; None where it has none."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def rms_norm_rule(norm: nn.Module, dtype: torch.dtype) -> dict[str, Any] | None:
    """The rule that is nearest to this norm with random weights; None if none is near enough."""
    probe = copy.deepcopy(norm)
    assert isinstance(probe.weight, nn.Parameter)
    probe.weight.copy_(_random(1, probe.weight)[0])
    x = _random(4, probe.weight).to(dtype)
    # One row is so small that eps matters.
    x[0] *= 1e-3
    theirs = probe(x)
    ours = [FusedRMSNorm(probe, rule)(x) for rule in RMS_NORM_RULES]
    # Rules that differ only in the order of two roundings differ by one last place, so the sum of differences decides.
    best = min(range(len(ours)), key=lambda i: float((ours[i].float() - theirs.float()).abs().sum()))
    if _is_close(ours[best], theirs):
        return RMS_NORM_RULES[best]
    return None


def _is_gated_mlp(module: nn.Module) -> bool:
    if set(module._modules) != GATED_MLP_NAMES or module._parameters or module._forward_hooks:
        return False
    gate, up, activation = (module.get_submodule(name) for name in ("gate_proj", "up_proj", "act_fn"))
    is_merged = isinstance(gate, MergedLinear) and isinstance(up, MergedLinear) and gate.merged is up.merged
    x = torch.linspace(-3.0, 3.0, 7)
    return is_merged and torch.equal(activation(x), F.silu(x))
