"""The JSON that clients know, from an engine's events: whole answers, and the pieces of a stream."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from selfspec.api import Completion
from selfspec.engine import Event
from selfspec.loop.sequence import Request
from selfspec.serve.errors import ApiError
from selfspec.serve.parts import CONTENT, PartParser, Parts
from selfspec.serve.protocol import StreamOptions
from selfspec.serve.token_names import Place, Reading, TokenText
from selfspec.serve.usage import running_usage, usage

JSON = dict[str, Any]
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def to_json(content: Any) -> bytes:
    return _ENCODER.encode(content).encode()


class Answer(ABC):
    """The form of one call's answer: whole, or as a stream that begins, is added to, and ends.

    Args:
        answer_id: the id that the answer and every piece of a stream carry.
        tokenizer: names the tokens in log-probabilities.
        num_samples: samples for each prompt.
        drafter: the drafter's name, for the usage.
        requests: what was asked, in the order of the answer's choices.
        new_parser: makes what takes one answer's text apart; None where it has no parts.

    Attributes:
        NAMES: what the answer's API calls the fields of a chat, for errors.
    """

    NAMES: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        answer_id: str,
        model: str,
        tokenizer: Any,
        num_samples: int,
        drafter: str,
        requests: Sequence[Request],
        *,
        new_parser: Callable[[], PartParser | None] = lambda: None,
    ) -> None:
        self.answer_id = answer_id
        self.model = model
        self.created = int(time.time())
        self.num_samples = num_samples
        self.drafter = drafter
        self._tokenizer = tokenizer
        self._requests = requests
        self._new_parser = new_parser

    @abstractmethod
    def whole(self, completions: list[Completion]) -> JSON:
        """The whole answer, from completions in any order."""

    @abstractmethod
    def begin(self) -> bytes:
        """What opens a stream."""

    @abstractmethod
    def add(self, event: Event) -> bytes:
        """What an event adds to a stream; nothing where it has nothing to show."""

    @abstractmethod
    def end(self) -> bytes:
        """What ends a stream."""

    @abstractmethod
    def fail(self, error: ApiError) -> bytes:
        """What ends a stream in the middle."""


class ChoiceAnswer(Answer):
    """An answer with a choice for each sample of each prompt.

    Args:
        options: a stream's, as the client wants them.
    """

    kind: str
    chunk_kind: str

    def __init__(self, *args: Any, options: StreamOptions | None = None, **named: Any) -> None:
        super().__init__(*args, **named)
        self.head: JSON = {"id": self.answer_id, "created": self.created, "model": self.model}
        # What all pieces of a stream begin with is written once.
        self._opening = to_json({**self.head, "object": self.chunk_kind})[:-1] + b',"choices":'
        self._wants_usage = bool(options and options.include_usage)
        self._wants_running_usage = bool(options and options.continuous_usage_stats)
        self._completions: list[Completion] = []
        self._readings: dict[int, Reading] = {}
        # For each choice, its tokens and passes so far.
        self._running: dict[int, tuple[int, int]] = {}

    def choice_index(self, request: Request) -> int:
        return request.index * self.num_samples + request.sample_index

    def whole(self, completions: list[Completion]) -> JSON:
        order = sorted(completions, key=lambda c: (c.prompt_index, c.sample_index))
        choices = [self.choice(index, each) | self._end(index, each) for index, each in enumerate(order)]
        return {**self.head, "object": self.kind, "choices": choices, "usage": usage(order, self.drafter)}

    def begin(self) -> bytes:
        return b"".join(self._line([choice], self._no_usage()) for choice in self.first_choices())

    def add(self, event: Event) -> bytes:
        if event.completion is not None:
            self._completions.append(event.completion)
        more = self._running_usage(event) if self._wants_running_usage else self._no_usage()
        # A step may have nothing to show: its text waits for the rest of a character, or may become a stop string.
        has_counts = (event.request.sampling.logprobs or self._wants_running_usage) and event.token_ids
        choice = self.piece(event) | self._end(self.choice_index(event.request), event.completion)
        is_shown = choice.get("delta") or choice.get("text") or event.completion is not None or has_counts
        return self._line([choice], more) if is_shown else b""

    def end(self) -> bytes:
        last = self._line([], {"usage": usage(self._completions, self.drafter)}) if self._wants_usage else b""
        return last + b"data: [DONE]\n\n"

    def fail(self, error: ApiError) -> bytes:
        return b"data: " + to_json(error.body()) + b"\n\n"

    def first_choices(self) -> list[JSON]:
        """What opens a stream, a chunk each."""
        return []

    def _line(self, choices: list[JSON], more: JSON) -> bytes:
        """A chunk of a stream as a server-sent event."""
        end = b"," + to_json(more)[1:] if more else b"}"
        return b"data: " + self._opening + to_json(choices) + end + b"\n\n"

    def _no_usage(self) -> JSON:
        """If usage is asked for, OpenAI's chunks have an empty one until the last."""
        return {"usage": None} if self._wants_usage else {}

    def _running_usage(self, event: Event) -> JSON:
        index = self.choice_index(event.request)
        num_tokens, num_passes = self._running.get(index, (0, 0))
        num_tokens, num_passes = num_tokens + len(event.token_ids), num_passes + 1
        self._running[index] = num_tokens, num_passes
        return {"usage": running_usage(len(event.request.prompt_ids), num_tokens, num_passes)}

    @abstractmethod
    def choice(self, index: int, completion: Completion) -> JSON:
        """One choice of a whole answer."""

    @abstractmethod
    def piece(self, event: Event) -> JSON:
        """What an event adds to its choice."""

    def _end(self, index: int, completion: Completion | None) -> JSON:
        """The stop string or the stop id that ended a choice, as vLLM's clients know it; null for any other end."""
        reason = None
        if completion is not None:
            end = completion.end_token_id
            reason = end if end in self._requests[index].sampling.stop_token_ids else completion.stop_string
        return {"stop_reason": reason}

    def _places(self, index: int, said: Completion | Event, completion: Completion | None) -> list[Place]:
        """What log-probabilities say of a choice's next tokens; nothing where they were not asked for."""
        if not said.logprobs:
            return []
        if index not in self._readings:
            request = self._requests[index]
            self._readings[index] = Reading(
                self._tokenizer, request.prompt_ids, skip_special_tokens=request.sampling.skip_special_tokens
            )
        tops = said.top_logprobs or [[] for _ in said.token_ids]
        last = len(said.token_ids) - 1 if completion is not None and completion.end_token_id is not None else None
        return [
            self._readings[index].read(token_id, logprob, others, is_end=i == last)
            for i, (token_id, logprob, others) in enumerate(zip(said.token_ids, said.logprobs, tops, strict=True))
        ]


