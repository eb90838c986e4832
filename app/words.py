"""Records in words: where a token came from, what became of a node, and numbers as people write them."""

from __future__ import annotations

import math

from selfspec.app.records import Node, StepRecord

# Deeper drafts look alike, because nobody could tell more shades apart.
MAX_SHADE = 6


def origin_class(step: StepRecord, k: int) -> str:
    """The CSS class of a step's k-th token."""
    if k < step.num_accepted:
        return f"draft d{min(k + 1, MAX_SHADE)}"
    return "own" if len(step.nodes) == 1 else "bonus"


def origin(step: StepRecord, k: int, number: int) -> str:
    """A token's origin in words, and the drafts that were refused in its place."""
    where = f"step {number + 1}: "
    if k < step.num_accepted:
        node = step.nodes[step.path[k + 1]]
        words = f"draft accepted at depth {k + 1}{percent(node, ' with probability ')}"
    elif len(step.nodes) == 1:
        words = "the target’s own token; nothing was drafted"
    else:
        words = "the target’s own token, the bonus of this pass"
    parent = step.path[k]
    taken = step.path[k + 1] if k < step.num_accepted else -1
    refused = [node for i, node in enumerate(step.nodes) if node.parent == parent and i != taken]
    if refused:
        words += "; refused here: " + ", ".join(f"“{node.text}”{percent(node, ' ')}" for node in refused)
    return where + words


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


def visible(text: str) -> str:
    """A token's text with its white space made visible."""
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or "∅"


def percent(node: Node, before: str = "") -> str:
    """The drafter's estimate that the whole path to a node is accepted; empty if it gives none."""
    if node.probability is None or not math.isfinite(node.probability):
        return ""
    share = 100 * node.probability
    return before + ("<1 %" if share < 1 else f"{share:.0f} %")


def milliseconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
