"""Heads as HTML: a table of those that come with the package, and what a head's card reports, as bars."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from selfspec.app import charts, render
from selfspec.drafters.names import kind_of_head
from selfspec.heads.base import WEIGHTS_NAME, read_config
from selfspec.plan.cards import CardFigures, read_figures, read_task_lengths

README = "README.md"
MAIN_FACTS = ("kind", "trained for", "parameters")


@dataclass(frozen=True)
class HeadSummary:
    """A head in one row of a table."""

    label: str
    drafter: str
    target: str
    num_bytes: int
    figures: CardFigures


def summaries(folders: Sequence[Path]) -> Iterator[HeadSummary]:
    """Of every head folder."""
    for folder in folders:
        record = read_config(folder)
        kind = kind_of_head(record["head_type"])
        figures = read_figures((folder / README).read_text(encoding="utf-8"))
        size = (folder / WEIGHTS_NAME).stat().st_size
        yield HeadSummary(kind.label, kind.name, record["target"]["name"], size, figures)


def shipped(heads: Sequence[HeadSummary], offered: Collection[str]) -> str:
    """The table of shipped heads. Those whose drafter is offered fit the loaded target."""
    rows = "".join(
        f"<tr><td><b>{escape(head.label)}</b></td><td>{escape(head.target)}</td><td>{head.num_bytes / 1e6:.1f} MB</td>"
        f"<td>{'–' if head.figures.length is None else f'{head.figures.length:.2f}'}</td>"
        f"<td>{'yes' if head.drafter in offered else 'no'}</td></tr>"
        for head in sorted(heads, key=lambda head: -(head.figures.length or 0))
    )
    names = ("shipped head", "made for", "size", "tokens per pass", "fits here")
    columns = "".join(f"<th>{name}</th>" for name in names)
    return f'<table class="outcomes heads"><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table>'


def acceptance(folder: Path) -> str:
    """What a head's card reports of acceptance: by depth and by task, as far as it does."""
    readme = folder / README
    if not readme.is_file():
        return ""
    card = readme.read_text(encoding="utf-8")
    figures, lengths = read_figures(card), read_task_lengths(card)
    drawn = []
    if figures.rates:
        rows = [(f"depth {depth}", rate, f"{rate:.0%}") for depth, rate in enumerate(figures.rates, start=1)]
        hint = "of the passes that drafted so deep, how many accepted it"
        drawn.append(charts.bars("Acceptance by depth", hint, rows, "draft"))
    if lengths:
        longest = max(lengths.values())
        rows = [(name.replace("_", " "), value / longest, f"{value:.2f}") for name, value in lengths.items()]
        hint = "tokens per target pass, the bonus token included; plain decoding has 1"
        drawn.append(charts.bars("Acceptance by task", hint, rows, "draft"))
    return f'<div class="plots">{"".join(drawn)}</div>' if drawn else ""


def facts(values: Mapping[str, Any]) -> str:
    """A head's main facts, and the rest of its configuration on demand."""
    words = readable(values)
    main = {name: words.pop(name) for name in MAIN_FACTS if name in words}
    return f"{render.facts(main)}<details><summary>Configuration</summary>{render.facts(words)}</details>"


def readable(facts: Mapping[str, Any]) -> dict[str, str]:
    """A head's facts as words. What is a table of its own is left to the head's files."""
    found = {}
    for name, value in facts.items():
        if value is None or isinstance(value, Mapping):
            continue
        if isinstance(value, bool):
            found[name] = "yes" if value else "no"
        elif isinstance(value, float):
            found[name] = f"{value:g}"
        elif isinstance(value, list | tuple):
            found[name] = ", ".join(map(str, value))
        else:
            found[name] = str(value)
    return {name: value for name, value in found.items() if value}
