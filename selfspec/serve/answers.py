"""The JSON that clients know, from an engine's events: whole answers, and the pieces of a stream."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from selfspec.api import Completion
from selfspec.engine import Event
from selfspec.loop.sequence import Request
from selfspec.serve.parts import PartParser, Parts
from selfspec.serve.token_names import Place, Reading, TokenText

JSON = dict[str, Any]
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def to_json(content: Any) -> bytes:
    return _ENCODER.encode(content).encode()


class Answer(ABC):
    """The form of one call's answer.

    Args:
        answer_id: the id that the answer and every piece of a stream carry.
        tokenizer: names the tokens in log-probabilities.
        num_samples: samples for each prompt.
        drafter: the drafter's name, for the usage.
        requests: what was asked, in the order of the choices.
    """

    kind: str
    chunk_kind: str

    def __init__(
        self,
        answer_id: str,
        model: str,
        tokenizer: Any,
        num_samples: int,
        drafter: str,
        requests: Sequence[Request],
    ) -> None:
        self.head: JSON = {"id": answer_id, "created": int(time.time()), "model": model}
        # What all pieces of a stream begin with is written once.
        self._opening = to_json({**self.head, "object": self.chunk_kind})[:-1] + b',"choices":'
        self.num_samples = num_samples
        self.drafter = drafter
        self._tokenizer = tokenizer
        self._requests = requests
        self._readings: dict[int, Reading] = {}

    def choice_index(self, request: Request) -> int:
        return request.index * self.num_samples + request.sample_index

    def whole(self, completions: list[Completion]) -> JSON:
        """The whole answer, from completions in any order."""
        order = sorted(completions, key=lambda c: (c.prompt_index, c.sample_index))
        choices = [self.choice(index, each) | self._end(index, each) for index, each in enumerate(order)]
        return {**self.head, "object": self.kind, "choices": choices, "usage": usage(order, self.drafter)}

    def line(self, choices: list[JSON], **more: Any) -> bytes:
        """A chunk of a stream as a server-sent event."""
        end = b"," + to_json(more)[1:] if more else b"}"
        return b"data: " + self._opening + to_json(choices) + end + b"\n\n"

    def first_choices(self, num_prompts: int) -> list[JSON]:
        """What opens a stream, a chunk each."""
        return []

    def next_choice(self, event: Event) -> JSON:
        """What an event adds to a stream."""
        return self.piece(event) | self._end(self.choice_index(event.request), event.completion)

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


class ChatAnswer(Answer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, *args: Any, new_parser: Callable[[], PartParser | None] = lambda: None) -> None:
        super().__init__(*args)
        self._new_parser = new_parser
        # For each choice of a stream.
        self._parsers: dict[int, PartParser | None] = {}
        self._num_calls: dict[int, int] = {}

    def first_choices(self, num_prompts: int) -> list[JSON]:
        opening = {"role": "assistant", "content": ""}
        indices = range(num_prompts * self.num_samples)
        return [{"index": index, "delta": opening, "logprobs": None, "finish_reason": None} for index in indices]

    def message(self, completion: Completion) -> JSON:
        """The answer, taken apart."""
        parts = _parts(self._new_parser(), completion.text, is_last=True)
        said = {"reasoning_content": parts.reasoning, "tool_calls": [call.record() for call in parts.calls]}
        return {
            "role": "assistant",
            "content": parts.content if parts.content or not parts.calls else None,
            "refusal": None,
            **{name: value for name, value in said.items() if value},
        }

    def choice(self, index: int, completion: Completion) -> JSON:
        message = self.message(completion)
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
        parts = _parts(self._parsers[index], event.text, is_last=event.completion is not None)
        num_before = self._num_calls.get(index, 0)
        self._num_calls[index] = num_before + len(parts.calls)
        calls = [{"index": i, **call.record()} for i, call in enumerate(parts.calls, num_before)]
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


def _parts(parser: PartParser | None, text: str, *, is_last: bool) -> Parts:
    return Parts(content=text) if parser is None else parser.push(text, is_last=is_last)


def _finish_reason(completion: Completion, num_calls: int) -> str:
    return "tool_calls" if num_calls and completion.finish_reason == "stop" else completion.finish_reason


class CompletionAnswer(Answer):
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


def usage(completions: list[Completion], drafter: str) -> JSON:
    """Tokens as OpenAI counts them (a prompt once, however many samples it has), and what speculation did."""
    firsts = [completion for completion in completions if completion.sample_index == 0]
    num_prompt = sum(completion.num_prompt_tokens for completion in firsts)
    num_completion = sum(len(completion.token_ids) for completion in completions)
    num_passes = sum(completion.num_target_passes for completion in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(completion.num_reused_tokens for completion in firsts)},
        "speculation": {
            "drafter": drafter,
            "draft_tokens": sum(completion.num_draft_tokens for completion in completions),
            "accepted_tokens": sum(completion.num_accepted_tokens for completion in completions),
            "verify_passes": num_passes,
            "acceptance_length": num_completion / num_passes,
            "queue_seconds": max(completion.queue_seconds for completion in completions),
            "prefill_seconds": sum(completion.prefill_seconds for completion in completions),
            "decode_seconds": sum(completion.seconds - completion.prefill_seconds for completion in completions),
        },
    }


def running_usage(num_prompt: int, num_completion: int, num_passes: int) -> JSON:
    """The usage of one choice so far."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "speculation": {"verify_passes": num_passes},
    }
