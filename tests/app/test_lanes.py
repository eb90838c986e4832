"""Lanes show who is where, who won and by how much, with every word of a visitor or a model as text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from selfspec.app import lanes
from selfspec.app.records import Column, Node, Parting, StepRecord
from selfspec.app.settings import TRANSFORMERS

HOSTILE = "</span><script>alert('x')</script>\"&"


def column(name: str, *ends: float, num_tokens: int = 1, finish_reason: str | None = "length", text: str = "x") -> Column:
    """A column whose steps ended at these times, each with so many tokens, all but the last of them drafted."""
    nodes = [Node(0, text, depth - 1, depth, 0.5 if depth else None) for depth in range(num_tokens)]
    tokens = [text] * num_tokens
    steps = [StepRecord(at, 0, 0, 0, 0, nodes, list(range(num_tokens)), tokens, [1] * num_tokens, tokens) for at in ends]
    return Column(name, name, steps, finish_reason=finish_reason)


def race(*columns: Column, **options) -> str:
    settings = {"max_new_tokens": 10, "is_over": True, "has_steps": True, **options}
    return lanes.race([lanes.Lane(each, "") for each in columns], **settings)


def shown(html: str, name: str) -> list[str]:
    return [re.sub("<[^>]*>", "", value) for value in re.findall(f"<dt>{name}</dt><dd>(.*?)</dd>", html)]


def test_figures_compare_with_plain_decoding_and_transformers():
    # Two tokens a second, and six; transformers three. The first step's time, which has the prompt's, is nobody's speed.
    plain, fast = column("none", 9.0, 9.5, 10.0), column("x", 3.0, 3.5, 4.0, num_tokens=3)
    html = race(plain, column(TRANSFORMERS, 7.0, 7.0 + 1 / 3, 7.0 + 2 / 3), fast)
    assert shown(html, "vs plain") == ["1.00×", "1.50×", "3.00×"]
    assert shown(html, "vs transformers") == ["0.67×", "1.00×", "2.00×"]
    assert shown(html, "passes saved") == ["0%", "0%", "67%"]
    assert shown(html, "tokens/s") == ["0.3", f"{3 / (7 + 2 / 3):.1f}", "2.2"]
    assert shown(html, "acceptance length") == ["1.00", "1.00", "3.00"]
    assert shown(html, "first token") == ["9.00 s", "7.00 s", "3.00 s"]
    alone = race(plain, fast, is_comparable=False)
    assert shown(alone, "vs plain") == [] and "winner" not in alone
    waiting = race(Column("none", "a"), Column("x", "b"), is_over=False)
    assert set(re.findall(r"</dt><dd>([^<]+)", waiting)) == {"–"}


def test_a_speed_up_that_cannot_be_is_called_noise():
    plain = column("none", 1.0, 2.0, 3.0)
    assert shown(race(plain, column("x", 1.0, 1.5, 2.0, num_tokens=2)), "vs plain")[1] == "4.00× noise"
    assert shown(race(plain, column("x", 1.0, 2.1, 3.2, num_tokens=2)), "vs plain")[1] == "1.82×"
    # transformers' own code may be faster at one token a pass.
    assert shown(race(plain, column(TRANSFORMERS, 1.0, 1.5, 2.0)), "vs plain")[1] == "2.00×"


def test_with_level_clocks_a_slow_spell_counts_only_while_both_run():
    # The spell slows plain decoding to a token in 5 seconds, when the other has ended long ago.
    plain, fast = column("none", 1.0, 2.0, 3.0, 8.0, 13.0), column("x", 1.0, 2.0, 3.0, num_tokens=2)
    assert lanes.speedup(fast, plain, is_level=True) == 2.0
    assert lanes.speedup(fast, plain, is_level=False) == 6.0
    assert lanes.speedup(column("x", 0.5), plain, is_level=True) is None
    assert shown(race(plain, fast, is_level=True), "vs plain")[1] == "2.00×"


def states(html: str) -> list[str]:
    return re.findall(r'<section class="column ([^"]+)">', html)


def test_every_lane_says_where_it_is():
    waits, runs = Column("a", "a"), column("b", 0.1, finish_reason=None)
    done = column("c", 0.1, 0.2)
    assert states(race(done, waits, runs, is_over=False)) == ["done", "waits", "runs"]
    assert states(race(done, waits, runs, is_over=True)) == ["done winner", "stopped", "stopped"]


def test_the_winner_is_known_as_soon_as_nobody_can_be_faster():
    done, behind = column("a", 1.0, 2.0), column("b", 1.0, finish_reason=None)
    level = column("b", 1.0, 2.5, finish_reason=None)
    assert lanes.winner([done, behind], is_over=False) is None
    assert lanes.winner([done, level], is_over=False) is done
    assert lanes.winner([done, behind], is_over=True) is done
    assert lanes.winner([behind, level], is_over=False) is None
    assert lanes.winner([done, column("b", 0.5)], is_over=True).name == "b"


def test_progress_and_ticks_share_one_scale():
    plain, fast = column("none", *range(1, 9)), column("x", 1, 2, num_tokens=4)
    html = race(plain, fast)
    assert re.findall(r'aria-valuenow="(\d+)"', html) == ["100", "100"]
    assert html.count("--passes:8") == 2
    ticks = re.findall(r'<button class="drafting" style="--height:([\d.]+);--drafted:([\d.]+)"', html)
    assert ticks == [("0.667", "0.750")] * 2
    # Until a column is done, a bar's length is the most that the answer may have.
    running = race(column("none", 1, 2, finish_reason=None), Column("x", "x"), is_over=False)
    assert re.findall(r'aria-valuenow="(\d+)"', running) == ["20", "0"]


def test_a_step_can_be_chosen_when_the_race_is_over():
    plain = column("none", 1, 2, 3)
    over = race(plain)
    assert re.findall(r'data-step="(\d)" data-lane="none" tabindex="(-?\d)"', over) == [("0", "0"), ("1", "-1"), ("2", "-1")]
    assert "data-step" not in race(plain, is_over=False) and "data-step" not in race(plain, has_steps=False)


@pytest.mark.parametrize(
    "text", ["# A\n\n```py\nx<1\n```", "<b>bold</b>", "![a](http://e.org/a.png)", "[a](javascript:x)", "<http://e.org>"]
)
def test_markdown_loads_and_runs_nothing(text):
    html = race(column("none", 1, text=text))
    assert not re.search(r"<(img|a|b|script)\b", html)
    ElementTree.fromstring(f"<root>{html}</root>")


def test_hostile_words_stay_text():
    evil = column(HOSTILE, 0.5, num_tokens=2, text=HOSTILE)
    badges = lanes.parting_badge(Parting(0, HOSTILE, HOSTILE, 0.5)), lanes.text_badge(HOSTILE, HOSTILE + "x")
    for html in (*badges, lanes.race([lanes.Lane(evil, "", badges[0])] * 2, max_new_tokens=9, is_over=True, has_steps=True)):
        assert "<script" not in html
        # Well-formed: every tag closed, every attribute quoted.
        ElementTree.fromstring(f"<root>{html}</root>")
