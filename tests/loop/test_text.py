"""Token ids to text pieces: joined they are the tokenizer's own text, cut at the stop string, whatever is split."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from selfspec.loop.stop_strings import StopString
from selfspec.loop.text import MAX_PENDING, TextStream, context_of

# Merges from this text put spaces and letters into one token with the first bytes of the character that follows.
TEXT = "naïve café – “déjà vu” … 日本語 日本 émigré 🙂🙃 🙂 the cat, the café… “the” – the end é à 日 🙂"
REPLACEMENT = "\ufffd"


def _wrapped(backend: Tokenizer, special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special, clean_up_tokenization_spaces=False)


def byte_level() -> PreTrainedTokenizerFast:
    """As in GPT-2, Llama 3 and Qwen, without splitting into words: a token may be any run of bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    return _wrapped(backend, "<|end|>")


def sentence_piece() -> PreTrainedTokenizerFast:
    """As in Llama 2 and Gemma: spaces inside tokens, the first one stripped, unknown characters as byte tokens."""
    words = ["▁", "▁the", "▁cat", "the", "▁cafe", "s", "é", "▁é", ",", "…"]
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["</s>"])
    return _wrapped(backend, "</s>")


BYTE_LEVEL = byte_level()
SENTENCE_PIECE = sentence_piece()
END = BYTE_LEVEL.eos_token_id


def decoded(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)


def settled(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """The text that no later token can change: all but half a character at its end."""
    return decoded(tokenizer, ids).rstrip(REPLACEMENT)


def run(
    tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], stop: Sequence[str] = (), step_sizes: Sequence[int] = (1,)
) -> tuple[TextStream, list[str], int]:
    """Push ids, taking a piece after every so many; the stream, its pieces, and how many ids were pushed."""
    text_stream = TextStream(tokenizer, stop)
    pieces = []
    sizes = list(step_sizes)
    left = sizes[0]
    num_pushed = 0
    is_stopped = False
    for token in ids:
        is_stopped = text_stream.push(token)
        num_pushed += 1
        if is_stopped:
            break
        left -= 1
        if left == 0:
            pieces.append(text_stream.take())
            sizes.append(sizes.pop(0))
            left = sizes[0]
    text_stream.finish()
    assert is_stopped == (text_stream.stop_string is not None)
    pieces.append(text_stream.take(is_last=True))
    return text_stream, pieces, num_pushed


# Any ids at all, bytes that are no characters included; and ids of real text, whose characters span several tokens.
random_ids = st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=24)
text_ids = (
    st.text(alphabet="the café…“”–日本語🙂\n,", max_size=20)
    .map(lambda text: BYTE_LEVEL(text).input_ids)
    .flatmap(lambda ids: st.just(ids) | st.sampled_from(range(len(ids) + 1)).map(lambda i: [*ids[:i], END, *ids[i:]]))
)
step_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def test_the_tokenizer_splits_characters_and_joins_them_with_others() -> None:
    """What the properties below rely on: tokens of half characters, and of text with half a character at its end."""
    texts = [decoded(BYTE_LEVEL, [token]) for token in range(len(BYTE_LEVEL))]
    assert any(text.endswith(REPLACEMENT) and text.strip(REPLACEMENT) for text in texts)
    assert len(BYTE_LEVEL("🙃").input_ids) > 1
    assert decoded(BYTE_LEVEL, BYTE_LEVEL(TEXT).input_ids) == TEXT


@PROPERTY
@given(random_ids | text_ids, step_sizes)
def test_pieces_joined_are_the_tokenizers_text(ids: list[int], sizes: list[int]) -> None:
    text_stream, pieces, _ = run(BYTE_LEVEL, ids, step_sizes=sizes)
    assert "".join(pieces) == text_stream.text == decoded(BYTE_LEVEL, ids)


@PROPERTY
@given(random_ids | text_ids)
def test_text_is_shown_at_once_and_never_half_a_character(ids: list[int]) -> None:
    """After every token the text shown is all that is settled, so nothing shown is ever taken back."""
    text_stream = TextStream(BYTE_LEVEL)
    shown = ""
    for count, token in enumerate(ids, start=1):
        text_stream.push(token)
        shown += text_stream.take()
        assert shown == settled(BYTE_LEVEL, ids[:count])
    assert decoded(BYTE_LEVEL, ids).startswith(shown)


