"""Requests that were made to hurt, one kind after the other, against a server of its own on one core.

    python tests/serve/attacks.py --target PATH_OR_ID

During each attack one process asks for `/health` every 50 milliseconds, and another sends ordinary requests of one line in
turn. Prints a table: what the attackers were told, how long they took, the slowest `/health`, the slowest ordinary request
during the attack and the first one after it, and the server's memory.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MEGABYTE = 10**6
# An attacker waits no longer for an answer.
PATIENCE = 60.0
PROBE_SECONDS = 0.05
ONE_LINE = {"prompt": "the cat sat on", "max_tokens": 4, "temperature": 0}


@dataclass(frozen=True)
class Attack:
    """What attackers send, all of them at once.

    Args:
        body: makes the request's body; an iterator of pieces is sent without its length.
        pause: seconds between the pieces.
        leaves_after: seconds after which the attackers close their connections.
    """

    body: Callable[[], bytes | Iterable[bytes]]
    path: str = COMPLETION
    num_attackers: int = 1
    leaves_after: float = PATIENCE
    pause: float = 0.0
    host: str | None = None


def completion(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"model": "attacked", **ONE_LINE, **fields}).encode()


def chat(**fields: Any) -> Callable[[], bytes]:
    user = {"role": "user", "content": "the cat"}
    return lambda: json.dumps({"model": "attacked", "max_tokens": 4, "messages": [user], **fields}).encode()


def form(**fields: Any) -> Callable[[], bytes]:
    return completion(response_format=fields)


def schema(content: Any) -> Callable[[], bytes]:
    return form(type="json_schema", json_schema={"name": "x", "schema": content})


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def digits(count: int) -> str:
    return "".join(random.Random(0).choices("0123456789", k=count))


def references(count: int) -> dict[str, Any]:
    """Objects that refer to each other in a chain."""
    chain = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{count}": {"type": "null"}}}


def rules(count: int) -> str:
    """Rules of a Lark grammar that refer to each other in a chain."""
    return "\n".join(["start: a0", *(f'a{i}: "x{i}" a{i + 1}' for i in range(count)), f'a{count}: "a"'])


def doubling(depth: int) -> str:
    return "\n".join([f"start: a{depth}", *(f"a{i}: a{i - 1} a{i - 1}" for i in range(1, depth + 1)), 'a0: "a"'])


def raw(text: bytes) -> Callable[[], bytes]:
    return lambda: text


def trickle() -> Iterator[bytes]:
    yield b'{"model": "attacked", "prompt": "'
    while True:
        yield b"a"


PROPERTIES = {f"p{i}": {"type": "string"} for i in range(3000)}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}}
ATTACKS: dict[str, Attack] = {
    "nothing": Attack(completion()),
    "20,000 prompts, n=128": Attack(completion(prompt=["a"] * 20_000, n=128)),
    "200,000 prompts": Attack(completion(prompt=["a"] * 200_000)),
    "500 prompts, n=128": Attack(completion(prompt=["a"] * 500, n=128)),
    "a prompt of 10 MB": Attack(completion(prompt="the cat " * (10 * MEGABYTE // 8))),
    "7 prompts of 2 MB, all left after 1 s": Attack(
        completion(prompt="the cat " * (2 * MEGABYTE // 8)), num_attackers=7, leaves_after=1
    ),
    "250,000 messages": Attack(chat(messages=[{"role": "user", "content": "a"}] * 250_000), CHAT),
    "3 million stop_token_ids": Attack(completion(stop_token_ids=[5] * 3_000_000)),
    "10 MB of numbers in JSON": Attack(completion(metadata={"a": [1] * (10 * MEGABYTE // 3)})),
    "49,152 biases, n=128": Attack(completion(logit_bias={str(i % 300 + i): 1 for i in range(49_152)}, n=128)),
    "100,000 brackets": Attack(raw(b"[" * 100_000)),
    "50,000 nested objects": Attack(raw(b'{"metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001)),
    "a message nested 900 deep": Attack(chat(messages=[{"role": "user", "content": "a", "foo": nested(900)}]), CHAT),
    "16 stops of 40,000 characters": Attack(completion(stop=[f"{i:02}" + "a" * 39_998 for i in range(16)], max_tokens=200)),
    "regex a{1000000}": Attack(form(type="regex", pattern="a{1000000}")),
    "Lark rules that double 30 times": Attack(form(type="grammar", grammar=doubling(30))),
    "a schema of 3,000 properties": Attack(schema({"type": "object", "properties": PROPERTIES})),
    "another name in Host": Attack(completion(), host="evil.example:8000"),
    # As bad as the limits allow, or aimed at the checks themselves.
    "1 MB of empty lists, 8 times": Attack(raw(b'{"metadata": {"a": [' + b"[]," * 349_000 + b"1]}}"), num_attackers=8),
    "80,000 unknown fields": Attack(raw(b"{" + b",".join(b'"x%d":1' % i for i in range(80_000)) + b"}")),
    "a schema of 1,600 references": Attack(schema(references(1600))),
    "10,000 Lark rules in a chain": Attack(form(type="grammar", grammar=rules(10_000))),
    "quotes in a string without end": Attack(raw(b'{"prompt": "' + b"[" * 200_000 + b'\\"' * 400_000)),
    "64 prompts of 900 kB of digits, all left after 1 s": Attack(
        completion(prompt=digits(900_000)), num_attackers=64, leaves_after=1
    ),
    "16 prompts of 500 kB of digits": Attack(completion(prompt=digits(500_000)), num_attackers=16),
    "100 MB in pieces": Attack(lambda: iter([b"a" * 2**16] * 1600)),
    "200 bodies of a byte a second": Attack(trickle, num_attackers=200, pause=1, leaves_after=10),
    "2,048 messages and 100 kB of tools, 16 times": Attack(
        chat(messages=[{"role": "user", "content": "a"}] * 2048, tools=[TOOL]), CHAT, num_attackers=16
    ),
    "16 schemas that are slow to compile, all left after 1 s": Attack(
        schema({"type": "integer", "multipleOf": 99_991}), num_attackers=16, leaves_after=1
    ),
    "a prompt of ids for all but two tokens, n=128, left after 5 s": Attack(
        completion(prompt=[5] * 4000, n=128), leaves_after=5
    ),
    "20,000 spaces in the path": Attack(completion(), path="/v1/" + "%20" * 20_000),
}


def main(
    *,
    target: Annotated[str, typer.Option("--target", help="directory or Hub id")],
    only: Annotated[list[str] | None, typer.Option("--only", help="a part of an attack's name; repeatable")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="write the table there, too")] = None,
) -> None:
    """Attack a server, and print what it did."""
    chosen = [name for name in ATTACKS if not only or any(part in name for part in only)]
    lines = [
        "| attack | answers | seconds | slowest /health | ordinary: slowest | first after | memory, MiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    server = Server(target)
    try:
        for name in chosen:
            if not server.is_alive:
                server.close()
                server = Server(target)
            lines.append(f"| {name} | {report(server, name)} |")
            typer.echo(lines[-1])
    finally:
        server.close()
    if output is not None:
        output.write_text("\n".join(lines) + "\n")


class Server:
    """`selfspec serve` as a process, on the first core."""

    def __init__(self, target: str) -> None:
        command = [sys.executable, "-m", "selfspec", "serve", "--target", target, "--device", "cpu", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--served-name", "attacked"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {0}),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if " serves " not in line:
            raise SystemExit("the server did not start")
        self.address = urlsplit(line.split()[0]).netloc
        for _ in range(3):
            ask(self.address)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def resident_mib(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        [line] = [line for line in text.splitlines() if line.startswith("VmRSS")] or ["VmRSS 0"]
        return int(line.split()[1]) / 1024

    def close(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def report(server: Server, name: str) -> str:
    """One attack's row, without its name."""
    context = multiprocessing.get_context("fork")
    found: multiprocessing.SimpleQueue[Any] = context.SimpleQueue()
    began = time.perf_counter()
    with (
        watched(context, probe, server.address) as health,
        watched(context, bystand, server.address) as ordinary,
    ):
        attacker = context.Process(target=attack, args=(name, server.address, found))
        attacker.start()
        attacker.join(PATIENCE + 60)
        attacker.kill()
        attacker.join()
    answers, seconds = found.get() if not found.empty() else ("none", time.perf_counter() - began)
    if not server.is_alive:
        return f"{answers} | {seconds:.1f} | the server died | | | "
    after = ask(server.address)
    return f"{answers} | {seconds:.1f} | {health[0]:.2f} s | {ordinary[0]:.2f} s | {after:.2f} s | {server.resident_mib:.0f}"


