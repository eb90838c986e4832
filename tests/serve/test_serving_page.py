"""The examples of docs/serving.md are sent as they stand there, to a server whose model writes calls and reasoning."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
# A command of curl goes on as long as a quoted text or a backslash says so.
CURL = re.findall(r"^curl (?:'[^']*'|\\\n|[^\n'])*", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def server(family_server: Callable[..., LiveServer]) -> LiveServer:
    return family_server("hermes", api_key=("SECRET",))


def here(example: str, server: LiveServer) -> str:
    return example.replace(ADDRESS, server.url).replace("NAME", "tiny")


@pytest.mark.parametrize("example", PYTHON, ids=lambda example: example.splitlines()[0])
def test_python_examples_run(server: LiveServer, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    package = example.split()[1]
    pytest.importorskip(package, reason=f"the example is one of {package}'s: pip install {package}")
    exec(compile(here(example, server), "serving.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("example", CURL, ids=lambda example: example.split()[1])
def test_curl_lines_are_answered(server: LiveServer, example: str) -> None:
    _, url, *options = shlex.split(here(example, server).replace("\\\n", ""))
    given = list(zip(options[::2], options[1::2], strict=True))
    headers = dict(value.split(": ", 1) for name, value in given if name == "-H")
    [body] = [value for name, value in given if name == "-d"]
    answer = httpx.post(url, content=body, headers={"x-api-key": "SECRET", **headers}, timeout=60)
    assert answer.status_code == 200, answer.text


def test_every_api_has_its_examples() -> None:
    routes = {example.split()[1].removeprefix(ADDRESS) for example in CURL}
    apis = {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/completions"}
    assert routes == apis
    assert len(PYTHON) == 3
