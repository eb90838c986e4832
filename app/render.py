"""Records to HTML: spans coloured by origin, candidate trees, plots. Pure functions; everything is escaped here.

A token's place in its step gives its origin, never its text: the first `num_accepted` tokens of a step are drafts of depth
1, 2, …, and the one after them is the target's own. Each origin has a colour, and an underline of its own style and
thickness, so readers need not see colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from selfspec.app.records import Column, Node, StepRecord
from selfspec.plan.predict import Choice, Plan

# Deeper drafts look alike, because nobody could tell more shades apart.
MAX_SHADE = 6
# Begins and ends a block of code in Markdown.
FENCE = "```"


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


def _origin_class(step: StepRecord, k: int) -> str:
    if k < step.num_accepted:
        return f"draft d{min(k + 1, MAX_SHADE)}"
    return "own" if len(step.nodes) == 1 else "bonus"


def _origin(step: StepRecord, k: int, number: int) -> str:
    """A token's origin in words, and the drafts that were refused in its place."""
    where = f"step {number + 1}: "
    if k < step.num_accepted:
        node = step.nodes[step.path[k + 1]]
        words = f"draft accepted at depth {k + 1}{_percent(node, ' with probability ')}"
    elif len(step.nodes) == 1:
        words = "the target’s own token; nothing was drafted"
    else:
        words = "the target’s own token, the bonus of this pass"
    parent = step.path[k]
    taken = step.path[k + 1] if k < step.num_accepted else -1
    refused = [node for i, node in enumerate(step.nodes) if node.parent == parent and i != taken]
    if refused:
        words += "; refused here: " + ", ".join(f"“{node.text}”{_percent(node, ' ')}" for node in refused)
    return where + words


def legend() -> str:
    """The origins, each in its own style."""
    return (
        '<p class="legend"><span class="own">target’s own</span> <span class="bonus">bonus of a pass with drafts</span> '
        '<span class="draft d1">draft accepted at depth 1</span> '
        + " ".join(f'<span class="draft d{d}">{d}</span>' for d in range(2, MAX_SHADE))
        + f' <span class="draft d{MAX_SHADE}">{MAX_SHADE}+</span></p>'
    )


