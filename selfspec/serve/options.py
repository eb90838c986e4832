"""The settings of a server, checked when they are made. This file imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# gpt-oss writes reasoning and calls in channels.
CHANNELS = "harmony"
TOOL_FORMATS = ("auto", "none", "hermes", "mistral", "llama3", CHANNELS)
REASONING_FORMATS = ("auto", "none", "think", "mistral", CHANNELS)
HTTP_PROCESS = ("auto", "on", "off")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How requests are run, and who may send them."""

    served_name: str | None = field(
        default=None, metadata={"help": "the model's name in requests; by default the last part of the target's name"}
    )
    max_batch: int = field(default=16, metadata={"help": "answers that are decoded at once"})
    max_waiting: int = field(default=128, metadata={"help": "answers that may wait for their turn; more are refused (429)"})
    cache_tokens: int = field(default=32768, metadata={"help": "tokens that the KV cache holds for all answers together"})
    prefill_tokens: int = field(default=512, metadata={"help": "prompt tokens that are read between two decoding steps"})
    api_key: Sequence[str] = field(
        default=(), metadata={"help": "a key that requests must bring; repeatable; $SELFSPEC_API_KEY is one too"}
    )
    allowed_host: Sequence[str] = field(
        default=(),
        metadata={
            "help": "a name that requests may call this server by, * for any; repeatable; by default --host, localhost and "
            "addresses, and with an API key any name"
        },
    )
    cors_origin: Sequence[str] = field(
        default=(), metadata={"help": "web origin whose pages may send requests; repeatable; none by default"}
    )
    allow_heads: bool = field(
        default=False,
        metadata={"help": "let requests load drafters, from the Hub and from this machine's disk, and unload them"},
    )
    tool_format: str = field(
        default="auto",
        metadata={"help": f"how the target writes tool calls: {', '.join(TOOL_FORMATS)}; auto asks its chat template"},
    )
    reasoning_format: str = field(
        default="auto",
        metadata={"help": f"how it marks its reasoning: {', '.join(REASONING_FORMATS)}; auto asks its chat template"},
    )
    literal_text: bool = field(
        default=False, metadata={"help": "control tokens in chat messages are text, and only the template writes them"}
    )
    max_body_megabytes: int | None = field(
        default=None, metadata={"help": "most megabytes of a request; by default 1, and more where the context is long"}
    )
    http_process: str = field(
        default="auto",
        metadata={"help": "on or off: HTTP and the engine in two processes; auto is on where the target is on a GPU"},
    )
    log_level: str = field(
        default="info", metadata={"help": "debug, info (requests, too), warning or error: what is logged"}
    )
    no_request_log: bool = field(default=False, metadata={"help": "log no line for each request"})
    drain_seconds: float = field(default=30.0, metadata={"help": "how long running answers may go on after SIGTERM"})
    capture: Path | None = field(default=None, metadata={"help": "directory to log conversations to, for `selfspec data`"})
    capture_share: float = field(default=1.0, metadata={"help": "share of the conversations to log, from 0 to 1"})
    capture_megabytes: int = field(
        default=1024, metadata={"help": "most megabytes that the log may take; the oldest part is deleted"}
    )
    capture_redact: bool = field(default=False, metadata={"help": "replace personal data in the log by placeholders"})

    def __post_init__(self) -> None:
        if self.served_name is not None and not self.served_name.strip():
            raise ValueError("served_name is empty: leave it out, or give one")
        for name, least in (("max_batch", 1), ("max_waiting", 0), ("cache_tokens", 1), ("prefill_tokens", 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}={value} is not allowed: use {least} or more")
        for name, known in (
            ("tool_format", TOOL_FORMATS),
            ("reasoning_format", REASONING_FORMATS),
            ("http_process", HTTP_PROCESS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known: use one of {', '.join(known)}")
        if not self.drain_seconds >= 0:
            raise ValueError(f"drain_seconds={self.drain_seconds} is not allowed: use 0 or more")
        if self.max_body_megabytes is not None and self.max_body_megabytes < 1:
            raise ValueError(f"max_body_megabytes={self.max_body_megabytes} is not allowed: use 1 or more")
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"log_level={self.log_level!r} is not allowed: use {', '.join(LOG_LEVELS)}")
        if any(not host.strip() for host in self.allowed_host):
            raise ValueError("an allowed_host is empty: leave it out, or give one such as api.example")
        if any(not key.strip() for key in self.api_key):
            raise ValueError("an api_key is empty: leave it out, or give one")
        if any(not origin.strip() for origin in self.cors_origin):
            raise ValueError("a cors_origin is empty: leave it out, or give one such as https://page.example")
