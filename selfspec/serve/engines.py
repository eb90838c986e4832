"""Engines as a server's options want them."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.drafters import Drafter
from selfspec.engine import Listener, SpecEngine
from selfspec.model.target import Target
from selfspec.serve.options import ServeOptions


def make_engine(
    target: Target,
    drafters: Sequence[Drafter],
    options: ServeOptions,
    *,
    use_cost_guard: bool,
    listener: Listener,
    makes_text: bool = True,
) -> SpecEngine:
    """An engine that is warm."""
    engine = SpecEngine(
        target,
        drafters,
        max_batch=options.max_batch,
        max_waiting=options.max_waiting,
        cache_tokens=options.cache_tokens,
        prefill_tokens=options.prefill_tokens,
        use_cost_guard=use_cost_guard,
        makes_text=makes_text,
        listener=listener,
    )
    engine.warm_up()
    return engine
