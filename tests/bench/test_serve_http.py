"""The lean HTTP client: bodies of every kind, however the network cuts them, and connections that end too soon."""

import asyncio

import pytest

from selfspec.bench.serve_http import Address, Cut, send

LINES = [b"data: {}", b"", b"data: two", b"", b"last"]
BODY = b"data: {}\r\n\r\ndata: two\n\nlast"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x;note=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


BODIES = {
    "one chunk": (b"Transfer-Encoding: chunked", chunked(BODY)),
    "a chunk for each byte": (
        b"transfer-encoding: Chunked",
        chunked(*(BODY[i : i + 1] for i in range(len(BODY)))),
    ),
    "a length": (b"Content-Length: %d" % len(BODY), BODY),
    "until the end": (b"X-Other: 1", BODY),
}


async def talk(answer: bytes, step: int, request: bytes = b"") -> tuple[int, list[bytes], bytes]:
    """What the client makes of an answer that comes `step` bytes at a time; the status, the lines, and what it sent."""
    received = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        received = await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(len(request))
        for start in range(0, len(answer), step):
            writer.write(answer[start : start + step])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        address = Address.parse(f"http://127.0.0.1:{port}/below/")
        async with asyncio.timeout(10), send(address, "POST", "/v1/x", {"X-Key": "k"}, request) as response:
            return response.status, [line async for line in response.lines()], received


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize("kind", BODIES)
def test_a_body_is_read_however_it_comes(kind: str, step: int) -> None:
    header, body = BODIES[kind]
    head = b"HTTP/1.1 200 OK\r\n" + header + b"\r\n\r\n"
    status, lines, received = asyncio.run(talk(head + body, step, b'{"a": 1}'))
    assert (status, lines) == (200, LINES)
    assert received.startswith(b"POST /below/v1/x HTTP/1.1\r\nHost: 127.0.0.1:") and received.endswith(b'\r\n\r\n{"a": 1}')
    assert b"\r\nX-Key: k\r\n" in received and b"\r\nContent-Length: 8\r\n" in received


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Ty",
        b"not http\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nabc\r\nabc\r\n",
    ],
)
def test_an_answer_that_is_not_whole_is_told(answer: bytes) -> None:
    with pytest.raises(Cut, match="the connection ended before the answer did"):
        asyncio.run(talk(answer, 1000))


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://host:80/v1", Address("host", 80, "/v1")),
        (" https://host ", Address("host", 443, "", True)),
        ("http://[::1]:8000/", Address("::1", 8000)),
    ],
)
def test_addresses_are_read(url: str, address: Address) -> None:
    assert Address.parse(url) == address


@pytest.mark.parametrize("url", ["", "host:80", "ftp://host", "http://", "http://host:port", "http://[::1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not an address: write one such as http"):
        Address.parse(url)


def test_ipv6_has_its_brackets_in_the_host_header() -> None:
    assert Address.parse("http://[::1]:8000").name == "[::1]:8000"


def test_no_connection_is_an_error_of_the_system() -> None:
    async def ask() -> None:
        async with send(Address("127.0.0.1", 1), "GET", "/", {}):
            raise AssertionError("nothing listens there")

    with pytest.raises(ConnectionRefusedError):
        asyncio.run(ask())
