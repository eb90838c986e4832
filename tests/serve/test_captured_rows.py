"""What a captured row holds: what the target read and wrote, for training; how it was asked and served; nobody's data."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from support import tiny_model

from selfspec.drafters import NgramDrafter
from selfspec.heads.base import tokenizer_hash
from selfspec.model.target import Target
from selfspec.serve.app import create_app
from selfspec.serve.options import ServeOptions
from selfspec.serve.service import Service
from selfspec.traffic.capture import Capture
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.masking import tokenize
from selfspec.traffic.sources import read_conversations

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "one two the cat"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% if style %}{{ style }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Posts requests and returns the rows that they left, as they stand in the log and as training reads them.
Ask = Callable[..., tuple[list[dict[str, Any]], list[Conversation]]]


@pytest.fixture
def special_target(tiny_tokenizer: Any) -> Target:
    """A random target, half of whose tokens are special and so not in its texts."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens(["the", " cat", " sat", " on", *map(str, range(10))], special_tokens=True)
    return Target(tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=1024), tokenizer)


@pytest.fixture
def ask(special_target: Target, tmp_path: Path) -> Iterator[Ask]:
    services: list[Service] = []

    def ask(*requests: tuple[str, dict[str, Any]], redact: Any = None) -> tuple[list[dict[str, Any]], list[Conversation]]:
        service = Service("models/tiny", ServeOptions())
        services.append(service)
        capture = Capture(tmp_path / f"log-{len(services)}", redact=redact)
        service.open(special_target, [NgramDrafter(4)], use_cost_guard=False, capture=capture)
        with TestClient(create_app(service), base_url="http://127.0.0.1") as http:
            for path, body in requests:
                answer = http.post(path, json={"model": "tiny", "max_tokens": 24, "temperature": 0, **body})
                assert answer.status_code == 200, answer.text
        service.close()
        records = [json.loads(line) for file in sorted(capture.directory.iterdir()) for line in file.open()]
        report = Report()
        rows = list(read_conversations([capture.directory], report))
        assert not report.skipped and len(rows) == len(records) == len(requests)
        return records, rows

    yield ask
    for service in services:
        service.close()


def test_what_the_target_wrote_is_what_trains(ask: Ask, special_target: Target) -> None:
    """Whole, streamed, with tools, and with what is lost in its text."""
    special_target.set_chat_template_kwargs({"style": "plain"})
    own = {"style": "brief"}
    requests = [
        {},
        {"stream": True},
        {"tools": TOOLS},
        {"seed": 3, "temperature": 1, "chat_template_kwargs": own},
        {"skip_special_tokens": False},
        {"tools": TOOLS, "tool_choice": "none"},
    ]
    records, rows = ask(*((CHAT, {"messages": MESSAGES, **more}) for more in requests))
    for row in rows:
        assert row.tokenizer_hash == tokenizer_hash(special_target.tokenizer)
        [sample] = tokenize(row, special_target.tokenizer)
        ids = row.messages[-1]["token_ids"]
        prompt = special_target.encode(MESSAGES, tools=row.tools, chat_template_kwargs=row.chat_template_kwargs)
        assert sample.input_ids == [*prompt, *ids]
        assert sample.loss_mask == [False] * (len(sample.input_ids) - len(ids)) + [True] * len(ids)
    assert [row.tools for row in rows] == [None, None, TOOLS, None, None, None]
    assert [row.chat_template_kwargs for row in rows] == [own if i == 3 else {"style": "plain"} for i in range(6)]
    assert rows[0].messages == rows[1].messages
    encode = special_target.tokenizer.encode
    assert any(encode(row.messages[-1]["content"]) != row.messages[-1]["token_ids"] for row in rows)


