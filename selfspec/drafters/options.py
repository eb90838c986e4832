"""Load a target and its drafters as `TargetOptions` and `DraftOptions` say. Invariant: an unset option has no effect."""

from __future__ import annotations

from selfspec.config import DraftOptions, TargetOptions
from selfspec.drafters.load import load_drafter
from selfspec.drafters.specs import options_for
from selfspec.loop.drafter import Drafter
from selfspec.model.chat import parse_arguments
from selfspec.model.default_target import source_of
from selfspec.model.target import Target


def load_target(options: TargetOptions, *, use_packing: bool = True) -> Target:
    """Load the target that the options name; see `Target.from_pretrained`."""
    # Wrong JSON is told before the weights are read.
    arguments = parse_arguments(options.chat_template_kwargs or "{}")
    target = Target.from_pretrained(
        source_of(options),
        dtype=options.dtype,
        device=options.device,
        revision=options.revision,
        adapter=options.adapter,
        use_packing=use_packing,
    )
    target.set_chat_template_kwargs(arguments)
    return target


def load_drafter_of(options: DraftOptions, spec: str, target: Target) -> Drafter | None:
    """Load the drafter that `NAME[:ARGUMENT]` names, with the options that concern it; a command may name several."""
    return load_drafter(spec, target, **options_for(options, spec))
