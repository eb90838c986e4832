"""The loop's last stage: token ids to text pieces as they come, cut at the first stop string.

Invariant: the pieces joined are the final text. No piece holds a part of a stop string or half a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# As many ids of the context are decoded with the first ids of the text.
MAX_CONTEXT = 8


class TextStream:
    """Incremental detokenisation of one sequence.

    Args:
        tokenizer: anything with transformers' `decode(ids, skip_special_tokens=True)`; None for no text at all.
        stop: strings that end the text.
        context: ids that come before the text, of which the last few are enough. Many tokenizers drop a space at the very
            beginning, and an answer's first space is not at the beginning.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), *, context: Sequence[int] = ()) -> None:
        if tokenizer is None and stop:
            raise ValueError(f"stop={tuple(stop)!r} needs a tokenizer, and this target has none: use stop_token_ids")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = list(context[-MAX_CONTEXT:]) if tokenizer is not None else []
        if self._ids and self._decode(self._ids).endswith("\ufffd"):
            # The context ends within a character, so it cannot be told apart from what follows.
            self._ids = []
        # Only ids from `_start` on are decoded again. The context and the text have those up to `_known`, and the text has
        # `_num_ahead` characters more.
        self._start = 0
        self._known = len(self._ids)
        self._num_ahead = 0
        self.text = ""
        self._num_taken = 0
        self.stop_string: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Add a token. Returns True when it completes a stop string; the text then ends before that string."""
        if self._tokenizer is None:
            return False
        self._ids.append(token_id)
        fresh = self._fresh_text()
        if not fresh:
            return False
        begin = len(self.text)
        self.text += fresh
        return may_stop and self._cut(begin)

    def finish(self) -> None:
        """End the text. Half a character that was held back is added as it is, because no token follows."""
        if self._tokenizer is not None and self.stop_string is None:
            self.text += self._decode(self._ids[self._start :])[self._num_known_characters() :]
            self._start = self._known = len(self._ids)
            self._num_ahead = 0

    def take(self, *, is_last: bool = False) -> str:
        """The text that may be shown and was not taken before; all the rest once the sequence has ended."""
        end = len(self.text) if is_last or self.stop_string is not None else len(self.text) - self._held_back()
        piece = self.text[self._num_taken : end]
        self._num_taken = max(self._num_taken, end)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _num_known_characters(self) -> int:
        """How many of the characters decoded from `_start` on are in the text already."""
        return len(self._decode(self._ids[self._start : self._known])) + self._num_ahead

    def _fresh_text(self) -> str:
        """The whole characters that the last ids add; half a character at the end waits for its other half.

        Decoding starts a few tokens earlier, at one that is not empty, because a token's text can depend on what comes
        before it (leading spaces).
        """
        decoded = self._decode(self._ids[self._start :])
        whole = decoded.rstrip("\ufffd")
        fresh = whole[self._num_known_characters() :]
        if len(whole) < len(decoded):
            self._num_ahead += len(fresh)
        elif fresh:
            self._start, self._known, self._num_ahead = self._known, len(self._ids), 0
        return fresh

    def _cut(self, begin: int) -> bool:
        """End the text before the earliest stop string that the characters from `begin` on complete."""
        found: tuple[int, str] | None = None
        for stop in self._stop:
            at = self.text.find(stop, max(0, begin - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return False
        self.text = self.text[: found[0]]
        self.stop_string = found[1]
        return True

    def _held_back(self) -> int:
        """Length of the longest end of the text that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
