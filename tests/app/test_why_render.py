"""A step that can be chosen from: every token and node says what became of it, with one stop for the keyboard."""

from __future__ import annotations

from xml.etree import ElementTree

from selfspec.app import why_render
from selfspec.app.records import Node, StepRecord


def step(number: int = 0, pieces: tuple[str, ...] = ("a", "z")) -> StepRecord:
    """Root -> (a -> b, e -> f): a is accepted, b and e are refused, f is never reached, and the target adds z."""
    nodes = [
        Node(0, "root", -1, 0, 1.0),
        Node(1, "a", 0, 1, 0.6),
        Node(2, "e", 0, 1, 0.3),
        Node(3, "b", 1, 2, 0.44),
        Node(4, "f", 2, 2, 0.1),
    ]
    return StepRecord(float(number), 0.1, 0.2, 0.05, 0.01, nodes, [0, 1], ["a", "z"], [1, 9][: len(pieces)], list(pieces))


def elements(html: str, key: str) -> list[dict[str, str]]:
    return [each.attrib for each in ElementTree.fromstring(f"<root>{html}</root>").iter() if key in each.attrib]


def test_every_token_leads_to_its_step_and_one_takes_the_focus():
    steps = [step(), step(1, ("", "z")), step(2)]
    found = elements(why_render.answer(steps, 1), "data-step")
    # A token without text cannot be chosen.
    assert [each["data-step"] for each in found] == ["1", "1", "2", "3", "3"]
    assert [each["tabindex"] for each in found] == ["-1", "-1", "0", "-1", "-1"]
    assert all(each["role"] == "button" and each["data-details"] for each in found)
    assert found[0]["data-details"] == "“a”, step 1: draft accepted at depth 1 with probability 60 %; refused here: “e” 30 %"


def test_the_focus_goes_on_where_a_step_shows_no_text():
    found = elements(why_render.answer([step(), step(1, ("", "")), step(2)], 1), "data-step")
    assert [each["tabindex"] for each in found] == ["-1", "-1", "0", "-1"]
    found = elements(why_render.answer([step(), step(1, ("", ""))], 1), "data-step")
    assert {each["tabindex"] for each in found} == {"-1"}


def test_every_node_says_what_became_of_it():
    found = elements(why_render.tree(step()), "data-details")
    details = [each["data-details"] for each in found]
    assert details[0] == "“root”, depth 0, the last token of the text so far"
    assert "“b”, depth 2, refused: the target chose “z” here; chance of the whole path by the drafter: 44 %" in details
    assert (
        "“f”, depth 2, not reached: the token before it was refused; chance of the whole path by the drafter: 10 %"
        in details
    )
    assert [each["tabindex"] for each in found].count("0") == 1
    # What is shown is what a screen reader says.
    assert all(each["aria-label"] == each["data-details"] for each in found)


def test_the_legend_has_every_fate_and_the_table_waits_behind_a_disclosure():
    html = why_render.step([step()], 0)
    fates = {each["class"].split()[1] for each in elements(html, "class") if each["class"].startswith("node ")}
    assert fates == {"root", "accepted", "refused", "unseen", "bonus"}
    assert all(f'class="key of-{fate}"' in html for fate in fates)
    assert "drafter’s chance of the whole path" in html
    [disclosure] = ElementTree.fromstring(f"<root>{html}</root>").iter("details")
    assert "open" not in disclosure.attrib and len(list(disclosure.iter("tr"))) == 5
