"""What callers get of a sequence: news of each step, the text of it apart by where it came from, and the whole answer.

Invariants: the texts of an answer's events joined are its text, and the pieces of an event joined are the event's text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from selfspec.loop.sequence import OWN, Sequence

Source = Literal["draft", "bonus", "target"]


@dataclass(frozen=True)
class Completion:
    """One answer and what it cost.

    Attributes:
        text: the answer, cut before a stop string, without special tokens unless the settings keep them.
        token_ids: every emitted token, the one that ended the answer included.
        finish_reason: `stop` (end token, stop id or stop string) or `length`.
        stop_string: the stop string that ended the answer, if one did.
        logprobs: log-probability of each emitted token under the target, where asked for.
        top_logprobs: for each emitted token, the likeliest tokens in its place and their log-probabilities, where asked for.
        num_target_passes: verify passes that the answer took; prefill is not counted.
        num_draft_tokens, num_accepted_tokens: tokens that were drafted, and drafted tokens that were emitted.
        num_paused_passes: passes without drafts because the text had outgrown the drafter's context.
        num_reused_tokens: prompt tokens whose KV was in the cache already.
        seconds, prefill_seconds: wall clock from admission to the last token, and the prefill's part of it.
        queue_seconds: wall clock before admission.
    """

    prompt_index: int
    sample_index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_string: str | None
    logprobs: list[float] | None
    num_prompt_tokens: int
    num_target_passes: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_paused_passes: int
    seconds: float
    prefill_seconds: float
    top_logprobs: list[list[tuple[int, float]]] | None = None
    num_reused_tokens: int = 0
    queue_seconds: float = 0.0

    @property
    def end_token_id(self) -> int | None:
        """The token that ended the answer and is no part of its text; None where something else ended it."""
        return self.token_ids[-1] if self.finish_reason == "stop" and self.stop_string is None else None

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target pass, bonus token included; 1 in autoregressive decoding."""
        return len(self.token_ids) / self.num_target_passes

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of wall clock, prefill included."""
        return len(self.token_ids) / self.seconds


@dataclass(frozen=True)
class Piece:
    """A part of an answer's text, and where the token that completes it came from.

    Attributes:
        source: an accepted `draft`, the `bonus` token that a pass adds to accepted or refused drafts, or the `target`'s own
            token of a pass without drafts.
        depth: how deep in the candidate tree the draft was, from 1; 0 for the target's tokens.
    """

    text: str
    source: Source
    depth: int = 0


@dataclass(frozen=True)
class StreamEvent:
    """What one step added to an answer.

    Text may come later than its tokens, because half a character waits for the other half and the beginning of a stop
    string for its end. So `pieces` and `text` may hold what tokens of earlier steps make.

    Attributes:
        text: what may be shown.
        token_ids: the emitted tokens.
        completion: the whole answer, in the last event.
        num_draft_tokens, num_accepted_tokens: tokens that were drafted in this step, and those of them that were emitted.
        pieces: the text, apart by tokens.
        logprobs, top_logprobs: of the emitted tokens, where asked for.
    """

    text: str
    token_ids: list[int]
    completion: Completion | None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)


class Teller:
    """Tells one caller what is new in a sequence."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._num_tokens = self._num_drafted = self._num_accepted = 0

    def news(self) -> StreamEvent:
        """What was added since the last call. A sequence that failed has no completion."""
        sequence, begin = self._sequence, self._num_tokens
        is_over = sequence.finish_reason is not None
        pieces = take_pieces(sequence)
        event = StreamEvent(
            "".join(piece.text for piece in pieces),
            sequence.token_ids[begin:],
            completion_of(sequence) if is_over and sequence.error is None else None,
            sequence.num_draft_tokens - self._num_drafted,
            sequence.num_accepted_tokens - self._num_accepted,
            pieces,
            sequence.logprobs[begin:],
            sequence.top_logprobs[begin:],
        )
        self._num_tokens = len(sequence.token_ids)
        self._num_drafted, self._num_accepted = sequence.num_draft_tokens, sequence.num_accepted_tokens
        return event


def take_pieces(sequence: Sequence) -> list[Piece]:
    """The text of a sequence that may be shown and was not taken before."""
    parts = sequence.text_stream.take_by_token(is_last=sequence.finish_reason is not None)
    return [_piece(text, sequence.token_depths[number]) for number, text in parts]


def _piece(text: str, depth: int) -> Piece:
    if depth > 0:
        return Piece(text, "draft", depth)
    return Piece(text, "target" if depth == OWN else "bonus")


def completion_of(sequence: Sequence) -> Completion:
    """The answer of a sequence that has ended."""
    assert sequence.finish_reason is not None
    return Completion(
        prompt_index=sequence.request.index,
        sample_index=sequence.request.sample_index,
        text=sequence.text_stream.text,
        token_ids=sequence.token_ids,
        finish_reason=sequence.finish_reason,
        stop_string=sequence.text_stream.stop_string,
        logprobs=sequence.logprobs if sequence.sampling.logprobs else None,
        num_prompt_tokens=len(sequence.request.prompt_ids),
        num_target_passes=sequence.num_target_passes,
        num_draft_tokens=sequence.num_draft_tokens,
        num_accepted_tokens=sequence.num_accepted_tokens,
        num_paused_passes=sequence.num_paused_passes,
        seconds=sequence.seconds,
        prefill_seconds=sequence.prefill_seconds,
        top_logprobs=sequence.top_logprobs if sequence.request.num_top_logprobs else None,
        num_reused_tokens=sequence.num_reused_tokens,
        queue_seconds=sequence.started - sequence.created,
    )
