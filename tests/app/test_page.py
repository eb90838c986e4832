"""The real page in headless Chromium over a tiny target: race, watch, look into a step, stop, err, on a phone too."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from selfspec.app import main
from selfspec.app.local_races import LocalRaces

PHONE = {"width": 390, "height": 844}
PROMPT = "the cat sat on the mat and the cat sat on"
TOKEN_COUNTS = "[...document.querySelectorAll('.race section')].map(s => s.querySelectorAll('.answer span').length)"


@pytest.fixture(scope="module")
def passes() -> list[float]:
    """When each target pass began."""
    return []


@pytest.fixture(scope="module")
def race_ended() -> threading.Event:
    """Set while no race runs."""
    return threading.Event()


@pytest.fixture(scope="module")
def address(target, passes, race_ended) -> Iterator[str]:
    # A tiny target decodes faster than anyone can watch; a person's target takes tens of milliseconds a pass.
    forward = target.run_flat

    def slow_verify(*args, **kwargs):
        passes.append(time.perf_counter())
        time.sleep(0.02)
        return forward(*args, **kwargs)

    race = LocalRaces.race

    def noticed_race(*args):
        race_ended.clear()
        try:
            yield from race(*args)
        finally:
            race_ended.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "run_flat", slow_verify)
        patch.setattr(LocalRaces, "race", noticed_race)
        patch.setattr(main, "MAX_WAITING", 1)
        page = main.serve(target)
        yield page.local_url
        page.close()


def visit(page: Any, address: str, **settings: object) -> None:
    page.goto(f"{address}?{urlencode({'kind': 'text', 'drafters': 'ngram,truncated:1', **settings})}")
    page.wait_for_function("(text) => document.querySelector('#prompt textarea')?.value === text", arg=settings["prompt"])


def wait_for_verdicts(page: Any, num_columns: int = 3) -> None:
    page.wait_for_function("(n) => document.querySelectorAll('.race .badge').length === n", arg=num_columns)
    wait_until_idle(page)


def wait_until_idle(page: Any) -> None:
    page.wait_for_selector("#start:not([disabled])")
    page.wait_for_selector("#stop[disabled]")


def token_counts(page: Any) -> list[int]:
    return page.evaluate(TOKEN_COUNTS)


def test_columns_stream_and_turn_out_identical(page, address):
    visit(page, address, prompt=PROMPT, max_new_tokens=60)
    page.press("#prompt textarea", "Enter")
    page.wait_for_selector("#message >> text=Racing with level clocks")
    seen = [token_counts(page)]
    while page.is_disabled("#start"):
        page.wait_for_function(
            f"(old) => JSON.stringify({TOKEN_COUNTS}) !== JSON.stringify(old) || !document.querySelector('#start').disabled",
            arg=seen[-1],
        )
        seen.append(token_counts(page))
    wait_for_verdicts(page)
    # Every column was seen to grow, and at the end none had less text than before.
    for shown in zip(*seen, strict=True):
        assert len({count for count in shown if count > 0}) >= 3
        assert list(shown) == sorted(shown)
    badges = page.locator(".badge").all_inner_texts()
    assert badges == ["to match", "✓ identical", "✓ identical"]
    answers = page.eval_on_selector_all(".race .answer", "all => all.map(answer => answer.textContent)")
    assert len(set(answers)) == 1 and answers[0]
    assert "×" in page.inner_text(".race section:nth-child(2) .figures")

    with page.expect_download() as download:
        page.click("#download")
    with open(download.value.path(), encoding="utf-8") as file:
        assert [column["text"] for column in json.load(file)["columns"]] == answers
    assert "max_new_tokens=60" in page.get_attribute("#permalink a", "href")


def test_steps_can_be_looked_into(page, address):
    visit(page, address, prompt=PROMPT, max_new_tokens=24, use_cost_guard=False)
    page.click("#start")
    wait_for_verdicts(page)
    page.get_by_role("tab", name="Why").click()
    page.wait_for_selector("#tree svg")
    assert page.get_by_label("truncated").count() == 0
    num_steps = int(page.inner_text("#tree b").split()[-1])
    for number in (1, num_steps):
        page.fill("#step input[type=number]", str(number))
        page.press("#step input[type=number]", "Tab")
        page.wait_for_selector(f"#tree >> text=Step {number} of {num_steps}")
        drafts = page.locator("#tree .outcomes tbody tr").count()
        assert page.locator("#tree g.node:not(.bonus)").count() == drafts + 1
        assert page.locator("#text mark.step").count() == 1
    page.locator("#column").get_by_label("plain").click()
    page.wait_for_selector("#tree >> text=Step 1 of 24")
    assert page.locator("#tree g.node").count() == 2
    assert page.locator("#plots figure").count() == 3


def test_stop_ends_a_race_and_leaves_the_page_usable(page, address, race_ended):
    visit(page, address, prompt=PROMPT, max_new_tokens=512)
    page.click("#start")
    page.wait_for_function("document.querySelectorAll('.race .answer span').length > 10")
    page.click("#stop")
    wait_until_idle(page)
    assert page.inner_text("#message") == "Stopped."
    counts = token_counts(page)
    assert 0 < max(counts) < 512
    assert race_ended.wait(60)

    page.fill("#prompt textarea", "  ")
    page.click("#start")
    page.wait_for_selector("#message [role=alert]")
    assert "The prompt is empty" in page.inner_text("#message")
    wait_until_idle(page)
    assert token_counts(page) == counts, "the race went on after its stop"


def test_visitors_wait_their_turn_and_a_full_queue_says_so(browser, address):
    pages = [browser.new_page() for _ in range(3)]
    for page in pages:
        visit(page, address, prompt=PROMPT, max_new_tokens=512)
    # One races, one waits, and there is no room for a third.
    pages[0].click("#start")
    pages[0].wait_for_function("document.querySelectorAll('.race .answer span').length > 10")
    pages[1].click("#start")
    pages[1].wait_for_selector("#message >> text=Waiting for the target")
    assert "one visitor is before you" in pages[1].inner_text("#message")
    pages[2].click("#start")
    pages[2].wait_for_selector("#message >> text=too many wait")
    wait_until_idle(pages[2])
    # Whoever waits can leave at once, and stand in line again.
    start = time.perf_counter()
    pages[1].click("#stop")
    pages[1].wait_for_selector("#message >> text=Stopped.")
    assert time.perf_counter() - start < 5
    wait_until_idle(pages[1])
    pages[1].click("#start")
    pages[1].wait_for_selector("#message >> text=Waiting for the target")
    pages[0].click("#stop")
    pages[1].wait_for_function("document.querySelectorAll('.race .answer span').length > 10")
    pages[1].click("#stop")
    wait_until_idle(pages[1])
    for page in pages:
        page.close()


def test_closing_the_page_ends_its_race(browser, address, passes, race_ended):
    page = browser.new_page()
    visit(page, address, prompt=PROMPT, max_new_tokens=512)
    page.click("#start")
    page.wait_for_function("document.querySelectorAll('.race .answer span').length > 10")
    num_passes = len(passes)
    page.close()
    assert race_ended.wait(60)
    # Two columns of up to 512 passes: it did not end by itself.
    assert len(passes) - num_passes < 512


def test_what_people_type_is_shown_as_text(page, address):
    hostile = "${1+1}{{x}}<img src=x onerror=document.title=1>"
    visit(page, address, prompt=PROMPT)
    page.get_by_role("button", name="Settings").click()
    # What unfolds is put together anew, and a text that is typed before that is lost.
    page.wait_for_selector("#typed textarea")
    page.wait_for_timeout(500)
    page.locator("#typed textarea").press_sequentially(hostile)
    page.click("#start")
    page.wait_for_selector("#message [role=alert]")
    assert hostile in page.inner_text("#message")
    assert page.title() == "selfspec"


def test_a_bad_link_says_so(page, address):
    page.goto(f"{address}?{urlencode({'seed': 'x', 'prompt': PROMPT, 'kind': 'text', 'max_new_tokens': 8})}")
    page.wait_for_selector("#message [role=alert]")
    assert "the link's seed='x' cannot be read" in page.inner_text("#message")
    assert page.input_value("#prompt textarea") == PROMPT
    page.click("#start")
    # By default: plain decoding, transformers and prompt lookup.
    page.wait_for_function("document.querySelectorAll('.race .badge').length === 3")
    wait_until_idle(page)


def test_a_head_is_examined(page, address, head_dir):
    page.goto(address)
    page.get_by_role("tab", name="Heads").click()
    page.fill("#source input", str(head_dir))
    page.press("#source input", "Enter")
    page.click("#check")
    page.wait_for_selector("#verdict .good")
    assert "A tiny card" in page.inner_text("#card")
    page.fill("#source input", "nowhere/at-all")
    page.press("#source input", "Enter")
    page.click("#check")
    page.wait_for_selector("#verdict [role=alert]")
    assert "no such folder" in page.inner_text("#verdict")


def test_a_chat_goes_on(page, address):
    visit(page, address, prompt="one", kind="chat", drafters="ngram", max_new_tokens=8)
    page.click("#start")
    page.wait_for_selector("#forget")
    wait_until_idle(page)
    page.fill("#prompt textarea", "two")
    page.press("#prompt textarea", "Enter")
    page.wait_for_function("document.querySelectorAll('[data-testid=user]').length === 2")
    page.click("#forget")
    page.wait_for_selector("[data-testid=user]", state="hidden")


def test_a_phone_shows_it_all_without_scrolling_sideways(page, address):
    page.set_viewport_size(PHONE)
    visit(page, address, prompt=PROMPT, max_new_tokens=24, use_cost_guard=False)
    page.click("#start")
    wait_for_verdicts(page)
    boxes = page.eval_on_selector_all(".race section", "all => all.map(s => s.getBoundingClientRect().toJSON())")
    assert len(boxes) == 3 and len({box["left"] for box in boxes}) == 1
    # A strip of bars at the top: all of it is seen at once, and a tap opens a text.
    assert boxes[-1]["bottom"] < PHONE["height"] / 2 and max(box["height"] for box in boxes) < 80
    assert page.locator(".race .answer:visible").count() == 0
    page.locator(".race summary").nth(1).click()
    assert page.locator(".race .answer:visible").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    page.get_by_role("tab", name="Why").click()
    # The longest chain of drafts is wider than the phone: it scrolls in its own place.
    page.wait_for_selector("#tree svg")
    page.locator("#column").get_by_label("n-gram").click()
    page.wait_for_function("(width) => document.querySelector('#tree svg')?.clientWidth > width", arg=PHONE["width"])
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def test_a_plan_follows_the_sliders(page, address):
    page.goto(address)
    page.get_by_role("tab", name="Plan").click()
    page.wait_for_selector("#prediction .good")
    assert "It fits" in page.inner_text("#prediction")
    page.wait_for_selector("#plan-plot svg.marks")

    def speedup() -> str:
        return page.inner_text("#prediction .facts div:nth-child(1) dd")

    before = speedup()
    page.fill("#plan-depth input[type=number]", "9")
    page.press("#plan-depth input[type=number]", "Tab")
    page.wait_for_function("(old) => document.querySelector('#prediction .facts dd')?.textContent !== old", arg=before)
    # Prompt lookup costs nothing, so that nine drafts bring more than four.
    assert float(speedup().rstrip("×")) > float(before.rstrip("×"))
    page.fill("#plan-batch input[type=number]", "512")
    page.fill("#plan-context input[type=number]", "131072")
    page.press("#plan-context input[type=number]", "Tab")
    page.wait_for_selector("#prediction >> text=takes 1 to 4096 tokens")
    page.fill("#plan-target textarea", "nowhere/at-all")
    page.press("#plan-target textarea", "Enter")
    page.wait_for_selector("#prediction >> text=no such folder")


def test_a_races_page_keeps_its_width_and_shows_answers_above_the_fold(page, address):
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(address)
    # The first example stands ready.
    page.wait_for_function("document.querySelector('#prompt textarea')?.value.startsWith('Write a Python function')")
    widths = [page.evaluate("document.querySelector('.gradio-container').clientWidth")]
    visit(page, address, prompt=PROMPT, max_new_tokens=60, drafters="ngram")
    page.click("#start")
    page.wait_for_selector(".race .answer span")
    widths.append(page.evaluate("document.querySelector('.gradio-container').clientWidth"))
    wait_for_verdicts(page, 2)
    tops = page.eval_on_selector_all(
        ".race .answer", "all => all.map(answer => answer.parentElement.getBoundingClientRect().top)"
    )
    assert max(tops) < 400
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("tab", name="Heads").click()
    page.wait_for_selector("#check")
    widths.append(page.evaluate("document.querySelector('.gradio-container').clientWidth"))
    assert len(set(widths)) == 1


def test_a_step_that_is_chosen_in_a_race_is_shown_under_why(page, address):
    visit(page, address, prompt=PROMPT, max_new_tokens=24)
    page.click("#start")
    wait_for_verdicts(page)
    for number in 4, 7:
        page.get_by_role("tab", name="Compare").click()
        page.locator(".race section").nth(0).locator("[data-step]").nth(number).click()
        page.wait_for_selector(f"#tree >> text=Step {number + 1} of 24")
        assert page.locator("#column").get_by_label("plain").is_checked()
    # By keys too: one tab stop a lane, then arrows.
    page.get_by_role("tab", name="Compare").click()
    assert page.locator("[data-step][tabindex='0']").count() == 3
    page.locator("[data-step]").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("#tree >> text=Step 2 of 24")


def test_a_race_is_played_again_and_measured_alone(page, address):
    visit(page, address, prompt=PROMPT, max_new_tokens=40, drafters="ngram")
    page.click("#start")
    wait_for_verdicts(page, 2)
    before = page.inner_text("#columns")
    num_tokens = sum(token_counts(page))
    page.locator("#speed").get_by_label("½×").click()
    page.click("#replay")
    page.wait_for_selector("#message >> text=Replaying the race at 0.5× its speed")
    page.wait_for_selector(".race .runs")
    assert sum(token_counts(page)) < num_tokens
    page.wait_for_selector("#message >> text=Replayed")
    wait_until_idle(page)
    assert page.inner_text("#columns") == before
    page.click("#alone")
    page.wait_for_selector("#message >> text=Measuring one after the other")
    page.wait_for_selector("#message >> text=Each column ran alone")
    wait_for_verdicts(page, 2)
    assert "timing=alone" in page.get_attribute("#permalink a", "href")


def test_text_is_shown_with_or_without_colours(page, address):
    visit(page, address, prompt=PROMPT, max_new_tokens=8, drafters="ngram")
    page.click("#start")
    wait_for_verdicts(page, 2)
    assert page.locator(".race .answer:visible").count() == 2 and page.locator(".race .markdown:visible").count() == 0
    page.locator("#look").get_by_label("text").click()
    page.wait_for_selector(".race .markdown:visible")
    assert page.locator(".race .answer:visible").count() == 0 and page.locator(".race .markdown:visible").count() == 2


def test_a_page_that_is_loaded_anew_has_its_prompt_and_its_race(page, address):
    visit(page, address, prompt=PROMPT, max_new_tokens=8, drafters="ngram")
    page.click("#start")
    wait_for_verdicts(page, 2)
    text = page.inner_text(".race")
    page.fill("#prompt textarea", "something else")
    page.wait_for_timeout(300)
    page.reload()
    page.wait_for_selector(".race .badge")
    assert page.inner_text(".race") == text
    assert page.input_value("#prompt textarea") == "something else"
    page.get_by_role("tab", name="Why").click()
    page.wait_for_selector("#tree svg")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser, address, scheme, barriers):
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
    visit(page, address, prompt=PROMPT, max_new_tokens=24, use_cost_guard=False)
    assert barriers(page) == []
    page.click("#start")
    wait_for_verdicts(page)
    page.get_by_role("button", name="Settings").click()
    assert barriers(page) == []
    page.close()
