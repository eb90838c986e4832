"""A race to HTML: a lane for each column with its clock, its progress, a tick for every step, and its text.

Pure functions; everything is escaped here. A lane is a `details` element, so on a phone the lanes' summaries are a strip of
bars, and a tap opens a lane's text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol

from markdown_it import MarkdownIt

from selfspec.app.records import Figures, Parting, Tick
from selfspec.app.render import legend
from selfspec.app.settings import TRANSFORMERS

MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
# The image and link rules would load things from elsewhere.
MARKDOWN.disable(["image", "link", "autolink"])
# The highest tick of a race stands for at least this many tokens, so a race of single tokens has low ticks.
MIN_HIGHEST = 6


class Shown(Protocol):
    """What a lane needs of a column, local or remote. `finish_reason` is None while it is incomplete."""

    name: str
    label: str
    finish_reason: str | None

    @property
    def text(self) -> str: ...

    @property
    def seconds(self) -> float: ...

    def until(self, seconds: float) -> Shown:
        """As it stood at `seconds` of its own clock."""

    def figures(self) -> Figures | None:
        """None before the first step."""

    def ticks(self) -> list[Tick]: ...


@dataclass(frozen=True)
class Lane:
    """A column with its text as HTML, and its verdict, which is a badge or nothing."""

    column: Shown
    answer: str
    badge: str = ""


@dataclass(frozen=True)
class Scale:
    """What the lanes of a race share: the tokens and passes of a full bar and ribbon, and the tokens of the highest tick."""

    num_tokens: int
    num_passes: int
    highest: int


def race(
    shown: Sequence[Lane],
    *,
    max_new_tokens: int,
    is_over: bool,
    has_steps: bool,
    is_level: bool = False,
    is_comparable: bool = True,
) -> str:
    """The race as it stands. The first column is the reference of speed-ups and verdicts.

    Args:
        is_over: what is incomplete was stopped.
        has_steps: ticks can be chosen when the race is over.
        is_level: the columns took turns, by level clocks.
        is_comparable: the columns did not disturb each other.
    """
    columns = [lane.column for lane in shown]
    scale = _scale(columns, max_new_tokens)
    first = winner(columns, is_over=is_over) if is_comparable else None
    baselines = [columns[0], *(column for column in columns if column.name == TRANSFORMERS)]
    cards = [
        _lane(
            lane,
            baselines if is_comparable else [],
            scale,
            is_level=is_level,
            state=_state(lane.column, is_over=is_over),
            is_winner=lane.column is first,
            is_over=is_over,
            can_pick=has_steps and is_over,
            badge=lane.badge or (_reference_badge() if lane.column is columns[0] and lane.column.finish_reason else ""),
        )
        for lane in shown
    ]
    return f'<div class="race" style="--columns:{len(cards)}">{"".join(cards)}</div>{legend()}'


def winner(columns: Sequence[Shown], *, is_over: bool) -> Shown | None:
    """Who was done first by its own clock. None while somebody who runs could still be."""
    done = [column for column in columns if column.finish_reason is not None]
    if not done:
        return None
    first = min(done, key=lambda column: column.seconds)
    is_sure = is_over or all(column in done or column.seconds >= first.seconds for column in columns)
    return first if is_sure else None


def _scale(columns: Sequence[Shown], max_new_tokens: int) -> Scale:
    """The answer's length is known when a column is done; until then it is the most it may be."""
    done = [column for column in columns if column.finish_reason is not None]
    num_tokens = max((_num_tokens(column) for column in done), default=max_new_tokens)
    highest = max((tick.num_tokens for column in columns for tick in column.ticks()), default=0)
    return Scale(
        max(1, num_tokens), max([num_tokens, 1, *(len(column.ticks()) for column in columns)]), max(highest, MIN_HIGHEST)
    )


def _num_tokens(column: Shown) -> int:
    return sum(tick.num_tokens for tick in column.ticks())


