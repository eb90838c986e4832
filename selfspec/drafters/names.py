"""The table of drafters, one row per kind: the names of `specs`, with the classes behind them.

Invariant: everything that depends on a drafter's kind reads this table, so a new kind is one new row there and one here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from selfspec.drafters.draft_model import DraftModelDrafter
from selfspec.drafters.eagle import EagleDrafter
from selfspec.drafters.early_exit import EarlyExitDrafter
from selfspec.drafters.medusa import MedusaDrafter
from selfspec.drafters.ngram import NgramDrafter
from selfspec.drafters.specs import NAMES, DrafterName, name_of
from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.heads.early_exit import DistilledDraft, EarlyExitHead
from selfspec.heads.medusa import MedusaHead
from selfspec.loop.drafter import DefaultShape, Drafter, DraftShape
from selfspec.model.layers import decoder_layers, private_copy
from selfspec.model.load import lay_out
from selfspec.model.target import Target

# For a head that is served as a model of its own, whose drafts are cheap enough for trees.
STUDENT_SHAPE = DefaultShape(cpu=DraftShape(5, 12, 3), gpu=DraftShape(5, 12, 3))


@dataclass(frozen=True)
class Kind(DrafterName):
    """One kind of drafter: its name, and the classes behind it.

    Attributes:
        heads: the classes of trained heads that it serves.
        make: from (target, head, name=..., **shape) to a drafter that serves the head; None for kinds without heads.
        default_shape: how large its trees are by default.
    """

    heads: tuple[type[DraftHead], ...] = ()
    make: Callable[..., Drafter] | None = None
    default_shape: DefaultShape | None = None

    @property
    def head_types(self) -> tuple[str, ...]:
        """The `head_type` that its heads' configs name."""
        return tuple(head.config_class.head_type for head in self.heads)


def student_target(target: Target, head: EarlyExitHead) -> Target:
    """A draft model from a head whose layers compute their own keys and values."""
    model = private_copy(head).to(target.device, target.dtype).merged(target.model)
    lay_out(decoder_layers(model)[1], may_round=True)
    return Target(model, target.tokenizer, name=f"{head.config.head_type} of {target.name}")


def _early_exit(target: Target, head: EarlyExitHead, *, name: str, is_sampled: bool = False, **shape: Any) -> Drafter:
    """The drafter for a head: one that shares the target's keys and values, or else a draft model."""
    if head.features:
        return EarlyExitDrafter(target, head, name=name, **shape)
    default = STUDENT_SHAPE.on(target.device)
    tree = {"width": default.width, "num_nodes": default.num_nodes, **shape}
    return DraftModelDrafter(student_target(target, head), target.vocab_size, is_sampled=is_sampled, name=name, **tree)


# What stands behind the names that have more than a name.
_PARTS: dict[str, dict[str, Any]] = {
    "ngram": {"default_shape": NgramDrafter.default_shape},
    "truncated": {"default_shape": DraftModelDrafter.default_shape},
    "eagle": {"heads": (EagleHead, Eagle1Head), "make": EagleDrafter, "default_shape": EagleDrafter.default_shape},
    "medusa": {"heads": (MedusaHead,), "make": MedusaDrafter, "default_shape": MedusaDrafter.default_shape},
    "early_exit": {"heads": (EarlyExitHead,), "make": _early_exit, "default_shape": EarlyExitDrafter.default_shape},
    "draft_model": {"heads": (DistilledDraft,), "make": _early_exit, "default_shape": DraftModelDrafter.default_shape},
}
KINDS: dict[str, Kind] = {name.name: Kind(**asdict(name), **_PARTS.get(name.name, {})) for name in NAMES.values()}

# Trained heads by the `head_type` that their config.json names.
HEADS: dict[str, type[DraftHead]] = {head.config_class.head_type: head for kind in KINDS.values() for head in kind.heads}


def kind_of(spec: str) -> Kind:
    """The kind that `NAME[:ARGUMENT]` names.

    Raises:
        ValueError: no kind has this name.
    """
    return KINDS[name_of(spec).name]


def kind_of_head(head_type: str) -> Kind:
    """The kind of drafter that serves heads of a type.

    Raises:
        ValueError: no kind does.
    """
    for kind in KINDS.values():
        if head_type in kind.head_types:
            return kind
    raise ValueError(f"no drafter of this version serves {head_type} heads: update selfspec")
