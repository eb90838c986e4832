"""`selfspec app`: its options reach the server, and a missing gradio is one line."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from selfspec.app import main
from selfspec.app_cli import register


@pytest.fixture
def cli() -> typer.Typer:
    cli = typer.Typer()
    # With a callback, a lone command keeps its name on the command line.
    cli.callback()(lambda: None)
    register(cli)
    return cli


def test_options_reach_the_server(cli, monkeypatch, tiny_target_dir):
    served = {}

    def serve(target, **options):
        served.update(options, target=target.name)
        return SimpleNamespace(local_url="http://here/", block_thread=lambda: served.update(is_blocked=True))

    monkeypatch.setattr(main, "serve", serve)
    result = CliRunner().invoke(cli, ["app", "--target", str(tiny_target_dir), "--device", "cpu", "--port", "7999"])
    assert result.exit_code == 0, result.output
    assert served == {"host": "127.0.0.1", "port": 7999, "target": str(tiny_target_dir), "is_blocked": True}
    assert "http://here/" in result.output


def test_without_gradio_it_says_what_to_install(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    result = CliRunner().invoke(cli, ["app"])
    assert result.exit_code == 1
    assert "pip install 'selfspec[app]'" in result.output
