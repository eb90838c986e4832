"""One prompt on its way to its text: what was asked, what was emitted, why it ended, what it cost.

Invariant: a row's committed prefix in the cache is all its tokens but the last one, the next tree's root.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING

from selfspec.cache.blocks import CacheRow
from selfspec.config import SamplingParams
from selfspec.kernels.noise import sample_key
from selfspec.loop.sampling import Grammar
from selfspec.loop.survival import Record
from selfspec.loop.text import TextStream

if TYPE_CHECKING:
    from selfspec.model.target import Target
    from selfspec.model.text_side import TextSide


@dataclass(frozen=True)
class Request:
    """A tokenised prompt with its settings. `index` and `sample_index` say which prompt and sample it is.

    Attributes:
        num_top_logprobs: how many of the likeliest tokens to report with each emitted one, where `logprobs` is set.
        begin_grammar: makes the grammar that the answer must follow; None for any text.
    """

    # Not in the repr, because errors and logs may show a request but must not show its text.
    prompt_ids: list[int] = field(repr=False)
    sampling: SamplingParams = field(repr=False)
    index: int = 0
    sample_index: int = 0
    num_top_logprobs: int = 0
    begin_grammar: Callable[[], Grammar] | None = None


# Where a token comes from that was no draft: the target's own after drafts, and in a pass without any.
BONUS, OWN = 0, -1


class PromptTooLong(ValueError):
    """A prompt that leaves no room for an answer."""


def check_prompt(target: TextSide, prompt_ids: Sequence_[int], *, name: str = "the prompt") -> None:
    """Refuse a prompt that is empty, leaves no room for an answer, or has ids that the target does not know.

    Raises:
        ValueError: one sentence that begins with `name`; a `PromptTooLong` where that is the reason.
    """
    if not len(prompt_ids):
        raise ValueError(f"{name} is empty: give it at least one token")
    # Before anything that looks at every token.
    if len(prompt_ids) >= target.context_length:
        raise PromptTooLong(
            f"{name} has {len(prompt_ids)} tokens, and {target.label} takes {target.context_length} with its answer: "
            "shorten the prompt"
        )
    # Usually all are plain integers, which a set of their types tells fastest.
    if set(map(type, prompt_ids)) != {int}:
        odd = next((token for token in prompt_ids if not isinstance(token, Integral) or isinstance(token, bool)), None)
        if odd is not None:
            raise ValueError(f"{name} has {odd!r} among its token ids: give whole numbers")
    _check_known(target, name, prompt_ids)


def check_sampling(target: TextSide, sampling: SamplingParams) -> None:
    """Refuse settings that could never be followed: unknown tokens, no token to choose, stop strings without a tokenizer.

    Raises:
        ValueError: one sentence that names the setting.
    """
    _check_known(target, "stop_token_ids", sampling.stop_token_ids)
    _check_known(target, "logit_bias", sampling.logit_bias)
    banned = {token for token, bias in sampling.logit_bias.items() if bias == -math.inf}
    if len(banned) >= target.vocab_size:
        raise ValueError(f"logit_bias bans all {target.vocab_size} tokens: leave at least one")
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(target.eos_token_ids))
    if sampling.min_new_tokens and len(banned | ends) >= target.vocab_size:
        raise ValueError(
            f"stop_token_ids leaves no token for the first {sampling.min_new_tokens} of the answer: name fewer ids, "
            "or ask for no minimum length"
        )
    if sampling.stop and target.tokenizer is None:
        raise ValueError(f"stop={tuple(sampling.stop)!r} needs a tokenizer, and this target has none: use stop_token_ids")


def _check_known(target: TextSide, name: str, token_ids: Collection[int]) -> None:
    known = target.config.vocab_size
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < known:
        unknown = next(token for token in token_ids if not 0 <= token < known)
        raise ValueError(f"{name} has token id {unknown}: {target.label} knows ids 0 to {known - 1}")


def check_request(target: TextSide, request: Request, *, cache_tokens: int | None = None) -> None:
    """Refuse a request that could never be served.

    Args:
        cache_tokens: the most tokens that the KV cache holds; None for no limit.

    Raises:
        ValueError: one sentence that names the field and says what to do.
    """
    check_prompt(target, request.prompt_ids)
    check_sampling(target, request.sampling)
    num_tokens = len(request.prompt_ids)
    if cache_tokens is not None and num_tokens >= cache_tokens:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens, and the cache holds {cache_tokens} with its answer: shorten the prompt, "
            "or raise the cache's max_tokens (a server's cache_tokens)"
        )
    if not 0 <= request.num_top_logprobs <= target.vocab_size:
        raise ValueError(f"num_top_logprobs={request.num_top_logprobs} is not allowed: use 0 to {target.vocab_size}")


def open_sequence(target: Target, request: Request, row: CacheRow, *, cache_tokens: int | None = None) -> Sequence:
    """A sequence for a request that passed `check_request`, which will be decoded into an empty cache row.

    Raises:
        ValueError: its grammar cannot begin.
    """
    sampling = request.sampling
    room = min(target.context_length, cache_tokens or target.context_length) - len(request.prompt_ids)
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(target.eos_token_ids))
    return Sequence(
        request=request,
        row=row,
        text_stream=TextStream(
            target.tokenizer,
            sampling.stop,
            context=request.prompt_ids,
            skip_special_tokens=sampling.skip_special_tokens,
        ),
        key=sample_key(seed, request.sample_index),
        max_tokens=min(sampling.max_new_tokens, room),
        eos_token_ids=frozenset(ends),
        grammar=request.begin_grammar() if request.begin_grammar is not None else None,
    )


@dataclass(eq=False, repr=False)
class Sequence:
    """A request being decoded.

    Attributes:
        token_depths: for each emitted token the depth of the draft that it was, `BONUS` or `OWN`.
        num_target_passes, num_draft_tokens, num_accepted_tokens: over the whole answer. An accepted draft counts only if it
            was emitted, so not after a stop.
        num_paused_passes: passes without drafts because the text had outgrown the drafter's context.
        num_reused_tokens: prompt tokens whose KV was in the cache already.
        created, started: when it was submitted and admitted.
        record: what its group's planner knows of it.
        is_suspect: it was in a batch whose step failed, so it decodes alone from now on.
    """

    request: Request
    row: CacheRow
    text_stream: TextStream
    key: int
    max_tokens: int
    eos_token_ids: frozenset[int]
    grammar: Grammar | None = None
    token_ids: list[int] = field(default_factory=list)
    token_depths: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    num_target_passes: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_paused_passes: int = 0
    num_reused_tokens: int = 0
    created: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    prefill_seconds: float = 0.0
    seconds: float = 0.0
    record: Record = field(default_factory=Record)
    is_suspect: bool = False

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_tokens(self) -> int:
        """Prompt and output together, the root included."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def prefix_ids(self) -> list[int]:
        """All tokens but the root, which is what the cache holds while the sequence decodes."""
        return [*self.request.prompt_ids, *self.token_ids][:-1]

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Tokens `start … end - 1` of prompt and output together."""
        prompt, size = self.request.prompt_ids, len(self.request.prompt_ids)
        return prompt[start:end] + self.token_ids[max(start - size, 0) : max(end - size, 0)]

    @property
    def max_depth(self) -> int:
        """The deepest draft that can still be emitted; one place is for the bonus token."""
        return self.max_tokens - len(self.token_ids) - 1

    def fail(self, error: Exception) -> None:
        """End the sequence with an error instead of an answer."""
        self.error = error
        self.finish_reason = "error"

    def emit(self, tokens: list[int]) -> list[int]:
        """Append a verify pass's tokens, up to the first that ends the sequence; returns those appended."""
        for count, token in enumerate(tokens, start=1):
            self.token_ids.append(token)
            may_stop = len(self.token_ids) >= self.sampling.min_new_tokens
            is_end = token in self.eos_token_ids
            # The end token ends the text too; its own characters are not part of it.
            if is_end or self.text_stream.push(token, may_stop=may_stop):
                self.finish_reason = "stop"
            elif len(self.token_ids) == self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                self.text_stream.finish()
                return tokens[:count]
        return tokens


@dataclass(frozen=True)
class Emission:
    """What a step gave one row: the appended tokens (cut where the sequence ended), how many were drafted, and how many of
    the drafts were emitted.
    """

    tokens: list[int]
    num_drafted: int
    num_accepted: int

    @property
    def depths(self) -> list[int]:
        """For each token the depth of the draft that it was, `BONUS` or `OWN`."""
        drafts = list(range(1, self.num_accepted + 1))
        return drafts if len(self.tokens) == self.num_accepted else [*drafts, BONUS if self.num_drafted else OWN]