@PROPERTY
@given(random_ids | text_ids, step_sizes, st.sampled_from([(), ("the",), ("afé", "fé…"), ("語🙂",)]))
def test_text_by_token_is_the_text_whose_tokens_are_in_order(
    ids: list[int], sizes: list[int], stop: tuple[str, ...]
) -> None:
    """And where nothing is held back, a token's part is what it adds to the settled text."""
    _, expected, num_pushed = run(BYTE_LEVEL, ids, stop, sizes)
    text_stream, parts, pieces = TextStream(BYTE_LEVEL, stop), [], []
    sizes, left = list(sizes) * len(ids), 0
    for token in ids[:num_pushed]:
        is_stopped = text_stream.push(token)
        left += 1
        if not is_stopped and left == sizes[0]:
            parts.append(text_stream.take_by_token())
            sizes, left = sizes[1:], 0
    text_stream.finish()
    parts.append(text_stream.take_by_token(is_last=True))
    pieces = ["".join(text for _, text in part) for part in parts]
    assert pieces == expected
    numbers = [number for part in parts for number, text in part if text]
    assert numbers == sorted(numbers) and len(numbers) == sum(map(len, parts))
    if not stop:
        by_token = dict.fromkeys(numbers, "")
        for number, text in (pair for part in parts for pair in part):
            by_token[number] += text
        for number in numbers[:-1]:
            before, after = settled(BYTE_LEVEL, ids[:number]), settled(BYTE_LEVEL, ids[: number + 1])
            assert after == before + by_token[number]


@PROPERTY
@given(random_ids | text_ids, step_sizes, st.data())
def test_text_ends_before_the_stop_string_at_the_token_that_completes_it(
    ids: list[int], sizes: list[int], data: st.DataObject
) -> None:
    """[E1] [E2] any piece of the text as the stop string, over any number of tokens and steps."""
    text = decoded(BYTE_LEVEL, ids)
    begin = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stop = text[begin : begin + data.draw(st.integers(1, 6))].strip(REPLACEMENT) or "absent"
    text_stream, pieces, num_pushed = run(BYTE_LEVEL, ids, [stop], sizes)
    count = next((k for k in range(len(ids) + 1) if stop in settled(BYTE_LEVEL, ids[:k])), None)
    if count is None:
        assert num_pushed == len(ids) and text_stream.stop_string is None
        expected = text
    else:
        assert (num_pushed, text_stream.stop_string) == (count, stop)
        expected = text[: text.find(stop)]
    assert text_stream.text == "".join(pieces) == expected
    for i in range(len(pieces)):
        assert expected.startswith("".join(pieces[: i + 1]))


@PROPERTY
@given(text_ids, step_sizes, st.lists(st.text(alphabet="the café…", min_size=1, max_size=3), min_size=1, max_size=3))
def test_of_several_stop_strings_the_first_completed_ends_the_text(
    ids: list[int], sizes: list[int], stops: list[str]
) -> None:
    """[E2] of those that one token completes, the one that begins first."""
    text_stream, pieces, num_pushed = run(BYTE_LEVEL, ids, stops, sizes)
    hits = ((k, settled(BYTE_LEVEL, ids[:k])) for k in range(1, len(ids) + 1))
    count, text = next(((k, text) for k, text in hits if any(stop in text for stop in stops)), (len(ids), None))
    assert num_pushed == count
    if text is None:
        expected = decoded(BYTE_LEVEL, ids)
    else:
        expected = text[: min(text.find(stop) for stop in stops if stop in text)]
    assert "".join(pieces) == text_stream.text == expected


def test_a_stop_string_is_complete_although_half_a_character_follows_in_its_token() -> None:
    """[E2] it must not wait for the rest of the character, which may never come."""
    token = next(t for t in range(len(BYTE_LEVEL)) if decoded(BYTE_LEVEL, [t]) == " " + REPLACEMENT)
    ids = [*BYTE_LEVEL("the").input_ids, token]
    text_stream, pieces, _ = run(BYTE_LEVEL, [*ids, *BYTE_LEVEL("cat").input_ids], [" "])
    assert ("".join(pieces), text_stream.stop_string) == ("the", " ")
    text_stream, pieces, _ = run(BYTE_LEVEL, ids, ["e "])
    assert ("".join(pieces), text_stream.stop_string) == ("th", "e ")


