"""Prompts from the target itself: after a bare user header, a chat model writes what a user would say.

The method is Magpie's, https://arxiv.org/abs/2406.08464. The prompts resemble the data that the target was trained on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial

from selfspec.api import Completion, generate_iter
from selfspec.config import SamplingParams
from selfspec.loop.drafter import Drafter
from selfspec.model.target import Target
from selfspec.traffic.clean import words
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.prepare import check_drawing
from selfspec.traffic.regenerate import seed_for
from selfspec.traffic.turns import PROBE, Write, closing_after, first_added_token, render

MIN_WORDS = 3


def self_prompts(
    target: Target,
    numbers: Collection[int],
    report: Report,
    *,
    sampling: SamplingParams,
    drafter: Drafter | None = None,
    batch_size: int = 1,
    known: Collection[str] = (),
) -> Iterator[Conversation]:
    """Conversations of one user turn, with ids `self-NUMBER`. Short, cut and repeated prompts are only in the report.

    Args:
        numbers: which prompts to draw; each number decides its prompt's seed.
        known: prompts not to repeat.

    Raises:
        ValueError: sampling settings that cannot be used, or a chat template that does not lead the target to a user turn.
    """
    check_drawing(sampling)
    write = partial(render, target.tokenizer, chat_template_kwargs=target.chat_template_kwargs)
    header, ending = _header(target, write), _ending(target, write, sampling)
    completions = generate_iter(
        target,
        [header] * len(numbers),
        drafter=drafter,
        sampling=[ending.with_(seed=seed_for(sampling.seed, f"self-{number}")) for number in numbers],
        batch_size=batch_size,
    )
    return _usable(zip(numbers, completions, strict=True), report, {words(prompt) for prompt in known})


def _usable(
    completions: Iterable[tuple[int, Completion]], report: Report, seen: set[tuple[str, ...]]
) -> Iterator[Conversation]:
    for number, completion in completions:
        name, text = f"self-{number}", completion.text.strip()
        spoken = words(text)
        if completion.finish_reason == "length":
            report.skip("cut by max_new_tokens", f"{name}: {text[:80]}")
        elif len(spoken) < MIN_WORDS:
            report.skip(f"under {MIN_WORDS} words", f"{name}: {text[:80]}")
        elif spoken in seen:
            report.skip("repeated", f"{name}: {text[:80]}")
        else:
            seen.add(spoken)
            report.num_kept += 1
            yield Conversation(name, [{"role": "user", "content": text}])


def _header(target: Target, write: Write) -> list[int]:
    """Token ids of what the template writes before the first user turn."""
    header = write([{"role": "user", "content": PROBE}]).partition(PROBE)[0]
    token_ids = target.tokenizer(header, add_special_tokens=False)["input_ids"]
    if not token_ids:
        raise ValueError("the chat template puts nothing before a user turn, so the target cannot be led to write one")
    return token_ids


def _ending(target: Target, write: Write, sampling: SamplingParams) -> SamplingParams:
    """The settings, with an end where the template ends a user turn."""
    closing = closing_after(write, [], "user")
    token = first_added_token(target.tokenizer, closing)
    if token is not None:
        return sampling.with_(stop_token_ids=(target.tokenizer.convert_tokens_to_ids(token),))
    return sampling.with_(stop=(closing.strip(),)) if closing.strip() else sampling
