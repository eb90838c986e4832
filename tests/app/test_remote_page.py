"""The page over a running server in headless Chromium: race, stop, lose the server, and go on."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlencode

import pytest

for name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(name, reason=f"a live server needs {name}: pip install 'selfspec[serve]'")

# ruff: noqa: E402
from live_server import LiveServer

from selfspec.app import main
from selfspec.app.remote import Server
from selfspec.drafters import NgramDrafter
from selfspec.serve.options import ServeOptions
from selfspec.serve.service import Service

PROMPT = "the cat sat on the mat and the cat sat on"


@pytest.fixture(scope="module")
def live(slow_target) -> Iterator[LiveServer]:
    service = Service("models/tiny", ServeOptions(api_key=["key"]))
    service.open(slow_target, [NgramDrafter(4)], use_cost_guard=False)
    live = LiveServer(service)
    yield live
    live.close()


@pytest.fixture(scope="module")
def address(live) -> Iterator[str]:
    page = main.serve(Server(live.url, "key"))
    yield page.local_url
    page.close()


def race(page, address, **settings: object) -> None:
    page.goto(f"{address}?{urlencode({'kind': 'text', **settings})}")
    page.wait_for_function("(text) => document.querySelector('#prompt textarea')?.value === text", arg=settings["prompt"])
    page.click("#start")


def wait_until_idle(page) -> None:
    page.wait_for_selector("#start:not([disabled])")
    page.wait_for_selector("#stop[disabled]")


def test_the_servers_columns_stream_and_turn_out_identical(page, address):
    race(page, address, prompt=PROMPT, max_new_tokens=60)
    length = "(document.querySelector('.race .answer')?.textContent.length ?? 0)"
    lengths = [0]
    page.wait_for_selector("#start[disabled]")
    while page.is_disabled("#start"):
        page.wait_for_function(
            f"(old) => {length} !== old || !document.querySelector('#start').disabled",
            arg=lengths[-1],
        )
        lengths.append(page.evaluate(length))
    assert len(set(lengths)) >= 3
    wait_until_idle(page)
    assert page.locator(".badge").all_inner_texts() == ["to match", "✓ identical"]
    answers = page.eval_on_selector_all(".race .answer", "all => all.map(answer => answer.textContent)")
    assert len(set(answers)) == 1 and answers[0]
    assert "×" in page.inner_text(".race section:nth-child(2) .figures")
    assert page.inner_text(".heading b") == "tiny"
    assert page.locator("#alone").count() == 0 or page.is_hidden("#alone")
    page.click("#replay")
    page.wait_for_selector("#message >> text=Replayed from the recorded steps")
    assert page.eval_on_selector_all(".race .answer", "all => all.map(answer => answer.textContent)") == answers
    page.get_by_role("tab", name="Why").click()
    page.wait_for_selector("text=the step-by-step view needs a local target")
    assert page.get_by_role("tab", name="Heads").count() == 0


def test_stop_reaches_the_server(page, address, live):
    race(page, address, prompt=PROMPT, max_new_tokens=512, timing="live")
    page.wait_for_function("document.querySelector('.race .answer')?.textContent.length > 20")
    page.click("#stop")
    wait_until_idle(page)
    assert page.inner_text("#message") == "Stopped."
    live.wait_until_idle()


def test_a_server_that_shuts_down_is_a_sentence_and_the_page_goes_on(page, address, live, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(live.service, "is_draining", True)
        page.goto(address)
        page.wait_for_selector("#message >> text=the server is shutting down")
        page.fill("#prompt textarea", PROMPT)
        page.click("#start")
        wait_until_idle(page)
        assert "the server is shutting down" in page.inner_text("#message")
    race(page, address, prompt=PROMPT, max_new_tokens=8)
    page.wait_for_function("document.querySelectorAll('.race .badge').length === 2")
    wait_until_idle(page)


def test_a_page_without_its_server_says_so(browser):
    page = main.serve(Server("http://127.0.0.1:9/v1"))
    visitor = browser.new_page()
    visitor.goto(page.local_url)
    visitor.wait_for_selector("#message [role=alert]")
    assert "does not answer: start `selfspec serve` there" in visitor.inner_text("#message")
    visitor.fill("#prompt textarea", PROMPT)
    visitor.click("#start")
    wait_until_idle(visitor)
    assert "does not answer" in visitor.inner_text("#message")
    visitor.close()
    page.close()
