"""`selfspec app`: its options reach the server, and a missing gradio is one line."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from selfspec.app import main
from selfspec.cli.app import register


@pytest.fixture
def served(monkeypatch) -> dict:
    """What the page would be served with."""
    served: dict = {}

    def serve(source, **options):
        served.update(options, source=source)
        return SimpleNamespace(local_url="http://here/", block_thread=lambda: served.update(is_blocked=True))

    monkeypatch.setattr(main, "serve", serve)
    return served


@pytest.fixture
def cli() -> typer.Typer:
    cli = typer.Typer()
    # With a callback, a lone command keeps its name on the command line.
    cli.callback()(lambda: None)
    register(cli)
    return cli


def test_options_reach_the_server(cli, served, tiny_target_dir):
    result = CliRunner().invoke(cli, ["app", "--target", str(tiny_target_dir), "--device", "cpu", "--port", "7999"])
    assert result.exit_code == 0, result.output
    assert served.pop("source").name == str(tiny_target_dir)
    assert served == {"host": "127.0.0.1", "port": 7999, "is_blocked": True}
    assert "http://here/" in result.output


@pytest.mark.parametrize(
    ("host", "is_open"), [("0.0.0.0", True), ("192.0.2.7", True), ("::", True), ("127.0.0.1", False), ("localhost", False)]
)
def test_an_open_door_is_pointed_out(cli, served, host, is_open):
    result = CliRunner().invoke(cli, ["app", "--server", "http://127.0.0.1:8000", "--host", host])
    assert result.exit_code == 0, result.output
    warning = f"selfspec: anyone who can reach {host} can use the model: the page has no password"
    assert (warning in result.stderr) == is_open and len(result.stderr.splitlines()) == is_open


def test_a_server_takes_the_place_of_a_target(cli, served):
    result = CliRunner().invoke(cli, ["app", "--server", "http://127.0.0.1:8000", "--api-key", "secret"])
    assert result.exit_code == 0, result.output
    assert served["source"].url == "http://127.0.0.1:8000/v1"
    assert "secret" not in result.output


@pytest.mark.parametrize(
    ("args", "problem"),
    [(["--server", "elsewhere"], "is not an address"), (["--server", "http://a", "--target", "b"], "exclude each other")],
)
def test_a_wrong_server_is_one_line(cli, served, args, problem):
    result = CliRunner().invoke(cli, ["app", *args])
    assert result.exit_code == 1 and problem in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_taken_port_is_one_line_before_anything_is_loaded(cli, served):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(cli, ["app", "--port", str(port)])
    assert result.exit_code == 1 and f"port {port} of 127.0.0.1 is taken: give another --port" in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not result.stdout and not served


def test_it_says_at_once_what_it_does(tiny_target_dir):
    """In a process of its own, where nothing is imported yet."""
    command = [sys.executable, "-m", "selfspec", "app", "--target", str(tiny_target_dir), "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        line = process.stdout.readline()
        loaded = Path(f"/proc/{process.pid}/maps")
        is_early = not loaded.exists() or "libtorch_cpu" not in loaded.read_text()
        process.kill()
    assert line == f"selfspec app: importing gradio and torch, then loading {tiny_target_dir} …\n"
    assert is_early


def test_without_gradio_it_says_what_to_install(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    result = CliRunner().invoke(cli, ["app"])
    assert result.exit_code == 1
    assert "pip install 'selfspec[app]'" in result.output