@contextmanager
def watched(context: Any, watch: Callable[[str, Event, Any], None], address: str) -> Iterator[list[float]]:
    """The slowest of the requests that a process sends meanwhile, once it is over."""
    over, times, slowest = context.Event(), context.SimpleQueue(), [0.0]
    process = context.Process(target=watch, args=(address, over, times))
    process.start()
    # Until it sends requests.
    times.get()
    try:
        yield slowest
    finally:
        over.set()
        process.join(2 * PATIENCE)
        process.kill()
        slowest[0] = max(iter(lambda: times.get() if not times.empty() else None, None), default=2 * PATIENCE)


def probe(address: str, over: Event, times: Any) -> None:
    _repeat(lambda: _time(address, "GET", "/health"), over, times, pause=PROBE_SECONDS)


def bystand(address: str, over: Event, times: Any) -> None:
    _repeat(lambda: ask(address), over, times, pause=0.0)


def _repeat(request: Callable[[], float], over: Event, times: Any, *, pause: float) -> None:
    request()
    times.put(0.0)
    slowest = 0.0
    while not over.is_set():
        slowest = max(slowest, request())
        time.sleep(pause)
    times.put(slowest)


def ask(address: str) -> float:
    """The seconds that an ordinary request takes."""
    return _time(address, "POST", COMPLETION, completion()())


