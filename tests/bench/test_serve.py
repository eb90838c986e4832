"""`selfspec bench-serve` against servers of all kinds: what it sends, what it counts, and what it says."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Script, ScriptedServer
from typer.testing import CliRunner, Result

from selfspec.cli.main import app


@pytest.fixture
def serve() -> Iterator[Callable[..., ScriptedServer]]:
    servers: list[ScriptedServer] = []

    def serve(**script: Any) -> ScriptedServer:
        servers.append(ScriptedServer(Script(**script)))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., tuple[Result, list[dict[str, Any]]]]:
    """Runs the command; returns what it printed, and the runs in its file."""

    def bench(*args: object, code: int = 0) -> tuple[Result, list[dict[str, Any]]]:
        output = tmp_path / "out.json"
        output.unlink(missing_ok=True)
        command = ["bench-serve", *map(str, args), "--output", str(output)]
        result = CliRunner().invoke(app, command, env={"COLUMNS": "80", "SELFSPEC_API_KEY": ""})
        assert result.exit_code == code, (result.output, result.exception)
        return result, json.loads(output.read_text())["runs"] if output.exists() else []

    return bench


def asked(body: dict[str, Any]) -> str:
    return json.dumps(body.get("messages", body.get("prompt")))


def test_every_request_is_counted_and_timed(serve, bench) -> None:
    server = serve(pause=0.02)
    result, [run] = bench(server.url, "--concurrency", 3, "--num-prompts", 9)
    figures = run["figures"]
    assert (figures["num_done"], figures["failures"], figures["num_tokens"]) == (9, {}, 54)
    assert figures["most_at_once"] == server.most_open == 3
    assert figures["is_counted"] and figures["prompt_tokens"] == 7
    # Three chunks, and a pause before each; the chunk without text is no first token.
    for name, least in {"first_token": 0.02, "between_chunks": 0.02, "per_token": 0.04 / 5, "whole": 0.06}.items():
        assert figures[name]["p50"] >= least, name
        assert figures[name]["p50"] < least + 0.1, name
    assert figures["tokens_per_second"] == pytest.approx(54 / figures["seconds"])
    assert run["acceptance_length"] is None and 0 < run["generator_load"] < 1
    assert [request["chunks"] for request in run["requests"]] == [3] * 9
    assert "3 streams" in result.output and max(map(len, result.output.splitlines())) <= 80


def test_requests_are_as_the_options_say_and_are_the_same_for_every_server(serve, bench) -> None:
    ours, theirs = serve(), serve(models=["n"])
    options = ["--concurrency", "2,1", "--num-prompts", 4, "--max-tokens", 100, "--ignore-eos", "--temperature", 0.5]
    both = [ours.url, f"{theirs.url}/v1", "--name", "ours", "--name", "theirs", "--extra-body", '{"drafter": "ngram"}']
    result, runs = bench(*both, *options, "--extra-body", "{}")
    measured = [[body for body in server.bodies if body["max_tokens"] == 100] for server in (ours, theirs)]
    assert sorted(map(asked, measured[0])) == sorted(map(asked, measured[1]))
    assert len(set(map(asked, measured[0]))) == 8
    body = measured[0][0]
    assert body.pop("messages")[0]["role"] == "user"
    assert body == {
        "model": "m",
        "max_tokens": 100,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "drafter": "ngram",
    }
    assert measured[1][0]["model"] == "n" and "drafter" not in measured[1][0]
    # The order alternates.
    assert [run["server"] for run in runs] == ["ours", "theirs", "theirs", "ours"]
    # To warm up: short answers to other prompts.
    before = [body for body in ours.bodies if body["max_tokens"] == 64]
    assert len(before) == 8 and not set(map(asked, before)) & set(map(asked, measured[0]))
    assert "sent twice" not in result.output


def test_a_cold_run_sends_nothing_before(serve, bench) -> None:
    server = serve()
    bench(server.url, "--concurrency", 2, "--num-prompts", 4, "--cold", "--endpoint", "completions", "--input-tokens", 20)
    assert len(server.bodies) == 4
    assert {len(body["prompt"]) for body in server.bodies} == {80}


def test_prompts_are_sized_by_the_servers_own_count(serve, bench) -> None:
    """The scripted server counts a token for five characters, and a template of ten."""
    server = serve()
    options = ["--prompts", "random", "--input-tokens", 300, "--shared-prefix", 100]
    bench(server.url, "--concurrency", 1, "--num-prompts", 2, "--max-tokens", 99, *options)
    texts = [body["messages"][0]["content"] for body in server.bodies if body["max_tokens"] == 99]
    assert texts[0][:450] == texts[1][:450] and texts[0][520:] != texts[1][520:]
    assert all(len(text) == pytest.approx(5 * 400, rel=0.02) for text in texts)


def test_arrivals_do_not_wait_for_answers(serve, bench) -> None:
    server = serve(pause=0.1)
    result, [run] = bench(server.url, "--rate", 100, "--num-prompts", 20, "--seed", 3)
    assert run["figures"]["most_at_once"] > 5 and run["figures"]["busy_tokens_per_second"] is None
    due = [request["due"] for request in run["requests"]]
    assert due == sorted(due) and 0.05 < due[-1] < 0.6
    assert "100/s" in result.output


def test_chunks_stand_in_for_a_count_and_this_is_said(serve, bench) -> None:
    result, [run] = bench(serve(usage=None).url, "--concurrency", 1, "--num-prompts", 2)
    assert run["figures"]["num_tokens"] == 6 and not run["figures"]["is_counted"]
    assert "their chunks were counted as tokens" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("counters", "length"),
    [
        ('selfspec:generation_tokens_total {0}\nselfspec:verify_rows_total{{a="b"}} {1}\n', 6 / 4),
        ("vllm:spec_decode_num_accepted_tokens_total {0}\nvllm:spec_decode_num_drafts_total {1}\n", 1 + 6 / 4),
        ("something_else_total {0}\n", None),
    ],
)
def test_acceptance_is_the_servers_word(serve, bench, counters: str, length: float | None) -> None:
    server = serve(counters=lambda answers: counters.format(6 * answers + 1000, 4 * answers + 5))
    _, [run] = bench(server.url, "--concurrency", 2, "--num-prompts", 6)
    assert run["acceptance_length"] == length


def test_a_failed_request_is_shown_with_its_reason(serve, bench) -> None:
    """Every third is refused."""
    count = iter(range(1000))
    server = serve(refuse=lambda body: (429, "the queue is full") if body and next(count) % 3 == 0 else None)
    result, [run] = bench(server.url, "--concurrency", 1, "--num-prompts", 9, "--cold")
    assert (run["figures"]["num_done"], run["figures"]["failures"]) == (6, {"refuses (429): the queue is full": 3})
    assert "3 of 9 requests failed: refuses (429): the queue is full." in " ".join(result.output.split())
    assert sum(request["failure"] is not None for request in run["requests"]) == 3


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("cut", "the connection ended before the answer did"),
        ("error", "gave up: the engine met a fault"),
        ("other", "sent what is no chunk of OpenAI's API"),
    ],
)
def test_a_stream_that_breaks_off_is_a_failure(serve, bench, ending: str, reason: str) -> None:
    result, [run] = bench(serve(ending=ending).url, "--concurrency", 1, "--num-prompts", 2, "--cold", code=1)
    assert run["figures"]["failures"] == {reason: 2} and run["figures"]["num_tokens"] == 0
    assert result.stderr == "selfspec: no request was answered: the reasons are above\n"


def test_an_answer_that_takes_too_long_is_a_failure(serve, bench) -> None:
    _, [run] = bench(serve(pause=0.5).url, "--concurrency", 1, "--num-prompts", 1, "--cold", "--timeout", 0.2, code=1)
    assert run["figures"]["failures"] == {"no whole answer within 0.2 seconds": 1}


def test_the_key_is_sent_and_never_written(serve, bench, tmp_path: Path) -> None:
    server = serve()
    bench(server.url, "--concurrency", 1, "--num-prompts", 1, "--api-key", "hush-hush")
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer hush-hush"}
    assert "hush" not in (tmp_path / "out.json").read_text()


def test_a_server_that_loads_is_waited_for(serve, bench) -> None:
    options = ["--concurrency", 1, "--num-prompts", 1]
    result, _ = bench(serve(loading_seconds=60).url, *options, code=1)
    assert "refuses (503): the model is loading" in result.stderr
    bench(serve(loading_seconds=0.3).url, *options, "--wait", 20)


@pytest.mark.parametrize(
    ("script", "args", "message"),
    [
        ({"refuse": lambda body: (401, "no")}, [], "refuses the API key: give the right one with --api-key"),
        # No time is lost where waiting would not help.
        ({"refuse": lambda body: (401, "no")}, ["--wait", "600"], "refuses the API key"),
        ({"refuse": lambda body: (404, "no such model") if body else None}, [], "refuses (404): no such model"),
        ({}, ["--model", "x"], "has no model 'x': use m for --model"),
        ({"models": []}, [], "lists no model: name one with --model"),
        ({"streams": False}, [], "does not stream its answers"),
        ({}, ["--concurrency", "0"], "--concurrency '0' is not a list of whole numbers such as 1,8,32"),
        ({}, ["--concurrency", "1,,2"], "is not a list of whole numbers"),
        ({}, ["--rate", "0"], "--rate '0' is not a list of numbers above 0 such as 2,4.5"),
        ({}, ["--rate", "1e3"], "--rate '1e3' is not a list of numbers"),
        ({}, ["--burstiness", "0"], "--burstiness 0.0 is not allowed: use a number above 0"),
        ({}, ["--timeout", "nan"], "--timeout nan is not allowed"),
        ({}, ["--temperature", "-1"], "--temperature -1.0 is not allowed: use 0 or more"),
        ({}, ["--num-prompts", "0"], "--num-prompts 0 is not allowed: use 1 or more"),
        ({}, ["--input-tokens", "0"], "--input-tokens 0 is not allowed"),
        ({}, ["--shared-prefix", "-1"], "--shared-prefix -1 is not allowed"),
        ({}, ["--endpoint", "embeddings"], "--endpoint 'embeddings' is not known: use chat or completions"),
        ({}, ["--prompts", "absent.jsonl"], "cannot read absent.jsonl"),
        ({}, ["--extra-body", "{"], "is not JSON: write an object"),
        ({}, ["--extra-body", "[]"], "is not an object: write one"),
        ({}, ["--name", "a", "--name", "b"], "--name is given twice for 1 server: give one for each"),
    ],
)
def test_mistakes_take_one_line(serve, bench, script: dict[str, Any], args: list[str], message: str) -> None:
    result, runs = bench(serve(**script).url, *args, code=1)
    assert message in result.stderr and len(result.stderr.splitlines()) == 1 and not runs


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1", "does not answer (connection refused): start the server, or correct the address"),
        ("http://nowhere.invalid", "does not answer ("),
        ("127.0.0.1:8000", "is not an address: write one such as http://127.0.0.1:8000"),
    ],
)
def test_an_address_without_a_server_takes_one_line(bench, url: str, message: str) -> None:
    result, _ = bench(url, code=1)
    assert message in result.stderr and len(result.stderr.splitlines()) == 1


def test_an_output_that_cannot_be_written_is_refused_first(serve) -> None:
    server = serve()
    result = CliRunner().invoke(app, ["bench-serve", server.url, "--output", "/nowhere/at/all.json"])
    assert result.exit_code == 1 and "/nowhere/at/all.json: its folder does not exist" in result.stderr
    assert not server.bodies


def test_an_interruption_keeps_what_was_measured(serve, tmp_path: Path) -> None:
    server = serve(pause=0.02)
    output = tmp_path / "out.json"
    command = [sys.executable, "-m", "selfspec", "bench-serve", server.url, "--concurrency", "1,2", "--num-prompts", "40"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [*command, "--output", str(output)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + 60
    # In the second load, which comes after 40 answers and two times four to warm up.
    while len(server.bodies) < 60:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "interrupted\n")
    whole, cut = json.loads(output.read_text())["runs"]
    assert not whole["is_interrupted"] and whole["figures"]["num_done"] == 40
    assert cut["is_interrupted"] and 0 < cut["figures"]["num_done"] < 40 and not cut["figures"]["failures"]
    assert f"interrupted after {cut['figures']['num_done']} of 40 requests" in " ".join(printed.split())
    assert "1 stream" in printed and "2 streams" in printed


def test_a_generator_that_has_no_time_left_says_so(serve, bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own clock runs as fast as the wall's."""
    monkeypatch.setattr("selfspec.bench.serve.time.process_time", time.perf_counter)
    result, [run] = bench(serve().url, "--concurrency", 1, "--num-prompts", 2)
    assert run["generator_load"] == pytest.approx(1, abs=0.05)
    assert "so the figures may be its own limit: send fewer requests at once" in " ".join(result.output.split())


def test_the_command_and_its_help_need_no_torch() -> None:
    code = "import sys, selfspec.bench.serve, selfspec.cli.main, selfspec.cli.display; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "False\n"
