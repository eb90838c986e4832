"""What log-probabilities call tokens: bytes that clients can join, names that differ, offsets in the text shown."""

from __future__ import annotations

from typing import Any

import pytest
from fuzz.vocabularies import byte_level, sentence_piece
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from selfspec import SamplingParams
from selfspec.api import Completion
from selfspec.loop.sequence import Request
from selfspec.serve.answers import ChatAnswer, CompletionAnswer
from selfspec.serve.token_names import Reading, TokenTexts

HALVES = "😐😑".encode()


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


BYTE_LEVEL = wrapped(byte_level([b"the", b" cat", b" \xf0\x9f"], gap=0))
SENTENCE_PIECE = wrapped(sentence_piece(["the", " cat", "A"], gap=0, is_unigram=False, strips=True, has_bytes=True))


def ids_of(tokenizer: PreTrainedTokenizerFast, *pieces: str | bytes) -> list[int]:
    """The ids of whole tokens, and of single bytes."""
    found = []
    for piece in pieces:
        if isinstance(piece, str):
            marked = piece.replace(" ", "Ġ" if tokenizer is BYTE_LEVEL else "▁")
            found.append(tokenizer.convert_tokens_to_ids(marked))
        elif tokenizer is BYTE_LEVEL:
            found += [ids[0] for byte in piece if (ids := [i for i in range(256) if TEXTS.of(i).data == bytes([byte])])]
        else:
            found += [1 + byte for byte in piece]
    return found


TEXTS = TokenTexts(BYTE_LEVEL, skip_special_tokens=True)


def read(tokenizer: Any, prompt: list[int], ids: list[int], *, skip: bool = True) -> list[tuple[str, bytes, int]]:
    reading = Reading(tokenizer, prompt, skip_special_tokens=skip)
    places = [reading.read(token_id, -1.0, [], is_end=False) for token_id in ids]
    return [(place.token.written, place.token.data, place.offset) for place in places]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte level", "byte fallback"])
def test_parts_of_characters_have_their_bytes_and_the_offset_of_their_character(tokenizer: Any) -> None:
    prompt = ids_of(tokenizer, "the")
    said = read(tokenizer, prompt, ids_of(tokenizer, " cat", HALVES, " cat"))
    assert b"".join(data for _, data, _ in said).decode() == " cat😐😑 cat"
    assert [offset for *_, offset in said] == [0, *[4] * 4, *[5] * 4, 6]
    assert said[1][0] == r"bytes:\xf0" and said[4][0] == r"bytes:\x90"


def test_a_token_of_a_space_and_a_part_of_a_character_has_both() -> None:
    token = BYTE_LEVEL.convert_tokens_to_ids("ĠðŁ")
    assert (TEXTS.of(token).name, TEXTS.of(token).data) == (" \ufffd", b" \xf0\x9f")
    assert TEXTS.of(token).written == r"bytes: \xf0\x9f"


def test_bytes_that_never_become_a_character_count_as_one() -> None:
    said = read(BYTE_LEVEL, [], ids_of(BYTE_LEVEL, b"\xe2", "the", b"\xff", "the"))
    assert [offset for *_, offset in said] == [0, 1, 4, 5]


def test_the_first_token_of_a_text_has_no_space_where_the_text_has_none() -> None:
    ids = ids_of(SENTENCE_PIECE, " cat", " cat")
    assert [name for name, *_ in read(SENTENCE_PIECE, [SENTENCE_PIECE.bos_token_id], ids)] == ["cat", " cat"]
    assert [name for name, *_ in read(SENTENCE_PIECE, ids[:1], ids)] == [" cat", " cat"]


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_add_bytes_where_they_are_shown(skip: bool) -> None:
    end = BYTE_LEVEL.eos_token_id
    said = read(BYTE_LEVEL, [], [*ids_of(BYTE_LEVEL, "the"), end, *ids_of(BYTE_LEVEL, "the")], skip=skip)
    assert said[1] == ("</s>", b"" if skip else b"</s>", 3)
    assert said[2][2] == (3 if skip else 7)


class Counting:
    """A tokenizer that counts how often it decodes."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(BYTE_LEVEL, name)

    def __len__(self) -> int:
        return len(BYTE_LEVEL)

    def decode(self, *args: Any, **options: Any) -> str:
        self.num_calls += 1
        return BYTE_LEVEL.decode(*args, **options)


def test_a_token_is_worked_out_once_and_only_if_it_is_asked_for() -> None:
    counting = Counting()
    texts = TokenTexts(counting, skip_special_tokens=True)
    before = counting.num_calls
    for _ in range(100):
        texts.of(256)
    assert counting.num_calls - before <= 4 and before < len(BYTE_LEVEL)


def completion(ids: list[int], top: list[tuple[int, float]], finish_reason: str = "length") -> Completion:
    counts = dict.fromkeys(("num_target_passes", "num_draft_tokens", "num_accepted_tokens", "num_paused_passes"), 1)
    facts = {"stop_string": None, "num_prompt_tokens": 1, "seconds": 1.0, "prefill_seconds": 0.0, **counts}
    tops = [top for _ in ids]
    return Completion(0, 0, "", ids, finish_reason, logprobs=[-1.0] * len(ids), top_logprobs=tops, **facts)  # type: ignore[arg-type]


def test_no_two_entries_have_one_name() -> None:
    """Neither parts of characters, nor a byte token and the letter it stands for, nor ids that the tokenizer lacks."""
    letter, byte = SENTENCE_PIECE.convert_tokens_to_ids("A"), ids_of(SENTENCE_PIECE, b"A")[0]
    tops = [*ids_of(SENTENCE_PIECE, HALVES[:3]), letter, byte, 100_000, 100_001]
    request = Request(ids_of(SENTENCE_PIECE, "the"), SamplingParams(logprobs=True), num_top_logprobs=7)
    answer = CompletionAnswer("id", "m", SENTENCE_PIECE, 1, "none", [request])
    choice = answer.choice(0, completion([letter], [(token_id, float(-i)) for i, token_id in enumerate(tops)]))
    expected = [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", "A", f"token_id:{byte}", "", "token_id:100001"]
    assert list(choice["logprobs"]["top_logprobs"][0]) == expected
    assert list(choice["logprobs"]["top_logprobs"][0].values()) == [float(-i) for i in range(7)]


@pytest.mark.parametrize(("stop_ids", "reason"), [((), None), ((256,), 256)])
def test_the_token_that_ends_a_chat_adds_no_bytes_and_is_named_as_the_reason(stop_ids: tuple[int, ...], reason: Any) -> None:
    request = Request([1], SamplingParams(logprobs=True, stop_token_ids=stop_ids))
    answer = ChatAnswer("id", "m", BYTE_LEVEL, 1, "none", [request])
    [choice] = answer.whole([completion([256, 256], [], "stop")])["choices"]
    entries = choice["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in entries] == [("the", list(b"the")), ("the", [])]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
