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
