"""What a person sees first: mistakes and help are told before anything slow is imported, and a spinner turns meanwhile."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from selfspec.cli.importing import SLOW
from selfspec.cli.main import app

# What takes a noticeable part of a second to import, or more.
HEAVY = {*SLOW.values(), "numpy", "scipy", "pandas", "uvicorn", "safetensors.torch", "sympy"}
MISTAKES = {
    "a misspelt option": ["generate", "hi", "--temprature", "1"],
    "a misspelt command": ["genrate"],
    "a misspelt drafter": ["generate", "hi", "--drafter", "foo"],
    "one of several": ["compare", "--drafters", "ngram,foo"],
    "in a dataclass": ["data", "prompts", "--number", "1", "--temperature", "1", "--output", "x", "--drafter", "foo"],
    "a drafter that is served": ["serve", "--drafter", "foo"],
    "a drafter's number": ["chat", "--drafter", "ngram:x"],
    "a drafter's folder": ["bench", "--drafters", "eagle:./absent"],
    "a draft's size": ["chat", "--num-draft-tokens", "0"],
    "a draft's dtype": ["chat", "--drafter", "draft_model:x/y", "--draft-dtype", "int3"],
    "a misspelt dtype": ["generate", "hi", "--dtype", "bf16"],
    "a misspelt device": ["generate", "hi", "--device", "gpu"],
    "a target that is not there": ["chat", "./absent"],
    "an adapter that is not there": ["chat", "--adapter", "./absent"],
    "two targets": ["chat", "some/target", "--target", "other/target"],
    "a prompt and a file": ["generate", "hi", "--prompt-file", "x"],
    "a file that is not there": ["generate", "--prompt-file", "x", "--output", "y"],
    "a server's address": ["app", "--server", "not-a-url"],
    "a format": ["export", "heads/mine", "--format", "gguf", "--output", "x"],
    "a setting": ["generate", "hi", "--top-p", "2"],
}
PROBE = """
import sys
from typer.testing import CliRunner
from selfspec.cli.main import app
for case in {cases}:
    result = CliRunner().invoke(app, case)
    print(case, result.exit_code, sorted({heavy} & set(sys.modules)))
"""


def probe(cases: list[list[str]]) -> list[str]:
    """For each command line: itself, its exit code, and the slow libraries that were imported by then."""
    code = PROBE.format(cases=cases, heavy=HEAVY)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    return result.stdout.splitlines()


def test_help_is_told_before_anything_slow_is_imported():
    names = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    cases = [["--help"], ["--version"], *([name, "--help"] for name in names)]
    assert probe(cases) == [f"{case} 0 []" for case in cases]


def test_mistakes_are_told_before_anything_slow_is_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = dict(zip(MISTAKES, probe(list(MISTAKES.values())), strict=True))
    for name, line in told.items():
        assert line in (f"{MISTAKES[name]} 1 []", f"{MISTAKES[name]} 2 []"), (name, line)


def on_a_terminal(*command: str) -> str:
    """What a command writes to a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execvp(command[0], command)
    parts = []
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:
            break
        if not part:
            break
        parts.append(part)
    os.close(terminal)
    os.waitpid(pid, 0)
    return b"".join(parts).decode()


@pytest.mark.parametrize("body", ["print('at work')", "raise ImportError('at work')"])
def test_a_spinner_turns_before_a_slow_library_runs(tmp_path: Path, body: str):
    # Spinners are drawn some twelve times a second.
    (tmp_path / "slow_library.py").write_text(f"import time\ntime.sleep(0.5)\n{body}")
    code = (
        "import sys; from selfspec.cli import importing, display\n"
        "importing.SLOW['slow_library'] = 'a slow library'; importing.show_slow_imports()\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "with display.stage('loading'):\n    import slow_library\n"
        "print('done', 'exec_module' in vars(slow_library.__spec__.loader))"
    )
    shown = on_a_terminal(sys.executable, "-c", code)
    assert shown.index("importing a slow library") < shown.index("at work")
    assert ("done False" in shown) == body.startswith("print")


def test_nothing_turns_without_a_terminal():
    code = "import sys; from selfspec.cli import importing; importing.show_slow_imports(); print(sys.meta_path)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert "SlowImports" not in result.stdout and not result.stderr


@pytest.mark.parametrize("names", ["Target", "generate, stream, load_drafter, SamplingParams"])
def test_the_librarys_own_names_bring_none_of_transformers_models(names: str):
    """They take most of the seconds, and come with the first target that is loaded."""
    code = f"import sys; from selfspec import {names}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    imported = set(result.stdout.split())
    assert "torch" in imported
    assert not {"transformers.modeling_utils", "torch._dynamo", "sympy", "scipy", "accelerate", "peft"} & imported
