"""A lean HTTP/1.1 client on asyncio, for many answers that stream at once.

A load generator must cost far less than the server that it measures, and a piece of a stream takes less than half of the
time here that it takes httpx (docs/benchmark.md has the figures). So it does one thing: one request on a connection of its
own, whose answer is read as it comes. It follows no redirects and knows no proxies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

# The longest line of a header or a chunk's size.
MAX_LINE_BYTES = 1 << 20
CONNECT_SECONDS = 10.0


class Cut(Exception):
    """The connection ended before the answer did, or what came is not HTTP."""


@dataclass(frozen=True)
class Address:
    """Where a server listens, and what its paths begin with."""

    host: str
    port: int
    prefix: str = ""
    is_secure: bool = False

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read `http://HOST:PORT/PREFIX`.

        Raises:
            ValueError: it is no such address.
        """
        try:
            parts = urlsplit(url.strip())
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https"):
            raise ValueError(f"{url!r} is not an address: write one such as http://127.0.0.1:8000")
        is_secure = parts.scheme == "https"
        return cls(host, port or (443 if is_secure else 80), parts.path.rstrip("/"), is_secure)

    @property
    def name(self) -> str:
        """For the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class Response:
    """An answer whose head has come, and whose body is read from the connection."""

    status: int
    headers: Mapping[str, str]
    _reader: asyncio.StreamReader

    async def lines(self) -> AsyncIterator[bytes]:
        """The lines of the body as they come, without their ends.

        Raises:
            Cut: the body is not whole.
        """
        rest = b""
        async for piece in self._pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self._pieces()])

    async def _pieces(self) -> AsyncIterator[bytes]:
        reader = self._reader
        with _as_cut():
            if "chunked" in self.headers.get("transfer-encoding", "").lower():
                while size := int((await reader.readuntil(b"\n")).partition(b";")[0], 16):
                    # The line end after a chunk is not a part of it.
                    yield (await reader.readexactly(size + 2))[:-2]
            elif "content-length" in self.headers:
                yield await reader.readexactly(int(self.headers["content-length"]))
            else:
                while piece := await reader.read(MAX_LINE_BYTES):
                    yield piece


@contextlib.asynccontextmanager
async def send(
    address: Address, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> AsyncIterator[Response]:
    """Send a request on a new connection, which is closed at the end.

    Raises:
        OSError: the server cannot be reached.
        Cut: it hung up.
    """
    context = ssl.create_default_context() if address.is_secure else None
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context, limit=MAX_LINE_BYTES)
    except TimeoutError as error:
        # Apart from a limit that a caller has set for the whole answer.
        raise ConnectionError(f"no connection within {CONNECT_SECONDS:g} seconds") from error
    try:
        lines = [f"{method} {address.prefix}{path} HTTP/1.1", f"Host: {address.name}", "Connection: close"]
        lines += [f"Content-Length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        with _as_cut():
            # A server may refuse before it has read everything, and its answer is there all the same.
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            status = int((await reader.readuntil(b"\n")).split(maxsplit=2)[1])
            received = {}
            while line := (await reader.readuntil(b"\n")).strip():
                name, _, value = line.decode("latin-1").partition(":")
                received[name.lower()] = value.strip()
        yield Response(status, received, reader)
    finally:
        writer.close()


@contextlib.contextmanager
def _as_cut() -> Iterator[None]:
    try:
        yield
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError, IndexError) as error:
        raise Cut("the connection ended before the answer did") from error
