"""What a person meets in `selfspec chat`: commands, several lines, Ctrl-C, marks, and figures."""

from __future__ import annotations

import builtins
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from selfspec import Piece, SamplingParams, Target, load_drafter
from selfspec.cli.chat import converse
from selfspec.cli.chat_input import HINT, Reader
from selfspec.cli.chat_state import COMMANDS, Chat, run_command
from selfspec.cli.main import app
from selfspec.config import DraftOptions

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir)


@pytest.fixture
def state(target: Target) -> Chat:
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    return Chat(target, DraftOptions(no_cost_guard=True), sampling, drafter=load_drafter("ngram", target))


@pytest.fixture
def run(tiny_target_dir: Path) -> Run:
    def run(*args: object, stdin: str = "", code: int = 0) -> Any:
        options = ["--target", tiny_target_dir, "--max-new-tokens", 5, "--ignore-eos"]
        result = CliRunner().invoke(app, ["chat", *map(str, [*options, *args])], input=stdin)
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Reader]:
    """A reader at a terminal where a person types these lines; an exception is a key."""

    def typed(*lines: str | type[BaseException], prompts: list[str] | None = None) -> Reader:
        rest: Iterator[str | type[BaseException]] = iter(lines)

        def read(prompt: str = "") -> str:
            if prompts is not None:
                prompts.append(prompt)
            line = next(rest, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(builtins, "input", read)
        reader = Reader()
        reader.is_interactive = True
        return reader

    return typed


def messages(reader: Reader) -> list[str]:
    found = []
    while (text := reader.read()) is not None:
        found.append(text.strip())
    return found


# What is read.


def test_several_lines_between_quotes_are_one_message(typed: Callable[..., Reader]) -> None:
    prompts: list[str] = []
    reader = typed("one", '"""two', "", '  three"""', '"""four"""', '"""', "five", '"""', prompts=prompts)
    assert messages(reader) == ["one", "two\n\n  three", "four", "five"]
    assert prompts == ["> ", "> ", ". ", ". ", "> ", "> ", ". ", ". ", "> "]


def test_quotes_that_stay_open_end_with_the_input(typed: Callable[..., Reader]) -> None:
    assert messages(typed('"""one', "two")) == ["one\ntwo"]


def test_ctrl_c_at_the_prompt_hints_and_ends_the_second_time(
    typed: Callable[..., Reader], capsys: pytest.CaptureFixture[str]
) -> None:
    reader = typed(KeyboardInterrupt, "one", KeyboardInterrupt, '"""two', KeyboardInterrupt, "not read")
    assert messages(reader) == ["one"], "the second one in a row ends, in the middle of a message too"
    assert capsys.readouterr().out.count(HINT) == 2


def test_ctrl_c_ends_a_pipe(typed: Callable[..., Reader]) -> None:
    reader = typed(KeyboardInterrupt)
    reader.is_interactive = False
    with pytest.raises(KeyboardInterrupt):
        reader.read()


# Commands.


@pytest.mark.parametrize("line", ["/helo", "/", "/etc/passwd what is it?", "/HELP", "/quitnow"])
def test_an_unknown_command_is_one_sentence_and_not_a_message(state: Chat, line: str) -> None:
    said = run_command(state, line)
    assert said == f"{line.split()[0]} is not a command: /help lists them, and a space before it makes it a message"
    assert not state.messages


def test_help_names_every_command(state: Chat) -> None:
    said = run_command(state, "/help")
    assert said is not None
    lines = said.splitlines()
    assert len(lines) == len(COMMANDS)
    for command, line in zip(COMMANDS, lines, strict=True):
        assert line.startswith(command.names[0]) and line.endswith(command.help)


@pytest.mark.parametrize("line", ["/quit", "/exit", "/quit now", " /exit "])
def test_quitting(state: Chat, line: str) -> None:
    assert run_command(state, line) is None


@pytest.mark.parametrize(
    ("line", "said", "value"),
    [
        ("/set temperature 0.7", "temperature = 0.7", 0.7),
        ("/set top_k 40", "top_k = 40", 40),
        ("/set seed 7", "seed = 7", 7),
        ("/set seed none", "seed = None", None),
        ("/set stop The end", 'stop = ["The end"]', ("The end",)),
        ("/set stop 7", 'stop = ["7"]', ("7",)),
        ('/set stop ["a", "b\\n"]', 'stop = ["a", "b\\n"]', ("a", "b\n")),
        ("/set stop_token_ids 3", "stop_token_ids = [3]", (3,)),
        ("/set ignore_eos false", "ignore_eos = false", False),
        ('/set logit_bias {"5": -2}', 'logit_bias = {"5": -2.0}', {5: -2.0}),
    ],
)
def test_settings_are_shown_and_set(state: Chat, line: str, said: str, value: object) -> None:
    name = line.split()[1]
    assert run_command(state, line) == said and getattr(state.sampling, name) == value
    assert run_command(state, f"/set {name}") == said
    listed = run_command(state, "/set")
    assert listed is not None and said in listed.splitlines()
    assert not {"n", "logprobs"} & {shown.split(" = ")[0] for shown in listed.splitlines()}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temperature hot", "temperature='hot' is not allowed: use 0 or more"),
        ("/set temperature -1", "temperature=-1 is not allowed"),
        ("/set max_new_tokens 0", "max_new_tokens=0 is not allowed"),
        ("/set ignore_eos maybe", "ignore_eos=maybe is not allowed: use true or false"),
        ("/set logit_bias 5", "logit_bias=5 is not allowed: use an object"),
        ("/set stop_token_ids x", "stop_token_ids=['x'] is not allowed"),
        ("/set stop_token_ids 100000", "stop_token_ids has token id 100000"),
        ("/set max_tokens 5", "max_tokens is not a setting here: use max_new_tokens"),
        ("/set temp 5", "temp is not a setting: use"),
        ("/set n 3", "n cannot be set in a chat: use selfspec generate"),
        ("/drafter nrgam", "drafter 'nrgam' is not known"),
        ("/drafter eagle", "no shipped eagle head fits"),
    ],
)
def test_a_wrong_value_is_told_and_changes_nothing(state: Chat, line: str, words: str) -> None:
    before, drafter = state.sampling, state.drafter
    said = run_command(state, line)
    assert said is not None and words in said and len(said.splitlines()) == 1
    assert state.sampling is before and state.drafter is drafter


