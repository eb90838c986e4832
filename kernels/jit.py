# mypy: allow-untyped-defs
"""Triton where it is installed, else names that let kernel files be imported; their public functions then use the twins."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

# CPU builds of torch come without it.
triton: Any = import_module("triton") if find_spec("triton") else None
tl: Any = import_module("triton.language") if triton else None


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit(**options)`; without Triton the function itself, which nobody calls."""
    return (lambda function: function) if triton is None else triton.jit(**options)


def is_compiled_for(tensor: torch.Tensor) -> bool:
    """Whether a public function runs its kernel on the tensor's device, and not its twin."""
    return triton is not None and tensor.is_cuda


# Whether a kernel may be launched while the one before it ends (programmatic dependent launch, from Hopper on).
CAN_OVERLAP = True


def overlap(tensor: torch.Tensor) -> dict[str, bool]:
    """Launch options of a kernel that begins with `begin(OVERLAPS)`."""
    if CAN_OVERLAP and tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0):
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


@jit()
def begin(OVERLAPS: tl.constexpr):
    """Let the next kernel's programs be placed, and wait until the kernel before has written all its results."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
