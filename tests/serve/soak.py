"""A soak: many clients of every kind, good and bad, against a live server, and the proof that nothing stuck to it.

    python tests/serve/soak.py --target PATH_OR_ID --minutes 30

It starts a server with a small KV cache, so that answers must give way to each other. At the end no block may be held, every
text must be the one that `generate` gives the same request alone, every mistake must have been refused as one, and the
server's memory must have stayed flat. Prints a table; exit code 1 and a list of violations where one of these failed.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families

from selfspec import SamplingParams, Target, generate

CHAT_PATH = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "Answer in a few plain words, and go on with the next thing once you are done."}
TOPICS = ("the sea", "a cat on a mat", "numbers from one to ten", "bread", "snow in May", "two trains", "a letter", "moss")
CACHE_TOKENS = 640
MAX_BATCH = 8
MAX_WAITING = 12
# Memory may grow by this much after the first quarter of the time; a run shorter than this is all warm-up.
RSS_GROWTH, RSS_SLACK_MIB = 1.03, 16
LEAST_MINUTES = 2.0


@dataclass(frozen=True)
class Case:
    """A request, and the one text that answers it."""

    body: dict[str, Any]
    text: str


def make_cases(target: Target, count: int) -> list[Case]:
    """Greedy and seeded requests of many lengths, answered by `generate` one by one."""
    rng = random.Random(0)
    cases = []
    for number in range(count):
        talk = f"Tell me about {TOPICS[number % len(TOPICS)]}. " * rng.randint(1, 5) + f"This is question {number}."
        messages = [SYSTEM, {"role": "user", "content": talk}]
        settings = {"temperature": number % 2 * 1.0, "seed": number}
        max_tokens = rng.randint(4, 48)
        [completion] = generate(target, [messages], sampling=SamplingParams(max_new_tokens=max_tokens, **settings))
        cases.append(Case({"messages": messages, "max_tokens": max_tokens, **settings}, completion.text))
    return cases


@dataclass
class Soak:
    """Clients on one event loop, and what came of their requests."""

    url: str
    model: str
    cases: list[Case]
    drafters: list[str]
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    async def run(self, seconds: float, num_clients: int) -> None:
        until = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as http:
            await asyncio.gather(*(self._client(http, until) for _ in range(num_clients)))
            await self._settle(http)

    async def _client(self, http: httpx.AsyncClient, until: float) -> None:
        acts: dict[Callable[[httpx.AsyncClient], Awaitable[str]], int] = {
            self._whole: 4,
            self._stream: 4,
            self._other_api: 2,
            self._read_slowly: 1,
            self._leave_stream: 3,
            self._give_up: 2,
            self._hang_up: 1,
            self._send_mistake: 3,
        }
        while time.monotonic() < until:
            [act] = self.rng.choices(list(acts), list(acts.values()))
            name = act.__name__.removeprefix("_").replace("_", " ")
            try:
                outcome = await act(http)
            except httpx.HTTPError as error:
                outcome = "failed"
                self.violations.append(f"{name}: {type(error).__name__} {error}")
            self.counts[f"{name}: {outcome}"] += 1
            if outcome == "queue full":
                await asyncio.sleep(self.rng.uniform(0, 0.5))

    def _request(self, **more: Any) -> tuple[Case, dict[str, Any]]:
        case = self.rng.choice(self.cases)
        return case, {"model": self.model, "drafter": self.rng.choice(self.drafters), **case.body, **more}

    def _judge(self, case: Case, text: str, body: dict[str, Any], *, is_whole: bool = True) -> str:
        if text == case.text if is_whole else case.text.startswith(text):
            return "right"
        self.violations.append(f"drafter {body['drafter']}: {text!r} in place of {case.text!r}")
        return "WRONG"

    async def _whole(self, http: httpx.AsyncClient) -> str:
        case, body = self._request()
        answer = await http.post(CHAT_PATH, json=body)
        if answer.status_code != 200:
            return self._refused(answer.status_code, answer.text)
        return self._judge(case, answer.json()["choices"][0]["message"]["content"], body)

    async def _other_api(self, http: httpx.AsyncClient) -> str:
        """The same, asked for as responses or as messages."""
        case, body = self._request()
        path, asked = "/v1/messages", body
        if self.rng.random() < 0.5:
            names = {"messages": "input", "max_tokens": "max_output_tokens"}
            path, asked = "/v1/responses", {names.get(name, name): value for name, value in body.items()}
        answer = await http.post(path, json=asked)
        if answer.status_code != 200:
            return self._refused(answer.status_code, answer.text)
        record = answer.json()
        [block] = record["content"] if "content" in record else record["output"][0]["content"]
        return self._judge(case, block["text"], body)

    async def _stream(self, http: httpx.AsyncClient, *, pause: float = 0.0, most: int = sys.maxsize) -> str:
        case, body = self._request(stream=True)
        async with http.stream("POST", CHAT_PATH, json=body) as answer:
            if answer.status_code != 200:
                return self._refused(answer.status_code, (await answer.aread()).decode())
            text, num_events = "", 0
            async for line in answer.aiter_lines():
                if not line:
                    continue
                if line == "data: [DONE]":
                    return self._judge(case, text, body)
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.violations.append(f"a stream ended with {event['error']}")
                    return "WRONG"
                text += event["choices"][0]["delta"].get("content") or ""
                num_events += 1
                if num_events == most:
                    return self._judge(case, text, body, is_whole=False)
                await asyncio.sleep(self.rng.uniform(0, pause))
        self.violations.append("a stream ended without its last event")
        return "WRONG"

    async def _read_slowly(self, http: httpx.AsyncClient) -> str:
        return await self._stream(http, pause=0.4)

    async def _leave_stream(self, http: httpx.AsyncClient) -> str:
        return await self._stream(http, most=self.rng.randint(1, 12))

    async def _give_up(self, http: httpx.AsyncClient) -> str:
        """A whole answer that its client does not wait for."""
        _, body = self._request()
        try:
            answer = await asyncio.wait_for(http.post(CHAT_PATH, json=body), self.rng.uniform(0.0, 0.5))
        except TimeoutError:
            return "left"
        return "in time" if answer.status_code == 200 else self._refused(answer.status_code, answer.text)

    async def _hang_up(self, http: httpx.AsyncClient) -> str:
        """A connection that breaks in the middle of a request."""
        host, port = http.base_url.host, http.base_url.port
        _, writer = await asyncio.open_connection(host, port)
        writer.write(b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{"model":')
        await writer.drain()
        writer.close()
        return "done"

    async def _send_mistake(self, http: httpx.AsyncClient) -> str:
        """Something that is refused with 400, whatever else goes on."""
        _, body = self._request()
        # More characters than the cache's tokens could hold, so it is refused without a look at the queue.
        too_long = [{"role": "user", "content": "one two three " * 40 * CACHE_TOKENS}]
        mistakes: list[bytes] = [
            b"{",
            b"",
            b"[1, 2]",
            b'"text"',
            b"\xff\xfe",
            json.dumps(body).encode()[:-3],
            *(
                json.dumps({**body, **change}).encode()
                for change in (
                    {"messages": too_long},
                    {"messages": []},
                    {"messages": 5},
                    {"max_tokens": -1},
                    {"temperature": "hot"},
                    {"drafter": "oracle"},
                    {"colour": "red"},
                    {"messages": [{"role": "user", "content": "\ud800"}]},
                )
            ),
        ]
        content = self.rng.choice(mistakes)
        answer = await http.post(CHAT_PATH, content=content, headers={"Content-Type": "application/json"})
        if answer.status_code == 400 and answer.json()["error"]["message"]:
            return "refused"
        self.violations.append(f"{content[:60]!r}: {answer.status_code} {answer.text[:200]}")
        return "WRONG"

    def _refused(self, status: int, text: str) -> str:
        if status == 429:
            return "queue full"
        self.violations.append(f"a good request: {status} {text[:200]}")
        return "WRONG"

    async def _settle(self, http: httpx.AsyncClient) -> None:
        """All is over: nothing may run, wait or be held."""
        held = {}
        for _ in range(100):
            metrics = read_metrics((await http.get("/metrics")).text)
            names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
            held = {name: value for name in names if (value := metrics[f"selfspec:{name}"])}
            if not held:
                self.counts["preemptions"] = int(metrics["selfspec:num_preemptions_total"])
                self.counts["tokens"] = int(metrics["selfspec:generation_tokens_total"])
                return
            await asyncio.sleep(0.1)
        self.violations.append(f"10 seconds after the last request: {held}")


def read_metrics(text: str) -> dict[str, float]:
    """Every sample by its name, summed over its labels."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def resident_mib(pid: int) -> float:
    """A process's resident memory."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def grown(resident: list[float]) -> str | None:
    """What is wrong with a server's memory over time, if anything."""
    quarter, end = median(settled(resident)), median(resident[-max(1, len(resident) // 10) :])
    if end > quarter * RSS_GROWTH + RSS_SLACK_MIB:
        return f"memory grew from {quarter:.0f} MiB after warm-up to {end:.0f} MiB"
    return None


def settled(resident: list[float]) -> list[float]:
    """The samples of the tenth that follows the first quarter, which is the warm-up."""
    start = len(resident) // 4
    return resident[start : start + max(1, len(resident) // 10)]


def main(
    *,
    target: Annotated[str, typer.Option("--target", help="directory or Hub id")],
    minutes: Annotated[float, typer.Option("--minutes", help="how long to send requests")] = 30.0,
    clients: Annotated[int, typer.Option("--clients", help="how many at once")] = 24,
    drafter: Annotated[list[str] | None, typer.Option("--drafter", help="as of `selfspec serve`; repeatable")] = None,
    cases: Annotated[int, typer.Option("--cases", help="different requests")] = 24,
    cache_tokens: Annotated[
        int, typer.Option("--cache-tokens", help="of the KV cache; fewer where a tokenizer makes few tokens of the requests")
    ] = CACHE_TOKENS,
    http_process: Annotated[str, typer.Option("--http-process", help="as of `selfspec serve`")] = "auto",
) -> None:
    """Start a server, soak it, and end it."""
    drafters = drafter or ["ngram"]
    command = [sys.executable, "-m", "selfspec", "serve", "--target", target, "--device", "cpu", "--port", "0"]
    command += ["--served-name", "soaked", "--max-batch", str(MAX_BATCH), "--max-waiting", str(MAX_WAITING)]
    command += ["--http-process", http_process]
    command += ["--cache-tokens", str(cache_tokens), *(word for name in drafters for word in ("--drafter", name))]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        # While the server loads.
        expected = make_cases(Target.from_pretrained(target, device="cpu"), cases)
        assert server.stdout is not None
        line = server.stdout.readline()
        if " serves " not in line:
            raise SystemExit("the server did not start")
        soak = Soak(line.split("/v1 ")[0], "soaked", expected, [*drafters, "none"])
        resident = asyncio.run(_watch(soak, server.pid, 60 * minutes, clients))
        server.send_signal(signal.SIGTERM)
        if (code := server.wait(60)) != 0:
            soak.violations.append(f"the server ended with exit code {code}")
    finally:
        server.kill()
        server.wait()
    if minutes >= LEAST_MINUTES:
        soak.violations += filter(None, [grown(resident)])
    for name, count in sorted(soak.counts.items()):
        typer.echo(f"{name:32} {count:8}")
    for name, value in (("start", resident[0]), ("after warm-up", median(settled(resident))), ("end", resident[-1])):
        typer.echo(f"{'memory, ' + name:32} {value:8.0f} MiB")
    for violation in soak.violations[:20]:
        typer.echo(f"VIOLATION: {violation}", err=True)
    typer.echo(f"{len(soak.violations)} violations in {minutes:g} minutes with {clients} clients")
    raise SystemExit(1 if soak.violations else 0)


async def _watch(soak: Soak, pid: int, seconds: float, num_clients: int) -> list[float]:
    """Run the soak; the server's memory in MiB, sampled all along."""
    resident = [resident_mib(pid)]
    running = asyncio.create_task(soak.run(seconds, num_clients))
    while not running.done():
        await asyncio.wait([running], timeout=0.2)
        resident.append(resident_mib(pid))
    await running
    return resident


if __name__ == "__main__":
    typer.run(main)
