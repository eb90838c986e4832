"""Drafters by name, as the command line and `load_drafter` know them."""

from __future__ import annotations

from typing import Any

from selfspec.drafters.draft_model import DraftModelDrafter, check_same_tokenizer
from selfspec.drafters.eagle import EagleDrafter
from selfspec.drafters.early_exit import EarlyExitDrafter
from selfspec.drafters.medusa import MedusaDrafter
from selfspec.drafters.ngram import NgramDrafter
from selfspec.drafters.shipped import is_head, load_head
from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.heads.early_exit import EarlyExitHead
from selfspec.heads.medusa import MedusaHead
from selfspec.loop.drafter import Drafter
from selfspec.model.layers import decoder_layers
from selfspec.model.load import lay_out
from selfspec.model.target import Target

DRAFTERS = {
    "none": "autoregressive decoding",
    "ngram": "prompt lookup; ngram:K drafts at most K tokens",
    "draft_model": "draft_model:PATH_OR_ID drafts with a smaller model of the same vocabulary",
    "early_exit": "early_exit:PATH_OR_ID drafts a tree with the target's own first layers and trained blocks on top",
    "truncated": "truncated:L drafts with the target's own first L layers, untrained",
    "medusa": "medusa:PATH_OR_ID drafts a tree with trained Medusa heads",
    "eagle": "eagle:PATH_OR_ID drafts a tree with a trained EAGLE-3 head",
}


def load_drafter(
    spec: str,
    target: Target,
    *,
    num_draft_tokens: int | None = None,
    num_nodes: int | None = None,
    width: int | None = None,
    dtype: str | None = None,
    is_sampled: bool = False,
) -> Drafter | None:
    """The drafter that `NAME[:ARGUMENT]` names, for this target; None for `none`.

    Args:
        num_draft_tokens: longest draft; each drafter has its own default, as it has for the next two.
        num_nodes: most nodes of a candidate tree, root included.
        width: nodes of a tree that are expanded at each depth; of Medusa, how many tokens of each head are considered.
        dtype: the draft model's, `auto` by default; `int8` is weight-only quantisation.
        is_sampled: for draft models, draw the drafts (see `DraftModelDrafter`).
    """
    name, _, argument = spec.partition(":")
    if name not in DRAFTERS:
        raise ValueError(f"drafter {spec!r} is not known: use " + "; ".join(f"{k} ({v})" for k, v in DRAFTERS.items()))
    if is_sampled and name not in ("draft_model", "truncated"):
        raise ValueError(f"drafter {spec!r} cannot draw its drafts: sampled drafts need draft_model or truncated")
    if dtype is not None and name != "draft_model":
        raise ValueError(f"drafter {spec!r} has no weights of its own, so it takes no draft dtype")
    for option, value, most in (
        ("num_draft_tokens", num_draft_tokens, MAX_DRAFT_TOKENS),
        ("num_nodes", num_nodes, MAX_NODES),
        ("width", width, MAX_NODES),
    ):
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"{option}={value} is not allowed: use 1 to {most}")
    if name == "none":
        if argument:
            raise ValueError(f"drafter {spec!r} takes no argument: write none")
        return None
    if name == "ngram":
        number = _number(spec, argument) if argument else 15
        if not 1 <= number <= MAX_DRAFT_TOKENS:
            raise ValueError(f"drafter {spec!r} is out of range: draft 1 to {MAX_DRAFT_TOKENS} tokens")
        return NgramDrafter(num_draft_tokens or number)
    # Only what was given: each drafter has defaults of its own.
    given = {"num_draft_tokens": num_draft_tokens, "num_nodes": num_nodes, "width": width}
    shape: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if name in ("medusa", "eagle", "early_exit"):
        return drafter_of(load_head(argument or None, target, drafter=name), target, name=spec, **shape)
    if name == "truncated":
        draft = target.truncated(_number(spec, argument))
    elif not argument or is_head(argument):
        if dtype is not None:
            raise ValueError(f"drafter {spec!r} is a head, which has its target's dtype: leave out the draft dtype")
        return drafter_of(
            load_head(argument or None, target, drafter=name), target, name=spec, is_sampled=is_sampled, **shape
        )
    else:
        draft = Target.from_pretrained(argument, dtype=dtype or "auto", device=target.device)
        check_same_tokenizer(target.tokenizer, draft.tokenizer)
    return DraftModelDrafter(draft, target.vocab_size, is_sampled=is_sampled, name=spec, **shape)


def drafter_of(
    head: DraftHead, target: Target, *, name: str | None = None, is_sampled: bool = False, **shape: int
) -> Drafter:
    """The drafter that serves a head; `shape` is what it takes of num_draft_tokens, num_nodes and width."""
    name = name or head.config.head_type
    if isinstance(head, MedusaHead):
        return MedusaDrafter(target, head, name=name, **shape)
    if isinstance(head, EagleHead | Eagle1Head):
        return EagleDrafter(target, head, name=name, **shape)
    assert isinstance(head, EarlyExitHead)
    if head.features:
        return EarlyExitDrafter(target, head, name=name, **shape)
    draft = student_target(target, head)
    tree = {"width": 3, "num_nodes": 12, **shape}
    return DraftModelDrafter(draft, target.vocab_size, is_sampled=is_sampled, name=name, **tree)


def student_target(target: Target, head: EarlyExitHead) -> Target:
    """A head whose layers compute keys and values of their own, as a model to draft with."""
    model = head.to(target.device, target.dtype).merged(target.model)
    lay_out(decoder_layers(model)[1])
    return Target(model, target.tokenizer, name=f"{head.config.head_type} of {target.name}")


MAX_DRAFT_TOKENS = 64
MAX_NODES = 128


def _number(spec: str, argument: str) -> int:
    if not argument.isdecimal():
        raise ValueError(f"drafter {spec!r} needs a whole number after the colon, as in {spec.partition(':')[0]}:8")
    return int(argument)
