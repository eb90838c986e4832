"""HTML that shows what happened and nothing else: text intact, everything escaped, trees drawn without collisions."""

from __future__ import annotations

import re
from html import unescape
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.app import render, why_render
from selfspec.app.records import Column, Node, StepRecord
from selfspec.app.render import spans
from selfspec.app.why_render import acceptance_by_position, tree
from selfspec.app.words import fate, visible

HOSTILE = "</span><script>alert('x')</script>\"&"


def step(
    nodes: list[Node], path: list[int], chosen: list[str], pieces: list[str] | None = None, at: float = 1.0
) -> StepRecord:
    pieces = chosen if pieces is None else pieces
    return StepRecord(at, 0.1, 0.2, 0.05, 0.01, nodes, path, chosen, list(range(len(pieces))), pieces)


def branching(**changes) -> StepRecord:
    """Root -> (a -> (b, c -> d), e -> f); a and c are accepted, then the target says "z"."""
    nodes = [
        Node(0, "root", -1, 0, 1.0),
        Node(1, "a", 0, 1, 0.6),
        Node(2, "e", 0, 1, 0.3),
        Node(3, "b", 1, 2, 0.5),
        Node(4, "c", 1, 2, 0.004),
        Node(5, "f", 2, 2, 0.1),
        Node(6, "d", 4, 3, 0.002),
    ]
    return step(nodes, [0, 1, 4], ["a", "c", "z"], **changes)


def plain(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", html))


@given(st.lists(st.text(), min_size=1, max_size=8))
def test_spans_hold_the_text_and_its_white_space(pieces):
    steps = [step([Node(0, piece, -1, 0, None)], [0], [piece]) for piece in [*pieces, HOSTILE, "  \n\t x"]]
    assert plain(spans(steps, chosen_step=0)) == "".join(pieces) + HOSTILE + "  \n\t x"


def test_origin_is_the_place_in_the_step():
    alone = step([Node(0, "x", -1, 0, None)], [0], ["x"])
    found = re.findall(r'<span class="([^"]+)" title="([^"]+)">([^<]+)', spans([branching(), alone]))
    assert [(kind, text) for kind, _, text in found] == [
        ("draft d1", "a"),
        ("draft d2", "c"),
        ("bonus", "z"),
        ("own", "x"),
    ]
    titles = [title for _, title, _ in found]
    assert titles[0] == "step 1: draft accepted at depth 1 with probability 60 %; refused here: “e” 30 %"
    assert titles[1] == "step 1: draft accepted at depth 2 with probability &lt;1 %; refused here: “b” 50 %"
    assert titles[2] == "step 1: the target’s own token, the bonus of this pass; refused here: “d” &lt;1 %"
    assert titles[3] == "step 2: the target’s own token; nothing was drafted"


def test_every_node_has_its_reason():
    kinds = {node.text: fate(branching(), i) for i, node in enumerate(branching().nodes)}
    assert kinds["a"][0] == kinds["c"][0] == "accepted"
    assert kinds["e"] == ("refused", "refused: the target chose “a” here")
    assert kinds["b"] == ("refused", "refused: the target chose “c” here")
    assert kinds["d"] == ("refused", "refused: the target chose “z” here")
    assert kinds["f"][0] == "unseen"


def test_drafts_behind_the_end_of_the_answer_say_so():
    ended = branching(pieces=["a"])
    assert fate(ended, 1)[0] == "accepted"
    assert fate(ended, 4) == ("unseen", "the target chose it too, but the answer had ended")
    # The bonus token was not emitted, so it is not drawn.
    assert tree(branching()).count("node bonus") == 1 and "node bonus" not in tree(ended)


def boxes(svg: str) -> dict[str, tuple[float, float, str]]:
    """Label -> x, y and class of each node."""
    root = ElementTree.fromstring(svg)
    found = {}
    for group in root.iter("g"):
        rect = group.find("rect")
        text = group.find("text")
        assert rect is not None and text is not None and text.text is not None
        found[text.text] = (float(rect.attrib["x"]), float(rect.attrib["y"]), group.attrib["class"])
    return found


def test_tree_is_drawn_by_depth_without_collisions():
    drawn = boxes(tree(branching()))
    places = [(x, y) for x, y, _ in drawn.values()]
    assert len(set(places)) == len(places) == 8
    # The accepted path and the bonus token are one straight line.
    assert len({drawn[name][1] for name in ("root", "a", "c", "z")}) == 1
    assert drawn["a"][0] == drawn["e"][0] < drawn["b"][0] == drawn["c"][0] == drawn["f"][0] < drawn["d"][0] == drawn["z"][0]
    svg = ElementTree.fromstring(tree(branching())).find("svg")
    assert svg is not None
    assert max(x for x, _ in places) + why_render.BOX_WIDTH < float(svg.attrib["width"])
    assert max(y for _, y in places) + why_render.BOX_HEIGHT < float(svg.attrib["height"])


def test_hostile_tokens_stay_text():
    nodes = [Node(0, HOSTILE, -1, 0, None), Node(1, HOSTILE, 0, 1, 0.5)]
    evil = step(nodes, [0], [HOSTILE], at=0.5)
    for html in (
        spans([evil]),
        why_render.step([evil], 0),
        why_render.answer([evil], 0),
        why_render.plots(Column(HOSTILE, HOSTILE, [evil])),
        render.note(HOSTILE, "error"),
        render.facts({HOSTILE: HOSTILE}),
        render.permalink(HOSTILE),
        render.heading(HOSTILE, "float32", "cpu"),
    ):
        assert "<script" not in html
        # Well-formed: every tag closed, every attribute quoted.
        ElementTree.fromstring(f"<root>{html}</root>")


def test_code_has_a_fixed_width():
    texts = ["Look", ":\n``", "`py", "\nx = 1\n", "```", " done"]
    shown = spans([step([Node(0, "", -1, 0, None)], [0], [text]) for text in texts])
    kinds = re.findall(r'<span class="([^"]+)" title="[^"]*">([^<]+)', shown)
    assert [text for kind, text in kinds if "code" in kind] == ["`py", "\nx = 1\n"]


def test_acceptance_by_position_counts_steps_that_drafted_so_deep():
    alone = step([Node(0, "x", -1, 0, None)], [0], ["x"])
    refused = step([Node(0, "x", -1, 0, None), Node(1, "y", 0, 1, 0.5)], [0], ["z"])
    assert acceptance_by_position([branching(), alone, refused]) == [(1, 2), (1, 1), (0, 1)]
    assert acceptance_by_position([alone]) == []


@pytest.mark.parametrize(("text", "seen"), [(" the", "␣the"), ("\n\n", "⏎⏎"), ("\t", "⇥"), ("", "∅")])
def test_white_space_tokens_can_be_seen(text, seen):
    assert visible(text) == seen
