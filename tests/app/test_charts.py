"""Charts that stand alone: well-formed, to scale, readable without colours, and asking no other host for anything."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.app import charts
from selfspec.app.charts import Axes, Series, bars, curves, stacked

HOSTILE = "</span><script>alert('x')</script>\"&"
POINTS = [(1, 1.0), (2, 1.8), (4, 2.4), (8, 2.2)]


def parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<root>{html}</root>")


def test_every_chart_is_well_formed_and_stays_here():
    series = [Series(HOSTILE, POINTS, best=2, chosen=0), Series("b", [(1, 0.5)])]
    for html in (
        bars(HOSTILE, HOSTILE, [(HOSTILE, 0.5, HOSTILE)], "draft"),
        bars("a", "b", [], "draft", empty=HOSTILE),
        curves(HOSTILE, HOSTILE, series, Axes(HOSTILE, "y", floor=(1.0, HOSTILE))),
        stacked(HOSTILE, HOSTILE, [(HOSTILE, 1.0), ("b", 0.001)], 80.0, "GB"),
    ):
        assert "<script" not in html and "http" not in html
        parsed(html)


def test_a_curve_is_to_scale_and_its_points_say_what_they_are():
    html = curves("t", "h", [Series("a", POINTS, best=2, chosen=3)], Axes("batch", "speed-up", unit="×", is_log=True))
    circles = list(parsed(html).iter("circle"))
    # Batches that double are equally far apart.
    places = [float(circle.attrib["cx"]) for circle in circles]
    gaps = [right - left for left, right in pairwise(places)]
    assert max(gaps) - min(gaps) < 0.2
    heights = [charts.HEIGHT - charts.BOTTOM - float(circle.attrib["cy"]) for circle in circles]
    for height, (_, value) in zip(heights, POINTS, strict=True):
        assert height / heights[0] == pytest.approx(value, rel=0.01)
    assert [circle.attrib["class"] for circle in circles] == ["s0", "s0", "s0 best", "s0 chosen"]
    assert circles[2].find("title").text == "a: batch 4, speed-up 2.4×"
    assert re.findall(r'class="key ([^"]+)">([^<]+)', html) == [("line s0", "a"), ("best", "best"), ("chosen", "chosen")]


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 1e6)), min_size=1, max_size=20, unique_by=lambda p: p[0]))
def test_any_points_lie_within_the_drawing(points):
    drawn = parsed(curves("t", "h", [Series("a", sorted(points))], Axes("x", "y")))
    for circle in drawn.iter("circle"):
        assert charts.LEFT <= float(circle.attrib["cx"]) <= charts.WIDTH - charts.RIGHT + 0.1
        assert charts.TOP - 0.1 <= float(circle.attrib["cy"]) <= charts.HEIGHT - charts.BOTTOM + 0.1
    assert 2 <= len(list(drawn.iter("path"))) <= 12


def test_a_stacked_bar_shows_small_parts():
    html = stacked("Memory", "", [("weights", 16.0), ("head", 0.01)], 80.0, "GB")
    shares = [float(share) for share in re.findall(r"flex:([\d.]+)", html)]
    assert shares == pytest.approx([16 / 16.01, 0.01 / 16.01], abs=1e-4)
    assert "head</td><td>0.01 GB</td><td>&lt;0.1%" in html and "total</td><td>16.01 GB</td><td>20.0%" in html
    assert 'class="whole over"' in stacked("Memory", "", [("weights", 90.0)], 80.0, "GB")
