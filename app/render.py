"""Records to HTML: columns, and spans coloured by origin. Pure functions; everything is escaped here.

A token's place in its step gives its origin, never its text: the first `num_accepted` tokens of a step are drafts of depth
1, 2, …, and the one after them is the target's own. Each origin has a colour, and an underline of its own style and
thickness, so readers need not see colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from selfspec.app.race import Column, Figures, Parting, StepRecord
from selfspec.app.remote import RemoteColumn
from selfspec.app.words import MAX_SHADE
from selfspec.app.words import milliseconds as _milliseconds
from selfspec.app.words import origin as _origin
from selfspec.app.words import origin_class as _origin_class


class Contestant(Protocol):
    """What the head of a card needs of a column, local or remote."""

    label: str

    def figures(self) -> Figures | None:
        """None before the first step."""


def columns(shown: Sequence[Column], badges: Mapping[str, str], *, is_comparable: bool) -> str:
    """The race as it stands. The first column is the reference of every speed-up; badges are by column name."""
    cards = [_card(column, shown[0], badges.get(column.name, ""), is_comparable, spans(column.steps)) for column in shown]
    return _grid(cards) + legend()


def remote_columns(shown: Sequence[RemoteColumn], badges: Mapping[str, str], *, is_comparable: bool) -> str:
    """The same for a server's answers, whose tokens have no known origin."""
    return _grid(
        [_card(column, shown[0], badges.get(column.name, ""), is_comparable, escape(column.text)) for column in shown]
    )


def _grid(cards: Sequence[str]) -> str:
    return f'<div class="race" style="--columns:{len(cards)}">{"".join(cards)}</div>'


def _card(column: Contestant, reference: Contestant, badge: str, is_comparable: bool, answer: str) -> str:
    figures = "".join(
        f'<div title="{escape(hint)}"><dt>{name}</dt><dd>{value}</dd></div>'
        for name, value, hint in _figures(column, reference, is_comparable)
    )
    return (
        f'<section class="column"><header><h3>{escape(column.label)}</h3>{badge}</header>'
        f'<dl class="figures">{figures}</dl><div class="answer">{answer}</div></section>'
    )


def _figures(column: Contestant, reference: Contestant, is_comparable: bool) -> Iterable[tuple[str, str, str]]:
    own, base = column.figures(), reference.figures()
    ratio = "–"
    if own and base and is_comparable:
        ratio = f"{own.tokens_per_second / base.tokens_per_second:.2f}×"
    yield "tokens/s", f"{own.tokens_per_second:.1f}" if own else "–", "emitted tokens over seconds, prefill included"
    yield "speed-up", ratio, f"over the {reference.label} column of this run"
    yield (
        "acceptance length",
        f"{own.acceptance_length:.2f}" if own else "–",
        "tokens per target pass, bonus token included",
    )
    yield "target passes", str(own.num_target_passes) if own else "–", "verify passes so far; prefill is not counted"
    yield (
        "first token",
        _milliseconds(own.first_seconds) if own else "–",
        "from the start to the first token, with prefill",
    )


def reference_badge() -> str:
    return '<span class="badge" title="the output that the others must reproduce">reference</span>'


def identical_badge() -> str:
    return '<span class="badge same" title="every token is the reference’s">✓ identical</span>'


def parting_badge(parting: Parting) -> str:
    """Where the output differs from the reference. A tiny gap is a rounding tie; a large one is a fault."""
    hint = (
        f"“{parting.text}” where the reference has “{parting.expected_text}”: "
        f"the target’s logits of the two differ by {parting.logit_gap:.4g}"
    )
    words = f"✗ differs at token {parting.position + 1}, logit gap {parting.logit_gap:.2g}"
    return f'<span class="badge differs" title="{escape(hint)}">{words}</span>'


def same_text_badge() -> str:
    return '<span class="badge same" title="every character is the reference’s">✓ identical</span>'


def text_parting_badge(text: str, expected: str) -> str:
    """Where a text differs from the reference's. One may be the beginning of the other."""
    shared = min(len(text), len(expected))
    at = next((i for i in range(shared) if text[i] != expected[i]), shared)
    hint = f"“{text[at : at + 20]}” where the reference has “{expected[at : at + 20]}”"
    return f'<span class="badge differs" title="{escape(hint)}">✗ differs at character {at + 1}</span>'


def stopped_badge() -> str:
    return '<span class="badge" title="stopped before its end, so not compared">stopped</span>'


def spans(steps: Sequence[StepRecord], chosen_step: int | None = None) -> str:
    """The text token by token, with white space unchanged and code in a fixed width. `chosen_step` is highlighted."""
    parts, before = [], ""
    for number, step in enumerate(steps):
        marks = ""
        for k, piece in enumerate(step.pieces):
            before += piece
            if piece:
                kind = _origin_class(step, k) + (" code" if before.count(FENCE) % 2 else "")
                marks += f'<span class="{kind}" title="{escape(_origin(step, k, number))}">{escape(piece)}</span>'
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