class ChatAnswer(ChoiceAnswer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # For each choice of a stream.
        self._parsers: dict[int, PartParser | None] = {}
        self._num_calls: dict[int, int] = {}

    def first_choices(self) -> list[JSON]:
        opening = {"role": "assistant", "content": ""}
        indices = range(len(self._requests))
        return [{"index": index, "delta": opening, "logprobs": None, "finish_reason": None} for index in indices]

    def choice(self, index: int, completion: Completion) -> JSON:
        message = message_of(take_apart(self._new_parser(), completion.text, is_last=True))
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(self._places(index, completion, completion)),
            "finish_reason": _finish_reason(completion, len(message.get("tool_calls", ()))),
        }

    def piece(self, event: Event) -> JSON:
        index = self.choice_index(event.request)
        if index not in self._parsers:
            self._parsers[index] = self._new_parser()
        parts = take_apart(self._parsers[index], event.text, is_last=event.completion is not None)
        num_before = self._num_calls.get(index, 0)
        calls = [{"index": i, **call.record()} for i, call in enumerate(parts.calls, num_before)]
        self._num_calls[index] = num_before + len(calls)
        said = {"reasoning_content": parts.reasoning, "content": parts.content, "tool_calls": calls}
        return {
            "index": index,
            "delta": {name: value for name, value in said.items() if value},
            "logprobs": self._logprobs(self._places(index, event, event.completion)),
            "finish_reason": event.completion and _finish_reason(event.completion, self._num_calls[index]),
        }

    def _logprobs(self, places: list[Place]) -> JSON | None:
        entries = [
            {
                **_entry(place.token, place.logprob),
                "top_logprobs": [_entry(token, logprob) for _, token, logprob in place.others],
            }
            for place in places
        ]
        return {"content": entries, "refusal": None} if entries else None


def take_apart(parser: PartParser | None, text: str, *, is_last: bool) -> Parts:
    """What a piece of text adds to an answer; without a parser all of it is content."""
    if parser is not None:
        return parser.push(text, is_last=is_last)
    parts = Parts()
    parts.say(CONTENT, text)
    return parts


def message_of(parts: Parts) -> JSON:
    """An answer as the message of a chat."""
    calls = parts.calls
    said = {"reasoning_content": parts.reasoning, "tool_calls": [call.record() for call in calls]}
    return {
        "role": "assistant",
        "content": parts.content if parts.content or not calls else None,
        "refusal": None,
        **{name: value for name, value in said.items() if value},
    }


def _finish_reason(completion: Completion, num_calls: int) -> str:
    return "tool_calls" if num_calls and completion.finish_reason == "stop" else completion.finish_reason


class CompletionAnswer(ChoiceAnswer):
    kind = "text_completion"
    chunk_kind = "text_completion"

    def choice(self, index: int, completion: Completion) -> JSON:
        return {
            "index": index,
            "text": completion.text,
            "logprobs": self._logprobs(self._places(index, completion, completion)),
            "finish_reason": completion.finish_reason,
        }

    def piece(self, event: Event) -> JSON:
        index = self.choice_index(event.request)
        return {
            "index": index,
            "text": event.text,
            "logprobs": self._logprobs(self._places(index, event, event.completion)),
            "finish_reason": event.completion and event.completion.finish_reason,
        }

    def _logprobs(self, places: list[Place]) -> JSON | None:
        if not places:
            return None
        return {
            "tokens": [place.token.written for place in places],
            "token_logprobs": [place.logprob for place in places],
            "top_logprobs": [_by_name(place.others) for place in places] if places[0].others else None,
            "text_offset": [place.offset for place in places],
        }


def _entry(token: TokenText, logprob: float) -> JSON:
    return {"token": token.name, "logprob": logprob, "bytes": list(token.data)}


def _by_name(others: list[tuple[int, TokenText, float]]) -> dict[str, float]:
    """Log-probabilities by name, the likeliest first. Of tokens with one name, the others are called by their ids."""
    named: dict[str, float] = {}
    for token_id, token, logprob in others:
        named[f"token_id:{token_id}" if token.written in named else token.written] = logprob
    return named
