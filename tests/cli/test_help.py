"""What `--help` says: every command has an example, and the example is one that the command takes."""

import shlex

import pytest
import typer
from typer.testing import CliRunner

from selfspec.cli.main import app

COMMANDS = ["generate", "chat", "serve", "app", "compare", "demo", "bench", "bench-engine", "bench-serve", "fetch", "doctor"]
COMMANDS += ["train", "compare-runs", "import", "export", "verify-head"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_parses(name: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    [example] = [line.strip() for line in command.help.splitlines() if line.strip().startswith("Example: ")]
    program, given, *arguments = shlex.split(example.removeprefix("Example: "))
    assert (program, given) == ("selfspec", name)
    command.make_context(name, arguments)
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and example in shown.output


def test_every_option_has_a_help_text() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    silent = {
        f"{name} {parameter.name}"
        for name, command in commands.items()
        for parameter in command.params
        if parameter.param_type_name == "option" and not parameter.help
    }
    assert not silent