def _state(column: Shown, *, is_over: bool) -> str:
    if column.finish_reason is not None:
        return "done"
    if is_over:
        return "stopped"
    return "runs" if column.ticks() else "waits"


def _lane(
    lane: Lane,
    baselines: Sequence[Shown],
    scale: Scale,
    *,
    is_level: bool,
    state: str,
    is_winner: bool,
    is_over: bool,
    can_pick: bool,
    badge: str,
) -> str:
    column, label = lane.column, escape(lane.column.label)
    share = min(1.0, _num_tokens(column) / scale.num_tokens)
    main, others = _figures(column, baselines, is_level=is_level, is_over=is_over or state == "done")
    gain = next((value for name, value, _ in main if name == "vs plain"), "–")
    prose = f'<div class="markdown">{MARKDOWN.render(column.text)}</div>' if is_over else ""
    return (
        f'<section class="column {state}{" winner" if is_winner else ""}">'
        f'<details open="" data-lane="{escape(column.name)}"><summary>'
        f'<span class="who"><h2>{label}</h2>{_place(state, is_winner, badge)}{badge}</span>'
        f'<span class="gain">{gain}</span><span class="clock">{column.seconds:.1f} s</span>'
        f'<span class="track" role="progressbar" aria-label="{label}" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{100 * share:.0f}"><i style="--share:{share:.4f}"></i></span></summary>'
        + _list(main, "figures")
        + _ribbon(column, scale, can_pick=can_pick)
        + f'<div class="box" tabindex="0" role="region" aria-label="answer of {label}">'
        + f'<div class="answer">{lane.answer}</div>{prose}</div>'
        + f"{_list(others, 'details')}</details></section>"
    )


def _place(state: str, is_winner: bool, badge: str) -> str:
    """How far it is. A verdict tells that it is done."""
    if is_winner:
        return '<span class="state first" title="the first to have the whole answer, by its own clock"><i></i>first</span>'
    if badge:
        return ""
    hint = {
        "waits": "its turn comes",
        "runs": "it has not finished yet",
        "done": "it has the whole answer",
        "stopped": "stopped before its end, so not compared",
    }[state]
    return f'<span class="state {state}" title="{hint}">{"<i></i>" if state == "done" else ""}{state}</span>'


def _list(figures: Iterable[tuple[str, str, str]], kind: str) -> str:
    rows = "".join(f'<div title="{escape(hint)}"><dt>{name}</dt><dd>{value}</dd></div>' for name, value, hint in figures)
    return f'<dl class="{kind}">{rows}</dl>'


def _ribbon(column: Shown, scale: Scale, *, can_pick: bool) -> str:
    """A tick for each step: as high as it has tokens, in the colours of where they come from."""
    ticks = column.ticks()
    parts = []
    for number, tick in enumerate(ticks):
        words = f"step {number + 1}: {_count(tick.num_tokens, 'token')}, {tick.num_drafted} of them drafted"
        style = f"--height:{tick.num_tokens / scale.highest:.3f};--drafted:{tick.num_drafted / max(1, tick.num_tokens):.3f}"
        kind = "drafting" if tick.is_drafting else "own"
        if can_pick:
            # Arrow keys go from tick to tick, so that only one of them is a tab stop.
            attributes = f'data-step="{number}" data-lane="{escape(column.name)}" tabindex="{0 if number == 0 else -1}"'
            words += ". Show it under Why"
            parts.append(
                f'<button class="{kind}" style="{style}" {attributes} title="{words}" aria-label="{words}"></button>'
            )
        else:
            parts.append(f'<i class="{kind}" style="{style}" title="{words}"></i>')
    label = f"{_count(len(ticks), 'step')} of {escape(column.label)}"
    return (
        f'<div class="ribbon" role="group" aria-label="{label}" style="--passes:{scale.num_passes}">{"".join(parts)}</div>'
    )


