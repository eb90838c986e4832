"""A target and its drafters, loaded as `TargetOptions` and `DraftOptions` say."""

from __future__ import annotations

from selfspec.config import DraftOptions, TargetOptions
from selfspec.drafters.load import load_drafter
from selfspec.drafters.names import kind_of
from selfspec.loop.drafter import Drafter
from selfspec.model.default_target import source_of
from selfspec.model.target import Target


def load_target(options: TargetOptions, *, use_packing: bool = True) -> Target:
    """The target that the options name; see `Target.from_pretrained`."""
    return Target.from_pretrained(
        source_of(options),
        dtype=options.dtype,
        device=options.device,
        revision=options.revision,
        adapter=options.adapter,
        use_packing=use_packing,
    )


def load_drafter_of(options: DraftOptions, spec: str, target: Target) -> Drafter | None:
    """The drafter that `NAME[:ARGUMENT]` names. A command may name several: each takes the options that concern it."""
    kind = kind_of(spec)
    return load_drafter(
        spec,
        target,
        num_draft_tokens=options.num_draft_tokens,
        num_nodes=options.num_nodes,
        width=options.width,
        dtype=options.draft_dtype if kind.has_weights else None,
        is_sampled=options.sampled_draft and kind.has_model,
    )
