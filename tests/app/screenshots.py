"""Take the pictures of docs/app.md anew, over the default target: `python tests/app/screenshots.py`.

It needs playwright, Chromium, and a machine that does nothing else: the figures in the pictures are measured.
"""

from __future__ import annotations

import shutil
from io import BytesIO
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from selfspec import Target
from selfspec.app.main import serve
from selfspec.fetch import default_target

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


def plan(page: Page, address: str) -> None:
    """Open the Plan tab, and wait for its first prediction."""
    page.goto(f"{address}?__theme=light")
    page.get_by_role("tab", name="Plan").click()
    page.wait_for_selector("#prediction .good")
    page.wait_for_selector("#plan-plot svg.marks")
    page.wait_for_timeout(500)


def save(page: Page, name: str) -> None:
    """The whole page, in 128 colours: a third of the size, and nothing to see of it."""
    page.mouse.move(0, 0)
    picture = Image.open(BytesIO(page.screenshot(full_page=True))).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)


def main() -> None:
    target = Target.from_pretrained(default_target())
    served = serve(target)
    IMAGES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in "light", "dark":
            page = browser.new_page(viewport=DESKTOP, color_scheme=scheme)
            race(page, served.local_url)
            save(page, f"app-compare-{scheme}")
            page.get_by_role("tab", name="Why").click()
            page.wait_for_selector("#tree svg")
            save(page, f"app-why-{scheme}")
        plan(page, served.local_url)
        save(page, "app-plan")
        page = browser.new_page(viewport=PHONE, color_scheme="light")
        race(page, served.local_url, drafters="eagle", max_new_tokens=48)
        save(page, "app-phone")
        browser.close()
    served.close()


if __name__ == "__main__":
    main()
