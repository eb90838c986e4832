"""Drafters by name, as the command line and `load_drafter` know them."""

from __future__ import annotations

from selfspec.drafters.base import Drafter, NoDrafter
from selfspec.drafters.draft_model import DraftModelDrafter, check_same_tokenizer
from selfspec.drafters.eagle import EagleDrafter
from selfspec.drafters.medusa import MedusaDrafter
from selfspec.drafters.ngram import NgramDrafter
from selfspec.heads.eagle import EagleHead
from selfspec.heads.medusa import MedusaHead
from selfspec.hub import load_head, shipped_head
from selfspec.target import Target

__all__ = [
    "DRAFTERS",
    "DraftModelDrafter",
    "Drafter",
    "EagleDrafter",
    "MedusaDrafter",
    "NgramDrafter",
    "NoDrafter",
    "load_drafter",
]

DRAFTERS = {
    "none": "autoregressive decoding",
    "ngram": "prompt lookup; ngram:K drafts at most K tokens",
    "draft_model": "draft_model:PATH_OR_ID drafts with a smaller model of the same vocabulary",
    "truncated": "truncated:L drafts with the target's own first L layers, untrained",
    "medusa": "medusa:PATH_OR_ID drafts a tree with trained Medusa heads",
    "eagle": "eagle:PATH_OR_ID drafts a tree with a trained EAGLE-3 head",
}


def load_drafter(
    spec: str,
    target: Target,
    *,
    num_draft_tokens: int | None = None,
    dtype: str | None = None,
    is_sampled: bool = False,
) -> Drafter | None:
    """The drafter that `NAME[:ARGUMENT]` names, for this target; None for `none`.

    Args:
        num_draft_tokens: longest draft; each drafter has its own default.
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
    if num_draft_tokens is not None and not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"num_draft_tokens={num_draft_tokens} is not allowed: use 1 to {MAX_DRAFT_TOKENS}")
    if name == "none":
        if argument:
            raise ValueError(f"drafter {spec!r} takes no argument: write none")
        return None
    if name == "ngram":
        number = _number(spec, argument) if argument else 15
        if not 1 <= number <= MAX_DRAFT_TOKENS:
            raise ValueError(f"drafter {spec!r} is out of range: draft 1 to {MAX_DRAFT_TOKENS} tokens")
        return NgramDrafter(num_draft_tokens or number)
    if name in ("medusa", "eagle"):
        head = load_head(argument or shipped_head(name, target), target, kind=name)
        if isinstance(head, MedusaHead):
            return MedusaDrafter(target, head, num_draft_tokens=num_draft_tokens, name=spec)
        assert isinstance(head, EagleHead)
        return EagleDrafter(target, head, num_draft_tokens=num_draft_tokens or 6, name=spec)
    if name == "truncated":
        draft = target.truncated(_number(spec, argument))
    else:
        if not argument:
            raise ValueError("drafter 'draft_model' needs a model: write draft_model:PATH_OR_ID")
        draft = Target.from_pretrained(argument, dtype=dtype or "auto", device=target.device)
        check_same_tokenizer(target.tokenizer, draft.tokenizer)
    return DraftModelDrafter(
        draft, target.vocab_size, num_draft_tokens=num_draft_tokens or 5, is_sampled=is_sampled, name=spec
    )


MAX_DRAFT_TOKENS = 64


def _number(spec: str, argument: str) -> int:
    if not argument.isdecimal():
        raise ValueError(f"drafter {spec!r} needs a whole number after the colon, as in {spec.partition(':')[0]}:8")
    return int(argument)
