"""This machine: its memory's ceiling for plain decoding, where the last race stands against it, and what a pass costs."""

from __future__ import annotations

import gradio as gr

from selfspec.app import machine_render, render
from selfspec.app.events import COMPUTING, DRAWING, Updates, html
from selfspec.app.frame import Frame
from selfspec.app.local_races import LocalRaces, Race
from selfspec.bench.machine import Measured, measure, this_machine
from selfspec.failures import describe

HINT = "Measure reads memory for half a second and times passes of 1 to 64 nodes, which takes some seconds."


def build(frame: Frame) -> None:
    """Open the tab. A server's machine is not this one, so there is none over a server."""
    if isinstance(frame.races, LocalRaces):
        with gr.Tab("This machine") as tab:
            machine = MachineTab(frame.races, frame.finished)
        tab.select(machine.show, frame.finished, machine.outputs, **DRAWING)


class MachineTab:
    """The tab's components and events. It compares with the race that `finished` holds."""

    def __init__(self, races: LocalRaces, finished: gr.State) -> None:
        self._races = races
        self._target = target = races.target
        self._machine = this_machine()
        self._dtype = str(target.dtype).removeprefix("torch.")
        # A measurement is of the machine, not of a visitor, so everyone sees the last one.
        self._measured: Measured | None = None
        html(machine_render.about(self._machine, str(target.device), self._dtype))
        with gr.Row():
            button = gr.Button("Measure", variant="primary", size="sm", elem_id="measure", scale=0, min_width=130)
        self._standing = html(render.note(HINT), elem_id="standing")
        button.click(lambda: render.note("Measuring …"), None, self._standing, queue=False, **DRAWING).then(
            self._measure, finished, self._standing, **COMPUTING
        )
        finished.change(self.show, finished, self._standing, **DRAWING)
        self.outputs = [self._standing]

    def _measure(self, race: Race | None) -> Updates:
        try:
            with self._races.line.turn():
                self._measured = measure(self._target)
        except Exception as error:
            if (sentence := describe(error)) is None:
                raise
            return {self._standing: render.note(sentence, "error")}
        return self.show(race)

    def show(self, race: Race | None) -> Updates:
        """What is measured, beside the last race."""
        if self._measured is None:
            return {self._standing: render.note(HINT)}
        columns = [] if race is None else race.columns
        is_cuda = self._target.device.type == "cuda"
        drawn = machine_render.standing(self._machine, self._measured, columns, dtype=self._dtype, is_cuda=is_cuda)
        return {self._standing: drawn}