@pytest.mark.parametrize("skipped", [1, 2, 3, 5])
def test_a_stop_string_before_the_minimum_is_text_and_one_after_it_ends(skipped: int) -> None:
    """[E2] with `may_stop` false; an occurrence that began in time and is completed later ends the text."""
    ids = [token for letter in "xyxyxyxy" for token in BYTE_LEVEL(letter).input_ids]
    text_stream = TextStream(BYTE_LEVEL, ["xy"])
    stopped = [text_stream.push(token, may_stop=i >= skipped) for i, token in enumerate(ids)]
    first = next(i for i in range(skipped, len(ids)) if i % 2 == 1)
    assert stopped.index(True) == first
    fresh = TextStream(BYTE_LEVEL, ["xy"])
    assert [fresh.push(token, may_stop=i >= skipped) for i, token in enumerate(ids[: first + 1])][-1]
    assert (fresh.text, fresh.take()) == ("xyxyxyxy"[: first - 1],) * 2


WORDS = [2 + 256 + i for i in range(10)]
CHARACTERS = [[2 + byte for byte in character.encode()] for character in "ß日🙂é"]


@PROPERTY
@given(st.lists(st.sampled_from([[1], *([word] for word in WORDS), *CHARACTERS]), max_size=14), step_sizes)
def test_leading_spaces_and_byte_tokens_survive_being_streamed(parts: list[list[int]], sizes: list[int]) -> None:
    """Decoding from the middle strips a space there, and a skipped end token must not hide the one before it."""
    ids = [token for part in parts for token in part]
    text_stream, pieces, _ = run(SENTENCE_PIECE, ids, step_sizes=sizes)
    assert "".join(pieces) == text_stream.text == decoded(SENTENCE_PIECE, ids)


def of_bytes(data: bytes) -> list[int]:
    return [2 + byte for byte in data]


THE, CAT = (2 + 256 + i for i in (1, 2))


@pytest.mark.parametrize("characters", ["한국어", "é😂é😂", "日é本é", "한 국"])
def test_an_answer_keeps_its_space_after_characters_of_several_tokens(characters: str) -> None:
    """Wherever the last ids of the context begin, and whatever they cut."""
    context = [THE, *of_bytes(characters.encode())]
    text_stream = TextStream(SENTENCE_PIECE, context=context)
    text_stream.push(CAT)
    assert text_stream.text == " cat"
    assert decoded(SENTENCE_PIECE, [*context, CAT]) == f"the{characters} cat"


def test_half_a_character_at_a_contexts_end_is_no_context() -> None:
    assert context_of(SENTENCE_PIECE, [THE, *of_bytes("한".encode()[:2])]) == []
    assert context_of(SENTENCE_PIECE, [1, 1, 1]) == [1, 1, 1] and context_of(SENTENCE_PIECE, []) == []
    assert context_of(SENTENCE_PIECE, [THE, 1, 1]) == [THE, 1, 1]


def test_bytes_that_are_no_character_leave_those_before_and_after_alone() -> None:
    """Some tokenizers decode a run of bytes as one, and one bad byte spoils the run."""
    text_stream = TextStream(SENTENCE_PIECE, context=[THE])
    shown = ""
    for token in [*of_bytes("é".encode()), *of_bytes(b"\xe2"), CAT, *of_bytes("日".encode()), CAT]:
        text_stream.push(token)
        shown += text_stream.take()
    assert shown == text_stream.text == f"é{REPLACEMENT} cat日 cat"


class Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, ids: list[int], **options: bool) -> str:
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


STRAY = BYTE_LEVEL.convert_tokens_to_ids("¡")


@pytest.mark.parametrize(
    ("tokenizer", "ids", "context"),
    [
        (BYTE_LEVEL, BYTE_LEVEL(TEXT).input_ids, []),
        (BYTE_LEVEL, [STRAY], []),
        (BYTE_LEVEL, [END], BYTE_LEVEL("the").input_ids),
        (BYTE_LEVEL, [END], []),
        (SENTENCE_PIECE, of_bytes(b"\xe2"), [THE]),
        (SENTENCE_PIECE, [THE, *of_bytes("日".encode())], []),
    ],
    ids=["text", "stray bytes", "special tokens", "nothing but special tokens", "stray byte tokens", "byte tokens"],
)
def test_every_token_costs_the_same_in_a_long_answer(
    tokenizer: PreTrainedTokenizerFast, ids: list[int], context: list[int]
) -> None:
    """By the number of ids decoded: thirty thousand tokens cost thirty times as many as a thousand."""
    counts = []
    for size in (1_000, 30_000):
        counting = Counting(tokenizer)
        text_stream = TextStream(counting, context=context)
        shown = []
        for i in range(size):
            text_stream.push(ids[i % len(ids)])
            shown.append(text_stream.take())
        text_stream.finish()
        assert "".join(shown) + text_stream.take(is_last=True) == text_stream.text
        counts.append(counting.num_decoded / size)
    assert counts[1] < 1.1 * counts[0] < 2 * MAX_PENDING


