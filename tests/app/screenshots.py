"""Take the pictures of docs/app.md anew, over the default target: `python tests/app/screenshots.py`.

It needs playwright, Chromium, and a machine that does nothing else: the figures in the pictures are measured. With `plan` as
its argument it takes the Plan tab alone, where nothing is.
"""

from __future__ import annotations

import os
import shutil
import sys
from io import BytesIO
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from selfspec import Target
from selfspec.app.main import serve
from selfspec.model.default_target import default_target

IMAGES = Path(__file__).parents[2] / "docs" / "images"
PROMPT = "Write a Python function that returns the n-th Fibonacci number."
DESKTOP = {"width": 1180, "height": 900}
PHONE = {"width": 390, "height": 844}


def race(page: Page, address: str, **settings: object) -> None:
    """Open the page with these settings, run the race, and wait for its end."""
    page.goto(f"{address}?{urlencode({'prompt': PROMPT, **settings})}")
    page.wait_for_function("(text) => document.querySelector('#prompt textarea')?.value === text", arg=PROMPT)
    page.click("#start")
    page.wait_for_selector("#start[disabled]")
    page.wait_for_selector("#start:not([disabled])", timeout=120_000)
    page.wait_for_timeout(500)


def save(page: Page, name: str) -> None:
    """The whole page, in 128 colours: a third of the size, and nothing to see of it."""
    page.mouse.move(0, 0)
    picture = Image.open(BytesIO(page.screenshot(full_page=True))).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)


def take_races(browser: Browser, address: str) -> None:
    """The pictures with measured figures."""
    for scheme in "light", "dark":
        page = browser.new_page(viewport=DESKTOP, color_scheme=scheme)
        race(page, address)
        save(page, f"app-compare-{scheme}")
        page.get_by_role("tab", name="Why").click()
        page.wait_for_selector("#tree svg")
        save(page, f"app-why-{scheme}")
    page = browser.new_page(viewport=PHONE, color_scheme="light")
    race(page, address, drafters="eagle", max_new_tokens=48)
    save(page, "app-phone")


def take_plan(browser: Browser, address: str) -> None:
    """The Plan tab with its first prediction."""
    page = browser.new_page(viewport=DESKTOP, color_scheme="light")
    page.goto(address)
    page.get_by_role("tab", name="Plan").click()
    page.wait_for_selector("#prediction .good")
    page.wait_for_selector("#plan-plot svg.marks")
    page.wait_for_timeout(500)
    save(page, "app-plan")


def main(names: list[str]) -> None:
    # By its name alone: the page shows where the target is.
    os.chdir(default_target().parent)
    served = serve(Target.from_pretrained(default_target().name))
    IMAGES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        if names != ["plan"]:
            take_races(browser, served.local_url)
        take_plan(browser, served.local_url)
        browser.close()
    served.close()


if __name__ == "__main__":
    main(sys.argv[1:])
