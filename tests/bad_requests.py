"""Requests that nobody can serve, each with what is said of it: one table for every public entry."""

from __future__ import annotations

from typing import Any

from selfspec import SamplingParams, Target
from selfspec.loop.sampling import Grammar
from selfspec.loop.sequence import Request

PLAIN = SamplingParams(max_new_tokens=4)


def _no_grammar() -> Grammar:
    raise ValueError("the schema has no type")


# Name -> what is wrong with the prompt, as a function of the target, and the words that name it.
BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": (lambda target: [], "is empty: give it at least one token"),
    "unknown id": (lambda target: [5, target.config.vocab_size], "has token id .*: .* knows ids 0 to"),
    "negative id": (lambda target: [5, -1], "has token id -1: .* knows ids 0 to"),
    "a fraction": (lambda target: [5, 1.5], "has 1.5 among its token ids: give whole numbers"),
    "a truth value": (lambda target: [5, True], "has True among its token ids: give whole numbers"),
    "a word": (lambda target: [5, "six"], "has 'six' among its token ids: give whole numbers"),
    "as long as the context": (
        lambda target: [5] * target.context_length,
        "tokens, and .* takes .* with its answer: shorten the prompt",
    ),
}
# Of settings that only the target can judge.
BAD_SETTINGS: dict[str, tuple[Any, str]] = {
    "unknown stop id": (
        lambda target: PLAIN.with_(stop_token_ids=(target.config.vocab_size,)),
        "stop_token_ids has token id .*: .* knows ids 0 to",
    ),
    "every token banned": (
        lambda target: PLAIN.with_(logit_bias=dict.fromkeys(range(target.vocab_size), float("-inf"))),
        "logit_bias bans all .* tokens: leave at least one",
    ),
    "every token an end before the minimum": (
        lambda target: PLAIN.with_(stop_token_ids=range(target.vocab_size), min_new_tokens=2),
        "stop_token_ids leaves no token for the first 2 of the answer: name fewer ids",
    ),
    "unknown biased id": (
        lambda target: PLAIN.with_(logit_bias={target.config.vocab_size + 7: 1.0}),
        "logit_bias has token id .*: .* knows ids 0 to",
    ),
}


def bad_requests(target: Target, cache_tokens: int) -> dict[str, tuple[Request, str]]:
    """Name -> a request, and what an engine with a cache of so many tokens says."""
    found = {name: (Request(make(target), PLAIN), words) for name, (make, words) in BAD_PROMPTS.items()}
    found |= {name: (Request([5, 6], make(target)), words) for name, (make, words) in BAD_SETTINGS.items()}
    found["as long as the cache"] = (Request([5] * cache_tokens, PLAIN), "the cache holds .* with its answer: shorten")
    found["too many likely tokens"] = (
        Request([5], PLAIN.with_(logprobs=True), num_top_logprobs=target.vocab_size + 1),
        "num_top_logprobs=.* is not allowed",
    )
    if target.tokenizer is None:
        found["stop without a tokenizer"] = (Request([5], PLAIN.with_(stop=("x",))), "needs a tokenizer")
    return found


# What only shows when a request begins.
LATE = {"a grammar that cannot begin": (Request([5, 6], PLAIN, begin_grammar=_no_grammar), "the schema has no type")}