def _figures(
    column: Shown, baselines: Sequence[Shown], *, is_level: bool, is_over: bool
) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Name, value and explanation of what matters most, and of the rest."""
    own = column.figures()
    saved = "–" if own is None else f"{own.passes_saved:.0%}"
    passes = "verify passes; prefill is not counted"
    if own is not None:
        passes = (
            f"{_count(own.num_target_passes, 'target pass')} for {_count(own.num_tokens, 'token')}; prefill is not counted"
        )
    main = [("passes saved", saved, passes)]
    for name, baseline in zip(("vs plain", "vs transformers"), baselines, strict=False):
        is_bounded = is_over and TRANSFORMERS not in (column.name, baseline.name)
        main.append((name, *_ratio(column, baseline, is_level=is_level, is_bounded=is_bounded)))
    others = [
        (
            "tokens/s",
            "–" if own is None else f"{own.tokens_per_second:.1f}",
            "emitted tokens over seconds, prefill included",
        ),
        (
            "acceptance length",
            "–" if own is None else f"{own.acceptance_length:.2f}",
            "tokens per target pass, bonus token included",
        ),
        ("target passes", "–" if own is None else str(own.num_target_passes), passes),
        (
            "first token",
            "–" if own is None else _milliseconds(own.first_seconds),
            "from the start to the first token, with prefill",
        ),
    ]
    return main, others


def speedup(column: Shown, baseline: Shown, *, is_level: bool) -> float | None:
    """A column's speed of decoding over another's, without prefill. None before it is known.

    With level clocks both count as far as both had got, because a slow spell after that meets only the slower one.
    """
    until = min(column.seconds, baseline.seconds)
    own, base = ((each.until(until) if is_level else each).figures() for each in (column, baseline))
    own_speed = own.decode_tokens_per_second if own else None
    base_speed = base.decode_tokens_per_second if base else None
    return None if own_speed is None or base_speed is None else own_speed / base_speed


def _ratio(column: Shown, baseline: Shown, *, is_level: bool, is_bounded: bool) -> tuple[str, str]:
    """A speed-up and its explanation. One over the same passes cannot be more than the acceptance length."""
    hint = f"speed of decoding, prefill left out, over the {baseline.label} lane of this race"
    ratio, own = speedup(column, baseline, is_level=is_level), column.figures()
    if ratio is None or own is None:
        return "–", hint
    if is_bounded and ratio > own.acceptance_length:
        noise = f"an acceptance length of {own.acceptance_length:.2f} cannot give so much, so noise is in it: race again"
        return f'{ratio:.2f}× <small class="noise">noise</small>', f"{hint}; {noise}"
    return f"{ratio:.2f}×", hint


def _reference_badge() -> str:
    return '<span class="badge" title="the output that the others must reproduce">to match</span>'


def parting_badge(parting: Parting | None) -> str:
    """Where the output differs from plain decoding. A tiny gap is a rounding tie; a large one is a fault."""
    if parting is None:
        return '<span class="badge same" title="every token is that of plain decoding">✓ identical</span>'
    hint = (
        f"“{parting.text}” where plain decoding has “{parting.expected_text}”: "
        f"the target’s logits of the two differ by {parting.logit_gap:.4g}"
    )
    words = f"✗ differs at token {parting.position + 1}, logit gap {parting.logit_gap:.2g}"
    return f'<span class="badge differs" title="{escape(hint)}">{words}</span>'


def text_badge(text: str, expected: str) -> str:
    """The same for texts whose tokens are not known. One may be the beginning of the other."""
    if text == expected:
        return '<span class="badge same" title="every character is that of plain decoding">✓ identical</span>'
    shared = min(len(text), len(expected))
    at = next((i for i in range(shared) if text[i] != expected[i]), shared)
    hint = f"“{text[at : at + 20]}” where plain decoding has “{expected[at : at + 20]}”"
    return f'<span class="badge differs" title="{escape(hint)}">✗ differs at character {at + 1}</span>'


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{'es' if thing.endswith('s') else 's'}"