def test_the_drafter_is_shown_and_changed(state: Chat) -> None:
    said = run_command(state, "/drafter")
    assert said is not None and said.startswith("drafter = ngram; there are auto, none, ngram")
    assert run_command(state, "/drafter truncated:1") == "drafter = truncated:1"
    first = state.drafter
    assert run_command(state, "/drafter none") == "drafter = none" and state.drafter is None
    run_command(state, "/drafter truncated:1")
    assert state.drafter is first, "it is loaded once"


# The conversation.


def test_a_pipe_has_text_and_figures_without_colours(run: Run) -> None:
    result = run(stdin='the cat\n/wat\n"""the dog\nsat"""\n/drafter none\n/set max_new_tokens 3\nthe mat\n/exit\nnot read\n')
    figures = re.findall(r"^\[.*\]$", result.stdout, re.MULTILINE)
    assert len(figures) == 3 and "\x1b" not in result.output
    assert re.fullmatch(
        r"\[5 tokens, [\d.]+ tokens/s, acceptance length [\d.]+, drafter ngram; cut: /set max_new_tokens 10\]", figures[0]
    )
    assert figures[2].startswith("[3 tokens") and "drafter none" in figures[2]
    assert "/wat is not a command" in result.stdout and result.stdout.count(" …\n") == 3


def test_the_first_message_may_be_an_argument(run: Run) -> None:
    first = run("the cat").stdout
    assert first.count("acceptance length") == 1
    piped = run(stdin="the cat\n").stdout
    assert first.partition("[")[0] == piped.partition("[")[0]
    assert run("the cat", stdin="the dog\n").stdout.count("acceptance length") == 2


@pytest.mark.parametrize("message", ["smollm2", "Qwen/Qwen3-0.6B", "."])
def test_a_target_in_the_place_of_a_message_is_told(run: Run, message: str) -> None:
    assert f"{message} looks like a target: write --target {message}" in run(message, code=1).stderr


