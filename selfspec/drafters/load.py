"""From `NAME[:ARGUMENT]`, or from a trained head, to the drafter that drafts for a target.

Invariant: what cannot be served is refused here with one sentence, before the first token.
"""

from __future__ import annotations

from typing import Any

from selfspec.drafters.draft_model import DraftModelDrafter, check_same_tokenizer
from selfspec.drafters.names import kind_of, kind_of_head
from selfspec.drafters.ngram import NgramDrafter
from selfspec.drafters.shipped import best_drafter, is_head, load_head
from selfspec.drafters.specs import check_drafter, number_in
from selfspec.heads.base import DraftHead
from selfspec.loop.drafter import Drafter
from selfspec.model.target import Target


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

    `auto` is the shipped head that fits the target, or else `ngram`; the log says which.

    Each drafter has its own defaults for the first three settings.

    Args:
        num_draft_tokens: longest draft.
        num_nodes: most nodes of a candidate tree, root included.
        width: nodes of a tree that are expanded at each depth; for Medusa, tokens of each head that are considered.
        dtype: the draft model's, `auto` by default; `int8` is weight-only quantisation.
        is_sampled: for draft models, draw the drafts (see `DraftModelDrafter`).

    Raises:
        ValueError: the name is unknown, the drafter does not take a setting, or no head or model fits the target.
    """
    check_drafter(
        spec, num_draft_tokens=num_draft_tokens, num_nodes=num_nodes, width=width, dtype=dtype, is_sampled=is_sampled
    )
    if spec == "auto":
        spec = best_drafter(target)
    kind, argument = kind_of(spec), spec.partition(":")[2]
    if kind.name == "none":
        return None
    if kind.name == "ngram":
        return NgramDrafter(num_draft_tokens or number_in(spec))
    # Only what was given, because each drafter has its own defaults.
    given = {"num_draft_tokens": num_draft_tokens, "num_nodes": num_nodes, "width": width}
    shape: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if kind.name == "truncated":
        draft = target.truncated(int(argument))
        return DraftModelDrafter(draft, target.vocab_size, is_sampled=is_sampled, name=spec, **shape)
    if kind.has_weights and argument and not is_head(argument):
        draft = Target.from_pretrained(argument, dtype=dtype or "auto", device=target.device)
        check_same_tokenizer(target.tokenizer, draft.tokenizer)
        return DraftModelDrafter(draft, target.vocab_size, is_sampled=is_sampled, name=spec, **shape)
    if dtype is not None:
        raise ValueError(f"drafter {spec!r} is a head, which has its target's dtype: leave out the draft dtype")
    head = load_head(argument or None, target, drafter=kind.name)
    return drafter_of(head, target, name=spec, is_sampled=is_sampled, **shape)


def drafter_of(
    head: DraftHead, target: Target, *, name: str | None = None, is_sampled: bool = False, **shape: int
) -> Drafter:
    """The drafter that serves a head; `shape` may set num_draft_tokens, num_nodes and width."""
    kind = kind_of_head(head.config.head_type)
    assert kind.make is not None
    options: dict[str, Any] = {"is_sampled": True} if is_sampled else {}
    return kind.make(target, head, name=name or head.config.head_type, **options, **shape)
