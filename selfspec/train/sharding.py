"""A frozen target spread over the processes, for a target that does not fit on one device.

Every decoder layer is sharded with FSDP2 and gathered for its own forward. Embedding, final norm and LM head are whole on
every device, because losses and drafters call them directly. Gathering needs all processes: each must run the target the
same number of times, evaluation included.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoConfig

from selfspec.model.layers import decoder_layers
from selfspec.model.load import load_model, resolve_dtype
from selfspec.model.target import Target


def load_sharded(source: str, *, dtype: str, device: torch.device, num_processes: int, adapter: str | None = None) -> Target:
    """The target with its decoder layers sharded over all processes. Each process first reads it into host memory.

    Raises:
        ValueError: there is only one process, or `load_model` refuses the target.
    """
    if num_processes < 2:
        raise ValueError("shard_target needs several processes: start the recipe with accelerate launch --num_processes N")
    # Resolved for the device, because `auto` is float32 on the CPU, where the model is loaded first.
    resolved = resolve_dtype(dtype, AutoConfig.from_pretrained(source), device)
    model, tokenizer = load_model(source, dtype=resolved, device="cpu", adapter=adapter, use_packing=False)
    mesh = init_device_mesh(device.type, (num_processes,))
    for layer in decoder_layers(model)[1]:
        # Each layer is a root to FSDP, which keeps roots gathered unless told otherwise.
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        layer.register_forward_pre_hook(_gather, prepend=True)
    return Target(model.to(device), tokenizer, name=source, adapter=adapter)


def _gather(layer: nn.Module, args: object) -> None:
    """Gather a layer before FSDP's own hook would, and never in inference mode.

    Decoding runs in inference mode and training does not, and FSDP keeps one buffer for both.
    """
    assert isinstance(layer, FSDPModule)
    with torch.inference_mode(False), torch.no_grad():
        layer.unshard()
