"""A tiny target and a head for it; a browser, where there is one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from selfspec import Target
from selfspec.drafters.shipped import identity
from selfspec.heads.medusa import MedusaConfig, MedusaHead

pytest.importorskip("gradio", reason="the page needs gradio: pip install 'selfspec[app]'")

DESKTOP = {"width": 1280, "height": 900}
CHROMIUM_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="session")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir, device="cpu")


@pytest.fixture(scope="session")
def head_dir(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained Medusa head with a card."""
    directory = tmp_path_factory.mktemp("heads") / "tiny-medusa"
    MedusaHead(MedusaConfig(target=identity(target), num_heads=2)).save_pretrained(directory)
    (directory / "README.md").write_text("---\nlibrary_name: selfspec\n---\n\n# A tiny card\n", encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium: the system's, driven by playwright, whose event loop must end before other files' tests."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="driving the page needs playwright: pip install playwright"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("driving the page needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=CHROMIUM_OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def slow_target(target: Target) -> Iterator[Target]:
    """The target, of which every pass takes 20 ms longer, so that something can be seen of an answer."""
    run_flat = target.run_flat

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02)
        return run_flat(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "run_flat", slowly)
        yield target


@pytest.fixture
def barriers() -> Callable[[Any], list[str]]:
    """What axe finds on a page against WCAG A and AA: the rule, the element, and what is wrong with it."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="checking accessibility needs axe: pip install axe-playwright-python"
    ).Axe()

    def found(page: Any) -> list[str]:
        # Transitions of colours must have ended.
        page.wait_for_timeout(500)
        response = axe.run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}).response
        return [
            f"{violation['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
            for violation in response["violations"]
            for node in violation["nodes"]
        ]

    return found


@pytest.fixture
def page(browser, address) -> Iterator[Any]:
    """A fresh visitor; a page that asks any other host, or has a script error, fails its test."""
    context = browser.new_context(viewport=DESKTOP)
    page = context.new_page()
    strangers: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: strangers.append(request.url) if not is_ours(request.url, address) else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert strangers == []
    assert errors == []


def is_ours(url: str, address: str) -> bool:
    return url.startswith((address, "data:", "blob:"))
