"""Turns an engine's events into the JSON that clients know, as a whole answer or as a stream."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from selfspec.api import Completion
from selfspec.engine import Event, SpecEngine
from selfspec.loop.sequence import Request
from selfspec.serve.errors import api_error

JSON = dict[str, Any]


class Events:
    """The events of one call's requests, on the event loop. Closing it early cancels the requests that are left.

    Raises:
        ValueError, EngineFull, EngineClosed: the engine does not take the requests (see `SpecEngine.submit`).
    """

    def __init__(self, engine: SpecEngine, requests: Sequence[Request], drafter: str | None) -> None:
        loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._num_left = len(requests)

        def put(event: Event) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, event)

        self._handle = engine.submit(requests, put, drafter=drafter)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while self._num_left:
            event = await self._queue.get()
            self._num_left -= event.is_last
            if event.error is not None:
                # A call has one answer, so its other samples are of no use now.
                self.close()
                raise event.error
            yield event

    def close(self) -> None:
        if self._num_left:
            self._num_left = 0
            self._handle.cancel()


@lru_cache(maxsize=4)
def _naming(tokenizer: Any) -> tuple[frozenset[int], int, str]:
    """The special ids, and an ordinary token with its text that makes whole characters, after which others are decoded."""
    special = frozenset(tokenizer.all_special_ids)
    ids = (i for i in range(len(tokenizer)) if i not in special)
    anchor = next((i for i in ids if tokenizer.decode([i]).isalpha()), 0)
    return special, anchor, tokenizer.decode([anchor])


class Answer(ABC):
    """The form of one call's answer.

    Args:
        answer_id: the id that the answer and every piece of a stream carry.
        tokenizer: names the tokens in log-probabilities.
        num_samples: samples for each prompt.
        drafter: the drafter's name, for the usage.
    """

    kind: str
    chunk_kind: str

    def __init__(self, answer_id: str, model: str, tokenizer: Any, num_samples: int, drafter: str) -> None:
        self.head: JSON = {"id": answer_id, "created": int(time.time()), "model": model}
        self.num_samples = num_samples
        self.drafter = drafter
        self._tokenizer = tokenizer
        self._special_ids, self._anchor, self._anchor_text = _naming(tokenizer)

    def choice_index(self, request: Request) -> int:
        return request.index * self.num_samples + request.sample_index

    def whole(self, completions: list[Completion]) -> JSON:
        """The whole answer, from completions in any order."""
        order = sorted(completions, key=lambda c: (c.prompt_index, c.sample_index))
        choices = [self.choice(index, completion) for index, completion in enumerate(order)]
        return {**self.head, "object": self.kind, "choices": choices, "usage": usage(order, self.drafter)}

    def chunk(self, choices: list[JSON], **more: Any) -> JSON:
        return {**self.head, "object": self.chunk_kind, "choices": choices, **more}

    def first_chunks(self, num_prompts: int) -> list[JSON]:
        """The chunks that open a stream."""
        return []

    @abstractmethod
    def choice(self, index: int, completion: Completion) -> JSON:
        """One choice of a whole answer."""

    @abstractmethod
    def piece(self, event: Event) -> JSON:
        """What an event adds to its choice."""

    def _name(self, token_id: int) -> str:
        """The text that a token makes within a text: many tokenizers drop a space at the very beginning."""
        whole = self._tokenizer.decode([self._anchor, token_id])
        return whole[len(self._anchor_text) :] if whole.startswith(self._anchor_text) else self._tokenizer.decode([token_id])

    def _length(self, token_id: int) -> int:
        """How many characters of the answer's text a token makes; special tokens are no part of it."""
        return 0 if token_id in self._special_ids else len(self._name(token_id))


