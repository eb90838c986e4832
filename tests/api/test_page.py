"""docs/python.md: its code runs, and its table of settings says what is so."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from selfspec import StreamEvent

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")


def test_the_code_runs_from_top_to_bottom(tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        # The web application runs in tests/engine/test_asynchronous.py, with clients.
        if "FastAPI" in block:
            continue
        exec(compile(block.replace("path-or-hub-id", str(tiny_target_dir)), "python.md", "exec"), names)
        assert capsys.readouterr().out or "def generate" in block, block


def test_the_table_of_events_has_every_field() -> None:
    table = PAGE.partition("| of an event | |")[2].partition("\n\n")[0]
    assert all(f"`{field.name}`" in table for field in fields(StreamEvent))
