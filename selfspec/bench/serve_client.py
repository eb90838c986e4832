"""A client of an OpenAI-compatible server: its models, its counters, and answers whose pieces are timed as they come."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from selfspec.bench.serve_http import Address, Cut, Response, send

JSON = dict[str, Any]

ENDPOINTS = {"chat": "/chat/completions", "completions": "/completions"}
# Short requests: the models, the counters, and one prompt's length.
SHORT_SECONDS = 30.0
POLL_SECONDS = 0.5
DONE = b"data: [DONE]"
# The status of a server that is not ready.
LOADING = 503
SAMPLES = re.MULTILINE | re.IGNORECASE
# What a piece of a chat may bring.
TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")


class Refused(Exception):
    """A request that was not answered, and why, in a few words.

    Attributes:
        may_pass: the server may only not be ready yet.
    """

    def __init__(self, reason: str, *, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


@dataclass(frozen=True)
class Prompt:
    """What a request asks: chat messages, or raw text to be continued."""

    messages: list[dict[str, str]]

    @property
    def text(self) -> str:
        return "\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """How every request is sent.

    Attributes:
        endpoint: `chat` or `completions`.
        timeout: the most seconds for one answer.
    """

    endpoint: str = "chat"
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    timeout: float = 600.0


@dataclass(frozen=True)
class Answer:
    """What became of a request. Times are seconds of one clock, that of `time.perf_counter`.

    Attributes:
        due: when it was to be sent, connecting included.
        chunk_times: when each chunk with text came.
        ended: when its last byte came, or it failed.
        num_tokens: tokens of the answer as the server counts them, or else its chunks.
        is_counted: the server has counted them.
        failure: why there is no whole answer; None if there is one.
    """

    due: float
    chunk_times: list[float]
    ended: float
    num_tokens: int
    num_prompt_tokens: int | None = None
    is_counted: bool = True
    failure: str | None = None

    @property
    def first_seconds(self) -> float:
        """Until the first token. An answer without text has its only token at its end."""
        return (self.chunk_times[0] if self.chunk_times else self.ended) - self.due

    @property
    def seconds(self) -> float:
        return self.ended - self.due

    @property
    def seconds_per_token(self) -> float | None:
        """After the first token; None if there is only one."""
        return (self.seconds - self.first_seconds) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass
class Server:
    """A server at an address, and how its requests differ from those of other servers.

    Attributes:
        model: the model to ask for; None until `find_model` has asked which there is.
        more: fields that are added to every request.
    """

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.url = self.url.strip().rstrip("/").removesuffix("/v1")
        self._address = Address.parse(self.url)

    async def find_model(self, wait_seconds: float = 0.0) -> None:
        """Take the only model, or check that the one asked for is there. Waits for a server that still loads.

        Raises:
            ValueError: the server does not answer, refuses, or has no such model.
        """
        deadline = time.perf_counter() + wait_seconds
        while True:
            try:
                record = await self._json("GET", "/v1/models")
                break
            except Refused as error:
                if not error.may_pass or time.perf_counter() > deadline:
                    raise ValueError(f"{self.url} {error}") from error
                await asyncio.sleep(POLL_SECONDS)
        try:
            models = [entry["id"] for entry in record["data"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.url} is not a server of OpenAI's API: correct the address") from error
        if self.model is None:
            if not models:
                raise ValueError(f"{self.url} lists no model: name one with --model")
            self.model = models[0]
        elif self.model not in models:
            raise ValueError(f"{self.url} has no model {self.model!r}: use {' or '.join(models)} for --model")

    async def counters(self) -> dict[str, float]:
        """Every sample of `/metrics` by its name, summed over its labels; nothing if the server has none."""
        try:
            async with asyncio.timeout(SHORT_SECONDS), self._send("GET", "/metrics") as response:
                text = await response.body() if response.status == 200 else b""
        except (OSError, Cut):
            return {}
        return read_counters(text.decode(errors="replace"))

    async def count_prompt_tokens(self, text: str, ask: Ask) -> int:
        """The tokens of a prompt, by the server's own count.

        Raises:
            ValueError: the server refuses, or does not count.
        """
        body = self._body(Prompt([{"role": "user", "content": text}]), ask) | {"stream": False, "max_tokens": 1}
        del body["stream_options"]
        try:
            record = await self._json("POST", f"/v1{ENDPOINTS[ask.endpoint]}", body)
            return int(record["usage"]["prompt_tokens"])
        except Refused as error:
            raise ValueError(f"{self.url} {error}") from error
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{self.url} does not count a prompt's tokens: leave out --input-tokens and --shared-prefix"
            ) from error

    async def answer(self, prompt: Prompt, ask: Ask, due: float) -> Answer:
        """Send a request and read its stream. A failure is a part of what is returned."""
        times: list[float] = []
        usage: JSON | None = None
        failure = None
        try:
            async with asyncio.timeout(ask.timeout):
                usage = await self._stream(self._body(prompt, ask), ask.endpoint, times)
        except TimeoutError:
            failure = f"no whole answer within {ask.timeout:g} seconds"
        except (Refused, Cut) as error:
            failure = str(error)
        except OSError as error:
            failure = f"no connection: {_cause(error)}"
        ended = time.perf_counter()
        counted = (usage or {}).get("completion_tokens")
        num_tokens = len(times) if counted is None else int(counted)
        return Answer(due, times, ended, num_tokens, (usage or {}).get("prompt_tokens"), counted is not None, failure)

    async def _stream(self, body: JSON, endpoint: str, times: list[float]) -> JSON | None:
        """Note when the chunks with text come; returns the usage that the server tells."""
        usage, is_whole = None, False
        async with self._send("POST", f"/v1{ENDPOINTS[endpoint]}", body) as response:
            if response.status != 200:
                raise Refused(_reason(response, await response.body()))
            if "text/event-stream" not in response.headers.get("content-type", ""):
                raise Refused("does not stream its answers: measure a server that does")
            async for line in response.lines():
                now = time.perf_counter()
                if line.startswith(DONE):
                    return usage
                if not line.startswith(b"data:"):
                    continue
                try:
                    chunk = json.loads(line[5:])
                    choices, usage = chunk.get("choices") or (), chunk.get("usage") or usage
                    has_text = any(
                        choice.get("text") or any(map((choice.get("delta") or {}).get, TEXTS)) for choice in choices
                    )
                    is_whole = is_whole or any(choice.get("finish_reason") is not None for choice in choices)
                except (ValueError, TypeError, AttributeError) as error:
                    raise Refused("sent what is no chunk of OpenAI's API") from error
                if "error" in chunk:
                    raise Refused(f"gave up: {_message(chunk) or 'no reason given'}")
                if has_text:
                    times.append(now)
        if not is_whole:
            raise Cut("the connection ended before the answer did")
        return usage

    def _body(self, prompt: Prompt, ask: Ask) -> JSON:
        asked = {"messages": prompt.messages} if ask.endpoint == "chat" else {"prompt": prompt.text}
        body = {"model": self.model, **asked, "max_tokens": ask.max_tokens, "temperature": ask.temperature}
        if ask.ignore_eos:
            body["ignore_eos"] = True
        return {**body, "stream": True, "stream_options": {"include_usage": True}, **self.more}

    async def _json(self, method: str, path: str, body: JSON | None = None) -> JSON:
        """The JSON that a short request brings.

        Raises:
            Refused: there is none.
        """
        try:
            async with asyncio.timeout(SHORT_SECONDS), self._send(method, path, body) as response:
                content = await response.body()
        except TimeoutError as error:
            raise Refused("has not answered in time: see what it is doing, and try again", may_pass=True) from error
        except (OSError, Cut) as error:
            reason = f"does not answer ({_cause(error)}): start the server, or correct the address"
            raise Refused(reason, may_pass=True) from error
        if response.status != 200:
            raise Refused(_reason(response, content), may_pass=response.status == LOADING)
        try:
            return json.loads(content)
        except ValueError as error:
            raise Refused("is not a server of OpenAI's API: correct the address") from error

    def _send(self, method: str, path: str, body: JSON | None = None) -> Any:
        headers = {"Accept": "*/*"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        content = b""
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = json.dumps(body).encode()
        return send(self._address, method, path, headers, content)


def read_counters(text: str) -> dict[str, float]:
    """Samples in Prometheus' text format by their name, summed over their labels."""
    sums: dict[str, float] = {}
    # What is no number, or NaN, is left out.
    for name, value in re.findall(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?[ \t]+(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b", text, SAMPLES):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def acceptance_length(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Tokens per target pass between two readings of a server's counters, bonus token included; None if it tells neither."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    if rows := grown("selfspec:verify_rows_total"):
        return grown("selfspec:generation_tokens_total") / rows
    if drafts := grown("vllm:spec_decode_num_drafts_total"):
        return 1 + grown("vllm:spec_decode_num_accepted_tokens_total") / drafts
    return None


def _reason(response: Response, content: bytes) -> str:
    """Why a request was refused, as a sentence that goes on after the server's address."""
    try:
        message = _message(json.loads(content))
    except ValueError:
        message = None
    if response.status == 401:
        return "refuses the API key: give the right one with --api-key"
    return f"refuses ({response.status}): {message or 'no reason given'}"


def _message(record: Any) -> str | None:
    """The message of an error in OpenAI's form, or in one of those that others use."""
    error = record.get("error", record) if isinstance(record, dict) else record
    message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    return " ".join(str(message).split()) if message else None


def _cause(error: Exception) -> str:
    """A system's words for why a connection failed, without the address, which the sentence has already."""
    if isinstance(error, socket.gaierror):
        return str(error.strerror).lower()
    # Where a name has several addresses, the error is a list of them in a text.
    number = getattr(error, "errno", None) or next(iter(re.findall(r"\[Errno (\d+)\]", str(error))), None)
    return os.strerror(int(number)).lower() if number else str(error) or "no connection in time"
