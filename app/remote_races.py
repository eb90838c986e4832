"""Races on a running `selfspec serve`: plain decoding, and one column for each chosen drafter of the server.

Each column runs alone after a warm-up. The warm-up also puts the prompt into the server's prefix cache, so no column pays
for the others' prefill. The server sends text and counts; what happens within a step stays there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from selfspec.app import lanes
from selfspec.app.race import SECONDS_PER_FRAME
from selfspec.app.races import MAX_WAITING, Messages, Races, View, described
from selfspec.app.remote import Call, RemoteColumn, Server
from selfspec.app.render import MAX_SHADE
from selfspec.app.settings import LIVE, MAX_DRAFTERS, Settings, contestants_of, label_of
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

    def html(self, at: float | None = None, *, is_over: bool = True) -> str:
        """The columns at `at` seconds of the race, or as far as they got. Verdicts are shown when it is over."""
        shown = self.columns if at is None else [column.until(at) for column in self.columns]
        return lanes.race(
            [lanes.Lane(column, pieces(column), self._badge(column) if is_over else "") for column in shown],
            max_new_tokens=self.settings.max_new_tokens,
            is_over=is_over,
            has_steps=False,
            is_comparable=self.settings.timing != LIVE,
        )

    def _badge(self, column: RemoteColumn) -> str:
        return "" if self.is_identical(column) is None else lanes.text_badge(column.text, self.columns[0].text)


def pieces(column: RemoteColumn) -> str:
    """The text piece by piece, coloured by how many of its tokens were drafted: which ones, the server does not say."""
    parts = []
    for number, (piece, tick) in enumerate(zip(column.pieces, column.ticks(), strict=True), start=1):
        kind = f"draft d{min(tick.num_drafted, MAX_SHADE)}" if tick.num_drafted else "own"
        title = f"piece {number}: {tick.num_drafted} of {tick.num_tokens} tokens drafted"
        parts.append(f'<span class="{kind}" title="{title}">{escape(piece.text)}</span>' if piece.text else "")
    return "".join(parts)


class RemoteRaces(Races):
    """Races on a server. It is asked for its drafters at every visit, because it may be restarted, or load other ones."""

    def __init__(self, server: Server, max_waiting: int = MAX_WAITING) -> None:
        super().__init__(max_waiting)
        self.server = server
        self.drafters = {}
        self.default_drafters = ("ngram",)
        self._model = "the server's model"

    def about(self) -> tuple[str, ...]:
        return described(self._model, self.server.url)

    def refresh(self) -> None:
        self._model = self.server.model()
        self.drafters = {name: label_of(name) for name in self.server.drafters()}
        known = [name for name in self.drafters if name in ("ngram", "eagle")]
        self.default_drafters = tuple(known or list(self.drafters)[:MAX_DRAFTERS] or ("ngram",))

    def _race(self, settings: Settings, prompt: str | Messages, stop: threading.Event) -> Iterator[View]:
        model = self.server.model()
        names = contestants_of(settings)
        result = RemoteRace(settings, [RemoteColumn(name, label_of(name)) for name in names])
        calls = {name: call_for(model, name, settings, prompt) for name in names}
        is_together = settings.timing == LIVE
        if is_together:
            message = "Live: the server answers all columns at once, so their timings are not comparable"
            yield from self._follow(result, calls, stop, f"{message} …")
        else:
            message = f"Each column ran alone on {self.server.url}, one after the other; the clock is this page's"
            for place, (name, call) in enumerate(calls.items(), start=1):
                yield View(f"Warming {label_of(name)} up ({place} of {len(calls)}) …", result.html(is_over=False))
                # On the same prompt, because the server keeps it: otherwise only the first column would have to read it.
                warm_up = Call(call.path, {**call.body, "max_tokens": WARM_UP.max_new_tokens})
                for _ in self.server.stream({name: warm_up}, stop.is_set):
                    pass
                doing = f"{label_of(name)} answers alone ({place} of {len(calls)}) …"
                yield from self._follow(result, {name: call}, stop, doing)
        is_whole = all(column.finish_reason is not None for column in result.columns)
        yield View(f"{message}." if is_whole or not stop.is_set() else "Stopped.", result.html(), result)

    def _follow(self, result: RemoteRace, calls: dict[str, Call], stop: threading.Event, message: str) -> Iterator[View]:
        columns = {column.name: column for column in result.columns}
        last = 0.0
        for name, chunk, at in self.server.stream(calls, stop.is_set):
            columns[name].take(chunk, at)
            if time.perf_counter() - last >= SECONDS_PER_FRAME:
                yield View(message, result.html(is_over=False))
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
