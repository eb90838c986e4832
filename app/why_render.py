"""A step of a race as HTML: its sentence, its candidate tree, the table of its drafts, and the text with its tokens.

Tokens and nodes carry `data-details`, which `why_tab` shows where one is clicked, tapped or focused. Pure functions;
everything is escaped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from selfspec.app import charts
from selfspec.app.records import Column, Node, StepRecord
from selfspec.app.render import legend, spans
from selfspec.app.words import count, fate, milliseconds, origin, percent, visible

# The sizes of the drawn tree, in pixels.
COLUMN_WIDTH, ROW_HEIGHT, BOX_WIDTH, BOX_HEIGHT = 122, 38, 102, 28
MAX_LABEL = 8

TREE_HINT = "Choose a node to see what became of it, and why. Arrow keys go from node to node."
TEXT_HINT = "Choose a token to go to the step that wrote it. Arrow keys go from token to token."


def step(steps: Sequence[StepRecord], number: int) -> str:
    """One step in a sentence, its tree with a legend, and its outcomes."""
    return (
        f"{step_line(steps, number)}{tree(steps[number])}{panel(TREE_HINT)}{tree_legend()}"
        f"<details><summary>The drafts of this step as a table</summary>{outcomes(steps[number])}</details>"
    )


def answer(steps: Sequence[StepRecord], number: int) -> str:
    """The whole text, with one step's tokens highlighted."""
    return f'<div class="answer">{tokens(steps, number)}</div>{panel(TEXT_HINT)}{legend()}'


def panel(hint: str) -> str:
    """Where the details of what is chosen appear."""
    return f'<p class="details-panel" aria-live="polite">{escape(hint)}</p>'


def tokens(steps: Sequence[StepRecord], chosen_step: int) -> str:
    """The text token by token. Each token can be chosen, and the first one from the step on takes the focus."""
    shown = ((number, k) for number, step in enumerate(steps) for k, piece in enumerate(step.pieces) if piece)
    focus = next((place for place in shown if place[0] >= chosen_step), None)

    def choosable(step: StepRecord, k: int, number: int) -> str:
        words = escape(f"“{visible(step.pieces[k])}”, {origin(step, k, number)}")
        stop = 0 if (number, k) == focus else -1
        return f' role="button" tabindex="{stop}" data-step="{number + 1}" data-details="{words}"'

    return spans(steps, chosen_step, choosable)


def tree(step: StepRecord) -> str:
    """A step's candidate tree from left to right, with the accepted path at the top and the bonus token at its end."""
    fates = [fate(step, i) for i in range(len(step.nodes))]
    children: dict[int, list[int]] = {}
    for i, node in enumerate(step.nodes):
        children.setdefault(node.parent, []).append(i)
    end = step.path[-1]
    rows: dict[int, int] = {}

    def place(i: int, row: int) -> int:
        """Place a node level with its first child, and the path's end with the bonus token. Returns the next free row."""
        rows[i] = row
        free = row + (i == end)
        for child in sorted(children.get(i, []), key=lambda c: (c not in step.path, -(step.nodes[c].probability or 0))):
            free = place(child, free)
        return max(free, row + 1)

    height = place(0, 0) * ROW_HEIGHT
    width = (step.max_depth + 1) * COLUMN_WIDTH
    shapes, boxes = [], []
    for i, node in enumerate(step.nodes):
        if node.parent >= 0:
            shapes.append(_edge(step.nodes[node.parent].depth, rows[node.parent], node.depth, rows[i], fates[i][0]))
        boxes.append(_box(node.depth, rows[i], node.text, percent(node) if i else "", *fates[i]))
    if len(step.token_ids) > step.num_accepted:
        depth = step.nodes[end].depth + 1
        shapes.append(_edge(depth - 1, rows[end], depth, rows[end], "bonus"))
        boxes.append(_box(depth, rows[end], step.chosen[-1], "", "bonus", "the target’s own token, emitted in every pass"))
        width = max(width, (depth + 1) * COLUMN_WIDTH)
    return (
        f'<div class="tree"><svg role="group" aria-label="candidate tree" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{"".join(shapes)}{"".join(boxes)}</svg></div>'
    )


def _edge(depth: int, row: int, to_depth: int, to_row: int, kind: str) -> str:
    x, y = depth * COLUMN_WIDTH + BOX_WIDTH + 2, row * ROW_HEIGHT + ROW_HEIGHT / 2
    to_x, to_y = to_depth * COLUMN_WIDTH + 2, to_row * ROW_HEIGHT + ROW_HEIGHT / 2
    middle = (x + to_x) / 2
    return f'<path class="edge {kind}" d="M{x:g},{y:g} C{middle:g},{y:g} {middle:g},{to_y:g} {to_x:g},{to_y:g}"/>'


