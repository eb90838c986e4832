"""An answer's text on its way to its parts: reasoning, content and calls of tools.

Invariant: the parts do not depend on how the text is cut into pieces, and the work grows with its length alone. What marks
the parts is no part of them, nor is white space beside it. Everything else is in one of them; a call that cannot be read is
content, with its marks.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from selfspec.serve.tool_calls import Call, ToolFormat

REASONING, CONTENT = "reasoning", "content"


@dataclass(slots=True)
class Said:
    """A stretch of text of one kind: reasoning or content."""

    kind: str
    text: str


@dataclass(slots=True)
class Parts:
    """What a piece of text adds to an answer, in its order. Two neighbours are never texts of one kind."""

    pieces: list[Said | Call] = field(default_factory=list)

    def say(self, kind: str, text: str) -> None:
        """Add text; none at all adds nothing."""
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, Said) and last.kind == kind:
            last.text += text
        elif text:
            self.pieces.append(Said(kind, text))

    @property
    def reasoning(self) -> str:
        return self._text(REASONING)

    @property
    def content(self) -> str:
        return self._text(CONTENT)

    @property
    def calls(self) -> list[Call]:
        return [piece for piece in self.pieces if isinstance(piece, Call)]

    def _text(self, kind: str) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Said) and piece.kind == kind)


class PartParser(ABC):
    """Cuts text at marks, as it comes. An end that may become a mark waits.

    Args:
        hidden: texts to leave out wherever they are, such as control tokens.
    """

    def __init__(self, hidden: Sequence[str] = ()) -> None:
        self._hidden = tuple(hidden)
        self._marks: dict[tuple[str, ...], tuple[re.Pattern[str], frozenset[str], int]] = {}
        self._waiting = ""
        self._parts = Parts()

    def push(self, text: str, *, is_last: bool = False) -> Parts:
        """What a piece adds; `is_last` ends the text."""
        self._parts = Parts()
        text, at = self._waiting + text, 0
        while (found := self._search(text, at, is_last)) is not None:
            self._add(text[at : found.start()])
            if found[0] not in self._hidden:
                self._turn(found[0])
            at = found.end()
        end = len(text) if is_last else self._safe_end(text, at)
        self._add(text[at:end])
        self._waiting = text[end:]
        if is_last:
            self._end()
        return self._parts

    @property
    @abstractmethod
    def _current_marks(self) -> tuple[str, ...]:
        """The marks that count where the text is now."""

    @abstractmethod
    def _add(self, text: str) -> None:
        """Take text without marks."""

    @abstractmethod
    def _turn(self, mark: str) -> None:
        """Take a mark."""

    @abstractmethod
    def _end(self) -> None:
        """Take the end of the answer."""

    def _search(self, text: str, at: int, is_last: bool) -> re.Match[str] | None:
        """The next mark, unless it may still become a longer one."""
        pattern, beginnings, longest = self._compiled()
        found = pattern.search(text, at)
        if found is None or is_last or len(text) - found.start() >= longest or text[found.start() :] not in beginnings:
            return found
        return None

    def _safe_end(self, text: str, at: int) -> int:
        """Where the longest end of the text begins that may be the beginning of a mark."""
        _, beginnings, longest = self._compiled()
        for size in range(min(longest - 1, len(text) - at), 0, -1):
            if text[-size:] in beginnings:
                return len(text) - size
        return len(text)

    def _compiled(self) -> tuple[re.Pattern[str], frozenset[str], int]:
        """The current marks as a pattern, all their beginnings, and the length of the longest."""
        current = self._current_marks
        if current not in self._marks:
            # The longest first, because one may begin another.
            marks = sorted({*current, *self._hidden}, key=len, reverse=True)
            beginnings = frozenset(mark[:size] for mark in marks for size in range(1, len(mark)))
            pattern = re.compile("|".join(map(re.escape, marks)) or "(?!)")
            self._marks[current] = pattern, beginnings, max(map(len, marks), default=1)
        return self._marks[current]


class TagParser(PartParser):
    """Reasoning between tags, and calls between a model's marks.

    Tags count at the beginning of an answer; later they are what the answer is about.

    Args:
        tags: those that open and close the reasoning; None for none.
        tools: form of the calls and the tools that there are; None for no calls.
        is_open: the prompt ends with the opening tag.
    """

    def __init__(
        self,
        tags: tuple[str, str] | None,
        tools: tuple[ToolFormat, Sequence[dict[str, Any]]] | None,
        *,
        is_open: bool = False,
        hidden: Sequence[str] = (),
    ) -> None:
        self._tags = tags
        self._format: ToolFormat | None = tools[0] if tools else None
        self._tools: Sequence[dict[str, Any]] = tools[1] if tools else ()
        own = {*(tags or ()), *((self._format.opening, self._format.closing) if self._format else ())}
        super().__init__([text for text in hidden if text not in own])
        self._place = REASONING if tags and is_open else CONTENT
        # Whether white space that comes next is beside a mark.
        self._is_after_mark = self._place == REASONING
        self._has_content = False
        self._space: list[str] = []
        self._opening = ""
        self._body: list[str] = []

    @property
    def _current_marks(self) -> tuple[str, ...]:
        if self._place == REASONING:
            assert self._tags is not None
            return self._tags
        if self._place == "calls":
            assert self._format is not None
            return (self._format.closing,) if self._format.closing else ()
        return (*(self._tags or ())[:1], *((self._format.opening,) if self._format else ()))

    def _add(self, text: str) -> None:
        if self._place == "calls":
            self._body.append(text)
            return
        if self._is_after_mark:
            text = text.lstrip()
        solid = text.rstrip()
        if not solid:
            self._space.append(text)
            return
        self._is_after_mark = False
        if self._place == CONTENT:
            if self._format and self._format.is_bare and not self._has_content and solid.lstrip().startswith("{"):
                self._place, self._opening, self._body = "calls", "", [text]
                return
            self._has_content = True
        self._say("".join(self._space) + solid)
        self._space = [text[len(solid) :]]

    def _say(self, text: str) -> None:
        self._parts.say(REASONING if self._place == REASONING else CONTENT, text)

    def _turn(self, mark: str) -> None:
        if self._place == "calls" and self._format is not None and mark == self._format.closing:
            self._close_calls(mark)
        elif self._place == "calls":
            # A bare call has just begun, and has no marks.
            self._body.append(mark)
        elif self._format is not None and mark == self._format.opening:
            self._place, self._opening, self._body = "calls", mark, []
        elif self._tags is None or mark == self._tags[0]:
            self._open_reasoning(mark)
        else:
            self._place = CONTENT
            self._start_afresh()

    def _open_reasoning(self, tag: str) -> None:
        if self._place == CONTENT and not self._has_content:
            self._place = REASONING
            self._start_afresh()
        # Some models repeat the tag that the prompt ends with.
        elif self._place == CONTENT or not self._is_after_mark:
            self._add(tag)

    def _close_calls(self, closing: str) -> None:
        assert self._format is not None
        body = "".join(self._body)
        calls = self._format.calls(body, self._tools)
        self._place, self._body, self._has_content = CONTENT, [], True
        if calls is None:
            self._is_after_mark = False
            self._say("".join(self._space) + self._opening + body + closing)
            self._space = []
        else:
            self._parts.pieces += calls
            self._start_afresh()

    def _start_afresh(self) -> None:
        """Forget white space, here and in what comes next: it is beside a mark."""
        self._is_after_mark = True
        self._space = []

    def _end(self) -> None:
        if self._place == "calls":
            self._close_calls("")
        self._say("".join(self._space))
