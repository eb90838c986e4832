"""The page at the root of its own server: the API stays as it is, the page races on it, and keys keep strangers out."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlencode

import pytest

for name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(name, reason=f"a live server needs {name}: pip install 'selfspec[serve]'")

# ruff: noqa: E402
import httpx
from live_server import LiveServer

from selfspec.app.mounted import mount
from selfspec.drafters import NgramDrafter
from selfspec.serve.options import ServeOptions
from selfspec.serve.service import Service

PROMPT = "the cat sat on the mat and the cat sat on"


def started(target, **options: object) -> LiveServer:
    service = Service("models/tiny", ServeOptions(**options))
    service.open(target, [NgramDrafter(4)], use_cost_guard=False)
    return LiveServer(service, mount)


@pytest.fixture(scope="module")
def live(slow_target) -> Iterator[LiveServer]:
    server = started(slow_target)
    yield server
    server.close()


@pytest.fixture
def address(live) -> str:
    return live.url


def test_the_api_stays_where_it_is(live):
    assert "text/html" in httpx.get(live.url).headers["content-type"]
    assert httpx.get(f"{live.url}/v1/models").json()["data"][0]["id"] == "tiny"
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
    assert httpx.post(f"{live.url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 4
    answer = httpx.get(f"{live.url}/v1/nothing")
    assert answer.status_code == 404 and "the routes are /v1/chat/completions" in answer.json()["error"]["message"]
    assert httpx.get(f"{live.url}/health").json()["status"] == "ok"


def test_other_hosts_pages_are_kept_out(live):
    assert httpx.get(live.url, headers={"Host": "evil.example"}).status_code == 403


def test_a_key_is_asked_for_where_the_server_has_one(target):
    server = started(target, api_key=["key"])
    try:
        assert httpx.get(f"{server.url}/config").status_code == 401
        wrong = httpx.post(f"{server.url}/login", data={"username": "me", "password": "guess"})
        assert wrong.status_code == 400
        with httpx.Client(base_url=server.url) as client:
            assert client.post("/login", data={"username": "me", "password": "key"}).status_code == 200
            assert client.get("/config").status_code == 200
    finally:
        server.close()


def test_the_page_races_on_its_own_server_and_shows_its_figures(page, address):
    page.goto(f"{address}/?{urlencode({'kind': 'text', 'prompt': PROMPT, 'max_new_tokens': 48, 'drafters': 'ngram'})}")
    page.wait_for_function("(text) => document.querySelector('#prompt textarea')?.value === text", arg=PROMPT)
    page.click("#start")
    page.get_by_role("tab", name="Server").click()
    page.wait_for_selector("#live svg", timeout=20_000)
    page.wait_for_selector("#live >> text=between tokens", timeout=20_000)
    assert "tokens/s now" in page.inner_text("#live")
    page.get_by_role("tab", name="Compare").click()
    page.wait_for_selector("#start:not([disabled])")
    page.wait_for_selector(".race .badge >> text=identical")
