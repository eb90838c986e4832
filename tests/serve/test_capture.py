"""The log of traffic: whole lines, bounded in size, and never at the cost of serving."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from selfspec.traffic.capture import Capture
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.sources import read_conversations


def conversation(number: int, size: int = 10) -> Conversation:
    messages = [{"role": "user", "content": f"{number} " + "x" * size}, {"role": "assistant", "content": "yes"}]
    return Conversation(f"row-{number}", messages, finish_reason="stop")


def read(directory: Path) -> list[Conversation]:
    report = Report()
    rows = list(read_conversations([directory], report))
    assert not report.skipped, report.examples
    return rows


def test_lines_are_read_back_and_are_the_owners_alone(tmp_path: Path) -> None:
    capture = Capture(tmp_path / "log" / "deep")
    for number in range(20):
        capture.record(conversation(number), {"model": "tiny"})
    capture.close()
    assert read(tmp_path / "log" / "deep") == [conversation(number) for number in range(20)]
    [file] = (tmp_path / "log" / "deep").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text().splitlines()[3])["model"] == "tiny"


def test_the_oldest_goes_and_the_whole_stays_within_bounds(tmp_path: Path) -> None:
    for start in (0, 300):
        # A second run counts the files of the first.
        capture = Capture(tmp_path, max_bytes=1 << 16)
        for number in range(start, start + 300):
            capture.record(conversation(number, size=1000), {})
        capture.close()
        assert capture.num_written == 300 and capture.num_dropped == 0
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1 << 16
    kept = [int(row.id.removeprefix("row-")) for row in read(tmp_path)]
    assert kept == list(range(kept[0], 600)) and len(kept) > 40, "the newest, in order, and most of the room used"


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "notes.jsonl"
    other.write_text("x" * (1 << 17))
    capture = Capture(tmp_path, max_bytes=1 << 16)
    capture.record(conversation(0), {})
    capture.close()
    assert other.exists()


def test_a_share_is_about_that_share(tmp_path: Path) -> None:
    capture = Capture(tmp_path, share=0.25)
    for number in range(1000):
        capture.record(conversation(number), {})
    capture.close()
    # Five standard deviations of a binomial, 0.25 of 1000.
    assert abs(capture.num_written - 250) < 70


def test_a_torn_last_line_costs_that_line_only(tmp_path: Path) -> None:
    capture = Capture(tmp_path)
    capture.record(conversation(0), {})
    capture.close()
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes() * 2 + b'{"id": "torn", "mess')
    capture = Capture(tmp_path)
    capture.record(conversation(1), {})
    capture.close()
    report = Report()
    assert [row.id for row in read_conversations([tmp_path], report)] == ["row-0", "row-0#2", "row-1"]
    assert report.skipped == {"not JSON": 1}


def test_a_full_disk_costs_lines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    outcomes = iter([len, lambda line: 10, OSError(28, "No space left on device"), len])

    def write(file: int, line: bytes) -> int:
        outcome = next(outcomes)
        if isinstance(outcome, OSError):
            raise outcome
        return real_write(file, line[: outcome(line)])

    capture = Capture(tmp_path)
    monkeypatch.setattr("selfspec.traffic.capture.os.write", write)
    for number in range(4):
        capture.record(conversation(number), {})
    capture.close()
    assert (capture.num_written, capture.num_dropped) == (2, 2)
    report = Report()
    assert [row.id for row in read_conversations([tmp_path], report)] == ["row-0", "row-3"]
    assert report.skipped == {"not JSON": 1}


def test_a_slow_disk_drops_and_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()

    def redact(conversation: Conversation) -> Conversation:
        may_go_on.wait()
        return conversation

    monkeypatch.setattr("selfspec.traffic.capture.MAX_WAITING", 5)
    capture = Capture(tmp_path, redact=redact)
    for number in range(20):
        capture.record(conversation(number), {})
    assert capture.num_dropped >= 14
    may_go_on.set()
    capture.close()
    assert capture.num_written + capture.num_dropped == 20


def test_redaction_comes_before_the_disk(tmp_path: Path) -> None:
    def redact(conversation: Conversation) -> Conversation:
        return replace(conversation, messages=[{**m, "content": "<GONE>"} for m in conversation.messages])

    capture = Capture(tmp_path, redact=redact)
    capture.record(conversation(0), {})
    capture.close()
    [file] = tmp_path.iterdir()
    assert "xxx" not in file.read_text() and "<GONE>" in file.read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"share": 0}, "share=0 is not allowed"), ({"share": 1.5}, "share=1.5"), ({"max_bytes": 10}, "max_bytes=10")],
)
def test_settings_are_checked(tmp_path: Path, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Capture(tmp_path / "log", **settings)
    assert not (tmp_path / "log").exists()
