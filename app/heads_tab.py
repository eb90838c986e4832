"""Heads: those that are shipped, the facts and acceptance of any, and whether it fits the target."""

from __future__ import annotations

import gradio as gr

from selfspec.app import heads_render, render
from selfspec.app.events import COMPUTING, Updates, html
from selfspec.app.frame import Frame
from selfspec.app.local_races import LocalRaces
from selfspec.failures import describe
from selfspec.files import shipped_heads
from selfspec.heads.base import find_head


def build(frame: Frame) -> None:
    """Open the tab. A server loads its heads by itself, so there is none over a server."""
    if isinstance(frame.races, LocalRaces):
        with gr.Tab("Heads"):
            HeadsTab(frame.races, frame.drafters)


class HeadsTab:
    """The tab's components and events. A head that fits is added to the choices of `drafters`."""

    def __init__(self, races: LocalRaces, drafters: gr.CheckboxGroup) -> None:
        self._races = races
        self._drafters = drafters
        html(heads_render.shipped(list(heads_render.summaries(shipped_heads())), races.drafters), elem_id="shipped")
        with gr.Row(equal_height=True):
            self._source = gr.Dropdown(
                races.shipped_heads(),
                value=None,
                allow_custom_value=True,
                label="Head",
                info="Choose one that is shipped, or type a folder or an id on the Hugging Face Hub",
                elem_id="source",
                scale=4,
                min_width=280,
            )
            self._check = gr.Button("Does it fit?", variant="primary", size="sm", elem_id="check", scale=0, min_width=130)
        self._verdict = html(elem_id="verdict")
        self._plots = html(elem_id="acceptance")
        self._facts = html(elem_id="facts")
        self._card = gr.Markdown(elem_id="card")
        shown = [self._verdict, self._plots, self._facts, self._card, drafters]
        self._check.click(self._examine, self._source, shown, **COMPUTING)

    def _examine(self, source: str | None) -> Updates:
        try:
            report = self._races.examine(source or "")
            plots = heads_render.acceptance(find_head((source or "").strip()))
        except Exception as error:
            if (sentence := describe(error)) is None:
                raise
            return {self._verdict: render.note(sentence, "error"), self._plots: "", self._facts: "", self._card: ""}
        return {
            self._verdict: render.note(report.verdict, "error" if report.drafter is None else "good"),
            self._plots: plots,
            self._facts: heads_render.facts(report.facts),
            self._card: report.card or "*This head has no card.*",
            self._drafters: gr.CheckboxGroup([(label, name) for name, label in self._races.drafters.items()]),
        }
