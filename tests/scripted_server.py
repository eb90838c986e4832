"""A server of OpenAI's API that says what a test has written down, as servers of all kinds do, good and bad."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Script:
    """How a server answers.

    Attributes:
        pieces: the texts of an answer's chunks.
        pause: seconds before each.
        usage: what it tells at the end of a stream; None for nothing.
        refuse: the status and message for a request with this body, an empty one for the models; None to answer it.
        counters: the text of `/metrics` after so many answers; None for no such page.
        ending: `whole`, `cut` in the middle of a chunk, `error` for an error as the last event, `other` for an odd event.
        loading_seconds: answers 503 for so long.
    """

    pieces: Sequence[str] = ("one", " two", " three")
    pause: float = 0.0
    usage: dict[str, int] | None = field(default_factory=lambda: {"prompt_tokens": 7, "completion_tokens": 6})
    models: Sequence[str] = ("m",)
    refuse: Callable[[dict[str, Any]], tuple[int, str] | None] = lambda body: None
    counters: Callable[[int], str] | None = None
    streams: bool = True
    ending: str = "whole"
    loading_seconds: float = 0.0


class ScriptedServer:
    """Serves on a port of this machine, in threads of this process, and keeps what it was asked."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_answers = self.most_open = self._num_open = 0
        self.started = time.monotonic()
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                outer._get(self)

            def do_POST(self) -> None:
                # A client may go before it has read everything.
                with contextlib.suppress(ConnectionError):
                    outer._post(self)
                self.close_connection = True

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _get(self, http: BaseHTTPRequestHandler) -> None:
        script = self.script
        if time.monotonic() - self.started < script.loading_seconds:
            _whole(http, 503, {"error": {"message": "the model is loading"}})
        elif http.path == "/v1/models" and (refusal := script.refuse({})) is not None:
            _whole(http, refusal[0], {"error": {"message": refusal[1]}})
        elif http.path == "/v1/models":
            _whole(http, 200, {"data": [{"id": name} for name in script.models]})
        elif http.path == "/metrics" and script.counters is not None:
            _whole(http, 200, script.counters(self.num_answers))
        else:
            _whole(http, 404, {"detail": "Not Found"})

    def _post(self, http: BaseHTTPRequestHandler) -> None:
        script = self.script
        body = json.loads(http.rfile.read(int(http.headers["Content-Length"])))
        with self._lock:
            self.bodies.append(body)
            self.headers.append(dict(http.headers))
        if (refusal := script.refuse(body)) is not None:
            _whole(http, refusal[0], {"error": {"message": refusal[1]}})
            return
        if not body.get("stream") or not script.streams:
            text = json.dumps(body.get("messages", body.get("prompt")))
            usage = {"prompt_tokens": 10 + len(text) // 5, "completion_tokens": 1}
            _whole(http, 200, {"choices": [{"text": "x", "finish_reason": "length"}], "usage": usage})
            return
        http.send_response(200)
        http.send_header("Content-Type", "text/event-stream; charset=utf-8")
        http.send_header("Transfer-Encoding", "chunked")
        http.end_headers()
        for event in self._events("messages" in body):
            http.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            http.wfile.flush()
        if script.ending == "cut":
            http.wfile.write(b"40\r\ndata: {")
            http.close_connection = True
            return
        http.wfile.write(b"0\r\n\r\n")

    def _events(self, is_chat: bool) -> Iterator[bytes]:
        self._count_open(1)
        try:
            yield from self._answer(is_chat)
        finally:
            # Before the client knows, because it may send its next request at once.
            self._count_open(-1)
        if self.script.ending == "whole":
            yield b"data: [DONE]\n\n"

    def _answer(self, is_chat: bool) -> Iterator[bytes]:
        script = self.script
        if is_chat:
            # A chunk without text, as every chat begins with.
            yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for piece in script.pieces:
            time.sleep(script.pause)
            said = {"delta": {"content": piece}} if is_chat else {"text": piece}
            yield _event({"choices": [{"index": 0, **said, "finish_reason": None}], "usage": None})
        if script.ending == "error":
            yield _event({"error": {"message": "the engine met a fault"}})
        elif script.ending == "other":
            yield b"data: [[]]\n\n"
        elif script.ending == "whole":
            yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            if script.usage is not None:
                yield _event({"choices": [], "usage": script.usage})

    def _count_open(self, change: int) -> None:
        with self._lock:
            self._num_open += change
            self.most_open = max(self.most_open, self._num_open)
            self.num_answers += change < 0


def _event(record: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(record).encode() + b"\n\n"


def _whole(http: BaseHTTPRequestHandler, status: int, content: dict[str, Any] | str) -> None:
    data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    http.send_response(status)
    http.send_header("Content-Type", "text/plain" if isinstance(content, str) else "application/json")
    http.send_header("Content-Length", str(len(data)))
    http.end_headers()
    http.wfile.write(data)
