"""Load trained heads by path, by Hub id, or from the package. Invariant: a loaded head fits its target."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selfspec.drafters.names import HEADS, KINDS
from selfspec.drafters.specs import BEST
from selfspec.files import shipped_heads
from selfspec.heads.base import CONFIG_NAME, DraftHead, HeadConfig, TargetIdentity, find_head, read_config
from selfspec.model.adapter import adapter_hash
from selfspec.model.target import Target

logger = logging.getLogger(__name__)


def identity(target: Target) -> TargetIdentity:
    """What a head's config records about this target."""
    adapter: dict[str, str] = {}
    if target.adapter is not None:
        adapter = {"adapter": Path(target.adapter).name, "adapter_hash": adapter_hash(target.adapter)}
    return TargetIdentity.of(target.model, target.tokenizer, name=target.label, **adapter)


def load_head(source: str | Path | None, target: Target, *, drafter: str, revision: str | None = None) -> DraftHead:
    """A head that this drafter can serve, for this target.

    Args:
        source: folder or Hub id; None takes the shipped head whose fingerprint fits the target.

    Raises:
        ValueError: there is no head, or it is damaged, of another kind or for another target; the sentence says which.
    """
    # Before the head is read, because a target that was laid out for decoding makes a plain weight anew for this.
    ours = identity(target)
    directory = find_head(source or _shipped_head(drafter, target.label, ours), revision)
    head_type = read_config(directory, source)["head_type"]
    allowed = KINDS[drafter].head_types
    if head_type not in allowed:
        raise ValueError(f"{source} is a {head_type} head, and drafter {drafter} serves {' and '.join(allowed)} heads")
    head = HEADS[head_type].from_pretrained(source or directory, revision=revision, dtype=target.dtype)
    head.config.target.check(ours)
    for doubt in _doubts(head.config, target, ours):
        logger.warning("head %s: %s", directory.name, doubt)
    return head


def _doubts(config: HeadConfig, target: Target, ours: TargetIdentity) -> Iterator[str]:
    """Why fewer of a head's drafts may be accepted than its card says, though it fits the target, whose identity is `ours`.

    Yields one sentence for each reason.
    """
    theirs = config.target
    if theirs.adapter_hash != ours.adapter_hash and theirs.adapter is None:
        yield f"its card's acceptance was measured without adapter {target.adapter}; `selfspec verify-head` measures both"
    elif theirs.adapter_hash != ours.adapter_hash:
        yield (
            f"it was trained {theirs.adaptation}, and the target is loaded {ours.adaptation}, so fewer of its drafts "
            f"may be accepted: load the target with --adapter {theirs.adapter}"
        )
    trained = config.chat_template_kwargs
    if trained and trained != target.chat_template_kwargs:
        yield (
            "it was trained with other arguments of the chat template and drafts best with them: "
            f"--chat-template-kwargs '{json.dumps(trained)}'"
        )


def is_head(source: str | Path) -> bool:
    """True where a folder or Hub id holds a selfspec head and not a model. Only the config is fetched."""
    try:
        read_config(find_head(source, patterns=(CONFIG_NAME,)))
    except ValueError:
        return False
    return True


def shipped_head(drafter: str, target: Target) -> Path:
    """The folder of the shipped head that this drafter can serve and that fits the target.

    Raises:
        ValueError: no shipped head fits.
    """
    return _shipped_head(drafter, target.label, identity(target))


def _shipped_head(drafter: str, label: str, ours: TargetIdentity) -> Path:
    for directory, head_type in _fitting(ours):
        if head_type in KINDS[drafter].head_types:
            logger.info("drafter %s: the shipped head %s/%s", drafter, directory.parent.name, directory.name)
            return directory
    raise ValueError(f"no shipped {drafter} head fits {label}: name one as {drafter}:PATH_OR_HUB_ID, or train one")


def best_drafter(target: Target) -> str:
    """What `auto` means for this target: the first of `BEST` that has a shipped head, or else `ngram`."""
    head_types = {head_type for _, head_type in _fitting(identity(target))}
    for drafter in BEST:
        if head_types & set(KINDS[drafter].head_types):
            return drafter
    logger.info("drafter ngram: no shipped head fits %s", target.label)
    return "ngram"


def _fitting(ours: TargetIdentity) -> Iterator[tuple[Path, str]]:
    """The folders and types of the shipped heads that fit the target of this identity."""
    for directory in shipped_heads():
        record: dict[str, Any] = read_config(directory)
        config = HEADS[record["head_type"]].config_class.from_dict(record)
        try:
            config.target.check(ours)
        except ValueError:
            continue
        yield directory, record["head_type"]
