"""Races on a running `selfspec serve`: plain decoding, and one column for each chosen drafter of the server.

Each column runs alone after a warm-up. The warm-up also puts the prompt into the server's prefix cache, so no column pays
for the others' prefill. The server sends text and counts; what happens within a step stays there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from selfspec.app import render
from selfspec.app.race import SECONDS_PER_FRAME
from selfspec.app.races import Messages, Races, View
from selfspec.app.remote import Call, RemoteColumn, Server
from selfspec.app.settings import LIVE, Settings, label_of
from selfspec.bench.compare import WARM_UP

WHY_NEEDS_A_TARGET = (
    "What happens in a step stays on the server: the step-by-step view needs a local target. Start `selfspec app` without "
    "--server for it."
)


@dataclass(eq=False)
class RemoteRace:
    """A race: its settings, and the columns as far as they got."""

    settings: Settings
    columns: list[RemoteColumn]

    def is_identical(self, column: RemoteColumn) -> bool | None:
        """Whether a complete answer has the first column's text. None for the first column, and if either is incomplete."""
        reference = self.columns[0]
        if column is reference or None in (column.finish_reason, reference.finish_reason):
            return None
        return column.text == reference.text

    def html(self, *, is_over: bool = False) -> str:
        """The columns as they stand. A column that has ended has a badge."""
        badges = {}
        reference = self.columns[0]
        for column in self.columns:
            if column.finish_reason is None:
                badges[column.name] = render.stopped_badge() if is_over else ""
            elif column is reference:
                badges[column.name] = render.reference_badge()
            elif (is_identical := self.is_identical(column)) is not None:
                badge = render.same_text_badge() if is_identical else render.text_parting_badge(column.text, reference.text)
                badges[column.name] = badge
        return render.remote_columns(self.columns, badges, is_comparable=self.settings.timing != LIVE)


class RemoteRaces(Races):
    """Races on a server. It is asked for its drafters at every visit, because it may be restarted, or load other ones."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        self.drafters: dict[str, str] = {}

    def refresh(self) -> None:
        self.drafters = {name: label_of(name) for name in self.server.drafters()}

    def _race(self, settings: Settings, prompt: str | Messages, stop: threading.Event) -> Iterator[View]:
        model = self.server.model()
        names = ("none", *settings.drafters)
        result = RemoteRace(settings, [RemoteColumn(name, label_of(name)) for name in names])
        calls = {name: call_for(model, name, settings, prompt) for name in names}
        is_together = settings.timing == LIVE
        if is_together:
            message = "Live: the server answers all columns at once, so their timings are not comparable"
            yield from self._follow(result, calls, stop, f"{message} …")
        else:
            message = f"Each column ran alone on {self.server.url}, one after the other; the clock is this page's"
            for place, (name, call) in enumerate(calls.items(), start=1):
                yield View(f"Warming {label_of(name)} up ({place} of {len(calls)}) …", result.html())
                warm_up = Call(call.path, {**call.body, "max_tokens": WARM_UP.max_new_tokens})
                for _ in self.server.stream({name: warm_up}, stop.is_set):
                    pass
                doing = f"{label_of(name)} answers alone ({place} of {len(calls)}) …"
                yield from self._follow(result, {name: call}, stop, doing)
        is_whole = all(column.finish_reason is not None for column in result.columns)
        yield View(f"{message}." if is_whole or not stop.is_set() else "Stopped.", result.html(is_over=True), result)

    def _follow(self, result: RemoteRace, calls: dict[str, Call], stop: threading.Event, message: str) -> Iterator[View]:
        columns = {column.name: column for column in result.columns}
        last = 0.0
        for name, chunk, at in self.server.stream(calls, stop.is_set):
            columns[name].take(chunk, at)
            if time.perf_counter() - last >= SECONDS_PER_FRAME:
                yield View(message, result.html())
                last = time.perf_counter()

    def record(self, result: RemoteRace) -> dict[str, Any]:
        return {
            "environment": {"server": self.server.url},
            "settings": result.settings.to_dict(),
            "columns": [
                {**asdict(column), "text": column.text, "is_identical": result.is_identical(column)}
                for column in result.columns
            ],
        }


def call_for(model: str, drafter: str, settings: Settings, prompt: str | Messages) -> Call:
    """The request for one drafter's answer to a prompt, with counts in every piece."""
    body = {
        "model": model,
        "drafter": drafter,
        "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "seed": settings.seed,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if isinstance(prompt, str):
        return Call("completions", {**body, "prompt": prompt})
    return Call("chat/completions", {**body, "messages": prompt})
