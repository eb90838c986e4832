"""This machine's tab: speeds without prefill stand against the ceiling, and the words name the fastest drafter."""

from __future__ import annotations

import re

from selfspec.app.machine_render import about, standing
from selfspec.app.records import Column, Node, StepRecord
from selfspec.app.settings import TRANSFORMERS
from selfspec.bench.machine import Ceiling, Machine, Measured

MACHINE = Machine("A processor", "AVX2", num_threads=2, num_cores=2)
# The floor of a pass is 0.1 s.
MEASURED = Measured(Ceiling(10e9, 1_000_000_000), {1: 0.15, 2: 0.16, 8: 0.4})


def column(name: str, label: str, num_tokens: int) -> Column:
    """Two steps: the first ends after 5 s with its prefill, and the second emits `num_tokens` in one second."""
    root = [Node(0, "", -1, 0, None)]

    def step(at: float, count: int) -> StepRecord:
        return StepRecord(at, 0, 0, 0, 0, root, [0], ["x"], [1] * count, ["x"] * count)

    return Column(name, label, [step(5.0, 1), step(6.0, num_tokens)])


def test_what_is_known_beforehand_is_shown():
    html = about(MACHINE, "cpu", "float32")
    assert "A processor" in html and "2 for 2 cores" in html


def test_a_race_stands_against_the_ceiling():
    columns = [column("none", "plain", 6), column(TRANSFORMERS, "transformers", 30), column("eagle", "EAGLE", 20)]
    html = standing(MACHINE, MEASURED, columns, dtype="float32", is_cuda=False)
    assert "Plain decoding gives 6.0 of the 10.0 tokens/s" in html
    assert "EAGLE gives 20.0: 2.00 times what plain decoding could ever give here" in html
    shown = re.findall(r"<span>(\w+)</span><i[^>]*></i><b>([^<]+)</b>", html)
    assert shown == [("plain", "6.0, 60%"), ("transformers", "30.0, 300%"), ("EAGLE", "20.0, 200%"), ("ceiling", "10.0")]
    assert "150.0 ms, 1.5 × its floor" in html and "--dtype bfloat16" in html
    assert "nodes of the tree 8, ms 400" in html


def test_before_a_race_the_pass_speaks_for_plain_decoding():
    html = standing(MACHINE, MEASURED, [], dtype="float32", is_cuda=False)
    assert "Plain decoding gives 6.7 of the 10.0" in html and "Run a race under Compare" in html
    stopped = Column("none", "plain", [])
    assert "6.7" in standing(MACHINE, MEASURED, [stopped], dtype="float32", is_cuda=False)
