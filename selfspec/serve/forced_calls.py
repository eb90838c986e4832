"""A grammar for answers that must call a tool: `tool_choice` required, or a named function.

A call has the form that the target writes by itself. Reasoning that the prompt opened is free, and the call comes after it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.model.chat import template_text
from selfspec.serve.syntax import Syntax

# As `json.dumps` writes, and chat templates with it.
SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


@dataclass(frozen=True)
class Frame:
    """What is around calls, in Lark's notation: around all, around each, and between two.

    Attributes:
        key: the name of the arguments in a call's object; None where a call is its name, a mark and the arguments.
    """

    begin: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    end: str = ""
    key: str | None = "arguments"


def forced_grammar(syntax: Syntax, tools: Sequence[dict[str, Any]], *, is_open: bool, is_single: bool) -> str:
    """A grammar in Lark's notation.

    Args:
        tools: those that may be called.
        is_open: the prompt opened the reasoning.
        is_single: one call only.

    Raises:
        ValueError: this model's calls cannot be forced, or a tool is not a function.
    """
    frame = _frame(syntax)
    rules = []
    for i, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        schema = function.get("parameters", {"type": "object"}) if isinstance(function, dict) else None
        if not isinstance(name, str) or not name or not isinstance(schema, dict):
            raise ValueError(f"tools[{i}] cannot be called, because it lacks a function with a name and parameters: add it")
        if frame.key is None:
            rules.append(f"call_{i}: {_text(name)} {_mark(syntax, '[ARGS]')} args_{i}")
        else:
            beginning = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{frame.key}": '
            rules.append(f'call_{i}: {_text(beginning)} args_{i} "}}"')
        rules.append(f"args_{i}: %json {json.dumps({**schema, 'x-guidance': SPACING})}")
    rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}")
    rules.append(f"framed: {frame.before} call {frame.after}")
    more = "" if is_single else f"({frame.between} framed)*"
    reasoning = ""
    if is_open and syntax.tags is not None:
        reasoning = "reasoning"
        rules += [f"reasoning: THOUGHT {_mark(syntax, syntax.tags[1])} /\\n*/", "THOUGHT: /(.|\\n)*/"]
    return "\n".join([f"start: {reasoning} {frame.begin} framed {more} {frame.end}", *rules])


def _frame(syntax: Syntax) -> Frame:
    template, form = template_text(syntax.tokenizer), syntax.form
    if form is None or "<function=" in template:
        raise ValueError("tool_choice cannot force a call, because there is no grammar for this model's calls: use 'auto'")
    opening = _mark(syntax, form.opening)
    if syntax.tool_format == "llama3":
        return Frame(between='"; "', key="parameters")
    if syntax.tool_format == "hermes":
        return Frame(before=f'{opening} "\\n"', after=f'"\\n" {_mark(syntax, form.closing or "")}', between='"\\n"')
    if "[ARGS]" in template:
        return Frame(before=opening, key=None)
    return Frame(begin=f'{opening} "["', between='", "', end='"]"')


def _mark(syntax: Syntax, mark: str) -> str:
    """A mark as a grammar has it: where it is a token, by its id, because text does not make that token."""
    token_id = syntax.tokenizer.get_added_vocab().get(mark)
    return _text(mark) if token_id is None else f"<[{token_id}]>"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