def test_ids_are_kept_only_where_they_say_what_the_row_says(ask: Ask) -> None:
    """Not after raw text, which no template renders, nor beyond a stop string; and a client's own are nobody's word."""
    [[record], _] = ask((CHAT, {"messages": MESSAGES}))
    text = record["messages"][-1]["content"]
    stop = text[len(text) // 2 :][:2]
    history = [*MESSAGES, {"role": "assistant", "content": "x", "token_ids": [5]}, *MESSAGES]
    records, _ = ask(
        (CHAT, {"messages": MESSAGES, "stop": [stop]}),
        (COMPLETIONS, {"prompt": "one two"}),
        (CHAT, {"messages": history}),
    )
    assert ["token_ids" in record["messages"][-1] for record in records] == [False, False, True]
    assert "token_ids" not in records[2]["messages"][1]


def test_how_it_was_served(ask: Ask) -> None:
    before = time.time()
    records, _ = ask((CHAT, {"messages": MESSAGES}), (CHAT, {"messages": MESSAGES, "drafter": "none", "seed": 5}))
    assert [record["drafter"] for record in records] == ["ngram", "none"]
    assert records[1]["settings"] == {"max_tokens": 24, "temperature": 0.0, "seed": 5}
    for record in records:
        assert before - 1 < record["time"] < time.time() + 1
        seconds, counts = record["seconds"], record["token_counts"]
        assert 0 <= seconds["queue"] and 0 < seconds["prefill"] <= seconds["total"] < 60
        assert counts["answer"] == len(record["messages"][-1]["token_ids"])
        assert 0 <= counts["accepted"] <= counts["drafted"] and counts["prompt"] > 0
    assert records[0]["token_counts"]["drafted"] > 0 == records[1]["token_counts"]["drafted"]


MAIL = "bob@example.com"
WEATHER = {
    "name": "weather",
    "description": f"Ask {MAIL}",
    "parameters": {"type": "object", "properties": {MAIL: {"type": "string", "enum": [MAIL], "default": MAIL}}},
}
EVERYTHING: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": f"You serve {MAIL}", "owner": MAIL},
        {"role": "user", "content": [{"type": "text", "text": f"Mail {MAIL}"}]},
        {
            "role": "assistant",
            "content": MAIL,
            "reasoning_content": f"who is {MAIL}",
            "token_ids": [1, 2],
            "tool_calls": [{"id": "1", "note": MAIL, "function": {"name": "f", "arguments": json.dumps({MAIL: MAIL})}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": MAIL, "details": {"to": MAIL}},
        {"role": "user", "content": "the cat"},
    ],
    "user": MAIL,
    "safety_identifier": MAIL,
    "prompt_cache_key": MAIL,
    "service_tier": MAIL,
    "metadata": {MAIL: MAIL},
    "stop": [MAIL],
    "tools": [{"type": "function", "function": WEATHER}],
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": MAIL,
            "description": MAIL,
            "schema": {"type": "string", "description": MAIL},
        },
    },
}


def test_no_personal_data_is_logged_anywhere_with_redaction(ask: Ask) -> None:
    pytest.importorskip("presidio_analyzer", reason="redacting needs Presidio: pip install 'selfspec[redact]'")
    from selfspec.traffic.redact import Redactor

    plain = {key: value for key, value in EVERYTHING.items() if key not in ("messages", "tools")}
    requests = [(CHAT, EVERYTHING), (COMPLETIONS, {**plain, "prompt": f"Mail {MAIL} now"})]
    records, rows = ask(*requests, redact=Redactor())
    assert "example.com" not in json.dumps(records), json.dumps(records)
    assert "<EMAIL_ADDRESS>" in json.dumps(rows[0].tools) and rows[0].tools[0]["function"]["name"] == "weather"
    # Without redaction the messages and tools are what was sent; identifiers are not kept even so.
    records, _ = ask(*requests)
    assert "example.com" in json.dumps([records[0]["messages"], records[0]["tools"]])
    rest = [{key: value for key, value in record.items() if key not in ("messages", "tools")} for record in records]
    assert "example.com" not in json.dumps(rest)


def test_an_answer_that_is_redacted_has_no_ids(ask: Ask) -> None:
    pytest.importorskip("presidio_analyzer", reason="redacting needs Presidio: pip install 'selfspec[redact]'")
    from selfspec.traffic.redact import Redactor

    ids = [5, 6]
    said = [{**MESSAGES[0]}, {"role": "assistant", "content": f"It is {MAIL}", "token_ids": ids}]
    redacted = Redactor()(Conversation("a", said, tokenizer_hash="x"))
    assert redacted.messages[1] == {"role": "assistant", "content": "It is <EMAIL_ADDRESS>"}
    said[1]["content"] = "It is nobody"
    assert Redactor()(Conversation("a", said)).messages == said
