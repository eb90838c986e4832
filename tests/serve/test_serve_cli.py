"""The command as a process: it says where it listens, drains on SIGTERM, and names what is wrong."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from selfspec.cli.serve import first_steps, register

PROGRAM = "import test_serve_cli; test_serve_cli.command()()"
ENDLESS = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 3000, "ignore_eos": True, "stream": True}


def command() -> typer.Typer:
    """`selfspec serve` alone."""
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return app


@pytest.fixture
def serve(tiny_target_dir: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def serve(*args: str) -> subprocess.Popen[str]:
        paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, "serve", "--target", str(tiny_target_dir), "--port", "0", *args],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": paths},
            )
        )
        return processes[-1]

    yield serve
    for process in processes:
        process.kill()
        process.communicate()


def address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert " serves " in line, line + (process.stderr.read() if process.stderr else "")
    return line.split()[0]


@pytest.mark.parametrize("http_process", ["on", "auto"])
def test_sigterm_lets_running_answers_end(serve: Callable[..., subprocess.Popen[str]], http_process: str) -> None:
    options = ("--http-process", http_process, "--served-name", "mine", "--log-level", "warning")
    process = serve("--drafter", "none", "--drafter", "ngram", *options)
    url = address(process)
    body = {**ENDLESS, "model": "mine", "max_tokens": 500, "drafter": "ngram"}
    with httpx.Client(timeout=60) as client, client.stream("POST", f"{url}/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


def test_requests_and_the_end_are_logged(serve: Callable[..., subprocess.Popen[str]]) -> None:
    """After the address come the routes and a request to paste."""
    process = serve("--served-name", "mine")
    url = address(process)
    assert process.stdout is not None
    *routes, example = [process.stdout.readline().strip() for _ in range(4)]
    body = {"model": "mine", "prompt": "the cat", "max_tokens": 2, "ignore_eos": True}
    assert httpx.post(f"{url}/completions", json=body, timeout=60).status_code == 200
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert all(route in " ".join(routes) for route in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/health"))
    assert example.startswith(f"try:  curl {url}/chat/completions -H 'Content-Type: application/json' -d '{{")
    assert json.loads(shlex.split(example)[-1])["model"] == "mine"
    chosen, request, end = err.splitlines()
    assert "drafter ngram: no shipped head fits" in chosen
    assert " INFO POST /v1/completions 200 in " in request and "+2 tokens, req-" in request
    assert re.search(r" ms, first token after \d+ ms, [\d.]+ tokens/s, acceptance length [\d.]+, \d+\+2 tokens", request)
    assert end.endswith(" INFO SIGTERM: waiting for the running answers")


def test_time_for_running_answers_ends(serve: Callable[..., subprocess.Popen[str]]) -> None:
    process = serve("--drain-seconds", "0.1", "--served-name", "mine", "--no-request-log")
    url = address(process)
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{url}/chat/completions", json={**ENDLESS, "model": "mine"}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
    assert "shutting down" in rest[-1]
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0 and "POST" not in err and "SIGINT: waiting" in err


def test_the_example_is_one_that_the_model_and_the_server_take(tiny_target_dir: Path) -> None:
    # Here, because the servers' processes import this file.
    from selfspec.model.target import Target

    side = Target.from_pretrained(tiny_target_dir).text_side()
    keyed = first_steps("http://[::1]:80", "it's", has_key=True, text_side=side).splitlines()[-1]
    words = shlex.split(keyed.removeprefix("try:  "))
    assert words[1] == "http://[::1]:80/v1/chat/completions" and "Authorization: Bearer $SELFSPEC_API_KEY" in words
    assert json.loads(words[-1])["model"] == "it's"
    side.tokenizer.chat_template = None
    assert "/v1/completions -H" in first_steps("http://a", "m", has_key=False, text_side=side)


def engine_of(process: subprocess.Popen[str]) -> int:
    """The id of the process that a server's engine has to itself."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = file.read_text().rpartition(")")[2].split()[1]
            if int(parent) == process.pid and b"spawn_main" in (file.parent / "cmdline").read_bytes():
                return int(file.parent.name)
    raise AssertionError("the server has no process for its engine")


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="it finds the engine's process in /proc")
def test_neither_process_outlives_the_other(serve: Callable[..., subprocess.Popen[str]]) -> None:
    """A server without an engine ends with an error; an engine without a server ends by itself."""
    first = serve("--http-process", "on", "--served-name", "mine", "--log-level", "error")
    second = serve("--http-process", "on", "--served-name", "mine")
    url = address(first)
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{url}/chat/completions", json={**ENDLESS, "model": "mine"}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        os.kill(engine_of(first), signal.SIGKILL)
        rest = [line for line in lines if line]
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["code"] == "unavailable" and "the engine has ended unexpectedly" in error["message"]
    _, err = first.communicate(timeout=30)
    assert first.returncode == 1
    assert err.splitlines()[-1] == "selfspec: the engine's process ended with SIGKILL"

    address(second)
    engine = engine_of(second)
    second.kill()
    second.wait(30)
    deadline = time.monotonic() + 30
    while is_running(engine):
        assert time.monotonic() < deadline, "the engine goes on without its server"
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="it finds the engine's process in /proc")
def test_ctrl_c_while_the_model_is_loaded_ends_both(serve: Callable[..., subprocess.Popen[str]]) -> None:
    process = serve("--http-process", "on", "--port", "0")
    engine = None
    deadline = time.monotonic() + 30
    while engine is None:
        assert time.monotonic() < deadline
        with contextlib.suppress(AssertionError):
            engine = engine_of(process)
    # A terminal sends it to both.
    os.kill(engine, signal.SIGINT)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert out == "" and "Traceback" not in err
    assert not is_running(engine)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--target", "absent/target"], "absent/target"),
        (["--drafter", "oracle"], "drafter 'oracle' is not known"),
        (["--max-batch", "0"], "max_batch=0 is not allowed"),
        (["--drain-seconds", "-1"], "drain_seconds=-1.0 is not allowed"),
        (["--capture", "log", "--capture-share", "2"], "share=2.0 is not allowed"),
        (["--api-key", " "], "an api_key is empty"),
        (["--allowed-host", " "], "an allowed_host is empty"),
        (["--http-process", "perhaps"], "http_process='perhaps' is not known: use one of auto, on, off"),
        (["--http-process", "on", "--target", "absent/target"], "absent/target"),
        (["--log-level", "loud"], "log_level='loud' is not allowed: use debug, info, warning, error"),
        (["--max-body-megabytes", "0"], "max_body_megabytes=0 is not allowed"),
        (["--host", "203.0.113.1", "--api-key", "key"], "cannot listen on 203.0.113.1:0 ("),
    ],
)
def test_mistakes_take_one_line(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command(), ["serve", "--target", str(tiny_target_dir), "--port", "0", *args])
    assert result.exit_code == 1 and message in result.stderr, result.output
    assert result.stdout == "" and len(result.stderr.splitlines()) == 1 and result.stderr.startswith("selfspec: ")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(command(), ["serve", "--port", port])
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use): choose another" in result.stderr


def test_an_open_door_is_pointed_out(serve: Callable[..., subprocess.Popen[str]]) -> None:
    process = serve("--host", "0.0.0.0", "--log-level", "warning")
    address(process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert err == "selfspec: anyone who can reach 0.0.0.0 can use the model: think of --api-key\n"


def test_the_command_needs_nothing_heavy_to_be_listed() -> None:
    code = (
        "import sys, typer; from selfspec.cli.serve import register; register(typer.Typer());"
        "print({'torch', 'fastapi', 'uvicorn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
