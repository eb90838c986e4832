"""Names of devices. Apart from loading, because a device that is not there can be told before transformers is imported."""

from __future__ import annotations

import torch


def resolve_device(device: str | torch.device) -> torch.device:
    """The device that a name means; `auto` is the first CUDA device, or else the CPU.

    Raises:
        ValueError: there is no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not known: use auto, cpu, cuda or cuda:N") from error
    num_gpus = torch.cuda.device_count()
    if resolved.type == "cuda" and (resolved.index or 0) >= num_gpus:
        raise ValueError(f"device={device!r} was asked for, and torch sees {num_gpus} CUDA devices: use another")
    return resolved
