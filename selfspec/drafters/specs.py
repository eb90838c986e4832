"""What may be written for a drafter, `NAME[:ARGUMENT]`, and what it means: the names, and the checks that need no target.

Invariant: this file imports nothing slow, because commands check spelling before they import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selfspec.config import DraftOptions
from selfspec.files import check_is_there

MAX_DRAFT_TOKENS = 64
MAX_NODES = 128


@dataclass(frozen=True)
class DrafterName:
    """One kind of drafter, as people name it.

    Attributes:
        name: its name on the command line, before the colon.
        label: its name for people.
        help: what it does, and what may follow the colon.
        has_model: it drafts with a model, which can draw its drafts.
        has_weights: the argument may be a model, which has a dtype.
        takes_path: the argument is a folder or Hub id.
    """

    name: str
    label: str
    help: str
    has_model: bool = False
    has_weights: bool = False
    takes_path: bool = False


NAMES: dict[str, DrafterName] = {
    name.name: name
    for name in (
        DrafterName("none", "plain", "plain decoding"),
        DrafterName("auto", "automatic", "the shipped head that fits the target, or else ngram"),
        DrafterName("ngram", "n-gram", "prompt lookup; ngram:K drafts at most K tokens"),
        DrafterName("eagle", "EAGLE", "eagle:PATH_OR_ID drafts a tree with a trained EAGLE head", takes_path=True),
        DrafterName("medusa", "Medusa", "medusa:PATH_OR_ID drafts a tree with trained Medusa heads", takes_path=True),
        DrafterName(
            "early_exit",
            "early exit",
            "early_exit:PATH_OR_ID drafts a tree with the target's own first layers and trained blocks on top",
            takes_path=True,
        ),
        DrafterName(
            "draft_model",
            "draft model",
            "draft_model:PATH_OR_ID drafts with a smaller model of the same vocabulary",
            has_model=True,
            has_weights=True,
            takes_path=True,
        ),
        DrafterName(
            "truncated",
            "first layers",
            "truncated:L drafts with the target's own first L layers, untrained",
            has_model=True,
        ),
    )
}

# What `auto` tries: drafters with trained heads, by the tokens per target pass of the shipped ones (docs/heads.md).
BEST = ("eagle", "early_exit", "draft_model", "medusa")

# For help texts.
FORMS = "auto, none, ngram[:K], truncated:LAYERS, or a trained head: {}, with or without :PATH_OR_ID".format(
    ", ".join(name.name for name in NAMES.values() if name.takes_path)
)


def name_of(spec: str) -> DrafterName:
    """What the name in `NAME[:ARGUMENT]` means.

    Raises:
        ValueError: there is no such drafter.
    """
    name = spec.partition(":")[0]
    if name not in NAMES:
        raise ValueError(f"drafter {spec!r} is not known: use " + "; ".join(f"{n.name} ({n.help})" for n in NAMES.values()))
    return NAMES[name]


def number_in(spec: str) -> int | None:
    """The whole number after the colon of `ngram` or `truncated`; None where nothing is there.

    Raises:
        ValueError: it is no whole number.
    """
    name, _, argument = spec.partition(":")
    if not argument and name == "ngram":
        return None
    if not argument.isdecimal():
        raise ValueError(f"drafter {spec!r} needs a whole number after the colon, as in {name}:8")
    return int(argument)


def check_drafter(
    spec: str,
    *,
    num_draft_tokens: int | None = None,
    num_nodes: int | None = None,
    width: int | None = None,
    dtype: str | None = None,
    is_sampled: bool = False,
) -> None:
    """Refuse what no target could make right: names, numbers, folders that are not there, settings that do not apply.

    Raises:
        ValueError: the sentence names what is wrong.
    """
    known, argument = name_of(spec), spec.partition(":")[2]
    if is_sampled and not known.has_model:
        raise ValueError(f"drafter {spec!r} cannot draw its drafts: sampled drafts need draft_model or truncated")
    if dtype is not None and not known.has_weights:
        raise ValueError(f"drafter {spec!r} has no weights of its own, so it takes no draft dtype")
    for option, value, most in (
        ("num_draft_tokens", num_draft_tokens, MAX_DRAFT_TOKENS),
        ("num_nodes", num_nodes, MAX_NODES),
        ("width", width, MAX_NODES),
    ):
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"{option}={value} is not allowed: use 1 to {most}")
    if known.name in ("auto", "none") and argument:
        raise ValueError(f"drafter {spec!r} takes no argument: write {known.name}")
    if known.name in ("ngram", "truncated"):
        number = number_in(spec)
        if known.name == "ngram" and number is not None and not 1 <= number <= MAX_DRAFT_TOKENS:
            raise ValueError(f"drafter {spec!r} is out of range: draft 1 to {MAX_DRAFT_TOKENS} tokens")
    if known.takes_path and argument:
        check_is_there(argument)


def check_drafter_of(options: DraftOptions, spec: str) -> None:
    """`check_drafter` with the options that concern this drafter; a command may name several."""
    check_drafter(spec, **options_for(options, spec))


def options_for(options: DraftOptions, spec: str) -> dict[str, Any]:
    """The arguments of `load_drafter` that the options say for this drafter."""
    known = name_of(spec)
    return {
        "num_draft_tokens": options.num_draft_tokens,
        "num_nodes": options.num_nodes,
        "width": options.width,
        "dtype": options.draft_dtype if known.has_weights else None,
        "is_sampled": options.sampled_draft and known.has_model,
    }
