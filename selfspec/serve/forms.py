"""The compiler of forms, where there can be one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selfspec.model.text_side import TextSide

if TYPE_CHECKING:
    from selfspec.serve.grammar import GrammarCompiler


def grammar_compiler(target: TextSide) -> GrammarCompiler | None:
    """Made before requests come, because it reads the whole vocabulary and holds the interpreter's lock meanwhile."""
    if target.tokenizer is None:
        return None
    try:
        from selfspec.serve.grammar import GrammarCompiler
    except ImportError:
        return None
    return GrammarCompiler(target)
