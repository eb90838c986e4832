"""Medusa checkpoints, in both directions.

The original names are `HEAD.BLOCK.linear.weight` and, after the L blocks, `HEAD.L.weight` for an output layer of the head's
own (version 1). Without one, the head uses the target's LM head (version 2). vLLM's names are
`blocks.HEAD.layers.BLOCK.weight` and `lm_heads.HEAD.weight`. One exported folder serves both vLLM up to 0.32 and
text-generation-inference (TGI):

* vLLM drops biases unless `medusa_fc_bias` is true. It cannot share the target's LM head, and reads any key that contains
  "num" and "heads" as the number of heads.
* TGI requires the file name `medusa_lm_head.safetensors`, and a config without `architectures`.
"""

from __future__ import annotations

import logging
import re
import shlex
from typing import Any

import torch

from selfspec.heads.base import TargetIdentity
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.interop.commands import serve_command
from selfspec.interop.files import Checkpoint, Export, fill, is_same_weight, rename
from selfspec.model.target import Target

logger = logging.getLogger(__name__)

WEIGHTS_NAME = "medusa_lm_head.safetensors"

# Patterns for the names of other tools, and our names. `HEAD.L.weight` is an output layer: blocks have `linear` in theirs.
ALIASES = {
    r"^medusa_heads?\.": "",
    r"^blocks\.(\d+)\.layers\.(\d+)\.": r"heads.\1.\2.linear.",
    r"^lm_heads\.(\d+)\.": r"outputs.\1.",
    r"^(\d+)\.(\d+)\.linear\.": r"heads.\1.\2.linear.",
    r"^(\d+)\.\d+\.weight$": r"outputs.\1.weight",
}
HEAD_COUNTS = ("medusa_num_heads", "num_heads")
BLOCK = re.compile(r"heads\.(\d+)\.(\d+)\.linear\.weight$")


def is_medusa(checkpoint: Checkpoint) -> bool:
    return any(BLOCK.match(rename(name, ALIASES)) for name in checkpoint.tensors)


def read_medusa(checkpoint: Checkpoint, target: Target, identity: TargetIdentity) -> MedusaHead:
    """Read the heads in a checkpoint of the original repository, TGI or vLLM."""
    config = checkpoint.config
    if "token_map" in checkpoint.tensors or config.get("truncated_vocab_size") not in (None, config.get("vocab_size")):
        raise checkpoint.refuse(
            "it drafts a part of the vocabulary (token_map), but selfspec's Medusa heads draft all of it"
        )
    if any("embed_tokens." in name for name in checkpoint.tensors):
        raise checkpoint.refuse(
            "it is a whole model that was trained together with its Medusa heads, which fit that model alone: save the "
            "heads in a folder of their own, and name the model as their target"
        )
    checkpoint = checkpoint.renamed(ALIASES)
    state = checkpoint.tensors
    places = [tuple(map(int, match.groups())) for name in state if (match := BLOCK.match(name))]
    num_heads, num_blocks = (1 + max(numbers) for numbers in zip(*places, strict=True))
    counts = dict.fromkeys(HEAD_COUNTS, num_heads)
    counts |= dict.fromkeys(("medusa_num_layers", "num_hidden_layers"), num_blocks)
    for key, count in counts.items():
        written = config.get(key, count)
        if key in HEAD_COUNTS and isinstance(written, int) and written < count:
            # The config of a well-known checkpoint counts too few, and its own code overrules it.
            logger.warning(
                "%s: %s is %s in the config, but there are the weights of %d, which are all read",
                checkpoint.source,
                key,
                written,
                count,
            )
        elif written != count:
            raise checkpoint.refuse(f"{key} is {written} in the config, but there are the weights of {count}")
    if not config.get("medusa_fc_bias") and not any(name.endswith(".bias") for name in state):
        # By default vLLM's own heads have no biases.
        for i, j in places:
            state[f"heads.{i}.{j}.linear.bias"] = torch.zeros_like(state[f"heads.{i}.{j}.linear.weight"][:, 0])
    _drop_shared_output(state, checkpoint, target)
    has_output_layer = any(name.startswith("outputs.") for name in state)
    shape = {"num_heads": num_heads, "num_blocks": num_blocks, "has_output_layer": has_output_layer}
    head = MedusaHead(MedusaConfig(target=identity, **shape))
    fill(head, state, checkpoint)
    return head


def write_medusa(head: MedusaHead, target: Target, dialect: str, directory: str) -> Export:
    """Write a folder that both vLLM and TGI load, the same for every dialect."""
    config = head.config
    if config.has_root_input:
        raise ValueError("medusa cannot express this head: it has_root_input, but other engines' heads read no token")
    L, M = config.num_blocks, config.num_heads
    tensors: dict[str, torch.Tensor] = {}
    for name, value in head.state_dict().items():
        kind, rest = name.split(".", 1)
        if kind == "heads":
            tensors[rest] = value
        else:
            tensors[f"{rest.removesuffix('.weight')}.{L}.weight"] = value
    if not config.has_output_layer:
        # vLLM uses it as the LM head of all heads. TGI finds none for the second head, and uses the target's for every head.
        tensors[f"0.{L}.weight"] = (
            target.model.get_output_embeddings().weight.detach().to(next(iter(tensors.values())).dtype)
        )
    record: dict[str, Any] = {
        "model_type": "medusa",
        "base_model_name_or_path": target.name,
        "medusa_num_heads": M,
        "medusa_num_layers": L,
        "medusa_fc_bias": True,
        "original_lm_head": not config.has_output_layer,
        "hidden_size": config.target.hidden_size,
        "vocab_size": config.target.vocab_size,
        "version": "1" if config.has_output_layer else "2",
    }
    commands = [f"{serve_command('vllm', 'medusa', target.name, directory, M)}  # vLLM up to 0.32"]
    if L == 1 or config.has_output_layer:
        commands.append(f"text-generation-launcher --model-id {shlex.quote(directory)}  # TGI")
    return Export(record, tensors, commands, WEIGHTS_NAME)


def _drop_shared_output(state: dict[str, torch.Tensor], checkpoint: Checkpoint, target: Target) -> None:
    """If one output layer serves all heads, take it out of `state`. It must equal the target's LM head."""
    if not checkpoint.config.get("original_lm_head"):
        return
    shared = [name for name in ("lm_head.weight", "outputs.0.weight") if name in state]
    if len(shared) != 1:
        raise checkpoint.refuse("original_lm_head is true, but there is not just one LM head: lm_head.weight or 0.L.weight")
    if not is_same_weight(target.model.get_output_embeddings().weight, state.pop(shared[0])):
        raise checkpoint.refuse(f"{shared[0]} serves all heads and is not {target.name}'s LM head: name its own target")
