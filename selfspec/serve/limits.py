"""What one request may cost. Each limit is checked before the work that it bounds; docs/serving.md has them as a table.

Invariant: whatever a client sends, nothing that it causes holds the event loop or the interpreter's lock for long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selfspec.engine import Intake

# Bytes of JSON for each token of the context: text escaped as \uXXXX has some 24 a token.
BYTES_PER_TOKEN = 32
# What a body may have in any case, however short the context is.
LEAST_BODY_BYTES = 1 << 20
# A body may have so many JSON values besides the ids of one prompt that fills the context, and where larger bodies are
# allowed one for each of so many bytes.
MAX_OTHER_VALUES = 1 << 16
BYTES_PER_VALUE = 16
# How long a body may take to arrive.
BODY_SECONDS = 60.0

# Bytes or characters that take some ten milliseconds at most. Longer work waits in a lane of its own.
SHORT = 1 << 14
# Pieces of work that may wait in a lane, because each holds its request in memory.
MAX_WAITING_SHORT = 1024
MAX_WAITING_LONG = 64

# How many entries lists and objects have at most. OpenAI's API has the same limits on messages and tools.
MAX_MESSAGES = 2048
MAX_PARTS = 1024
MAX_TOOLS = 128
MAX_FIELDS = 64
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_STOP_TOKENS = 1024
# Characters. A stop string is a marker, and the end of a text is compared with it at every token.
MAX_STOP_LENGTH = 256
# Where clients may nest JSON freely. Deeper values would exhaust the stack of whatever reads them.
MAX_DEPTH = 64

# Characters of a pattern, a grammar or a schema: they bound how deep its compiler recurses, and so the stack that it needs.
MAX_FORM_LENGTH = 1 << 16
FORM_STACK_BYTES = 256 << 20
# Of llguidance's compiler and of each step of its parsers, in its own units: some tens of thousands a millisecond.
FORM_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}


@dataclass(frozen=True)
class Limits:
    """The limits that follow from the target and from a server's options.

    Attributes:
        max_answers: answers that may run or wait, so also the most that one request may ask for.
        max_characters: of one prompt. A longer one has too many tokens even if each is the longest that there is.
        max_body_bytes, max_values: of a body, and of the JSON values in it.
    """

    max_answers: int
    max_characters: int
    max_body_bytes: int
    max_values: int

    @classmethod
    def of(cls, engine: Intake, *, max_body_bytes: int | None = None) -> Limits:
        """The limits of requests to an engine.

        Args:
            max_body_bytes: in place of what follows from the context.
        """
        room = engine.max_tokens
        max_body_bytes = max_body_bytes or max(LEAST_BODY_BYTES, BYTES_PER_TOKEN * room)
        return cls(
            max_answers=engine.max_open,
            max_characters=room * _longest_token(engine.target.tokenizer),
            max_body_bytes=max_body_bytes,
            max_values=max(room + MAX_OTHER_VALUES, max_body_bytes // BYTES_PER_VALUE),
        )


def _longest_token(tokenizer: Any) -> int:
    """Characters of the longest token, at least: where a vocabulary spells bytes out, it is the number of bytes."""
    return max(map(len, tokenizer.get_vocab())) if tokenizer is not None else 1
