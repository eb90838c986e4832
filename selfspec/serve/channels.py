"""The parts of gpt-oss's answers, which are messages: each has a header, which names a channel or a tool, and a text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from selfspec.serve.parts import CONTENT, REASONING, PartParser
from selfspec.serve.tool_calls import call_of

# Precedes a tool's name in a header.
RECIPIENT = "to=functions."
# What is longer is no header, in characters.
MAX_HEADER = 256


class ChannelParser(PartParser):
    """What is said to a tool is a call, the channel `analysis` is reasoning, and all others are content.

    Args:
        has_reasoning: False makes reasoning content.
        has_calls: False makes calls content.
    """

    BEGIN, TEXT, END = ("<|start|>", "<|channel|>"), "<|message|>", ("<|end|>", "<|call|>", "<|return|>")
    MARKS = (*BEGIN, TEXT, *END)

    def __init__(self, *, has_reasoning: bool, has_calls: bool, hidden: Sequence[str] = ()) -> None:
        super().__init__([text for text in hidden if text not in self.MARKS])
        self._has_reasoning = has_reasoning
        self._has_calls = has_calls
        # The prompt ends within a header.
        self._header: str | None = ""
        self._opening = ""
        self._place = CONTENT
        self._spoken: set[str] = set()
        self._body: list[str] = []

    @property
    def _current_marks(self) -> tuple[str, ...]:
        return self.MARKS

    def _add(self, text: str) -> None:
        if self._header is None:
            self._say(text)
        elif text:
            self._header += text
            begun = self._header.lstrip()
            is_header = begun.startswith((*self.BEGIN, RECIPIENT)) or RECIPIENT.startswith(begun)
            if not is_header or len(self._header) > MAX_HEADER:
                self._open_content()

    def _say(self, text: str) -> None:
        if self._place == "calls":
            self._body.append(text)
        else:
            self._parts.say(self._place, text)

    def _turn(self, mark: str) -> None:
        if mark == self.TEXT and self._header is not None:
            channel = self._header.rpartition("<|channel|>")[2].strip()
            if self._has_calls and RECIPIENT in self._header:
                self._place, self._opening, self._body = "calls", self._header + mark, []
            else:
                self._place = REASONING if channel.startswith("analysis") and self._has_reasoning else CONTENT
                # A message begins a line.
                self._say("\n" if self._place in self._spoken else "")
                self._spoken.add(self._place)
            self._header = None
        elif mark == self.TEXT:
            self._say(mark)
        elif self._header is not None:
            self._header = self._header + mark if mark in self.BEGIN else ""
        else:
            self._close(mark)
            self._header = mark if mark in self.BEGIN else ""

    def _open_content(self) -> None:
        """What looked like a header is an answer without one."""
        header, self._header, self._place = self._header or "", None, CONTENT
        self._say(header)

    def _close(self, mark: str) -> None:
        if self._place != "calls":
            return
        body = "".join(self._body)
        name = re.match(r"[\w.-]+", self._opening.partition(RECIPIENT)[2])
        try:
            self._parts.pieces.append(call_of(name and name[0], body))
        except (ValueError, RecursionError):
            self._parts.say(CONTENT, self._opening + body + mark)
        self._place = CONTENT

    def _end(self) -> None:
        if self._header is None:
            self._close("")
        elif not self._header.lstrip().startswith((*self.BEGIN, RECIPIENT)):
            self._open_content()
