"""Trained heads by path, Hub id, or from those that ship with the package, checked against their target."""

from __future__ import annotations

import logging
from pathlib import Path

from selfspec.heads import HEADS
from selfspec.heads.base import DraftHead, TargetIdentity, find_head, read_config
from selfspec.target import Target

logger = logging.getLogger(__name__)

# heads/pretrained/TARGET/KIND, installed with the package.
SHIPPED = Path(__file__).parent / "heads" / "pretrained"


def identity(target: Target) -> TargetIdentity:
    """What a head's config records of this target."""
    return TargetIdentity.of(target.model, target.tokenizer, name=Path(target.name).name)


def load_head(source: str | Path, target: Target, *, kind: str, revision: str | None = None) -> DraftHead:
    """A head of the wanted kind for this target.

    Raises:
        ValueError: no head there, another kind, damaged weights, or a head of another target; the sentence names both sides.
    """
    head = HEADS[kind].from_pretrained(find_head(source, revision), dtype=target.dtype)
    head.config.target.check(identity(target))
    return head


def shipped_head(kind: str, target: Target) -> Path:
    """The folder of the shipped head of this kind that fits the target."""
    ours = identity(target)
    for directory in sorted(SHIPPED.glob(f"*/{kind}")):
        config = HEADS[kind].config_class.from_dict(read_config(directory))
        try:
            config.target.check(ours)
        except ValueError:
            continue
        logger.info("drafter %s: the shipped head %s/%s", kind, directory.parent.name, kind)
        return directory
    raise ValueError(f"no shipped {kind} head fits {target.name}: name one as {kind}:PATH_OR_HUB_ID, or train one")
