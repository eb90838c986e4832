"""The loop's last stage: token ids to text pieces as they come, cut at the first stop string.

Invariants: the pieces joined are the final text. No piece holds a part of a stop string or half a character. A token's cost
does not grow with the text.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from selfspec.loop.stop_strings import StopString

# A part of a character is decoded to this. A character at the text's end may still become another one.
HALF = "\ufffd"
# Among so many last ids of a context there is one that makes text.
MAX_CONTEXT = 8
# No more ids wait for the rest of a character, because a run of bytes that are none may be long.
MAX_PENDING = 32


def text_of(tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """The text of token ids. It is not cleaned up, because that takes back spaces that were shown."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def context_of(tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> list[int]:
    """The last ids that make whole characters, after which other ids are decoded; none where half a character is last.

    Many tokenizers drop a space at the very beginning, and an answer's first space is not at the beginning.
    """
    last: list[int] = []
    for size in range(1, min(MAX_CONTEXT, len(token_ids)) + 1):
        last = list(token_ids[-size:])
        text = text_of(tokenizer, last, skip_special_tokens=skip_special_tokens)
        if text and not text.endswith(HALF):
            return last
    # There is no text, or none that could be told apart from what follows.
    return [] if last and text else last


class TextStream:
    """Incremental detokenisation of one sequence.

    Args:
        tokenizer: anything with transformers' `decode`; None for no text at all.
        stop: strings that end the text.
        context: ids that come before the text.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        *,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        if tokenizer is None and stop:
            raise ValueError(f"stop={tuple(stop)!r} needs a tokenizer, and this target has none: use stop_token_ids")
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stops = [StopString(string) for string in stop]
        # Text in a buffer, because a string would be copied for every token.
        self._text = io.StringIO()
        self._num_characters = 0
        self._num_taken = 0
        # How many characters the text had after each token, before a stop string cut it, and the first token with text
        # that was not taken.
        self._ends: list[int] = []
        self._first = 0
        # Ids whose text may still change, how many of its characters are in the text already, and the ids before them with
        # their text.
        self._pending: list[int] = []
        self._num_ahead = 0
        self._before: list[int] = []
        self._text_before = ""
        # Not decoded before there is something to decode after it.
        self._context: Sequence[int] | None = context
        self.stop_string: str | None = None

    @property
    def text(self) -> str:
        return self._text.getvalue()

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Add a token. Returns True when it completes a stop string; the text then ends before that string."""
        if self._tokenizer is None:
            return False
        if self._context is not None:
            before = context_of(self._tokenizer, self._context, skip_special_tokens=self._skip_special_tokens)
            self._note_before(before)
            self._context = None
        self._pending.append(token_id)
        fresh = self._fresh_text()
        begin = self._num_characters
        self._append(fresh)
        self._ends.append(self._num_characters)
        ends = [(begin + end - len(stop.string), stop) for stop in self._stops if (end := stop.read(fresh)) is not None]
        if not ends or not may_stop:
            return False
        # Of several the one that begins first.
        self._num_characters, stop = min(ends, key=lambda end: end[0])
        self._text.truncate(self._num_characters)
        self.stop_string = stop.string
        return True

    def finish(self) -> None:
        """End the text. Half a character that was held back is added as it is, because no token follows."""
        if self.stop_string is None and self._pending:
            self._append(self._settle(len(self._pending), self._decode_after(self._pending)))
            self._ends[-1] = self._num_characters

    def take(self, *, is_last: bool = False) -> str:
        """The text that may be shown and was not taken before; all the rest once the sequence has ended."""
        if self._tokenizer is None:
            return ""
        is_open = not is_last and self.stop_string is None
        end = self._num_characters - (max((stop.size for stop in self._stops), default=0) if is_open else 0)
        self._text.seek(self._num_taken)
        self._num_taken = max(self._num_taken, end)
        return self._text.read(self._num_taken - self._text.tell())

    def take_by_token(self, *, is_last: bool = False) -> list[tuple[int, str]]:
        """As `take`, but apart by tokens: the number of each one that completes some text, and that text.

        The end token has no text. Use either this or `take` throughout.
        """
        begin = self._num_taken
        text = self.take(is_last=is_last)
        end, at, parts = begin + len(text), begin, []
        while at < end:
            # The last token's text may still grow, when the sequence ends.
            until = min(self._ends[self._first], end)
            if until > at:
                parts.append((self._first, text[at - begin : until - begin]))
                at = until
            if at < end:
                self._first += 1
        return parts

    def _append(self, text: str) -> None:
        self._text.seek(self._num_characters)
        self._text.write(text)
        self._num_characters += len(text)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return text_of(self._tokenizer, token_ids, skip_special_tokens=self._skip_special_tokens)

    def _decode_after(self, token_ids: Sequence[int]) -> str:
        """The text of ids in their place, after `_before`."""
        whole = self._decode([*self._before, *token_ids])
        if whole.startswith(self._text_before):
            return whole[len(self._text_before) :]
        # Some tokenizers decode a run of bytes as one: where it is no valid text, the characters before are lost with it.
        return self._decode(token_ids)

    def _note_before(self, token_ids: list[int]) -> None:
        self._before, self._text_before = token_ids, self._decode(token_ids)

    def _fresh_text(self) -> str:
        """The whole characters that the last ids add; half a character at the end waits for its other half."""
        decoded = self._decode_after(self._pending)
        whole = decoded.rstrip(HALF)
        if decoded and len(whole) == len(decoded):
            return self._settle(len(self._pending), decoded)
        if not decoded and self._text_before:
            # Special tokens that are left out, for instance.
            self._pending.clear()
            return ""
        if len(self._pending) > MAX_PENDING:
            # A character has at most four bytes, so only the last three ids can be part of one that will be whole.
            count = len(self._pending) - 3
            return self._settle(count, self._decode_after(self._pending[:count])) + self._fresh_text()
        fresh = whole[self._num_ahead :]
        self._num_ahead += len(fresh)
        return fresh

    def _settle(self, count: int, text: str) -> str:
        """Take the first pending ids, which make `text`, as they are; returns what of it is not in the text yet."""
        fresh = text[self._num_ahead :]
        self._num_ahead = max(self._num_ahead - len(text), 0)
        self._note_before(self._pending[:count])
        del self._pending[:count]
        return fresh
