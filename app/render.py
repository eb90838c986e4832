"""Records to HTML: spans coloured by origin, and small parts of all tabs. Pure functions; everything is escaped here.

A token's place in its step gives its origin, never its text: the first `num_accepted` tokens of a step are drafts of depth
1, 2, …, and the one after them is the target's own. Each origin has a colour, and an underline of its own style and
thickness, so readers need not see colours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from selfspec.app.records import StepRecord
from selfspec.app.words import MAX_SHADE, origin, origin_class

# Begins and ends a block of code in Markdown.
FENCE = "```"


def spans(
    steps: Sequence[StepRecord],
    chosen_step: int | None = None,
    attributes: Callable[[StepRecord, int, int], str] | None = None,
) -> str:
    """The text token by token, with white space unchanged and code in a fixed width. `chosen_step` is highlighted.

    Args:
        attributes: more attributes of a token's element, from its step, its place in it, and the step's number.
    """
    parts, before = [], ""
    for number, step in enumerate(steps):
        marks = ""
        for k, piece in enumerate(step.pieces):
            before += piece
            if piece:
                kind = origin_class(step, k) + (" code" if before.count(FENCE) % 2 else "")
                more = "" if attributes is None else attributes(step, k, number)
                marks += f'<span class="{kind}" title="{escape(origin(step, k, number))}"{more}>{escape(piece)}</span>'
        parts.append(f'<mark class="step">{marks}</mark>' if number == chosen_step else marks)
    return "".join(parts)


def legend() -> str:
    """The origins, each in its own style."""
    return (
        '<p class="legend"><span class="own">target’s own</span> <span class="bonus">bonus of a pass with drafts</span> '
        '<span class="draft d1">draft accepted at depth 1</span> '
        + " ".join(f'<span class="draft d{d}">{d}</span>' for d in range(2, MAX_SHADE))
        + f' <span class="draft d{MAX_SHADE}">{MAX_SHADE}+</span></p>'
    )


def heading(target: str, *details: str) -> str:
    """The page's title, and what it runs on."""
    return (
        '<div class="heading"><h1>selfspec</h1><p>The same answer in fewer passes: a drafter guesses tokens, and the model '
        f"checks many at once.</p><p><b>{escape(target)}</b>, {escape(', '.join(details))}</p></div>"
    )


def permalink(query: str) -> str:
    """A link to the page with these settings. It is relative, so it works behind any proxy."""
    return f'<a href="?{escape(query)}" target="_blank">Link to these settings</a>'


def facts(values: Mapping[str, object]) -> str:
    """Names and values as a list; None is left out."""
    rows = "".join(
        f"<div><dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in values.items()
        if value is not None
    )
    return f'<dl class="facts">{rows}</dl>'


def note(text: str, kind: str = "") -> str:
    """One sentence for the visitor: what is happening, or what was wrong and what to do."""
    role = "alert" if kind == "error" else "status"
    return f'<p class="note-line {kind}" role="{role}">{escape(text)}</p>' if text else ""
