"""What log-probabilities call an answer's tokens: the name, bytes and offset of the text that a token makes in its place.

Invariant: the bytes of an answer's tokens, joined and decoded, are its text, before a stop string cuts it.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from selfspec.loop.text import HALF, MAX_CONTEXT, context_of, text_of


def _byte_of_letter() -> dict[str, int]:
    """The letters in which byte-level vocabularies write bytes: printable bytes are themselves, the others follow."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    assert set(letters) == set(ByteLevel.alphabet())
    return letters


BYTE_OF_LETTER = _byte_of_letter()
# In which SentencePiece vocabularies write bytes.
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TokenText:
    """A token in its place.

    Attributes:
        name: its text, special tokens included, with U+FFFD for bytes that are no whole character.
        data: the bytes that it adds to the answer's text; none for a token that is left out.
    """

    name: str
    data: bytes

    @property
    def written(self) -> str:
        """The name, but with bytes that are no whole characters written out, as OpenAI writes them in completions."""
        try:
            self.data.decode()
        except UnicodeDecodeError:
            return f"bytes:{str(self.data)[2:-1]}"
        return self.name


class TokenTexts:
    """The texts of a tokenizer's tokens, each worked out when it is first asked for."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # An ordinary token, because many tokenizers drop a space at the very beginning.
        special = set(tokenizer.all_special_ids)
        ordinary = (token_id for token_id in range(len(tokenizer)) if token_id not in special)
        self._before = [next((each for each in ordinary if text_of(tokenizer, [each]).isalpha()), 0)]
        self._known: dict[int, TokenText] = {}

    def of(self, token_id: int, before: list[int] | None = None) -> TokenText:
        """A token's text after an ordinary one, or after the ids `before`."""
        if before is not None:
            return self._text(token_id, before)
        if token_id not in self._known:
            self._known[token_id] = self._text(token_id, self._before)
        return self._known[token_id]

    def _text(self, token_id: int, before: list[int]) -> TokenText:
        shown = self._in_place(token_id, before, skip_special_tokens=self._skip_special_tokens)
        if shown or not self._skip_special_tokens:
            return TokenText(shown, self._bytes(token_id, shown))
        return TokenText(self._in_place(token_id, before, skip_special_tokens=False), b"")

    def _in_place(self, token_id: int, before: list[int], *, skip_special_tokens: bool) -> str:
        def text(token_ids: list[int]) -> str:
            return text_of(self._tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

        text_before, whole = text(before), text([*before, token_id])
        return whole[len(text_before) :] if whole.startswith(text_before) else text([token_id])

    def _bytes(self, token_id: int, name: str) -> bytes:
        """A token's bytes, which its name does not tell where they are no whole characters."""
        if HALF in name:
            piece = self._tokenizer.convert_ids_to_tokens(token_id)
            if match := BYTE_TOKEN.fullmatch(piece):
                return bytes([int(match[1], 16)])
            if all(letter in BYTE_OF_LETTER for letter in piece):
                return bytes(BYTE_OF_LETTER[letter] for letter in piece)
        return name.encode()


@lru_cache(maxsize=8)
def token_texts(tokenizer: Any, skip_special_tokens: bool) -> TokenTexts:
    return TokenTexts(tokenizer, skip_special_tokens=skip_special_tokens)


@dataclass(frozen=True)
class Place:
    """One place of an answer: its token, how many characters the text has before it, and other tokens that were likely."""

    token: TokenText
    logprob: float
    offset: int
    others: list[tuple[int, TokenText, float]]


class Reading:
    """One answer's tokens as they come.

    Args:
        prompt_ids: what comes before the answer.
    """

    def __init__(self, tokenizer: Any, prompt_ids: list[int], *, skip_special_tokens: bool) -> None:
        self._texts = token_texts(tokenizer, skip_special_tokens)
        # What comes before the next token, until there is some text.
        context = context_of(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        has_text = text_of(tokenizer, context, skip_special_tokens=skip_special_tokens)
        self._before: list[int] | None = None if has_text else context
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def read(self, token_id: int, logprob: float, others: list[tuple[int, float]], *, is_end: bool) -> Place:
        """The next place. The token that ends an answer adds nothing to its text."""
        token = self._texts.of(token_id, self._before)
        named = [(other, self._texts.of(other, self._before), value) for other, value in others]
        if self._before is not None:
            self._before = None if token.data else [*self._before, token_id][-MAX_CONTEXT:]
        if is_end:
            token = TokenText(token.name, b"")
        pending, _ = self._decoder.getstate()
        first, rest = token.data[:1], token.data[1:]
        characters = self._decoder.decode(first)
        if pending and characters.startswith(HALF) and pending + first != HALF.encode():
            # The bytes before turned out to be no character, and count as one of their own.
            self._offset, characters = self._offset + 1, characters[1:]
        place = Place(token, logprob, self._offset, named)
        self._offset += len(characters) + len(self._decoder.decode(rest))
        return place