class ChatAnswer(Answer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first_chunks(self, num_prompts: int) -> list[JSON]:
        opening = {"role": "assistant", "content": ""}
        return [
            self.chunk([{"index": index, "delta": opening, "logprobs": None, "finish_reason": None}])
            for index in range(num_prompts * self.num_samples)
        ]

    def choice(self, index: int, completion: Completion) -> JSON:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion.token_ids, completion.logprobs, completion.top_logprobs),
            "finish_reason": completion.finish_reason,
        }

    def piece(self, event: Event) -> JSON:
        return {
            "index": self.choice_index(event.request),
            "delta": {"content": event.text} if event.text else {},
            "logprobs": self._logprobs(event.token_ids, event.logprobs or None, event.top_logprobs),
            "finish_reason": event.completion and event.completion.finish_reason,
        }

    def _logprobs(
        self, token_ids: list[int], logprobs: list[float] | None, top: list[list[tuple[int, float]]] | None
    ) -> JSON | None:
        if logprobs is None:
            return None
        entries = []
        for i, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
            others = [self._entry(*pair) for pair in top[i]] if top else []
            entries.append({**self._entry(token_id, logprob), "top_logprobs": others})
        return {"content": entries, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> JSON:
        name = self._name(token_id)
        # A token that is part of a character decodes to a replacement character, whose bytes would be wrong.
        return {"token": name, "logprob": logprob, "bytes": None if "\ufffd" in name else list(name.encode())}


class CompletionAnswer(Answer):
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # For each choice, how many characters were shown: the offset of the next token.
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, completion: Completion) -> JSON:
        logprobs = self._logprobs(index, completion.token_ids, completion.logprobs, completion.top_logprobs)
        return {"index": index, "text": completion.text, "logprobs": logprobs, "finish_reason": completion.finish_reason}

    def piece(self, event: Event) -> JSON:
        index = self.choice_index(event.request)
        logprobs = self._logprobs(index, event.token_ids, event.logprobs or None, event.top_logprobs)
        reason = event.completion and event.completion.finish_reason
        return {"index": index, "text": event.text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(
        self, index: int, token_ids: list[int], logprobs: list[float] | None, top: list[list[tuple[int, float]]] | None
    ) -> JSON | None:
        if logprobs is None:
            return None
        names = [self._name(token_id) for token_id in token_ids]
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + self._length(token_id)
        # Tokens may share a name (most are parts of characters). The likeliest comes last here, so it stays.
        tops = [{self._name(token_id): logprob for token_id, logprob in reversed(entries)} for entries in top or []]
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops or None, "text_offset": offsets}


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


async def collect(events: Events, on_completion: Callable[[Completion], None]) -> list[Completion]:
    """All completions of a call; `on_completion` is called with each as soon as it is there."""
    completions = []
    async for event in events:
        if event.completion is not None:
            on_completion(event.completion)
            completions.append(event.completion)
    return completions


async def lines(
    answer: Answer,
    events: Events,
    on_completion: Callable[[Completion], None],
    *,
    num_prompts: int,
    wants_usage: bool,
    wants_running_usage: bool,
    use_logprobs: bool,
) -> AsyncIterator[bytes]:
    """A stream's server-sent events. An error in the middle is an event of its own, the last one."""
    completions = []
    # If usage is asked for, OpenAI's chunks have an empty one until the last.
    more: JSON = {"usage": None} if wants_usage else {}
    # For each choice, its tokens and passes so far.
    running: dict[int, tuple[int, int]] = {}
    try:
        for chunk in answer.first_chunks(num_prompts):
            yield _line({**chunk, **more})
        async for event in events:
            if event.completion is not None:
                on_completion(event.completion)
                completions.append(event.completion)
            if wants_running_usage:
                index = answer.choice_index(event.request)
                num_tokens, num_passes = running.get(index, (0, 0))
                running[index] = num_tokens, num_passes = num_tokens + len(event.token_ids), num_passes + 1
                more = {"usage": running_usage(len(event.request.prompt_ids), num_tokens, num_passes)}
            # A step may have nothing to show: its text waits for the rest of a character, or may become a stop string.
            has_counts = (use_logprobs or wants_running_usage) and event.token_ids
            if event.text or event.completion is not None or has_counts:
                yield _line(answer.chunk([answer.piece(event)], **more))
        if wants_usage:
            yield _line(answer.chunk([], usage=usage(completions, answer.drafter)))
        yield b"data: [DONE]\n\n"
    except Exception as error:
        yield _line(api_error(error).body())


def _line(content: JSON) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends lines as they come. When the client goes, it stops at once, even while there is nothing to send.

    It closes the events itself, because a client may go before the first line is asked for, and a generator that never
    started runs no `finally`.
    """

    media_type = "text/event-stream"

    def __init__(self, lines: AsyncIterator[bytes], events: Events) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._lines = lines
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        finally:
            self._events.close()
            await self._lines.aclose()  # type: ignore[attr-defined]

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for line in self._lines:
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Callable[[], Awaitable[Message]], work: Any) -> Any:
    """The result of `work`. If the client goes first, the work is cancelled and the result is None."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(until_gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        # A cancelled task runs on until its next await.
        await asyncio.gather(*tasks, return_exceptions=True)