def _time(address: str, method: str, path: str, body: bytes | None = None) -> float:
    began = time.perf_counter()
    try:
        connection = http.client.HTTPConnection(address, timeout=PATIENCE)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        connection.getresponse().read()
        connection.close()
    except OSError:
        # A server that has died makes no one wait; its row says so.
        time.sleep(PROBE_SECONDS)
    return time.perf_counter() - began


def attack(name: str, address: str, found: Any) -> None:
    """Run one attack, at the lowest priority and on the server's core."""
    os.sched_setaffinity(0, {0})
    os.nice(19)
    plan = ATTACKS[name]
    body = plan.body()
    answers: Counter[str] = Counter()

    def one() -> None:
        answers[send(plan, address, body if isinstance(body, bytes) else plan.body())] += 1

    threads = [threading.Thread(target=one) for _ in range(plan.num_attackers)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = ", ".join(f"{count} × {answer}" if count > 1 else answer for answer, count in answers.most_common())
    found.put((told, time.perf_counter() - began))


def send(plan: Attack, address: str, body: bytes | Iterable[bytes]) -> str:
    """What one attacker is told: a status, `left` where it did not wait, or `none`."""
    until = time.perf_counter() + plan.leaves_after
    connection = http.client.HTTPConnection(address, timeout=plan.leaves_after)

    def pieces() -> Iterator[bytes]:
        for piece in body:
            yield piece  # type: ignore[misc]
            time.sleep(plan.pause)
            if time.perf_counter() > until:
                raise TimeoutError

    headers = {"Content-Type": "application/json"} | ({"Host": plan.host} if plan.host else {})
    try:
        with suppress(BrokenPipeError, ConnectionResetError):
            # It may be refused before its end, and then the answer is there already.
            connection.request("POST", plan.path, body if isinstance(body, bytes) else pieces(), headers)
        response = http.client.HTTPResponse(connection.sock)
        response.begin()
        return str(response.status)
    except TimeoutError:
        return "left" if plan.leaves_after < PATIENCE else "none"
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


if __name__ == "__main__":
    typer.run(main)
