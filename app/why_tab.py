"""Why: the last race step by step, with each step's candidate tree and the outcome of its nodes."""

from __future__ import annotations

import gradio as gr

from selfspec.app import render
from selfspec.app.events import DRAWING, Updates, html
from selfspec.app.frame import WHY, Frame
from selfspec.app.local_races import LocalRaces, Race
from selfspec.app.records import Column
from selfspec.app.remote_races import WHY_NEEDS_A_TARGET


def build(frame: Frame) -> None:
    """Open the tab. Over a server it can only say why it shows nothing."""
    with gr.Tab("Why", id=WHY):
        if isinstance(frame.races, LocalRaces):
            WhyTab(frame.finished, frame.picked)
        else:
            html(render.note(WHY_NEEDS_A_TARGET))


class WhyTab:
    """The tab's components and events. It shows the race that `finished` holds, at the step that `picked` holds."""

    def __init__(self, finished: gr.State, picked: gr.State) -> None:
        self._hint = html(render.note("Run a race under Compare first: this tab then shows its steps."))
        with gr.Column(visible=False) as self._body:
            self._column = gr.Radio([], label="Column", elem_id="column")
            self._number = gr.Slider(1, 2, 1, step=1, label="Verify step", elem_id="step")
            self._step = html(elem_id="tree")
            self._text = html(elem_id="text")
            self._plots = html(elem_id="plots")
        drawn = [self._step, self._text]
        finished.change(
            self._open, finished, [self._hint, self._body, self._column, self._number, self._plots, *drawn], **DRAWING
        )
        self._column.input(self._show_column, [finished, self._column], [self._number, self._plots, *drawn], **DRAWING)
        picked.change(self._show_picked, [finished, picked], [self._column, self._number, self._plots, *drawn], **DRAWING)
        self._number.input(self._show_step, [finished, self._column, self._number], drawn, **DRAWING)

    def _open(self, race: Race) -> Updates:
        columns = [column for column in race.columns if column.steps]
        if not columns:
            return {self._hint: gr.HTML(visible=True), self._body: gr.Column(visible=False)}
        # The last column is a drafter that somebody chose.
        name = columns[-1].name
        return {
            self._hint: gr.HTML(visible=False),
            self._body: gr.Column(visible=True),
            self._column: gr.Radio([(column.label, column.name) for column in columns], value=name),
            **self._show_column(race, name),
        }

    def _show_column(self, race: Race, name: str) -> Updates:
        column = race.column(name)
        # Begin with the most telling step: something was refused, and much was accepted.
        best = max(range(len(column.steps)), key=lambda i: (column.steps[i].has_refused, column.steps[i].num_accepted))
        return {
            self._number: gr.Slider(maximum=max(2, len(column.steps)), value=best + 1),
            self._plots: render.plots(column),
            **self._draw(column, best),
        }

    def _show_picked(self, race: Race, picked: tuple[str, int, int]) -> Updates:
        name, at, _ = picked
        column = race.column(name)
        return {
            self._column: name,
            self._number: gr.Slider(maximum=max(2, len(column.steps)), value=at + 1),
            self._plots: render.plots(column),
            **self._draw(column, at),
        }

    def _show_step(self, race: Race, name: str, number: int) -> Updates:
        column = race.column(name)
        return self._draw(column, min(number, len(column.steps)) - 1)

    def _draw(self, column: Column, at: int) -> Updates:
        return {self._step: render.step(column.steps, at), self._text: render.answer(column.steps, at)}
