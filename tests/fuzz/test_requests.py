"""Laws of the server's answers, for any tokenizer and any request: whole and streamed, drafted and not."""

# ruff: noqa: E402
from __future__ import annotations

import faulthandler
import json
import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

for name in ("fastapi", "prometheus_client", "llguidance", "httpx"):
    pytest.importorskip(name, reason=f"the server's laws need {name}: pip install httpx 'selfspec[serve]'")

from fuzz.requests import bodies, drafters_of, requests_of, said_by_the_library, target_of
from fuzz.vocabularies import Vocabulary, examples, report, vocabularies
from starlette.testclient import TestClient

from selfspec import Target
from selfspec.api import Completion
from selfspec.loop.sequence import Request
from selfspec.loop.text import HALF, text_of
from selfspec.serve.app import create_app
from selfspec.serve.options import ServeOptions
from selfspec.serve.service import Service

# No request takes longer, even on a busy machine.
MAX_SECONDS = 120


class Errors(logging.Handler):
    """What was logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(f"{record.getMessage()} {record.exc_info}")


@contextmanager
def served(target: Target) -> Iterator[TestClient]:
    """A server in this process. At its end nothing may be running, held or logged as an error."""
    service = Service("m", ServeOptions(max_batch=2, cache_tokens=256))
    service.open(target, drafters_of(target), use_cost_guard=False)
    errors = Errors()
    logging.getLogger().addHandler(errors)
    faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
    try:
        with TestClient(create_app(service), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
            yield client
        engine = service.engine
        assert engine.drain(10) and engine.num_used_blocks == 0 and not engine.problems
        assert not errors.records
    finally:
        faulthandler.cancel_dump_traceback_later()
        logging.getLogger().removeHandler(errors)
        service.close()


def streamed(lines: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices of a stream as those of a whole answer, and the usage."""
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert not any("error" in chunk for chunk in chunks), chunks
    choices: dict[int, dict[str, Any]] = {}
    for piece in (choice for chunk in chunks for choice in chunk["choices"]):
        choice = choices.setdefault(piece["index"], {"index": piece["index"], "text": "", "logprobs": None})
        choice["text"] += piece["delta"].get("content", "") if "delta" in piece else piece["text"]
        assert choice.get("finish_reason") is None, "nothing follows the end"
        choice |= {name: piece[name] for name in ("finish_reason", "stop_reason") if name in piece}
        if piece["logprobs"] is not None:
            logprobs = choice["logprobs"] = choice["logprobs"] or {}
            for key, values in piece["logprobs"].items():
                logprobs[key] = logprobs.get(key, []) + values if values is not None else None
    return [choices[index] for index in sorted(choices)], chunks[-1]["usage"]


