"""A client of a running `selfspec serve`: its drafters, and answers that stream over its API.

Requests run on an event loop in their own thread, so a stop closes their connections at once, whatever the server is doing;
the server then cancels the requests. A column's clock runs on this side, from sending the request to receiving a piece.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from selfspec.app.address import api_of
from selfspec.app.records import Figures, Tick

JSON = dict[str, Any]

CONNECT_SECONDS = 5.0
# Long, because an answer may wait its turn. A server that has gone closes the connection.
READ_SECONDS = 600.0
# A stop is noticed within this time.
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Piece:
    """What one step added to an answer.

    Attributes:
        at: seconds since the request was sent.
        num_tokens, num_passes: counts of the answer so far.
    """

    at: float
    text: str
    num_tokens: int
    num_passes: int


@dataclass
class RemoteColumn:
    """One drafter's answer so far. At its end, `speculation` holds the server's own counts."""

    name: str
    label: str
    pieces: list[Piece] = field(default_factory=list)
    finish_reason: str | None = None
    speculation: JSON | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def figures(self) -> Figures | None:
        """None before the first step. At the end, passes are as the server counted them."""
        if not self.pieces or not self.pieces[-1].num_tokens:
            return None
        first, last = self.pieces[0], self.pieces[-1]
        num_passes = self.speculation["verify_passes"] if self.speculation else last.num_passes
        return Figures(last.num_tokens, num_passes, last.at, first.num_tokens, first.at)

    @property
    def seconds(self) -> float:
        """When its last piece came."""
        return self.pieces[-1].at if self.pieces else 0.0

    @property
    def times(self) -> list[float]:
        """When its pieces came."""
        return [piece.at for piece in self.pieces]

    def until(self, seconds: float) -> RemoteColumn:
        """The column as it stood at `seconds` of its own clock."""
        pieces = [piece for piece in self.pieces if piece.at <= seconds]
        if len(pieces) == len(self.pieces):
            return self
        return RemoteColumn(self.name, self.label, pieces)

    def ticks(self) -> list[Tick]:
        """What each piece added. Every pass gives one token of the target's own, so the rest of its tokens were drafted."""
        ticks, num_tokens, num_passes = [], 0, 0
        for piece in self.pieces:
            num_new = piece.num_tokens - num_tokens
            num_drafted = max(0, num_new - (piece.num_passes - num_passes))
            ticks.append(Tick(num_new, num_drafted, self.name != "none"))
            num_tokens, num_passes = piece.num_tokens, piece.num_passes
        return ticks

    def take(self, chunk: JSON, at: float) -> None:
        """Add a chunk of the stream."""
        choices, usage = chunk["choices"], chunk.get("usage")
        if usage is not None and not choices:
            self.speculation = usage["speculation"]
        if usage is None or not choices:
            return
        choice = choices[0]
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        self.pieces.append(Piece(at, text, usage["completion_tokens"], usage["speculation"]["verify_passes"]))
        self.finish_reason = choice["finish_reason"]


@dataclass(frozen=True)
class Call:
    """A request to an endpoint that streams."""

    path: str
    body: JSON


class Server:
    """The API at an address, such as `http://127.0.0.1:8000/v1`.

    Raises:
        ValueError: this is not an HTTP address. Every method raises one, in one sentence, if the server fails or refuses.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = api_of(url)
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "timeout": httpx.Timeout(CONNECT_SECONDS, read=READ_SECONDS),
        }

    def model(self) -> str:
        """The name of the model that it serves."""
        return self._get("models")[0]["id"]

    def drafters(self) -> list[str]:
        """The names of the drafters that work, without `none`."""
        heads = self._get("heads")
        return [head["id"] for head in heads if head["status"] == "ready" and head["id"] != "none"]

    def metrics(self) -> str:
        """Its figures in Prometheus' text format."""
        try:
            response = httpx.get(self.url.removesuffix("/v1") + "/metrics", timeout=CONNECT_SECONDS)
        except httpx.HTTPError as error:
            raise ValueError(self._failure(error)) from error
        if response.status_code != 200:
            raise ValueError(self._refusal(response))
        return response.text

    def stream(
        self, calls: Mapping[str, Call], is_stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[str, JSON, float]]:
        """Run calls at the same time. Yields (name, chunk, seconds since its call was sent) as chunks come.

        A stop, an error and closing the iterator end all of them.
        """
        news: queue.SimpleQueue[tuple[str, JSON, float] | Exception | None] = queue.SimpleQueue()
        loop = asyncio.new_event_loop()
        task = loop.create_task(self._follow_all(calls, news))

        def run() -> None:
            try:
                loop.run_until_complete(task)
                news.put(None)
            except asyncio.CancelledError:
                pass
            except Exception as error:
                news.put(error)
            finally:
                loop.run_until_complete(loop.shutdown_asyncgens())

        thread = threading.Thread(target=run, name="selfspec-streams", daemon=True)
        thread.start()
        try:
            while not is_stopped():
                try:
                    item = news.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    continue
                if item is None:
                    return
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            # This does nothing if the task is done; the loop is still open.
            loop.call_soon_threadsafe(task.cancel)
            thread.join()
            loop.close()

    async def _follow_all(self, calls: Mapping[str, Call], news: queue.SimpleQueue[Any]) -> None:
        try:
            async with httpx.AsyncClient(**self._options) as client, asyncio.TaskGroup() as group:
                for name, call in calls.items():
                    group.create_task(self._follow(client, name, call, news))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _follow(self, client: httpx.AsyncClient, name: str, call: Call, news: queue.SimpleQueue[Any]) -> None:
        start = time.perf_counter()
        try:
            async with client.stream("POST", call.path, json=call.body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise ValueError(self._refusal(response))
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            raise ValueError(f"{self.url} gave up on {name}: {chunk['error']['message']}")
                        news.put((name, chunk, time.perf_counter() - start))
        except httpx.HTTPError as error:
            raise ValueError(self._failure(error)) from error
        raise ValueError(self._gone())

    def _get(self, path: str) -> list[JSON]:
        try:
            with httpx.Client(**self._options) as client:
                response = client.get(path, timeout=CONNECT_SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(self._failure(error)) from error
        if response.status_code != 200:
            raise ValueError(self._refusal(response))
        try:
            return response.json()["data"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.url} is not a selfspec server: correct the address") from error

    def _refusal(self, response: httpx.Response) -> str:
        if response.status_code == 401:
            return f"{self.url} refuses this page's API key: open the page with the right --api-key"
        try:
            reason = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return (
                f"{self.url} is not a selfspec server ({response.status_code} for {response.url.path}): correct the address"
            )
        return f"{self.url} refuses: {reason}"

    def _failure(self, error: Exception) -> str:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.InvalidURL):
            return f"{self.url} does not answer: start `selfspec serve` there, or correct the address"
        if isinstance(error, httpx.TimeoutException):
            return f"{self.url} has not answered in time: see what it is doing, and try again"
        return self._gone()

    def _gone(self) -> str:
        return f"{self.url} went away before its answer was whole: see whether the server still runs, and try again"
