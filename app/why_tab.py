"""Why: the last race step by step, with each step's candidate tree and the outcome of its nodes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import gradio as gr

from selfspec.app import render, why_render
from selfspec.app.events import DRAWING, Updates, html
from selfspec.app.frame import WHY, Frame
from selfspec.app.local_races import LocalRaces, Race
from selfspec.app.records import Column
from selfspec.app.remote_races import WHY_NEEDS_A_TARGET

# Of this tab and of those after it.
CSS = Path(__file__).with_name("tabs.css")

SECONDS_PER_STEP = 0.9
PLAY, PAUSE = "▶ Play", "❚❚ Pause"

CHOOSING = Path(__file__).with_name("choosing.js").read_text(encoding="utf-8")
# The text stays the same from step to step, and a tree does not.
KEEPING = "element.dataset.keeps = 1;"


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
            with gr.Row(elem_id="steps"):
                previous = gr.Button("◀ Previous", size="sm", elem_id="previous", scale=0, min_width=110)
                self._play = gr.Button(PLAY, size="sm", variant="primary", elem_id="play", scale=0, min_width=110)
                following = gr.Button("Next ▶", size="sm", elem_id="next", scale=0, min_width=110)
            self._number = gr.Slider(1, 2, 1, step=1, label="Verify step", elem_id="step")
            self._step = html(elem_id="tree", js_on_load=CHOOSING)
            self._text = html(elem_id="text", js_on_load=CHOOSING + KEEPING)
            self._plots = html(elem_id="plots")
        self._timer = gr.Timer(SECONDS_PER_STEP, active=False)
        place = [finished, self._column, self._number]
        drawn = [self._step, self._text]
        moved = [self._number, *drawn, self._timer, self._play]
        finished.change(self._open, finished, [self._hint, self._body, self._column, self._plots, *moved], **DRAWING)
        self._column.input(self._show_column, [finished, self._column], [self._plots, *moved], **DRAWING)
        picked.change(self._show_picked, [finished, picked], [self._column, self._plots, *moved], **DRAWING)
        self._number.input(self._show_step, place, drawn, **DRAWING)
        previous.click(partial(self._move, by=-1), place, moved, **DRAWING)
        following.click(partial(self._move, by=1), place, moved, **DRAWING)
        self._text.select(self._pick, [finished, self._column], moved, **DRAWING)
        self._play.click(self._start_or_pause, [*place, self._play], moved, **DRAWING)
        self._timer.tick(self._play_on, place, moved, **DRAWING)

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

    def _show_picked(self, race: Race, picked: tuple[str, int, int]) -> Updates:
        name, at, _ = picked
        return {self._column: name, **self._show_column(race, name, at)}

    def _show_column(self, race: Race, name: str, at: int | None = None) -> Updates:
        column = race.column(name)
        if at is None:
            # Begin with the most telling step: something was refused, and much was accepted.
            at = max(range(len(column.steps)), key=lambda i: (column.steps[i].has_refused, column.steps[i].num_accepted))
        return {
            self._plots: why_render.plots(column),
            **self._go(column, at),
            self._number: gr.Slider(maximum=max(2, len(column.steps)), value=at + 1),
        }

    def _show_step(self, race: Race, name: str, number: int) -> Updates:
        column = race.column(name)
        return self._draw(column, min(number, len(column.steps)) - 1)

    def _move(self, race: Race, name: str, number: int, *, by: int) -> Updates:
        column = race.column(name)
        return self._go(column, min(max(number - 1 + by, 0), len(column.steps) - 1))

    def _pick(self, race: Race, name: str, event: gr.EventData) -> Updates:
        return self._go(race.column(name), event.step - 1)

    def _start_or_pause(self, race: Race, name: str, number: int, label: str) -> Updates:
        if label == PAUSE:
            return self._resting()
        column = race.column(name)
        # At the end it begins again.
        at = 0 if number >= len(column.steps) else number - 1
        return {**self._go(column, at), self._timer: gr.Timer(active=True), self._play: PAUSE}

    def _play_on(self, race: Race, name: str, number: int) -> Updates:
        column = race.column(name)
        if number >= len(column.steps):
            return self._resting()
        return {self._number: number + 1, **self._draw(column, number)}

    def _go(self, column: Column, at: int) -> Updates:
        """To a step that a person chose, which ends a play."""
        return {self._number: at + 1, **self._draw(column, at), **self._resting()}

    def _resting(self) -> Updates:
        return {self._timer: gr.Timer(active=False), self._play: PLAY}

    def _draw(self, column: Column, at: int) -> Updates:
        return {self._step: why_render.step(column.steps, at), self._text: why_render.answer(column.steps, at)}
