"""The comparison's table: it fits, leads with passes, and says what can only be noise."""

import pytest

from selfspec.bench.compare import Mode, TimedAnswer
from selfspec.cli.tables import show_comparison


def mode(name: str, num_passes: int, seconds: float, tokens: int = 60) -> Mode:
    return Mode(name, [TimedAnswer("", list(range(tokens)), num_passes, seconds)], seconds)


def test_passes_come_first_and_both_baselines_have_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    show_comparison([mode("early_exit", 20, 2.0), mode("transformers", 60, 3.0), mode("none", 60, 4.0)], ["a"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    [row] = [line.split() for line in shown.splitlines() if line.startswith("early_exit")]
    assert row == ["early_exit", "67%", "20", "3.00", "30.0", "2.00x", "1.50x", "identical"]
    assert "noise" not in shown


def test_a_speedup_above_the_acceptance_length_is_called_noise(capsys: pytest.CaptureFixture[str]) -> None:
    show_comparison([mode("none", 60, 4.0), mode("ngram", 50, 2.0), mode("eagle", 20, 2.0)], ["a"])
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "2.00x ?" in rows["ngram"] and "?" not in rows["eagle"] and "?" not in rows["none"]
    assert "noise" in shown


def test_transformers_may_be_faster_than_plain_decoding(capsys: pytest.CaptureFixture[str]) -> None:
    show_comparison([mode("none", 60, 4.0), mode("transformers", 60, 2.0)], ["a"])
    shown = capsys.readouterr().out
    assert "2.00x" in shown and "?" not in shown
