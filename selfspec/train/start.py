"""Weights to start from: those of a head that is trained already, so that little data is enough to fit it to new traffic."""

from __future__ import annotations

from pathlib import Path

import torch

from selfspec.drafters.names import HEADS
from selfspec.heads.base import DraftHead, find_head, read_config

# Not of a head's shape. What transformers writes of a layer differs between its versions, and the weights must fit anyway.
IGNORED = ("selfspec_version", "target", "chat_template_kwargs", "layer_config")


def start_from(head: DraftHead, source: str | Path) -> None:
    """Give a new head the weights of another one of the same kind and shape, whose target has the same fingerprint.

    Raises:
        ValueError: there is no such head, or it is of another kind, shape or target; the sentence says which.
    """
    record = read_config(find_head(source), source)
    ours = head.config.head_type
    if record["head_type"] != ours:
        raise ValueError(
            f"init_head={source} is of type {record['head_type']}, and this run trains heads of type {ours}: name another"
        )
    start = HEADS[ours].from_pretrained(source, dtype=torch.float32)
    start.config.target.check(head.config.target)
    before, now = start.config.to_dict(), head.config.to_dict()
    for name, value in now.items():
        if name not in IGNORED and before[name] != value:
            raise ValueError(f"init_head={source} has {name} {before[name]}, and this run {value}: give the run its shape")
    head.load_state_dict(start.state_dict())
