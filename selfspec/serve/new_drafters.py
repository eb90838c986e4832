"""Drafters that clients load while the server runs."""

from __future__ import annotations

from collections.abc import Callable

from selfspec.drafters import Drafter, drafter_of, load_drafter
from selfspec.drafters.names import kind_of
from selfspec.drafters.shipped import is_head, load_head
from selfspec.loop.drafter import NoDrafter
from selfspec.model.target import Target


def prepare_drafter(spec: str, target: Target) -> Callable[[], Drafter]:
    """Do the slow part of loading a drafter, which touches nothing in use.

    Returns:
        The quick part, for the engine's thread.
    """
    kind, source = kind_of(spec), spec.partition(":")[2]
    is_model = kind.has_weights and source and not is_head(source)
    if kind.heads and not is_model:
        head = load_head(source or None, target, drafter=kind.name)
        return lambda: drafter_of(head, target, name=spec)
    if is_model:
        draft_model = load_drafter(spec, target)
        assert draft_model is not None
        return lambda: draft_model
    return lambda: load_drafter(spec, target) or NoDrafter()
