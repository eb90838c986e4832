"""EAGLE-1 and EAGLE-2 checkpoints, in both directions. They differ in how they grow trees, and have the same weights."""

from __future__ import annotations

import torch

from selfspec.heads.base import TargetIdentity
from selfspec.heads.eagle import Eagle1Config, Eagle1Head
from selfspec.interop.commands import serve_command
from selfspec.interop.facts import EAGLE1
from selfspec.interop.files import Checkpoint, Export, fill, is_same_weight, rename
from selfspec.interop.layer import read_layer, take_embedding, with_all_biases, without_zero_biases, write_layer
from selfspec.model.target import Target

LAYER = "layers.0."
ALIASES = {r"^model\.": ""}


def is_eagle1(checkpoint: Checkpoint) -> bool:
    names = {rename(name, ALIASES) for name in checkpoint.tensors}
    return {"fc.weight", f"{LAYER}self_attn.q_proj.weight"} <= names and f"{LAYER}hidden_norm.weight" not in names


def read_eagle1(checkpoint: Checkpoint, target: Target, identity: TargetIdentity) -> Eagle1Head:
    """Read the head in a checkpoint of the original repository, vLLM or SGLang."""
    checkpoint = without_zero_biases(checkpoint.renamed(ALIASES))
    state = checkpoint.tensors
    shape = read_layer(checkpoint.config, LAYER, checkpoint, identity)
    take_embedding(state, checkpoint, target)
    lm_head = state.pop("lm_head.weight", None)
    if lm_head is not None and not is_same_weight(target.model.get_output_embeddings().weight, lm_head):
        raise checkpoint.refuse(f"lm_head.weight is not {target.name}'s, but EAGLE-1 drafts with its target's LM head")
    head = Eagle1Head(Eagle1Config(target=identity, **shape))
    fill(head, state, checkpoint)
    return head


def write_eagle1(head: Eagle1Head, target: Target, dialect: str, directory: str) -> Export:
    """Write the head for the dialect's engine, which takes the embedding and LM head from the target."""
    if dialect not in EAGLE1:
        raise ValueError(f"{dialect} has no EAGLE-1 heads: export to {' or '.join(EAGLE1)}")
    facts, config = EAGLE1[dialect], head.config
    if config.has_qk_norm or (config.has_fc_bias and not facts.reads_fc_bias):
        name = "has_qk_norm" if config.has_qk_norm else "has_fc_bias"
        raise ValueError(f"{dialect} cannot express this head: it has {name}")
    tensors = with_all_biases(head.state_dict(), LAYER)
    if facts.reads_fc_bias and "fc.bias" not in tensors:
        tensors["fc.bias"] = torch.zeros_like(head.fc.weight[:, 0])
    record = {"architectures": [facts.architecture], **write_layer(config, target, head.fc.weight.dtype)}
    return Export(record, tensors, [serve_command(dialect, "eagle", target.name, directory)])
