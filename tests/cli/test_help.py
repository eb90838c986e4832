"""What `--help` says: every command has examples that the command takes, its place among the others, and plain words."""

import re
import shlex
from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from selfspec import __version__
from selfspec.cli.main import PANEL_OF, PANELS, app
from selfspec.drafters.specs import NAMES

COMMANDS = ["generate", "chat", "serve", "app", "compare", "demo", "bench", "bench-engine", "bench-serve", "fetch", "doctor"]
COMMANDS += ["train", "compare-runs", "import", "export", "verify-head", "bench-runtime", "plot"]
ALL = typer.main.get_command(app)


def helps() -> Iterator[tuple[str, str]]:
    """What every command says of itself, and all of them."""
    commands = {**ALL.commands, **{f"data {name}": each for name, each in ALL.commands["data"].commands.items()}}  # type: ignore[attr-defined]
    for name in ("", *commands):
        yield name, CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "200"}).output


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_two_examples_that_parse(name: str) -> None:
    command = ALL.commands[name]  # type: ignore[attr-defined]
    examples = [line.strip() for line in command.help.splitlines() if line.strip().startswith("Example: ")]
    assert len(examples) == 2
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for example in examples:
        program, given, *arguments = shlex.split(example.removeprefix("Example: "))
        assert (program, given) == ("selfspec", name)
        command.make_context(name, arguments)
        assert example in shown.output


@pytest.mark.parametrize("name", ["inspect", "prepare", "clean", "regenerate", "prompts"])
def test_help_of_data_has_two_examples_that_parse(name: str) -> None:
    command = typer.main.get_command(app).commands["data"].commands[name]  # type: ignore[attr-defined]
    examples = [line.strip() for line in command.help.splitlines() if line.strip().startswith("Example: ")]
    assert len(examples) == 2
    for example in examples:
        program, group, given, *arguments = shlex.split(example.removeprefix("Example: "))
        assert (program, group, given) == ("selfspec", "data", name)
        command.make_context(name, arguments)


def test_every_option_has_a_help_text() -> None:
    commands = ALL.commands  # type: ignore[attr-defined]
    silent = {
        f"{name} {parameter.name}"
        for name, command in commands.items()
        for parameter in command.params
        if parameter.param_type_name == "option" and not parameter.help
    }
    assert not silent


def test_every_command_has_its_place_among_the_others() -> None:
    names = ALL.list_commands(typer.Context(ALL))  # type: ignore[attr-defined]
    assert names == [name for name in PANEL_OF if name in names], "a new command gets its place in PANELS"
    shown = CliRunner().invoke(app, ["-h"]).output
    places = [shown.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)


def test_options_take_values_with_names_that_people_know_and_defaults_of_no_machine() -> None:
    for name, text in helps():
        assert not re.search(r"<\w+|list\[|None", text), name
        assert not re.search(r"default: /", text), name


@pytest.mark.parametrize("name", ["generate", "chat", "compare", "bench", "bench-engine", "data prompts"])
def test_options_stand_in_groups(name: str) -> None:
    text = dict(helps())[name]
    panels = re.findall(r"╭─ ([\w ]+) ─", text)
    assert {"Target", "Drafting"} <= set(panels), panels
    assert ("Sampling" in panels) == ("--temperature" in text)


@pytest.mark.parametrize("name", ["generate", "chat", "bench-engine", "plan"])
def test_the_drafters_are_named(name: str) -> None:
    shown = " ".join(dict(helps())[name].replace("│", " ").split())
    for drafter in NAMES:
        assert re.search(rf"\b{drafter}\b", shown), drafter


def test_chat_has_no_options_that_a_conversation_cannot_use() -> None:
    text = dict(helps())["chat"]
    assert "--temperature" in text and not re.search(r"--(n|logprobs)\b", text)


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version(flag: str) -> None:
    result = CliRunner().invoke(app, [flag])
    assert (result.exit_code, result.output) == (0, f"selfspec {__version__}\n")


def test_help_has_a_short_name_everywhere() -> None:
    for args in (["-h"], ["chat", "-h"], ["data", "-h"], ["data", "clean", "-h"]):
        assert CliRunner().invoke(app, args).exit_code == 0, args