def test_a_long_run_of_bytes_that_are_no_character_is_shown_and_ends() -> None:
    text_stream = TextStream(BYTE_LEVEL)
    for _ in range(100):
        text_stream.push(STRAY)
    assert len(text_stream.take()) > 50
    for token in BYTE_LEVEL("🙃 the").input_ids:
        text_stream.push(token)
    assert text_stream.text == REPLACEMENT * 100 + "🙃 the"


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that may be the beginning of a stop string, by definition."""
    sizes = [size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
    return max(sizes, default=0)


short_texts = st.text(alphabet="ab", min_size=1, max_size=7)


@PROPERTY
@given(st.lists(st.text(alphabet="ab", max_size=4), max_size=12), st.lists(short_texts, min_size=1, max_size=3))
def test_stop_strings_are_found_and_held_back_by_definition(pieces: list[str], stops: list[str]) -> None:
    """Of two letters, so that the strings overlap themselves and each other."""
    searches = [StopString(stop) for stop in stops]
    text = ""
    for piece in pieces:
        ends = [search.read(piece) for search in searches]
        for stop, end in zip(stops, ends, strict=True):
            whole = (text + piece)[max(len(text) - len(stop) + 1, 0) :]
            at = whole.find(stop)
            assert end == (None if at < 0 else at + len(stop) - min(len(text), len(stop) - 1))
        text += piece
        assert max(search.size for search in searches) == held_back(text, stops)


class CountingString(str):
    """A string that counts how often one of its characters is looked at."""

    num_looks = 0

    def __getitem__(self, index: object) -> str:
        CountingString.num_looks += 1
        return super().__getitem__(index)  # type: ignore[index]


@pytest.mark.parametrize("size", [1, 10, 10_000])
@pytest.mark.parametrize("text", ["a", "ab", "aaab", "the cat "])
def test_a_stop_strings_length_costs_nothing(size: int, text: str) -> None:
    """Also where it nearly ends in the text again and again."""
    CountingString.num_looks = 0
    search = StopString(CountingString("a" * size + "c"))
    num_characters = 0
    while num_characters < 40_000:
        search.read(text)
        num_characters += len(text)
    assert CountingString.num_looks < 6 * num_characters


def test_special_tokens_are_shown_where_asked_for_and_stop_strings_reach_over_them() -> None:
    ids = [*BYTE_LEVEL("the").input_ids, END, *BYTE_LEVEL(" cat").input_ids]
    shown, hidden = (TextStream(BYTE_LEVEL, skip_special_tokens=skip) for skip in (False, True))
    for token in ids:
        shown.push(token)
        hidden.push(token)
    assert (shown.text, hidden.text) == ("the<|end|> cat", "the cat")
    for skip, stop in ((False, "e<|end|> c"), (True, "e c")):
        stopped = TextStream(BYTE_LEVEL, [stop], skip_special_tokens=skip)
        assert any(stopped.push(token) for token in ids)
        assert (stopped.text, stopped.stop_string) == ("th", stop)


def test_text_is_not_cleaned_up() -> None:
    """A tokenizer that takes spaces back would take back what was shown."""
    cleaning = copy.deepcopy(SENTENCE_PIECE)
    cleaning.clean_up_tokenization_spaces = True
    cleaning.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    comma = 2 + 256 + 8
    ids = [THE, 2 + 256, comma, CAT]
    assert cleaning.decode(ids) == "the, cat"
    text_stream, pieces, _ = run(cleaning, ids)
    assert text_stream.text == "".join(pieces) == "the , cat"


def test_without_a_tokenizer_there_is_no_text_and_no_stop_string() -> None:
    text_stream = TextStream(None)
    assert not text_stream.push(5)
    text_stream.finish()
    assert (text_stream.take(), text_stream.take(is_last=True)) == ("", "")
    with pytest.raises(ValueError, match=r"stop=\('x',\) needs a tokenizer.*stop_token_ids"):
        TextStream(None, ["x"])
