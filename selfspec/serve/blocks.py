"""Answers as a row of blocks, each of them reasoning, text, or one call of a tool: what newer APIs have in place of choices.

Invariant: a whole answer has the blocks of its stream, because both are made in one way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from selfspec.api import Completion
from selfspec.engine import Event
from selfspec.serve.answers import JSON, Answer, take_apart, to_json
from selfspec.serve.parts import CONTENT
from selfspec.serve.tool_calls import Call

CALL = "call"


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        kind: reasoning, content or a call.
        text: what it says so far; of a call its arguments.
        record: of a call, as OpenAI's API has it.
        is_cut: the answer was cut in it.
    """

    index: int
    kind: str
    text: str = ""
    record: JSON | None = None
    is_cut: bool = False


class BlockAnswer(Answer):
    """The answer to a request for one sample."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.blocks: list[Block] = []
        self.completion: Completion | None = None
        self._is_open = False
        self._parser = self._new_parser()

    @property
    def has_calls(self) -> bool:
        return any(block.kind == CALL for block in self.blocks)

    def whole(self, completions: list[Completion]) -> JSON:
        [self.completion] = completions
        for _ in self._take(self.completion.text):
            pass
        return self.record()

    def add(self, event: Event) -> bytes:
        self.completion = event.completion
        return b"".join(map(self.line, self._take(event.text)))

    def line(self, content: JSON) -> bytes:
        """A server-sent event, which is called what its content is called."""
        return b"event: " + content["type"].encode() + b"\ndata: " + to_json(content) + b"\n\n"

    @abstractmethod
    def record(self) -> JSON:
        """The answer as far as it is there."""

    @abstractmethod
    def opened(self, block: Block) -> Iterator[JSON]:
        """The events of a new block."""

    @abstractmethod
    def extended(self, block: Block, text: str) -> Iterator[JSON]:
        """The events of more text in a block, or of a call's arguments, which come at once."""

    @abstractmethod
    def closed(self, block: Block) -> Iterator[JSON]:
        """The events of a block's end."""

    def _take(self, text: str) -> Iterator[JSON]:
        """Add text, which is the last if there is a completion."""
        is_last = self.completion is not None
        for piece in take_apart(self._parser, text, is_last=is_last).pieces:
            if isinstance(piece, Call):
                yield from self._open(CALL, piece.record())
                yield from self._extend(piece.arguments)
            else:
                if not self._is_open or self.blocks[-1].kind != piece.kind:
                    yield from self._open(piece.kind)
                yield from self._extend(piece.text)
        if self.completion is not None:
            if not self.blocks:
                # Clients look at the first block without asking whether there is one.
                yield from self._open(CONTENT)
            yield from self._close(is_cut=self.completion.finish_reason == "length")

    def _open(self, kind: str, record: JSON | None = None) -> Iterator[JSON]:
        yield from self._close()
        self.blocks.append(Block(len(self.blocks), kind, record=record))
        self._is_open = True
        yield from self.opened(self.blocks[-1])

    def _extend(self, text: str) -> Iterator[JSON]:
        self.blocks[-1].text += text
        yield from self.extended(self.blocks[-1], text)

    def _close(self, *, is_cut: bool = False) -> Iterator[JSON]:
        if self._is_open:
            self._is_open = False
            self.blocks[-1].is_cut = is_cut
            yield from self.closed(self.blocks[-1])
