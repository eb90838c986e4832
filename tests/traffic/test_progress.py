"""How far long work is, where no terminal watches."""

import threading

from selfspec.traffic import progress


def test_a_line_says_how_far_and_how_long() -> None:
    assert progress.line("answering", 0, 120, 30) == "answering: 0 of 120 after 0:30"
    assert progress.line("answering", 30, 120, 60) == "answering: 30 of 120 after 1:00, about 3:00 left"
    assert progress.line("answering", 1, 3601, 1) == "answering: 1 of 3601 after 0:01, about 1:00:00 left"
    assert progress.line("answering", 120, 120, 60) == "answering: 120 of 120 after 1:00"


def test_lines_come_while_an_item_takes_long(monkeypatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    lines: list[str] = []
    has_line = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("work: 1 of 3"):
            has_line.set()

    items = progress.tracked(iter("abc"), "work", 3, say)
    assert (next(items), next(items)) == ("a", "b")
    assert has_line.wait(10), lines
    items.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "selfspec-progress"]


def test_short_work_is_silent() -> None:
    lines: list[str] = []
    assert "".join(progress.tracked(iter("abc"), "work", 3, lines.append)) == "abc"
    assert lines == []


def test_what_comes_in_bursts_is_half_done_before() -> None:
    # The first of sixteen that are answered together says little of the fifty that are left.
    assert progress.line("answering", 1, 54, 90, 16) == "answering: 1 of 54 after 1:30, about 8:02 left"
    assert progress.line("answering", 53, 54, 90, 16) == "answering: 53 of 54 after 1:30, about 0:01 left"
