"""Take every picture of docs/ that shows the page, and the moving one: `python tests/app/screenshots.py [NAME ...]`.

Everything is over the default target, and the figures in the pictures are measured, so the machine should do nothing else.
With names, such as `race` or `app-plan`, only those pictures are taken. It needs playwright, Chromium and Pillow.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from selfspec import Target
from selfspec.app.local_races import LocalRaces
from selfspec.app.main import serve
from selfspec.app.settings import EXAMPLES, TRANSFORMERS, Settings
from selfspec.model.default_target import default_target

IMAGES = Path(__file__).parents[2] / "docs" / "images"
PROMPT = EXAMPLES["Code"]
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 700}

# The moving picture: 720 pixels of the page, ten frames a second, at true speed unless that takes longer than ten seconds.
FILM = {"width": 744, "height": 800}
SECONDS_PER_FRAME = 0.1
MOST_SECONDS = 10.0
LAST_SECONDS = 2.5
ONLY_THE_RACE = """
  .tab-wrapper, #choices, #message, #results, #settings, #stop, .heading p:last-child { display: none !important; }
  #columns .race { grid-template-columns: repeat(3, minmax(0, 1fr)); }
  #columns .who h2 { flex-basis: 100%; }
  #columns .figures div:nth-child(3), #columns .details { display: none; }
"""

Picture = Callable[[Page, str], None]


def race(page: Page, address: str, **settings: object) -> None:
    """Open the page with these settings, run the race, and wait for its end."""
    page.goto(f"{address}?{urlencode({'prompt': PROMPT, **settings})}")
    page.wait_for_function("(text) => document.querySelector('#prompt textarea')?.value === text", arg=PROMPT)
    page.click("#start")
    page.wait_for_selector("#start[disabled]")
    page.wait_for_selector("#start:not([disabled])", timeout=300_000)
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)


def compare(page: Page, address: str) -> None:
    race(page, address)


def why(page: Page, address: str) -> None:
    race(page, address)
    page.get_by_role("tab", name="Why").click()
    page.wait_for_selector("#tree svg")


def machine(page: Page, address: str) -> None:
    race(page, address)
    page.get_by_role("tab", name="This machine").click()
    page.click("#measure")
    page.wait_for_selector("#standing svg", timeout=60_000)


def plan(page: Page, address: str) -> None:
    page.goto(address)
    page.get_by_role("tab", name="Plan").click()
    page.wait_for_selector("#prediction .good")
    # A load at which the default target is not too small for a prediction.
    page.fill("#plan-batch input[type=number]", "32")
    page.press("#plan-batch input[type=number]", "Tab")
    for place, card in ("#plan-card", "l4"), ("#plan-other", "l40s"):
        page.click(f"{place} input")
        # The list that was opened before may be there still, on its way out.
        page.get_by_role("option", name=card, exact=True).last.click()
    page.wait_for_selector("#plan-plot .line.s1")
    page.wait_for_timeout(500)


# Name -> how to get there, the size of the window, and the colours.
PICTURES: dict[str, tuple[Picture, Any, Any]] = {
    "app-compare-light": (compare, DESKTOP, "light"),
    "app-compare-dark": (compare, DESKTOP, "dark"),
    "app-phone": (compare, PHONE, "light"),
    "app-why-light": (why, DESKTOP, "light"),
    "app-why-dark": (why, DESKTOP, "dark"),
    "app-machine": (machine, DESKTOP, "light"),
    "app-plan": (plan, DESKTOP, "light"),
}


def save(page: Page, name: str) -> None:
    """The whole page, in 128 colours: a third of the size, and nothing to see of it."""
    picture = Image.open(BytesIO(page.screenshot(full_page=True))).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)


def film(browser: Browser, address: str, races: LocalRaces) -> None:
    """A race at its true speed, drawn frame by frame from its recorded steps."""
    settings = Settings(prompt=PROMPT, drafters=(TRANSFORMERS, "eagle"), max_new_tokens=80)
    *_, end = races.race(settings, [], "film")
    assert end.race is not None
    slowest = max(column.seconds for column in end.race.columns)
    speed = max(1.0, slowest / MOST_SECONDS)
    page = browser.new_page(viewport=FILM, color_scheme="light")
    page.goto(f"{address}?{urlencode({'prompt': PROMPT})}")
    page.wait_for_function("(text) => document.querySelector('#prompt textarea')?.value === text", arg=PROMPT)
    page.add_style_tag(content=ONLY_THE_RACE)
    draw(page, end.race.html(), FILM["height"])
    height = page.evaluate("Math.ceil(document.querySelector('.legend').getBoundingClientRect().bottom) + 4")
    frames = []
    for number in range(int(slowest / speed / SECONDS_PER_FRAME) + 1):
        frames.append(draw(page, end.race.html(number * SECONDS_PER_FRAME * speed, is_over=False), height))
    frames.append(draw(page, end.race.html(), height))
    # One palette for all, from the frame that has every colour.
    palette = frames[-1].quantize(96, dither=Image.Dither.NONE)
    first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [round(1000 * SECONDS_PER_FRAME)] * len(others) + [round(1000 * LAST_SECONDS)]
    first.save(IMAGES / "race.gif", save_all=True, append_images=others, duration=durations, loop=0, optimize=True)


def draw(page: Page, html: str, height: int) -> Image.Image:
    """The page around these lanes, down to a height."""
    page.evaluate("(html) => { document.querySelector('#columns > :last-child').innerHTML = html }", html)
    clip = {"x": 12, "y": 0, "width": FILM["width"] - 24, "height": height}
    return Image.open(BytesIO(page.screenshot(clip=clip))).convert("RGB")


def main(names: list[str]) -> None:
    # By its name alone: the page shows where the target is.
    os.chdir(default_target().parent)
    target = Target.from_pretrained(default_target().name)
    served = serve(target)
    address = str(served.local_url)
    IMAGES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (picture, size, scheme) in PICTURES.items():
            if not names or name in names:
                page = browser.new_page(viewport=size, color_scheme=scheme)
                picture(page, address)
                save(page, name)
                page.close()
        if not names or "race" in names:
            races = LocalRaces(target)
            races.prepare()
            film(browser, address, races)
        browser.close()
    served.close()


if __name__ == "__main__":
    main(sys.argv[1:])
