"""A race in the terminal: bars for every lane, and the answers side by side as far as the width allows.

Where it does not, or in a pipe, the first lane's answer appears as it is made, and each other lane has a line at its end.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from selfspec.bench.lanes import Lane
from selfspec.loop.text import TextStream
from selfspec.traffic.prompt_files import PromptRow

# An answer needs so many characters to be read with ease; two fit into a terminal of 80.
COLUMN_WIDTH = 38
BAR_WIDTH = 24
SECONDS_PER_FRAME = 0.1
ACCEPTED = "bold cyan"
CUT = "[cut here]"


@dataclass
class Writing:
    """A lane's text, with the drafted tokens in colour. `num_turns` of its turns are in it."""

    stream: TextStream
    text: Text = field(default_factory=Text)
    num_turns: int = 0

    def catch_up(self, lane: Lane, ends: Collection[int]) -> Text:
        """Add the lane's new turns, and the end if it is done; returns what is new."""
        fresh = Text()
        for turn in lane.turns[self.num_turns :]:
            for number, token_id in enumerate(turn.token_ids):
                if token_id not in ends:
                    self.stream.push(token_id)
                    fresh.append(self.stream.take(), ACCEPTED if number < turn.num_accepted else None)
        self.num_turns = len(lane.turns)
        if lane.is_done:
            self.stream.finish()
            fresh.append(self.stream.take(is_last=True))
            if lane.token_ids[-1] not in ends:
                fresh.append(f" {CUT}", "yellow")
        self.text.append_text(fresh)
        return fresh


class RaceView:
    """Shows one race.

    Args:
        row: the prompt.
        texts: a stream of text for each lane, by the lane's name; the first is the one to show where there is no room.
        ends: the token ids that end an answer.
        max_tokens: the most tokens of an answer.
    """

    def __init__(
        self, console: Console, row: PromptRow, texts: Mapping[str, TextStream], *, ends: Iterable[int], max_tokens: int
    ) -> None:
        self._console = console
        question = row.prompt if isinstance(row.prompt, str) else row.prompt[-1]["content"]
        self._question = Text(" ".join(question.split()), style="bold")
        self._lanes = {name: Lane(name) for name in texts}
        self._writings = {name: Writing(stream) for name, stream in texts.items()}
        self._ends = frozenset(ends)
        self._max_tokens = max_tokens

    def follow(self, race: Iterable[Lane]) -> list[Lane]:
        """Show the question and a race until all its lanes are done, and return them."""
        self._ask(self._console)
        if self._console.is_terminal and self._console.width >= 2 * COLUMN_WIDTH:
            self._show_columns(race)
        else:
            self._show_lines(race)
        return list(self._lanes.values())

    def draw(self, console: Console) -> None:
        """Print the race as it stands now, in columns."""
        self._ask(console)
        console.print(self._frame(console))

    def _ask(self, console: Console) -> None:
        console.print()
        console.print(self._question, overflow="ellipsis", no_wrap=True)

    def _show_columns(self, race: Iterable[Lane]) -> None:
        shown = 0.0
        with Live(
            self._frame(self._console), console=self._console, auto_refresh=False, vertical_overflow="visible"
        ) as live:
            for lane in race:
                self._take(lane)
                if time.perf_counter() - shown >= SECONDS_PER_FRAME:
                    live.update(self._frame(self._console), refresh=True)
                    shown = time.perf_counter()
            live.update(self._frame(self._console), refresh=True)

    def _show_lines(self, race: Iterable[Lane]) -> None:
        first = next(iter(self._lanes))
        for lane in race:
            fresh = self._take(lane)
            if lane.name == first:
                self._console.print(fresh, end="", soft_wrap=True)
                self._console.file.flush()
                if lane.is_done:
                    self._console.print()
        for lane in self._lanes.values():
            self._console.print(Text(f"  {lane.name:{max(map(len, self._lanes))}}  {_figures(lane)}", style="dim"))

    def _take(self, lane: Lane) -> Text:
        self._lanes[lane.name] = lane
        return self._writings[lane.name].catch_up(lane, self._ends)

    def _frame(self, console: Console) -> RenderableType:
        bars = Table.grid(padding=(0, 2, 0, 0))
        longest = max((len(lane.token_ids) for lane in self._lanes.values() if lane.is_done), default=self._max_tokens)
        for lane in self._lanes.values():
            filled = min(BAR_WIDTH, BAR_WIDTH * len(lane.token_ids) // longest)
            bar = Text("━" * filled, style="cyan" if lane.is_done else "blue").append("─" * (BAR_WIDTH - filled), "dim")
            bars.add_row(lane.name, bar, _figures(lane))
        num_columns = min(len(self._lanes), max(1, console.width // COLUMN_WIDTH))
        # What is higher than the terminal cannot be drawn over, so long answers show their ends.
        num_lines = max(3, console.height - len(self._lanes) - 6)
        columns = Table.grid(expand=True)
        for _ in range(num_columns):
            columns.add_column(ratio=1)
        width = console.width // num_columns - 4
        columns.add_row(*(self._panel(name, width, num_lines) for name in list(self._lanes)[:num_columns]))
        return Group(bars, columns)

    def _panel(self, name: str, width: int, num_lines: int) -> Panel:
        lines = self._writings[name].text.wrap(self._console, width)
        return Panel(Text("\n").join(lines[-num_lines:]), title=Text(name), title_align="left", style="none")


def _figures(lane: Lane) -> str:
    return f"{len(lane.token_ids):3} tokens in {len(lane.turns):3} passes, {lane.seconds:4.1f} s"
