"""What breaks under a live server: its clients are told clearly, and it goes on as before."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from selfspec import SamplingParams, Target, generate
from selfspec.traffic.capture import Capture

Start = Callable[..., Any]
PATH = "/v1/chat/completions"


def body(prompt: str, **settings: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "temperature": 0, **settings}


def ask(server: Any, prompt: str, **settings: Any) -> httpx.Response:
    return httpx.post(server.url + PATH, json=body(prompt, **settings), timeout=60)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_killed_engine_thread_is_a_500_and_the_next_one_serves(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    expected = text(ask(server, "the cat", max_tokens=8))

    def die() -> None:
        raise SystemExit("killed")

    monkeypatch.setattr(server.engine._scheduler, "round", die)
    refused = ask(server, "the cat", max_tokens=8)
    assert refused.status_code == 500 and refused.json()["error"]["code"] == "failed"
    assert text(ask(server, "the cat", max_tokens=8)) == expected
    assert server.metrics()["selfspec:request_failure_total"] == 1


def test_a_full_disk_costs_no_answer(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(capture=Capture(tmp_path))
    expected = text(ask(server, "one two", max_tokens=8))

    def write(file: int, line: bytes) -> int:
        raise OSError(28, "No space left on device")

    # A conversation is written after its answer was sent.
    deadline = time.monotonic() + 30
    while not server.metrics()["selfspec:captured_conversations"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.setattr("selfspec.traffic.capture.os.write", write)
    assert text(ask(server, "one two", max_tokens=8)) == expected
    server.service.traffic_log.capture.close()
    metrics = server.metrics()
    assert (metrics["selfspec:captured_conversations"], metrics["selfspec:capture_dropped"]) == (1, 1)
    monkeypatch.undo()
    server.service.traffic_log = None
    assert text(ask(server, "one two", max_tokens=8)) == expected


def test_a_cache_too_small_for_all_serves_all_in_turn(start: Start, target: Target) -> None:
    server = start(cache_tokens=160, max_batch=6)
    prompts = [f"the cat sat {'on the mat ' * (number % 3)}{number}" for number in range(6)]
    chats = [body(prompt)["messages"] for prompt in prompts]
    expected = [c.text for c in generate(target, chats, sampling=SamplingParams(max_new_tokens=60, ignore_eos=True))]
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda prompt: text(ask(server, prompt, max_tokens=60, ignore_eos=True)), prompts))
    assert got == expected
    assert server.metrics()["selfspec:num_preemptions_total"] > 0
    refused = ask(server, "the cat " * 200)
    assert refused.status_code == 400 and "the cache holds 160 with its answer" in refused.json()["error"]["message"]
    server.wait_until_idle()
