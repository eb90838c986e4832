"""The page: its tabs, for a target or for a server, and how it is served.

`selfspec app` opens it; so does `python app` from a checkout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from selfspec.app import heads_tab, machine_tab, plan_tab, render, server_tab, why_tab
from selfspec.app.compare_tab import CompareTab
from selfspec.app.events import html
from selfspec.app.frame import Frame
from selfspec.app.local_races import LocalRaces
from selfspec.app.races import MAX_WAITING, Races
from selfspec.app.remote import Server
from selfspec.app.remote_races import RemoteRaces
from selfspec.model.target import Target

# After Compare, in this order. Each is a module with `build(frame)`, and may have `CSS`, the path of a style sheet.
TABS = (why_tab, server_tab, heads_tab, machine_tab, plan_tab)

STYLE = Path(__file__).with_name("style.css")
# Gradio ships this font, so nothing is loaded from elsewhere. Its weight 600 lacks letters; 700 has them all.
FONT = gr.themes.utils.fonts.LocalFont("IBM Plex Sans", weights=(400, 700))
# Text of any kind has a contrast of at least 4.5, as WCAG AA asks for.
THEME = gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=[FONT, "system-ui", "sans-serif"]).set(
    body_text_color_subdued="*neutral_600",
    body_text_color_subdued_dark="*neutral_300",
    block_info_text_color="*neutral_600",
    block_info_text_color_dark="*neutral_300",
    block_title_text_color="*neutral_700",
    input_placeholder_color="*neutral_500",
    input_placeholder_color_dark="*neutral_400",
    color_accent="*primary_600",
    button_primary_background_fill="*primary_600",
    button_primary_background_fill_hover="*primary_700",
    button_primary_background_fill_dark="*primary_600",
    button_primary_background_fill_hover_dark="*primary_700",
)
# How the page looks and what it leaves out, wherever it is served.
LOOK: dict[str, Any] = {
    # Gradio's own are about its API and itself.
    "footer_links": [],
    "run_history": False,
    "enable_monitoring": False,
    "ssr_mode": False,
    "mcp_server": False,
    "theme": THEME,
    "css_paths": [STYLE, *(tab.CSS for tab in TABS if hasattr(tab, "CSS"))],
}


def build(source: Target | Server) -> gr.Blocks:
    """The whole page for one target, or for a running server."""
    races: Races = RemoteRaces(source, MAX_WAITING) if isinstance(source, Server) else LocalRaces(source, MAX_WAITING)
    races.prepare()
    with gr.Blocks(title="selfspec", analytics_enabled=False, fill_width=True, delete_cache=(3600, 3600)) as page:
        finished, picked = gr.State(None), gr.State(None)
        heading = html(render.heading(*races.about()))
        with gr.Tabs() as tabs:
            with gr.Tab("Compare"):
                compare = CompareTab(races, finished, picked, tabs, has_target=not isinstance(source, Server))
            frame = Frame(source=source, races=races, tabs=tabs, finished=finished, picked=picked, drafters=compare.drafters)
            for tab in TABS:
                tab.build(frame)
        opened = compare.load(page)
        # A server may have another model at the next visit.
        opened.then(lambda: render.heading(*races.about()), None, heading, show_progress="hidden", api_visibility="private")
    return page


def serve(source: Target | Server, *, host: str = "127.0.0.1", port: int | None = None) -> gr.Blocks:
    """Serve in the background, at the page's `local_url`. Nothing is shared, recorded or reported to anyone."""
    page = build(source).queue(max_size=None, default_concurrency_limit=4)
    page.launch(
        server_name=host,
        server_port=port,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        **LOOK,
    )
    return page
