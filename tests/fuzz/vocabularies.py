"""Random tokenizers of every kind that decoders have, with all that makes a token's text odd.

`SELFSPEC_FUZZ=100 pytest tests/fuzz --log-cli-level=INFO` tries a hundred times as many examples as a usual run, other ones
every time, and says how many each law saw.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from selfspec.serve.token_names import BYTE_OF_LETTER

logger = logging.getLogger(__name__)

# How many times as many examples as in a usual run; more than once, they are other ones in every run.
FACTOR = int(os.environ.get("SELFSPEC_FUZZ", "1"))
LETTER_OF_BYTE = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
# Characters of one to four bytes, combining ones, and those that mean something to a decoder.
ALPHABET = "ab Zé ßд日本한😀🙂\u0301\u200d\ufffd\n\t.,'?!#▁<>|"
PIECES = st.text(alphabet=ALPHABET, min_size=1, max_size=4)
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def examples(count: int) -> settings:
    """Settings for laws that see `count` examples in a usual run."""
    return settings(
        max_examples=count * FACTOR,
        deadline=None,
        derandomize=FACTOR == 1,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


def report(seen: Counter[str], least: dict[str, int]) -> None:
    """Log how many examples each law saw, and refuse too few, because a law without examples holds always."""
    logger.info("examples: %s", dict(sorted(seen.items())))
    for law, count in least.items():
        assert seen[law] >= count, f"only {seen[law]} examples of {law!r}"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and how many ids a model of it has logits for."""

    kind: str
    tokenizer: PreTrainedTokenizerFast
    num_rows: int

    def __repr__(self) -> str:
        words = {i: token for token, i in self.tokenizer.get_vocab().items() if token not in BYTE_TOKENS and len(token) > 1}
        return f"<{self.kind}, {self.num_rows} rows, {dict(sorted(words.items()))}>"


def byte_level(pieces: list[bytes], gap: int) -> Tokenizer:
    """As in GPT-2, Llama 3 and Qwen: a token is any run of bytes."""
    tokens = [*LETTER_OF_BYTE.values(), *dict.fromkeys("".join(LETTER_OF_BYTE[byte] for byte in piece) for piece in pieces)]
    tokens = list(dict.fromkeys(tokens))
    ids = {token: i if i < 256 else i + gap for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentence_piece(pieces: list[str], gap: int, is_unigram: bool, strips: bool, has_bytes: bool) -> Tokenizer:
    """As in Llama 2 and Gemma: spaces inside tokens, the first one stripped or not, other characters as byte tokens."""
    tokens = ["<unk>", *(BYTE_TOKENS if has_bytes else []), *(piece.replace(" ", "▁") for piece in pieces), "▁"]
    tokens = list(dict.fromkeys(tokens))
    if is_unigram:
        model = models.Unigram([(token, -float(i)) for i, token in enumerate(tokens)], 0, byte_fallback=has_bytes)
    else:
        ids = {token: i if i < 257 else i + gap for i, token in enumerate(tokens)}
        model = models.BPE(vocab=ids, merges=[], unk_token="<unk>", byte_fallback=has_bytes)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    if strips:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return backend


def metaspace(pieces: list[str], scheme: str) -> Tokenizer:
    """As in T5 and XGLM."""
    tokens = list(dict.fromkeys(["<unk>", *(piece.replace(" ", "▁") for piece in pieces), "▁"]))
    backend = Tokenizer(models.Unigram([(token, -float(i)) for i, token in enumerate(tokens)], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return backend


def word_piece(pieces: list[str], gap: int, cleans: bool) -> Tokenizer:
    """As in BERT: words and their ends, with spaces that no token has."""
    words = [piece.replace(" ", "") or "a" for piece in pieces]
    tokens = list(dict.fromkeys(["[UNK]", *words, *(f"##{word}" for word in words)]))
    ids = {token: i if i < 3 else i + gap for i, token in enumerate(tokens)}
    backend = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=cleans)
    return backend


@st.composite
def vocabularies(draw: st.DrawFn) -> Vocabulary:
    gap = draw(st.sampled_from([0, 0, 3]))
    kind = draw(st.sampled_from(["byte level", "byte fallback", "unigram", "metaspace", "word piece"]))
    pieces = draw(st.lists(PIECES, max_size=12))
    if kind == "byte level":
        # Of real text, cut anywhere, and of any bytes.
        cut = st.tuples(PIECES, st.integers(0, 3), st.integers(1, 6)).map(lambda cut: cut[0].encode()[cut[1] :][: cut[2]])
        parts = draw(st.lists((cut | st.binary(max_size=3)).filter(bool), max_size=12))
        backend = byte_level([*parts, *(piece.encode() for piece in pieces)], gap)
    elif kind == "metaspace":
        backend = metaspace(pieces, draw(st.sampled_from(["always", "first", "never"])))
    elif kind == "word piece":
        backend = word_piece(pieces, gap, draw(st.booleans()))
    else:
        has_bytes = kind == "byte fallback" or draw(st.booleans())
        backend = sentence_piece(pieces, gap, kind == "unigram", draw(st.booleans()), has_bytes)
    flags = st.fixed_dictionaries(dict.fromkeys(("lstrip", "rstrip", "normalized", "special", "single_word"), st.booleans()))
    contents = st.sampled_from(["<|x|>", "<x> ", "日<本", " ", "  ", "é", "<0xE2>", "▁▁", "ab", "😀"])
    added = draw(st.dictionaries(contents, flags, max_size=4))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken(content, **options) for content, options in added.items()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=draw(st.booleans()),
    )
    num_rows = max(tokenizer.get_vocab().values()) + 1 + draw(st.sampled_from([0, 5]))
    return Vocabulary(kind, tokenizer, num_rows)
