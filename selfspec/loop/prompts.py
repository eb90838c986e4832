"""A prompt's way into the cache, a chunk at a time. Host only: `selfspec.loop.step` runs the chunks beside trees.

Invariant: the last token of a prompt is left out, because it is the first tree's root.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from selfspec.cache.kv import KVCache
from selfspec.loop.drafter import Drafter
from selfspec.loop.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """A prompt's next tokens in one pass.

    Attributes:
        next_ids: the token after each.
        is_last: the prompt is complete with them.
    """

    prefill: Prefill
    tokens: list[int]
    next_ids: list[int]
    is_last: bool

    @property
    def sequence(self) -> Sequence:
        return self.prefill.sequence


class Prefill:
    """One prompt that is being entered, and the features that its drafter wants of its tokens."""

    def __init__(self, sequence: Sequence, drafter: Drafter, cache: KVCache) -> None:
        self.sequence = sequence
        self._drafter = drafter
        self._cache = cache
        self._text = [*sequence.request.prompt_ids, *sequence.token_ids]
        self._num_taken = 0
        self._started = time.perf_counter()
        # Whether every token is in a chunk.
        self.is_taken = False
        self._parts: list[Mapping[Any, torch.Tensor]] = []

    @property
    def num_left(self) -> int:
        """Tokens that no chunk has yet."""
        return len(self._text) - 1 - self._num_taken

    def begin(self) -> None:
        """Adopt the beginning of the prompt that the cache holds, and reserve room for the rest. A second call does nothing.

        Raises:
            CacheFull: there is no room.
        """
        cache, sequence, row = self._cache, self.sequence, self.sequence.row
        if row.blocks:
            return
        adopted = cache.adopt(row, reusable(sequence, self._drafter), self._drafter.block_names)
        if adopted:
            self._parts.append(adopted)
        cache.reserve([row], len(self._text) - row.length)
        self._num_taken = row.length
        if not sequence.started:
            sequence.started = time.perf_counter()
            sequence.num_reused_tokens = row.length

    def take(self, num_tokens: int) -> Chunk:
        """The next `num_tokens` tokens, or those that are left."""
        first = self._num_taken
        end = min(first + num_tokens, len(self._text) - 1)
        self._num_taken, self.is_taken = end, end == len(self._text) - 1
        return Chunk(self, self._text[first:end], self._text[first + 1 : end + 1], self.is_taken)

    def note(self, chunk: Chunk, features: Mapping[int, torch.Tensor]) -> None:
        """Take note that a chunk of T tokens is in a pass.

        Args:
            features: of its tokens, each [1, T, E], for a drafter that is not resident.
        """
        self._cache.advance(self.sequence.row, len(chunk.tokens))
        if features:
            self._parts.append(features)
        if chunk.is_last:
            publish(self.sequence, self._drafter, self._cache, self.features)

    def finish(self) -> None:
        """Count the time, which a sequence that gave its place up takes once more for each return."""
        self.sequence.prefill_seconds += time.perf_counter() - self._started

    @property
    def features(self) -> dict[int, torch.Tensor]:
        """The features of all tokens so far, each [1, T, E]; none for a resident drafter."""
        if not self._parts:
            return {}
        return {name: torch.cat([part[name] for part in self._parts], dim=1) for name in self._parts[0]}


def reusable(sequence: Sequence, drafter: Drafter) -> list[int]:
    """The part of a sequence's prefix that may come from the cache.

    A resident drafter that reads features needs those of the last token, so a pass must compute it.
    """
    prefix = sequence.prefix_ids
    return prefix[:-1] if drafter.is_resident and drafter.features else prefix


def publish(
    sequence: Sequence, drafter: Drafter, cache: KVCache, features: Mapping[int, torch.Tensor] | None = None
) -> None:
    """Offer a sequence's full blocks to texts that begin alike, with what its drafter keeps there."""
    kept: dict[Hashable, torch.Tensor | None] = dict((features or {}).items())
    if drafter.is_resident:
        kept |= dict.fromkeys(drafter.block_names)
    cache.publish(sequence.row, sequence.prefix_ids, kept)
