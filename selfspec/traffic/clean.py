"""Which conversations to train on: no evaluation prompts, no near-duplicates, and none that are held out.

All three look at what the user says, because the target writes the answers anew. Words are runs of letters and digits in
lower case, so spacing and punctuation make no difference.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from selfspec.traffic.conversations import Conversation, Report

RUN_LENGTH = 10
SHINGLE_LENGTH = 5
NUM_PERMUTATIONS = 128
MOST_THRESHOLD = 0.95

Words = tuple[str, ...]


def words(text: str) -> Words:
    """A text's words, for comparison."""
    return tuple(re.findall(r"\w+", text.lower()))


class Exclusion:
    """Contains a conversation if one of its user turns equals an excluded one or shares a run of ten words with it."""

    def __init__(self, conversations: Iterable[Conversation]) -> None:
        turns = {words(turn) for conversation in conversations for turn in conversation.user_turns}
        self._turns = turns
        self._runs = {run for turn in turns for run in _runs(turn, RUN_LENGTH)}

    def __contains__(self, conversation: Conversation) -> bool:
        turns = [words(turn) for turn in conversation.user_turns]
        return any(turn in self._turns or any(run in self._runs for run in _runs(turn, RUN_LENGTH)) for turn in turns)


class NearDuplicates:
    """Remembers conversations, and finds one whose user says nearly the same, by MinHash over runs of five words.

    Args:
        similarity: least estimated Jaccard similarity of two that count as the same.
    """

    def __init__(self, similarity: float = 0.8) -> None:
        if not 0 < similarity <= 1:
            raise ValueError(f"similarity={similarity} is not allowed: use a number above 0, at most 1")
        try:
            from datasketch import MinHash, MinHashLSH
        except ImportError as error:
            raise ValueError("finding near-duplicates needs datasketch: pip install 'selfspec[train]'") from error
        self._new_hash = MinHash
        # It proposes, and `find` decides. It cannot be built for thresholds near 1.
        self._index = MinHashLSH(threshold=min(similarity, MOST_THRESHOLD), num_perm=NUM_PERMUTATIONS)
        self._remembered: list[tuple[str, Any]] = []
        self._similarity = similarity

    def find(self, conversation: Conversation) -> str | None:
        """The id of an earlier conversation like this one. If there is none: None, and this one is remembered."""
        spoken = words("\n".join(conversation.user_turns))
        shingles = set(_runs(spoken, SHINGLE_LENGTH)) or {spoken}
        own = self._new_hash(num_perm=NUM_PERMUTATIONS)
        own.update_batch(sorted(" ".join(shingle).encode() for shingle in shingles))
        for number in sorted(self._index.query(own)):
            other_id, other = self._remembered[number]
            if own.jaccard(other) >= self._similarity:
                return other_id
        self._index.insert(len(self._remembered), own)
        self._remembered.append((conversation.id, own))
        return None


def clean(
    conversations: Iterable[Conversation],
    report: Report,
    *,
    excluded: Iterable[Conversation] = (),
    similarity: float = 0.8,
    redact: Callable[[Conversation], Conversation] | None = None,
) -> Iterator[Conversation]:
    """The conversations that are neither excluded nor near-duplicates of earlier ones, redacted if asked for."""
    # Made here and not in the generator, because their errors should show before a target is loaded.
    return _clean(conversations, report, Exclusion(excluded), NearDuplicates(similarity), redact)


def _clean(
    conversations: Iterable[Conversation],
    report: Report,
    exclusion: Exclusion,
    duplicates: NearDuplicates,
    redact: Callable[[Conversation], Conversation] | None,
) -> Iterator[Conversation]:
    for conversation in conversations:
        if conversation in exclusion:
            report.skip("excluded", f"{conversation.id}: {conversation.user_turns[0][:80]}")
            continue
        # Redacted in between: evaluation prompts are recognised by their words, and two prompts that differ only in a name
        # become duplicates.
        if redact is not None:
            conversation = redact(conversation)
        if (other := duplicates.find(conversation)) is not None:
            report.skip("near-duplicate", f"{conversation.id} of {other}")
        else:
            report.num_kept += 1
            yield conversation


def is_held_out(conversation: Conversation, fraction: float) -> bool:
    """Whether this conversation is held out. Only what its user says decides."""
    digest = hashlib.blake2b(" ".join(words("\n".join(conversation.user_turns))).encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def _runs(turn: Words, length: int) -> Iterator[Words]:
    return (turn[i : i + length] for i in range(len(turn) - length + 1))
