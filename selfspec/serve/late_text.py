"""Text that is made where it is read: an engine in another process sends token ids, and the reading thread decodes them.

So the thread that takes the engine's messages never holds up the one that writes to connections.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from selfspec.engine import Event
from selfspec.loop.sequence import Request
from selfspec.loop.text import TextStream
from selfspec.serve.wire import Rest


@dataclass(slots=True)
class TokenEvent(Event):
    """An event that gets its text from its token ids."""

    stream: TextStream | None = None

    def with_text(self) -> Event:
        stream, completion = self.stream, self.completion
        assert stream is not None
        # The token that ends an answer is no part of its text.
        has_end = completion is not None and completion.end_token_id is not None
        for token_id in self.token_ids[:-1] if has_end else self.token_ids:
            stream.push(token_id)
        if completion is not None:
            stream.finish()
            completion = replace(completion, text=stream.text)
        text = stream.take(is_last=completion is not None)
        return Event(self.request, text, self.token_ids, self.logprobs, self.top_logprobs, completion, self.error)


class UnreadAnswer:
    """One request on its way to its text."""

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self.request = request
        self.is_open = True
        # The engine makes the text itself where it must look for stop strings.
        self._stream: TextStream | None = None
        if not request.sampling.stop:
            skip = request.sampling.skip_special_tokens
            self._stream = TextStream(tokenizer, context=request.prompt_ids, skip_special_tokens=skip)

    def event(self, token_ids: list[int], rest: Rest | None) -> Event:
        """News of the request, in the order in which the engine sent it."""
        text, logprobs, top_logprobs, completion, error = rest or ("", [], [], None, None)
        said = (self.request, text, token_ids, logprobs, top_logprobs, completion, error)
        return Event(*said) if self._stream is None else TokenEvent(*said, self._stream)
