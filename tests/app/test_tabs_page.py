"""The tabs beside Compare in headless Chromium: steps are chosen by pointer and keyboard, played, and read by everyone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from selfspec.app import main, why_tab

PHONE = {"width": 390, "height": 844}
PROMPT = "the cat sat on the mat and the cat sat on"
TABS = ("Why", "Heads", "This machine", "Plan")


@pytest.fixture(scope="module")
def address(target) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(why_tab, "SECONDS_PER_STEP", 0.2)
        page = main.serve(target)
        yield page.local_url
        page.close()


def race(page: Any, address: str) -> None:
    settings = {"kind": "text", "drafters": "ngram", "prompt": PROMPT, "max_new_tokens": 24, "use_cost_guard": False}
    page.goto(f"{address}?{urlencode(settings)}")
    page.wait_for_function("(text) => document.querySelector('#prompt textarea')?.value === text", arg=PROMPT)
    page.click("#start")
    page.wait_for_function("document.querySelectorAll('.race .badge').length === 2")
    page.wait_for_selector("#start:not([disabled])")


def open_tab(page: Any, name: str) -> None:
    tab = page.get_by_role("tab", name=name)
    if tab.count() and tab.first.is_visible():
        tab.first.click()
        return
    # On a phone some are behind a button.
    page.locator(".overflow-menu button").first.click()
    page.locator(".overflow-dropdown button", has_text=name).first.click()


def step_shown(page: Any) -> int:
    return int(page.inner_text("#tree b").split()[1])


def test_tokens_and_nodes_are_chosen_by_pointer_and_by_keyboard(page, address):
    race(page, address)
    open_tab(page, "Why")
    page.wait_for_selector("#tree svg")
    tokens = page.locator("#text [data-step]")
    wanted = tokens.last.get_attribute("data-step")
    tokens.last.click()
    page.wait_for_selector(f"#tree >> text=Step {wanted} of")
    assert f"step {wanted}:" in page.inner_text("#text .details-panel")
    # The drawing of the text is new, and the token in the same place has the focus.
    page.wait_for_function("document.activeElement === [...document.querySelectorAll('#text [data-step]')].at(-1)")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    before = page.evaluate("document.activeElement.dataset.step")
    assert page.inner_text("#text .details-panel") == page.evaluate("document.activeElement.dataset.details")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#tree >> text=Step {before} of")
    # One stop for all tokens, and one for all nodes.
    for place in ("#text", "#tree"):
        assert page.locator(f"{place} [data-details][tabindex='0']").count() == 1

    node = page.locator("#tree g.node").last
    node.click()
    assert page.inner_text("#tree .details-panel") == node.get_attribute("data-details")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#tree .details-panel") == page.evaluate("document.activeElement.dataset.details")


def test_steps_go_by_buttons_and_play_to_the_end(page, address):
    race(page, address)
    open_tab(page, "Why")
    page.wait_for_selector("#tree svg")
    page.fill("#step input[type=number]", "1")
    page.press("#step input[type=number]", "Tab")
    page.wait_for_selector("#tree >> text=Step 1 of")
    page.click("#previous")
    page.wait_for_timeout(300)
    assert step_shown(page) == 1
    page.click("#next")
    page.wait_for_selector("#tree >> text=Step 2 of")
    page.click("#play")
    page.wait_for_selector("#tree >> text=Step 3 of")
    page.wait_for_selector("#play >> text=Pause")
    # Whoever goes elsewhere ends the play.
    page.click("#previous")
    page.wait_for_selector("#play >> text=Play")
    at = step_shown(page)
    page.wait_for_timeout(600)
    assert step_shown(page) == at
    last = int(page.inner_text("#tree b").split()[-1])
    page.click("#play")
    page.wait_for_selector(f"#tree >> text=Step {last} of {last}")
    page.wait_for_selector("#play >> text=Play")


def test_this_machine_is_measured_beside_the_race(page, address):
    race(page, address)
    open_tab(page, "This machine")
    page.click("#measure")
    page.wait_for_selector("#standing svg", timeout=30_000)
    words = page.inner_text("#standing")
    assert "Plain decoding gives" in words and "n-gram" in words and "ceiling" in words
    assert page.locator("#standing circle").count() == 9


def test_a_phone_shows_every_tab_without_scrolling_sideways(page, address):
    page.set_viewport_size(PHONE)
    race(page, address)
    for name in TABS:
        open_tab(page, name)
        page.wait_for_timeout(500)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"], name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_any_tab(browser, address, scheme, barriers):
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
    race(page, address)
    for name in TABS:
        open_tab(page, name)
        if name == "This machine":
            page.click("#measure")
            page.wait_for_selector("#standing svg", timeout=30_000)
        if name == "Plan":
            page.wait_for_selector("#plan-plot svg")
        assert barriers(page) == [], name
    page.close()
