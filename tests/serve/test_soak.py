"""The soak itself: ten seconds of it find nothing, and it finds what it looks for."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serve import soak

from selfspec import Target

SCRIPT = Path(__file__).parent / "soak.py"


@pytest.mark.parametrize("http_process", ["on", "off"])
def test_ten_seconds_leave_nothing_behind(tiny_target_dir: Path, http_process: str) -> None:
    command = [sys.executable, SCRIPT, "--target", tiny_target_dir, "--minutes", "0.17", "--drafter", "ngram"]
    command += ["--http-process", http_process]
    done = subprocess.run([*map(str, command), "--drafter", "truncated:1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {line[:32].strip(): int(line[32:].split()[0]) for line in done.stdout.splitlines()[:-1]}
    # How many of each there are in ten seconds is the machine's affair.
    assert counts["whole: right"] + counts["stream: right"] > 0 and counts["send mistake: refused"] > 0


def test_wrong_texts_and_lost_requests_are_violations(start: Callable[..., Any], target: Target) -> None:
    server = start()
    [case] = soak.make_cases(target, 1)
    wrong = soak.Soak(server.url, "tiny", [soak.Case(case.body, "something else")], ["ngram"])
    asyncio.run(wrong.run(0.5, 2))
    assert any("in place of 'something else'" in violation for violation in wrong.violations)
    other = soak.Soak(server.url, "another model", [case], ["ngram"])
    asyncio.run(other.run(0.5, 2))
    assert any(violation.startswith("a good request: 404") for violation in other.violations)


@pytest.mark.parametrize(
    ("resident", "is_flat"), [([300.0] * 5 + [400.0] * 40, True), ([300.0 + n for n in range(100)], False)]
)
def test_memory_that_grows_is_found(resident: list[float], is_flat: bool) -> None:
    assert (soak.grown(resident) is None) == is_flat