def _box(depth: int, row: int, text: str, note: str, kind: str, reason: str) -> str:
    x, y = depth * COLUMN_WIDTH + 2, row * ROW_HEIGHT + (ROW_HEIGHT - BOX_HEIGHT) / 2
    label = visible(text)
    short = label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "…"
    baseline = y + BOX_HEIGHT / 2 + 4.5
    chance = f"; chance of the whole path by the drafter: {note}" if note else ""
    words = escape(f"“{label}”, depth {depth}, {reason}{chance}")
    return (
        f'<g class="node {kind}" role="button" tabindex="{-1 if depth else 0}" aria-label="{words}" data-details="{words}">'
        f"<title>{words}</title>"
        f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
        f'<text x="{x + 9:g}" y="{baseline:g}">{escape(short)}</text>'
        f'<text class="note" x="{x + BOX_WIDTH - 8:g}" y="{baseline:g}" text-anchor="end">{escape(note)}</text></g>'
    )


def tree_legend() -> str:
    """What the nodes' frames and numbers mean."""
    keys = {
        "root": "last token so far",
        "accepted": "draft accepted",
        "refused": "draft refused, where the target chose another",
        "unseen": "never reached",
        "bonus": "the target’s own token",
    }
    shown = " ".join(f'<span class="key of-{kind}"><i>ab</i> {words}</span>' for kind, words in keys.items())
    return (
        f'<p class="keys">{shown} <span class="key"><i class="note">44 %</i> drafter’s chance of the whole path</span></p>'
    )


def outcomes(step: StepRecord) -> str:
    """The tree's drafts as a table."""
    if len(step.nodes) == 1:
        return '<p class="hint">Nothing was drafted in this step: the pass gave only the target’s own token.</p>'
    order = sorted(range(1, len(step.nodes)), key=lambda i: (step.nodes[i].depth, i not in step.path, i))
    body = "".join(_row(step.nodes[i], *fate(step, i)) for i in order)
    return (
        '<table class="outcomes"><thead><tr><th>depth</th><th>draft</th>'
        '<th title="the drafter’s estimate that the whole path down to here is accepted">chance of the path</th>'
        f"<th>outcome</th></tr></thead><tbody>{body}</tbody></table>"
    )


def _row(node: Node, kind: str, reason: str) -> str:
    cells = (str(node.depth), f"<code>{escape(visible(node.text))}</code>", escape(percent(node)) or "–", escape(reason))
    return f'<tr class="{kind}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def step_line(steps: Sequence[StepRecord], number: int) -> str:
    """One step in a sentence."""
    step = steps[number]
    num_drafts = len(step.nodes) - 1
    thousandths = 1000 * (step.draft_seconds + step.verify_seconds + step.commit_seconds + step.host_seconds)
    return (
        f'<p class="hint"><b>Step {number + 1} of {len(steps)}</b>: {count(num_drafts, "draft token")} in one target pass, '
        f"{step.num_accepted} accepted, {count(len(step.token_ids), 'token')} emitted, {thousandths:.0f} ms.</p>"
    )


def plots(column: Column) -> str:
    """The whole answer at a glance: acceptance by position, tokens per pass, and where the time went."""
    return f'<div class="plots">{_by_position(column.steps)}{_lengths(column.steps)}{_time(column)}</div>'


def acceptance_by_position(steps: Sequence[StepRecord]) -> list[tuple[int, int]]:
    """For each depth from 1: the number of steps in which a draft of that depth was accepted, and in which there was one."""
    deepest = max((step.max_depth for step in steps), default=0)
    return [
        (sum(step.num_accepted >= d for step in steps), sum(step.max_depth >= d for step in steps))
        for d in range(1, deepest + 1)
    ]


def _by_position(steps: Sequence[StepRecord]) -> str:
    counts = acceptance_by_position(steps)
    rows = [
        (f"depth {d}", hits / tries, f"{hits / tries:.0%} of {tries}") for d, (hits, tries) in enumerate(counts, start=1)
    ]
    hint = "of the steps with a draft of that depth, how many accepted it"
    return charts.bars("Acceptance by position", hint, rows, "draft", empty="Nothing was drafted.")


def _lengths(steps: Sequence[StepRecord]) -> str:
    lengths = [len(step.token_ids) for step in steps]
    counts = [(n, lengths.count(n)) for n in range(1, max(lengths) + 1)]
    most = max(number for _, number in counts)
    rows = [(count(n, "token"), number / most, count(number, "step")) for n, number in counts]
    return charts.bars("Tokens per target pass", "how many steps emitted that many tokens, bonus included", rows, "bonus")


def _time(column: Column) -> str:
    parts = {
        "prefill": column.prefill_seconds,
        "draft": sum(step.draft_seconds for step in column.steps),
        "verify": sum(step.verify_seconds for step in column.steps),
        "commit": sum(step.commit_seconds for step in column.steps),
        "host": sum(step.host_seconds for step in column.steps),
    }
    total = sum(parts.values())
    rows = [
        (name, seconds / max(parts.values()), f"{milliseconds(seconds)}, {seconds / total:.0%}")
        for name, seconds in parts.items()
    ]
    return charts.bars("Where the time went", "the decode loop's own clock, whole answer", rows, "time")
