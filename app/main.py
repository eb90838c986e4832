"""The page's frame: three tabs over one target, and how it is served. `selfspec app` and `python app/main.py` open it."""

from __future__ import annotations

import sys
from pathlib import Path

import gradio as gr

from selfspec.app import render
from selfspec.app.compare_tab import CompareTab
from selfspec.app.heads_tab import HeadsTab
from selfspec.app.parts import html
from selfspec.app.why_tab import WhyTab
from selfspec.app.workbench import Workbench
from selfspec.target import Target

# How many people may wait for the one target; the next is told that the queue is full.
MAX_WAITING = 8

STYLE = Path(__file__).with_name("style.css")
# A font that gradio ships, so that nothing is loaded from elsewhere; its weight 600 lacks letters, and 700 does not.
FONT = gr.themes.utils.fonts.LocalFont("IBM Plex Sans", weights=(400, 700))
THEME = gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=[FONT, "system-ui", "sans-serif"])


def build(target: Target) -> gr.Blocks:
    """The whole page for one target."""
    bench = Workbench(target)
    with gr.Blocks(title="selfspec", analytics_enabled=False, fill_width=True, delete_cache=(3600, 3600)) as page:
        # The last race that ended, whole or stopped: Compare sets it, Why looks into it.
        finished = gr.State(None)
        html(render.heading(Path(target.name).name, str(target.dtype).removeprefix("torch."), str(target.device)))
        with gr.Tab("Compare"):
            compare = CompareTab(bench, finished)
        with gr.Tab("Why"):
            WhyTab(finished)
        with gr.Tab("Heads"):
            HeadsTab(bench, compare.drafters)
        page.load(compare.follow_link, None, compare.linked, api_visibility="private", show_progress="hidden")
    return page


def serve(target: Target, *, host: str = "127.0.0.1", port: int | None = None) -> gr.Blocks:
    """Start serving in the background: nothing is shared, recorded or reported to anyone. `local_url` is the address."""
    page = build(target).queue(max_size=MAX_WAITING, default_concurrency_limit=4)
    page.launch(
        server_name=host,
        server_port=port,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        footer_links=["settings"],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        mcp_server=False,
        theme=THEME,
        css_paths=[STYLE],
    )
    return page


if __name__ == "__main__":
    from selfspec.cli import app

    app(["app", *sys.argv[1:]], prog_name="app/main.py")
