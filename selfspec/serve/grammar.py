"""Answers in a form: JSON schemas, regular expressions and grammars, by llguidance (https://github.com/guidance-ai/llguidance).

The tokens so far decide which tokens may follow, so the walk through a candidate tree asks about each node's own path. The
parser stays at the last path that was asked about, and moves back and forth from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from selfspec.failures import first_line
from selfspec.loop.sampling import Grammar
from selfspec.model.text_side import TextSide
from selfspec.serve.limits import FORM_LIMITS, MAX_FORM_LENGTH
from selfspec.serve.protocol import ResponseFormat

# White space between two parts of a JSON text: enough for any indentation, but limited, because a model may never stop.
WHITESPACE = r"[ \t\n]{0,16}"


class GrammarCompiler:
    """Makes grammars for one target's tokens."""

    def __init__(self, target: TextSide) -> None:
        self._eos_token_ids = list(target.eos_token_ids)
        self._vocab_size = target.vocab_size
        self._limits = LLParserLimits(**FORM_LIMITS, verbose_errors=False)
        self._problem: str | None = None
        try:
            self._tokenizer: LLTokenizer = from_tokenizer(
                target.tokenizer, n_vocab=target.vocab_size, eos_token=self._eos_token_ids
            )
        except Exception as error:
            # Of a kind that llguidance does not know. Only those who ask for a form need to be told.
            self._problem = f"response_format cannot be used with this model's tokenizer ({first_line(error)}): leave it out"

    def compile(self, wanted: ResponseFormat) -> CompiledForm | None:
        """A function that begins a grammar for each answer; None if any text will do.

        It needs a stack of `FORM_STACK_BYTES`, because llguidance follows the references of a form recursively.

        Raises:
            ValueError: the schema, pattern or grammar is not a valid one or too complex, or the tokenizer cannot be used.
        """
        if wanted.type == "text":
            return None
        if self._problem is not None:
            raise ValueError(self._problem)
        source = _source(wanted)
        if len(source) > MAX_FORM_LENGTH:
            raise ValueError(
                f"response_format has {len(source)} characters: use a form of at most {MAX_FORM_LENGTH} characters"
            )
        begin = self.open(source)
        # Two steps are tried here, because the first ones are the slowest, and a form may be too complex from there on.
        trial = begin()
        token_id = int(trial.allowed([]).nonzero()[0])
        trial.allowed([token_id])
        if trial.problem is not None:
            raise ValueError(trial.problem)
        return begin

    def open(self, source: str) -> CompiledForm:
        """A form from its source in llguidance's own notation, which is not tried.

        Raises:
            ValueError: it is not valid.
        """
        beginning = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if beginning.is_error():
            raise ValueError(f"response_format cannot be used: {_sentence(beginning.get_error())}")
        return CompiledForm(source, lambda: _Parser(beginning.deep_copy(), self._vocab_size, self._eos_token_ids))


@dataclass(frozen=True)
class FormSource:
    """What goes to another process in place of a compiled form."""

    source: str


@dataclass(frozen=True)
class CompiledForm:
    """Begins a grammar for each answer that has the form."""

    source: str
    begin: Callable[[], Grammar]

    def __call__(self) -> Grammar:
        return self.begin()

    def __reduce__(self) -> tuple[Any, ...]:
        # A parser cannot leave its process.
        return FormSource, (self.source,)


def _source(wanted: ResponseFormat) -> str:
    if wanted.type == "regex":
        return LLMatcher.grammar_from_regex(wanted.pattern or "")
    if wanted.type == "grammar":
        return LLMatcher.grammar_from_lark(wanted.grammar or "")
    schema: Any = {"type": "object"}
    if wanted.type == "json_schema":
        assert wanted.json_schema is not None
        schema = wanted.json_schema.schema_
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})


def _sentence(problem: str) -> str:
    """The first line, without the position, which is in a grammar that the client never wrote."""
    first = first_line(problem)
    return first.partition("): ")[2] if first.startswith("at ") else first


class _Parser(Grammar):
    """One answer's parser."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._consumed: list[int] = []
        self._only_end = torch.zeros(vocab_size, dtype=torch.bool)
        self._only_end[list(eos_token_ids)] = True

    def allowed(self, token_ids: list[int]) -> torch.Tensor:
        matcher = self._matcher
        num_common = 0
        for before, after in zip(self._consumed, token_ids, strict=False):
            if before != after:
                break
            num_common += 1
        matcher.rollback(len(self._consumed) - num_common)
        rest = token_ids[num_common:]
        self._consumed = token_ids[: num_common + matcher.try_consume_tokens(rest)]
        if matcher.is_error():
            self.problem = f"response_format became too complex to follow: {_sentence(matcher.get_error())}"
        if self.problem is not None or matcher.is_stopped() or len(self._consumed) < len(token_ids):
            return self._only_end
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        return torch.from_numpy(bits[: len(self._only_end)].astype(bool))
