"""The library's front door: prompts in, completions or a stream of text out."""

from selfspec.api.calls import generate, generate_iter, stream
from selfspec.api.prompts import Prompt, encode
from selfspec.loop.answer import Completion, Piece, StreamEvent, completion_of

__all__ = [
    "Completion",
    "Piece",
    "Prompt",
    "StreamEvent",
    "completion_of",
    "encode",
    "generate",
    "generate_iter",
    "stream",
]
