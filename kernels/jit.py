"""Triton, if it is installed. Without it, kernel files can still be imported, and their public functions use the twins."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

# CPU builds of torch come without Triton.
triton: Any = import_module("triton") if find_spec("triton") else None
tl: Any = import_module("triton.language") if triton else None
TensorDescriptor: Any = import_module("triton.tools.tensor_descriptor").TensorDescriptor if triton else None


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit(**options)`. Without Triton, the decorator changes nothing and nobody calls the function."""
    return (lambda function: function) if triton is None else triton.jit(**options)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use for what it loads."""
    if device.type != "cuda":
        return 1 << 30
    # The compiler needs some bytes itself.
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"] - 2048


def is_compiled_for(tensor: torch.Tensor) -> bool:
    """Whether public functions run their kernels, rather than the twins, on the device of `tensor` (of any shape)."""
    return triton is not None and tensor.is_cuda