# The sizes of the drawn tree, in pixels.
COLUMN_WIDTH, ROW_HEIGHT, BOX_WIDTH, BOX_HEIGHT = 122, 38, 102, 28
MAX_LABEL = 8


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
        boxes.append(_box(node.depth, rows[i], node.text, _percent(node) if i else "", *fates[i]))
    if len(step.token_ids) > step.num_accepted:
        depth = step.nodes[end].depth + 1
        shapes.append(_edge(depth - 1, rows[end], depth, rows[end], "bonus"))
        boxes.append(_box(depth, rows[end], step.chosen[-1], "", "bonus", "the target’s own token, emitted in every pass"))
        width = max(width, (depth + 1) * COLUMN_WIDTH)
    return (
        f'<div class="tree"><svg role="img" aria-label="candidate tree" width="{width}" height="{height}" '
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
    return (
        f'<g class="node {kind}"><title>{escape(f"“{text}”: {reason}")}</title>'
        f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
        f'<text x="{x + 9:g}" y="{baseline:g}">{escape(short)}</text>'
        f'<text class="note" x="{x + BOX_WIDTH - 8:g}" y="{baseline:g}" text-anchor="end">{escape(note)}</text></g>'
    )


def fate(step: StepRecord, i: int) -> tuple[str, str]:
    """The outcome of a node as a CSS class, and the reason in words."""
    node = step.nodes[i]
    if i == 0:
        return "root", "the last token of the text so far"
    if i in step.path:
        if node.depth > len(step.token_ids):
            return "unseen", "the target chose it too, but the answer had ended"
        return "accepted", "accepted: the target chose it too"
    if node.parent in step.path:
        return "refused", f"refused: the target chose “{step.chosen[step.path.index(node.parent)]}” here"
    return "unseen", "not reached: the token before it was refused"


def outcomes(step: StepRecord) -> str:
    """The tree's drafts as a table, for touch screens, where nothing hovers, and for screen readers."""
    if len(step.nodes) == 1:
        return '<p class="hint">Nothing was drafted in this step: the pass gave only the target’s own token.</p>'
    order = sorted(range(1, len(step.nodes)), key=lambda i: (step.nodes[i].depth, i not in step.path, i))
    body = "".join(_row(step.nodes[i], *fate(step, i)) for i in order)
    return (
        '<table class="outcomes"><thead><tr><th>depth</th><th>draft</th>'
        '<th title="the drafter’s estimate that the whole path down to here is accepted">probability</th><th>outcome</th>'
        f"</tr></thead><tbody>{body}</tbody></table>"
    )


def _row(node: Node, kind: str, reason: str) -> str:
    cells = (str(node.depth), f"<code>{escape(visible(node.text))}</code>", escape(_percent(node)) or "–", escape(reason))
    return f'<tr class="{kind}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def step_line(steps: Sequence[StepRecord], number: int) -> str:
    """One step in a sentence."""
    step = steps[number]
    num_drafts = len(step.nodes) - 1
    milliseconds = 1000 * (step.draft_seconds + step.verify_seconds + step.commit_seconds + step.host_seconds)
    return (
        f'<p class="hint"><b>Step {number + 1} of {len(steps)}</b>: {_count(num_drafts, "draft token")} in one target pass, '
        f"{step.num_accepted} accepted, {_count(len(step.token_ids), 'token')} emitted, {milliseconds:.0f} ms.</p>"
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
    bars = [
        (f"depth {d}", hits / tries, f"{hits / tries:.0%} of {tries}") for d, (hits, tries) in enumerate(counts, start=1)
    ]
    return _plot("Acceptance by position", "of the steps with a draft of that depth, how many accepted it", bars, "draft")


def _lengths(steps: Sequence[StepRecord]) -> str:
    lengths = [len(step.token_ids) for step in steps]
    counts = [(n, lengths.count(n)) for n in range(1, max(lengths) + 1)]
    most = max(count for _, count in counts)
    bars = [(_count(n, "token"), count / most, _count(count, "step")) for n, count in counts]
    return _plot("Tokens per target pass", "how many steps emitted that many tokens, bonus included", bars, "bonus")


def _time(column: Column) -> str:
    parts = {
        "prefill": column.prefill_seconds,
        "draft": sum(step.draft_seconds for step in column.steps),
        "verify": sum(step.verify_seconds for step in column.steps),
        "commit": sum(step.commit_seconds for step in column.steps),
        "host": sum(step.host_seconds for step in column.steps),
    }
    total = sum(parts.values())
    bars = [
        (name, seconds / max(parts.values()), f"{_milliseconds(seconds)}, {seconds / total:.0%}")
        for name, seconds in parts.items()
    ]
    return _plot("Where the time went", "the decode loop's own clock, whole answer", bars, "time")


def plan(prediction: Plan, choice: Choice) -> str:
    """A prediction for one draft size, the best size for comparison, and the memory part by part."""
    best = prediction.best
    capacity = prediction.card.memory
    verdict = "It fits" if prediction.fits else "It does not fit"
    figures = {
        "speed-up": f"{choice.speedup:.2f}×",
        "tokens per target pass": f"{choice.expected_tokens:.2f}",
        "tokens/s at most": f"{choice.tokens_per_second:,.0f}",
        "draft cost, of a plain pass": f"{choice.draft_cost:.3f}",
        "verify cost, of a plain pass": f"{choice.verify_cost:.3f}",
        "best": f"{_count(best.depth, 'draft token')}, {best.speedup:.2f}×",
    }
    sizes = {
        "largest batch at this context": prediction.largest_batch,
        "largest context at this batch": prediction.largest_context,
    }
    parts = {**prediction.memory, "total": prediction.total_bytes}
    bars = [
        (name, min(1.0, num_bytes / capacity), f"{num_bytes / 1e9:.2f} GB") for name, num_bytes in parts.items() if num_bytes
    ]
    memory = _plot("Memory", f"of the {capacity / 1e9:.0f} GB of the {escape(prediction.card.name)}", bars, "time")
    total = f"{prediction.total_bytes / 1e9:.2f} of {capacity / 1e9:.2f} GB"
    return (
        facts(figures)
        + note(f"{verdict}: {total}.", "good" if prediction.fits else "error")
        + facts(sizes)
        + f'<div class="plots memory">{memory}</div>'
    )


def _plot(title: str, hint: str, bars: Iterable[tuple[str, float, str]], kind: str) -> str:
    rows = "".join(
        f'<div class="bar"><span>{name}</span><i class="{kind}" style="--share:{share:.4f}"></i><b>{value}</b></div>'
        for name, share, value in bars
    )
    rows = rows or '<p class="hint">Nothing was drafted.</p>'
    return f"<figure><figcaption>{title}<small>{hint}</small></figcaption>{rows}</figure>"


def heading(target: str, *details: str) -> str:
    """The page's title, and what it runs on."""
    return (
        '<div class="heading"><h1>selfspec</h1><p>The same answer in fewer passes: a drafter guesses tokens, and the model '
        f"checks many at once.</p><p><b>{escape(target)}</b>, {escape(', '.join(details))}</p></div>"
    )


def step(steps: Sequence[StepRecord], number: int) -> str:
    """One step in a sentence, its tree, and its outcomes."""
    return step_line(steps, number) + tree(steps[number]) + outcomes(steps[number])


def answer(steps: Sequence[StepRecord], number: int) -> str:
    """The whole text, with one step's tokens highlighted."""
    return f'<div class="answer">{spans(steps, number)}</div>{legend()}'


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


def visible(text: str) -> str:
    """A token's text with its white space made visible."""
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or "∅"


def _percent(node: Node, before: str = "") -> str:
    if node.probability is None or not math.isfinite(node.probability):
        return ""
    percent = 100 * node.probability
    return before + ("<1 %" if percent < 1 else f"{percent:.0f} %")


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