def whole(record: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    choices = []
    for choice in record["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        choices.append({key: choice[key] for key in ("index", "logprobs", "finish_reason", "stop_reason")} | {"text": text})
    return choices, record["usage"]


def places(logprobs: dict[str, Any]) -> list[tuple[str, bytes | None, int | None, float, int]]:
    """Each token's name, its bytes and offset where the route has them, its log-probability, how many others are named."""
    if "content" in logprobs:
        return [
            (entry["token"], bytes(entry["bytes"]), None, entry["logprob"], len(entry["top_logprobs"]))
            for entry in logprobs["content"]
        ]
    tops = logprobs["top_logprobs"] or [{} for _ in logprobs["tokens"]]
    columns = (logprobs["tokens"], logprobs["text_offset"], logprobs["token_logprobs"], tops)
    return [(name, None, offset, value, len(top)) for name, offset, value, top in zip(*columns, strict=True)]


def check_choice(choice: dict[str, Any], truth: Completion, request: Request, target: Target, seen: Counter[str]) -> None:
    """A choice is what the library says, its text that of its tokens, and its names that text."""
    assert (choice["text"], choice["finish_reason"]) == (truth.text, truth.finish_reason)
    assert choice["stop_reason"] in (truth.stop_string, truth.end_token_id)
    skip = request.sampling.skip_special_tokens
    spoken = truth.token_ids[:-1] if truth.end_token_id is not None else truth.token_ids
    prompt = request.prompt_ids
    before, after = (text_of(target.tokenizer, ids, skip_special_tokens=skip) for ids in (prompt, [*prompt, *spoken]))
    is_sound = HALF not in after and after.startswith(before)
    full = after[len(before) :]
    if is_sound:
        assert full == truth.text if truth.stop_string is None else full.startswith(truth.text + truth.stop_string)
        seen["text"] += 1
    if choice["logprobs"] is None:
        return
    said = places(choice["logprobs"])
    assert [value for *_, value, _ in said] == pytest.approx(truth.logprobs, abs=1e-3)
    assert {count for *_, count in said} == {min(request.num_top_logprobs, target.vocab_size)}
    seen["logprobs"] += 1
    if is_sound and said[0][1] is not None:
        assert b"".join(data or b"" for _, data, *_ in said).decode() == full
        seen["bytes"] += 1
    elif is_sound:
        for (name, _, offset, *_), token_id in zip(said, spoken, strict=False):
            is_shown = text_of(target.tokenizer, [*prompt, token_id], skip_special_tokens=skip) != before
            assert name.startswith("bytes:") or not is_shown or full.startswith(name, offset)
        seen["offsets"] += 1


def test_answers() -> None:
    """No 500, no error logged, nothing held; the library's answers, whole and streamed, with any drafter."""
    seen: Counter[str] = Counter()

    @examples(200)
    @given(st.data())
    def law(data: st.DataObject) -> None:
        vocabulary: Vocabulary = data.draw(vocabularies())
        target = target_of(vocabulary)
        route, body = data.draw(bodies(vocabulary))
        drafters = data.draw(st.permutations(["ngram", "truncated:1", "none"]))
        try:
            requests = requests_of(target, route, body)
            truth = said_by_the_library(target, requests)
        except ValueError as error:
            note(f"refused: {error}")
            requests, truth = [], []
        usual = {**body, "drafter": drafters[0]}
        streaming = {**body, "drafter": drafters[1], "stream": True, "stream_options": {"include_usage": True}}
        with served(target) as client, ThreadPoolExecutor() as threads:
            # At once, so that they share the engine.
            answer, stream = threads.map(lambda sent: client.post(f"/v1/{route}", json=sent), [usual, streaming])
        if not truth:
            assert answer.status_code == 400, answer.text
            assert stream.status_code == 400 or '"error"' in stream.text
            assert answer.json()["error"]["message"]
            seen["refused"] += 1
            return
        assert (answer.status_code, stream.status_code) == (200, 200), answer.text + stream.text
        by_whole, usage = whole(answer.json())
        by_stream, streamed_usage = streamed([line for line in stream.text.splitlines() if line])
        assert len(by_whole) == len(by_stream) == len(truth)
        for choice, piecewise, completion, request in zip(by_whole, by_stream, truth, requests, strict=True):
            check_choice(choice, completion, request, target, seen)
            check_choice(piecewise, completion, request, target, seen)
            if choice["logprobs"] is not None:
                names = [[place[:3] for place in places(each["logprobs"])] for each in (choice, piecewise)]
                assert names[0] == names[1]
        counts = [(each["prompt_tokens"], each["completion_tokens"]) for each in (usage, streamed_usage)]
        num_prompt = sum(len(request.prompt_ids) for request in requests if request.sample_index == 0)
        assert counts == [(num_prompt, sum(len(completion.token_ids) for completion in truth))] * 2
        seen["answered"] += 1
        seen[f"answered, {vocabulary.kind}"] += 1
        for name in body:
            seen[f"answered with {name}"] += 1
        for completion in truth:
            seen[f"ended by {'a string' if completion.stop_string else completion.finish_reason}"] += 1

    law()
    least = {"answered": 100, "refused": 5, "text": 50, "logprobs": 50, "bytes": 20, "offsets": 20, "ended by a string": 5}
    report(seen, least)
