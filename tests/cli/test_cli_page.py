"""docs/cli.md against the commands themselves: it names all of them, all drafters, and no option that does not exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from selfspec.cli.main import PANELS, app
from selfspec.cli.options import PANELS as OPTION_PANELS
from selfspec.drafters.specs import NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def options(command: Any) -> set[str]:
    found = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for each in getattr(command, "commands", {}).values():
        found |= options(each)
    return found


def test_every_command_is_in_its_group():
    table = PAGE.partition("| --- | --- |\n")[2].partition("\n\n")[0]
    groups = dict(re.findall(r"\| \*\*(\w+)\*\* \| \|\n((?:\| `.*\n?)*)", table))
    assert list(groups) == list(PANELS)
    for panel, names in PANELS.items():
        named = set(re.findall(r"[\w-]+", " ".join(re.findall(r"`(?:selfspec )?([\w-]+)`", groups[panel]))))
        assert {name for name in names if name in COMMANDS} <= named, panel


def test_every_drafter_is_in_the_table():
    rows = " ".join(line.split("|")[1] for line in section("Drafters").splitlines() if line.startswith("| `"))
    assert {name for name in NAMES if f"`{name}`" in rows or f"`{name}:" in rows} == set(NAMES)


@pytest.mark.parametrize("title", [name for name in ("Target", "Sampling", "Drafting") if name in OPTION_PANELS.values()])
def test_every_group_of_options_has_its_part(title):
    assert section({"Target": "Targets", "Drafting": "Drafters"}.get(title, title))


def test_every_option_exists():
    known = {"--help", "--version"}.union(*map(options, COMMANDS.values()))
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", PAGE))
    assert len(named) > 20 and named <= known, named - known
