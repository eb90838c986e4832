"""Import checkpoints of other tools as selfspec heads, and export selfspec heads for other engines.

A dialect is recognised by its tensors and its config, never by its path. If a tensor has no place in our head, the import
stops.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from selfspec.config import EXPORT_FORMATS as FORMATS
from selfspec.config import check_format
from selfspec.drafters.names import HEADS
from selfspec.drafters.shipped import identity
from selfspec.heads.base import DraftHead, find_head, read_config
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.heads.early_exit import DistilledDraft
from selfspec.heads.medusa import MedusaHead
from selfspec.interop.draft_model import check_draft_model, is_draft_model, write_draft_model
from selfspec.interop.eagle1 import is_eagle1, read_eagle1, write_eagle1
from selfspec.interop.eagle3 import Conventions, is_eagle3, read_eagle3, write_eagle3
from selfspec.interop.files import Export, listed, read_checkpoint
from selfspec.interop.kinds import check_kind
from selfspec.interop.medusa import is_medusa, read_medusa, write_medusa
from selfspec.model.target import Target

# Writers of heads that keep their form, each with the formats it takes. A distilled draft is written as a model instead.
WRITERS: dict[type[DraftHead], tuple[tuple[str, ...], Callable[[Any, Target, str, str], Export]]] = {
    MedusaHead: (("medusa", "vllm"), write_medusa),
    EagleHead: (("vllm", "sglang", "speculators"), write_eagle3),
    Eagle1Head: (FORMATS, write_eagle1),
}


def import_head(
    source: str, target: Target, conventions: Conventions | None = None, *, revision: str | None = None
) -> DraftHead | None:
    """Read the head in a foreign checkpoint, for this target. None for a draft model, because it needs no import.

    Raises:
        ValueError: the dialect is unknown, a tensor is damaged, missing or left over, or the head is another target's.
    """
    checkpoint, ours = read_checkpoint(source, revision), identity(target)
    if "head_type" in checkpoint.config:
        raise checkpoint.refuse("this is a selfspec head already: name it as the drafter")
    check_kind(checkpoint)
    if is_medusa(checkpoint):
        return read_medusa(checkpoint, target, ours)
    if is_eagle3(checkpoint):
        return read_eagle3(checkpoint, target, ours, conventions or Conventions())
    if is_eagle1(checkpoint):
        return read_eagle1(checkpoint, target, ours)
    if is_draft_model(checkpoint):
        check_draft_model(source, target)
        return None
    some = ", ".join(sorted(checkpoint.tensors)[:3])
    raise checkpoint.refuse(f"it holds no Medusa heads, EAGLE heads or model that selfspec knows; its tensors are {some} …")


def export_head(source: str, target: Target, engine: str, directory: Path) -> list[str]:
    """Write a selfspec head for another engine. Returns the commands that serve it there.

    Raises:
        ValueError: the format cannot express the head (the message says why), or the head is another target's.
    """
    check_format(engine)
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty: name a new directory")
    head = load_as_stored(source)
    head.config.target.check(identity(target))
    if isinstance(head, DistilledDraft):
        return write_draft_model(head, target, engine, directory)
    formats, write = WRITERS.get(type(head), ((), None))
    if write is None or engine not in formats:
        where = f": export to {listed(formats, 'or')}, or" if formats else ", nor has any other format:"
        raise ValueError(f"{engine} has no {head.config.head_type} heads{where} serve it with selfspec")
    export = write(head, target, engine, str(directory))
    export.save(directory)
    return export.commands


def load_as_stored(source: str) -> DraftHead:
    """Load a selfspec head in the dtype of its file."""
    directory = find_head(source)
    return HEADS[read_config(directory, source)["head_type"]].from_pretrained(source)
