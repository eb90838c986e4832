"""Server: what a running server does now, from its `/metrics`: throughput, load, acceptance and latencies."""

from __future__ import annotations

import time
from itertools import pairwise

import gradio as gr

from selfspec.app import charts, render
from selfspec.app.charts import Axes, Series
from selfspec.app.events import DRAWING, Updates, html
from selfspec.app.frame import Frame
from selfspec.app.remote import Server
from selfspec.app.server_figures import LATENCIES, NOTHING_YET, PERCENTILES, Figures, Reading, between
from selfspec.app.words import milliseconds
from selfspec.failures import describe

LABEL = "Server"
SECONDS_PER_READING = 2.0
# The readings that are kept, and that latencies are taken over: two minutes.
NUM_READINGS = 60


def build(frame: Frame) -> None:
    """Open the tab. Without a server there is none."""
    if isinstance(frame.source, Server):
        with gr.Tab(LABEL):
            ServerTab(frame.source, frame.tabs)


class ServerTab:
    """The tab's components and events. It reads while it is looked at."""

    def __init__(self, server: Server, tabs: gr.Tabs) -> None:
        self._server = server
        self._readings = gr.State([])
        self._live = html(render.note("Reading the server’s figures …"), elem_id="live")
        self._timer = gr.Timer(SECONDS_PER_READING, active=False)
        shown = [self._readings, self._live]
        tabs.select(self._look, None, self._timer, **DRAWING)
        self._timer.tick(self._read, self._readings, shown, **DRAWING)

    def _look(self, event: gr.SelectData) -> gr.Timer:
        return gr.Timer(active=event.value == LABEL)

    def _read(self, readings: list[Reading]) -> Updates:
        try:
            reading = Reading.of(self._server.metrics(), time.monotonic())
        except Exception as error:
            if (sentence := describe(error)) is None:
                raise
            return {self._readings: [], self._live: render.note(sentence, "error")}
        kept = [*readings, reading][-NUM_READINGS:]
        return {self._readings: kept, self._live: live(kept)}


def live(readings: list[Reading]) -> str:
    """The newest figures, throughput over the last minutes, and latencies over these, or else over the server's life."""
    if len(readings) < 2:
        return render.note("Reading the server’s figures …")
    first, *_, before, last = readings[0], *readings
    recent, since = between(first, last), "of the last minutes"
    if not recent.latencies:
        recent, since = between(NOTHING_YET, last), "since the server’s start"
    now = between(before, last)
    return _now(now, recent, since) + f'<div class="plots">{_throughput(readings)}{_latencies(recent, since)}</div>'


def _now(now: Figures, recent: Figures, since: str) -> str:
    length, rate = recent.acceptance_length, recent.acceptance_rate
    shown = render.facts(
        {
            "tokens/s now": f"{now.tokens_per_second:.1f}",
            "running": f"{now.running:.0f}",
            "waiting": f"{now.waiting:.0f}",
            "tokens per target pass": "–" if length is None else f"{length:.2f}",
            "drafts accepted": "–" if rate is None else f"{rate:.0%}",
            "cache in use": f"{now.cache_use:.0%}",
        }
    )
    return f'{shown}<p class="hint">Tokens per pass and accepted drafts are {since}.</p>'


def _throughput(readings: list[Reading]) -> str:
    end = readings[-1].at
    pairs = pairwise(readings)
    points = [(round(after.at - end), between(before, after).tokens_per_second) for before, after in pairs]
    axes = Axes("seconds from now", "tokens/s")
    return charts.curves("Throughput", "tokens a second, of all requests together", [Series("tokens/s", points)], axes)


def _latencies(figures: Figures, since: str) -> str:
    heads = "".join(f"<th>{percent} %</th>" for percent in PERCENTILES)
    rows = "".join(
        f"<tr><td>{name}</td>"
        + "".join(f"<td>{milliseconds(figures.latencies[key][percent])}</td>" for percent in PERCENTILES)
        + "</tr>"
        for key, name in LATENCIES.items()
        if key in figures.latencies
    )
    if not rows:
        return '<figure><figcaption>Latencies</figcaption><p class="hint">Nobody has asked for an answer yet.</p></figure>'
    return (
        f"<figure><figcaption>Latencies<small>so many {since} took at most so long, within the histograms’ bounds"
        f'</small></figcaption><table class="outcomes"><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table>'
        "</figure>"
    )