def test_numbers_of_tokens_are_not_for_a_chat(run: Run) -> None:
    for option in (("--n", "2"), ("--logprobs",)):
        assert "No such option" in run(*option, code=2).stderr


def test_a_target_without_a_chat_template_is_told_once(tiny_target_dir: Path, tmp_path: Path) -> None:
    for file in tiny_target_dir.iterdir():
        if "template" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    result = CliRunner().invoke(app, ["chat", "--target", str(tmp_path)], input="the cat\nthe dog\n")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        f"selfspec: {tmp_path.name} has no chat template, so it cannot chat: use selfspec generate"
    ]


def test_what_was_drafted_is_green_until_marks_are_off(
    state: Chat, typed: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, last = list(state.stream("the cat"))
    pieces = [Piece("ab", "bonus"), Piece("cd", "draft", 1), Piece("ef", "draft", 2), Piece("gh", "target")]
    monkeypatch.setattr(state, "stream", lambda text: (event for event in [replace(last, pieces=pieces)]))
    shown: list[str] = []
    # Not through a pipe, which takes colours away.
    monkeypatch.setattr(typer, "echo", lambda text="", nl=True, err=False: shown.append(text))
    converse(state, typed("/marks", "the dog"), "the cat")
    assert shown[:4] == ["ab", "\x1b[32mcd\x1b[0m", "\x1b[32mef\x1b[0m", "gh"]
    off = shown.index("Drafts that are accepted are not marked.")
    assert shown[off + 1 : off + 5] == ["ab", "cd", "ef", "gh"]
    assert [message["content"] for message in state.messages] == ["the cat", "abcdefgh", "the dog", "abcdefgh"]


def test_ctrl_c_stops_an_answer_and_keeps_what_came(
    state: Chat, typed: Callable[..., Reader], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = "".join(event.text for event in state.stream("the cat"))
    stream = state.stream

    def interrupted(text: str) -> Any:
        for number, event in enumerate(stream(text)):
            if number == 3:
                raise KeyboardInterrupt
            yield event

    monkeypatch.setattr(state, "stream", interrupted)
    converse(state, typed("/set"), "the cat")
    out = capsys.readouterr().out
    assert " [stopped]\n" in out and "acceptance length" not in out
    assert [message["role"] for message in state.messages] == ["user", "assistant"]
    assert state.messages[1]["content"] and whole.startswith(state.messages[1]["content"])


def test_a_full_context_is_told(state: Chat, capsys: pytest.CaptureFixture[str], typed: Callable[..., Reader]) -> None:
    room = state.target.context_length - len(state.target.encode([{"role": "user", "content": "the cat " * 9}]))
    assert room > 6
    text = "x" * (state.target.context_length - len(state.target.encode([{"role": "user", "content": ""}])) - 3)
    converse(state, typed(), text)
    assert "cut, because the context is full: /reset" in capsys.readouterr().out


def test_a_terminal(tiny_target_dir: Path) -> None:
    """The real thing: prompts, history, a hint at Ctrl-C, and an end at Ctrl-D."""
    ours, theirs = pty.openpty()
    # Ctrl-C counts, even where these tests run in the background and ignore it.
    program = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('selfspec', run_name='__main__')"
    )
    command = [sys.executable, "-c", program, "chat", "--target", str(tiny_target_dir), "--drafter", "ngram"]
    options = ["--max-new-tokens", "4", "--ignore-eos"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(root)}
    process = subprocess.Popen([*command, *options], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""

    def wait_for(words: bytes) -> None:
        nonlocal shown
        deadline = time.monotonic() + 60
        while words not in shown:
            assert time.monotonic() < deadline and process.poll() is None, shown.decode()
            if select.select([ours], [], [], 1)[0]:
                shown += os.read(ours, 4096)
        shown = shown.partition(words)[2]

    try:
        wait_for(b"> ")
        os.write(ours, b"the cat\n")
        wait_for(b"acceptance length")
        wait_for(b"> ")
        # A signal between the prompt and the wait for keys would be heard only with the next key.
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        wait_for(HINT.encode())
        # The message before, from the history.
        os.write(ours, b"\x1b[A\n")
        wait_for(b"the cat")
        wait_for(b"acceptance length")
        wait_for(b"> ")
        os.write(ours, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
