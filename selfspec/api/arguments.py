"""What calls take besides prompts: a drafter or its name, and settings as an object, a dict or keywords.

Invariant: what is wrong is refused here with one sentence, before the first token.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from selfspec.config import SamplingParams
from selfspec.drafters.load import load_drafter
from selfspec.loop.drafter import Drafter
from selfspec.loop.planner import Planner
from selfspec.model.target import Target

# A drafter, or a name that `load_drafter` knows.
DrafterLike = Drafter | str | None
SamplingLike = SamplingParams | Mapping[str, Any]

SETTINGS = tuple(field.name for field in fields(SamplingParams))
# What other libraries call them.
OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens, which leaves the prompt out",
    "min_tokens": "min_new_tokens",
    "do_sample": "temperature, which is greedy at 0",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "eos_token_id": "stop_token_ids",
    "top_logprobs": "top_logprobs as an argument of the call",
    "num_beams": "n, because beam search is not served",
}


def check_target(target: object) -> None:
    """Refuse anything but a target.

    Raises:
        TypeError: one sentence that says how to make one.
    """
    if isinstance(target, Target):
        return
    if isinstance(target, str):
        raise TypeError(f"target={target!r} is not a Target: pass Target.from_pretrained({target!r})")
    raise TypeError(
        f"a {type(target).__name__} is not a Target: pass Target(model, tokenizer) or Target.from_pretrained(PATH)"
    )


def resolve_drafter(drafter: DrafterLike, target: Target) -> Drafter | None:
    """The drafter itself, or the one that a name means. A name is loaded once for each target.

    Raises:
        TypeError: it is neither.
        ValueError: no drafter has this name, or none fits the target.
    """
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    if not isinstance(drafter, str):
        raise TypeError(
            f"{type(drafter).__name__} is not a drafter: pass a name such as 'ngram', or what load_drafter returns"
        )
    # Threads that ask for the same name at once get the same drafter.
    with target.lock:
        if drafter not in target.drafters:
            target.drafters[drafter] = load_drafter(drafter, target)
        return target.drafters[drafter]


def sampling_of(sampling: SamplingLike | None, settings: Mapping[str, Any], *, top_logprobs: int = 0) -> SamplingParams:
    """The settings that `sampling` and keywords make together; keywords come last, so they count.

    Raises:
        TypeError: a setting has an unknown name.
        ValueError: a value is not allowed.
    """
    if sampling is not None and not isinstance(sampling, SamplingParams | Mapping):
        raise TypeError(
            f"sampling={sampling!r} is not allowed: pass SamplingParams(max_new_tokens=64) or a dict, "
            "or max_new_tokens=64 instead"
        )
    given = {**sampling, **settings} if isinstance(sampling, Mapping) else dict(settings)
    for name in given:
        check_name(name)
    if top_logprobs:
        given["logprobs"] = True
    return sampling.with_(**given) if isinstance(sampling, SamplingParams) else SamplingParams(**given)


def check_name(name: str) -> None:
    """Refuse a setting that does not exist.

    Raises:
        TypeError: one sentence that names the right one.
    """
    if name in SETTINGS:
        return
    if name in OTHER_NAMES:
        raise TypeError(f"{name} is not a setting here: use {OTHER_NAMES[name]}")
    near = difflib.get_close_matches(str(name), SETTINGS, n=1)
    raise TypeError(f"{name} is not a setting: use {near[0] if near else 'one of ' + ', '.join(SETTINGS)}")


def samplings_of(
    sampling: SamplingLike | Sequence[SamplingLike] | None, settings: Mapping[str, Any], *, top_logprobs: int = 0
) -> Callable[[int], SamplingParams]:
    """As `sampling_of`, for one setting for all prompts or a list with one for each; returns a prompt's by its number.

    What a list holds is checked at once. It may grow while prompts are made.
    """
    check_top_logprobs(top_logprobs)
    if not isinstance(sampling, list | tuple):
        one = sampling_of(sampling, settings, top_logprobs=top_logprobs)  # type: ignore[arg-type]
        return lambda index: one
    for each in sampling:
        sampling_of(each, settings, top_logprobs=top_logprobs)

    def of_prompt(index: int) -> SamplingParams:
        if index >= len(sampling):
            raise ValueError(f"sampling has {len(sampling)} settings and there are more prompts: give one for each")
        return sampling_of(sampling[index], settings, top_logprobs=top_logprobs)

    return of_prompt


def check_top_logprobs(top_logprobs: object) -> None:
    """Refuse what is no number of tokens; the target then knows how many it has.

    Raises:
        ValueError: one sentence.
    """
    if not isinstance(top_logprobs, int) or isinstance(top_logprobs, bool) or top_logprobs < 0:
        raise ValueError(f"top_logprobs={top_logprobs!r} is not allowed: use a whole number, 0 for none")


def planner_of(use_cost_guard: bool) -> Planner | None:
    """The drafter's own planner, which guards costs; or one that always drafts as much as it can."""
    return None if use_cost_guard else Planner(is_active=False)
