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

from selfspec.loop.text import HALF, context_of, text_of


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
        self._known: dict[tuple[int, bool], TokenText] = {}

    def of(self, token_id: int, *, is_first: bool = False) -> TokenText:
        """A token's text, at the very beginning of a text or anywhere else."""
        key = (token_id, is_first)
        if key not in self._known:
            name = self._in_place(token_id, is_first, skip_special_tokens=False)
            is_left_out = self._skip_special_tokens and not self._in_place(token_id, is_first, skip_special_tokens=True)
            self._known[key] = TokenText(name, b"" if is_left_out else self._bytes(token_id, name))
        return self._known[key]

    def _in_place(self, token_id: int, is_first: bool, *, skip_special_tokens: bool) -> str:
        def text(token_ids: list[int]) -> str:
            return text_of(self._tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

        if not is_first:
            before, whole = text(self._before), text([*self._before, token_id])
            if whole.startswith(before):
                return whole[len(before) :]
        return text([token_id])

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
        prompt_ids: what comes before the answer; None where it is some text.
    """

    def __init__(self, tokenizer: Any, prompt_ids: list[int] | None, *, skip_special_tokens: bool) -> None:
        self._texts = token_texts(tokenizer, skip_special_tokens)
        self._is_first = prompt_ids is not None and not context_of(
            tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def read(self, token_id: int, logprob: float, others: list[tuple[int, float]], *, is_end: bool) -> Place:
        """The next place. The token that ends an answer adds nothing to its text."""
        of = self._texts.of
        token = of(token_id, is_first=self._is_first)
        if is_end:
            token = TokenText(token.name, b"")
        named = [(other, of(other, is_first=self._is_first), value) for other, value in others]
        place = Place(token, logprob, self._offset, named)
        self._offset += len(self._decoder.decode(token.data))
        self._is_first = self._is_first and not of(token_id).data
        return place
