"""Laws of an answer's text, for any tokenizer and any token ids: streamed, cut, and named token by token."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="the names of tokens are the server's: pip install 'selfspec[serve]'")

from fuzz.vocabularies import PIECES, Vocabulary, examples, report, vocabularies

from selfspec.loop.text import HALF, TextStream, context_of, text_of
from selfspec.serve.token_names import Reading


@st.composite
def answers(draw: st.DrawFn) -> tuple[Vocabulary, list[int], list[int]]:
    """A vocabulary, a prompt and an answer in it: any ids, and some that make characters of several tokens."""
    vocabulary = draw(vocabularies())
    tokenizer = vocabulary.tokenizer
    any_id = st.integers(0, vocabulary.num_rows - 1)
    written = PIECES.map(lambda text: tokenizer(text, add_special_tokens=False).input_ids)
    parts = st.lists(any_id.map(lambda i: [i]) | written, max_size=8)
    joined = parts.map(lambda parts: [i for part in parts for i in part][:24])
    return vocabulary, draw(joined), draw(joined)


def streamed(stream: TextStream, ids: list[int]) -> list[str]:
    pieces = []
    for token_id in ids:
        is_stopped = stream.push(token_id)
        pieces.append(stream.take())
        if is_stopped:
            break
    stream.finish()
    return [*pieces, stream.take(is_last=True)]


def test_texts_and_names() -> None:
    """The pieces joined are the text, the text is what the tokenizer adds to the prompt's, and so are the names' bytes."""
    seen: Counter[str] = Counter()

    @examples(500)
    @given(answers(), st.booleans())
    def law(answer: tuple[Vocabulary, list[int], list[int]], skip: bool) -> None:
        vocabulary, prompt, ids = answer
        tokenizer = vocabulary.tokenizer
        stream = TextStream(tokenizer, context=prompt, skip_special_tokens=skip)
        pieces = streamed(stream, ids)
        text = stream.text
        assert "".join(pieces) == text
        seen["pieces"] += 1

        before, whole = (text_of(tokenizer, part, skip_special_tokens=skip) for part in (prompt, [*prompt, *ids]))
        is_sound = HALF not in whole and whole.startswith(before)
        if is_sound:
            assert text == whole[len(before) :]
            seen[f"text, {vocabulary.kind}"] += 1
            seen["text with a special token"] += not skip and "</s>" in text
            seen["text of many bytes"] += len(text.encode()) > len(text)

        reading = Reading(tokenizer, prompt, skip_special_tokens=skip)
        places = [reading.read(token_id, 0.0, [(token_id, 0.0)], is_end=False) for token_id in ids]
        data = b"".join(place.token.data for place in places)
        if is_sound or (vocabulary.kind == "byte level" and not context_ends_early(tokenizer, prompt, skip)):
            assert data.decode(errors="replace") == text
            seen[f"bytes, {vocabulary.kind}"] += 1
            seen["bytes that are no text"] += HALF in text
            for place in places:
                name = place.token.name
                assert HALF in name or not place.token.data or text.startswith(name, place.offset)
                assert place.token == place.others[0][1]
                seen["name of a part of a character"] += place.token.written.startswith("bytes:")

    law()
    kinds = ("byte level", "byte fallback", "unigram", "metaspace", "word piece")
    odd = ("text with a special token", "text of many bytes", "bytes that are no text", "name of a part of a character")
    report(seen, {f"{law}, {kind}": 10 for law in ("text", "bytes") for kind in kinds} | dict.fromkeys(odd, 5))


def context_ends_early(tokenizer: object, prompt: list[int], skip: bool) -> bool:
    """True where the prompt ends within a character, so that the answer's first token may be the other half."""
    return bool(prompt) and not context_of(tokenizer, prompt, skip_special_tokens=skip)


def test_stop_strings() -> None:
    """The text ends before the first of them, at the token that completes it, and no piece shows a part of it."""
    seen: Counter[str] = Counter()

    @examples(300)
    @given(answers(), st.booleans(), st.data())
    def law(answer: tuple[Vocabulary, list[int], list[int]], skip: bool, data: st.DataObject) -> None:
        vocabulary, prompt, ids = answer
        full = TextStream(vocabulary.tokenizer, context=prompt, skip_special_tokens=skip)
        texts = []
        for token_id in ids:
            full.push(token_id)
            texts.append(full.text)
        begin = data.draw(st.integers(0, max(len(full.text) - 1, 0)))
        part = full.text[begin : begin + data.draw(st.integers(1, 6))]
        stops = [*([part] if part else []), *data.draw(st.lists(PIECES, max_size=2))]
        stream = TextStream(vocabulary.tokenizer, stops, context=prompt, skip_special_tokens=skip)
        pieces = streamed(stream, ids)
        text = next((text for text in texts if any(stop in text for stop in stops)), None)
        if text is None:
            full.finish()
            assert stream.stop_string is None and stream.text == full.text
            seen["none"] += 1
        else:
            at = min(text.find(stop) for stop in stops if stop in text)
            assert stream.stop_string in stops and text.startswith(stream.stop_string, at)
            assert stream.text == text[:at]
            seen["stopped"] += 1
        assert "".join(pieces) == stream.text

    law()
    report(seen, {"none": 20, "stopped": 20})
