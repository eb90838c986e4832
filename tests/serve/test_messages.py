"""Anthropic's Messages API: as Anthropic's own package sees it, and as raw events; it says what a chat says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import httpx
import pydantic
import pytest
from live_server import LiveServer
from serve.writers import TOOLS

from selfspec import SamplingParams, Target, generate

Post = Callable[..., httpx.Response]
Start = Callable[..., LiveServer]
FamilyServer = Callable[..., LiveServer]
Form = Callable[[str, str], dict[str, Any]]
# Makes a client of Anthropic's package.
Connect = Callable[[LiveServer], Any]

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
CHAT = [{"role": "system", "content": "the dog sat on the mat"}, {"role": "user", "content": "one two the cat"}]
ASKED: dict[str, Any] = {"model": "tiny", "system": CHAT[0]["content"], "messages": CHAT[1:], "max_tokens": 24}
CUSTOM = [
    {"name": tool["function"]["name"], "description": "the", "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]


class Color(pydantic.BaseModel):
    name: Literal["red", "blue"]


@pytest.fixture
def connect() -> Connect:
    anthropic = pytest.importorskip("anthropic", reason="it tests with Anthropic's package: pip install anthropic")
    return lambda server: anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)


@pytest.fixture
def client(server: LiveServer, connect: Connect) -> Iterator[Any]:
    with connect(server) as client:
        yield client


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each of which is called what its type says."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def without_names(block: Any) -> dict[str, Any]:
    """A block without what is new in every answer, and without what only the package adds."""
    return {name: value for name, value in block.model_dump().items() if name not in ("id", "parsed_output")}


def ask(client: Any, **body: Any) -> Any:
    """One message, whole; its stream must have the same blocks and the same end."""
    ours = {name: body.pop(name) for name in ("seed", "drafter", "top_p", "top_k") if name in body}
    extra = {"temperature": body.pop("temperature", 0), **ours}
    call = {"model": "tiny", "messages": [{"role": "user", "content": "the cat?"}], "max_tokens": 300, **body}
    whole = client.messages.create(**call, extra_body=extra)
    with client.messages.stream(**call, extra_body=extra) as stream:
        final = stream.get_final_message()
    assert list(map(without_names, final.content)) == list(map(without_names, whole.content))
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    return whole


@pytest.mark.parametrize("drafter", ["ngram", "draft", "none"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.8, "top_k": 30, "seed": 3}])
def test_a_message_says_what_generate_says(client: Any, target: Target, settings: dict[str, Any], drafter: str) -> None:
    [expected] = generate(target, [CHAT], sampling=SamplingParams(max_new_tokens=24, **settings))
    whole = ask(client, **ASKED, drafter=drafter, **settings)
    assert [block.text for block in whole.content] == [expected.text]
    assert whole.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[expected.finish_reason]
    usage = whole.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(target.encode(CHAT))
    assert usage.output_tokens == len(expected.token_ids) and usage.cache_creation_input_tokens == 0
    assert usage.speculation["drafter"] == drafter


def test_what_was_in_the_cache_is_counted_apart(post: Post) -> None:
    blocks = [{"type": "text", "text": "two mats and one dog " * 20, "cache_control": {"type": "ephemeral"}}]
    first, second = (
        post(PATH, system=blocks, messages=[{"role": "user", "content": text}], max_tokens=1).json()["usage"]
        for text in ("one", "two")
    )
    assert first["cache_read_input_tokens"] == 0 < second["cache_read_input_tokens"]
    totals = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in (first, second)]
    assert totals[0] == totals[1]


def test_a_stop_sequence_ends_a_message_and_is_named(client: Any, target: Target) -> None:
    [expected] = generate(target, [CHAT], sampling=SamplingParams(max_new_tokens=24))
    stop = expected.text[len(expected.text) // 2 :][:2]
    whole = ask(client, **ASKED, stop_sequences=[stop, "never"])
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", stop)
    assert whole.content[0].text == expected.text.partition(stop)[0]


def test_a_message_that_fills_the_context_says_so(post: Post) -> None:
    long = {"messages": [{"role": "user", "content": "the cat " * 1000}], "max_tokens": 4000, "temperature": 0}
    record = post(PATH, **long, seed=1).json()
    assert record["stop_reason"] in ("model_context_window_exceeded", "end_turn")


def test_every_event_comes_in_its_order(post: Post, target: Target) -> None:
    started, ping, opened, *deltas, closed, ended, last = events_of(post(PATH, **ASKED, temperature=0, stream=True))
    assert (started["type"], ping, last) == ("message_start", {"type": "ping"}, {"type": "message_stop"})
    message = started["message"]
    assert (message["content"], message["stop_reason"], message["role"]) == ([], None, "assistant")
    assert message["usage"]["input_tokens"] == len(target.encode(CHAT))
    assert opened == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {(event["type"], event["index"], event["delta"]["type"]) for event in deltas} == {
        ("content_block_delta", 0, "text_delta")
    }
    [expected] = generate(target, [CHAT], sampling=SamplingParams(max_new_tokens=24))
    assert "".join(event["delta"]["text"] for event in deltas) == expected.text and len(deltas) > 2
    assert closed == {"type": "content_block_stop", "index": 0}
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended["usage"]["output_tokens"] == 24


def test_the_package_parses_forms(client: Any) -> None:
    said = client.messages.parse(
        model="tiny", messages=CHAT[1:], max_tokens=60, output_format=Color, extra_body={"temperature": 0}
    )
    assert isinstance(said.parsed_output, Color)


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama3"])
def test_forced_calls_come_as_blocks_and_go_back_as_they_came(
    family_server: FamilyServer, connect: Connect, family: str
) -> None:
    """The next prompt is the one that a chat with the same messages has."""
    server = family_server(family)
    client = connect(server)
    said = ask(client, tools=CUSTOM, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    [call] = said.content
    assert (call.type, said.stop_reason) == ("tool_use", "tool_use") and call.name in ("weather", "time")
    named = ask(client, tools=CUSTOM, tool_choice={"type": "tool", "name": "time", "disable_parallel_tool_use": True})
    assert named.content[0].name == "time" and set(named.content[0].input) == {"days"}
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "18 C"}]},
        {"type": "text", "text": "and the dog?"},
    ]
    messages: list[Any] = [
        {"role": "user", "content": "the cat?"},
        {"role": "assistant", "content": said.content},
        {"role": "user", "content": results},
    ]
    later = client.messages.create(model="tiny", messages=messages, tools=CUSTOM, max_tokens=1)
    function = {"name": call.name, "arguments": json.dumps(call.input)}
    chat = [
        {"role": "user", "content": "the cat?"},
        {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.id, "content": "18 C"},
        {"role": "user", "content": "and the dog?"},
    ]
    tools = [
        {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]} for tool in CUSTOM
    ]
    functions = [{"type": "function", "function": tool} for tool in tools]
    body = {"model": "tiny", "messages": chat, "tools": functions, "max_tokens": 1}
    expected = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30).json()["usage"]["prompt_tokens"]
    assert later.usage.input_tokens + later.usage.cache_read_input_tokens == expected
    assert client.messages.count_tokens(model="tiny", messages=messages, tools=CUSTOM).input_tokens == expected


def test_thoughts_text_and_calls_are_blocks_in_their_order(
    family_server: FamilyServer, form_of: Form, connect: Connect
) -> None:
    says = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    form = form_of("hermes", f"<think>\nHm.\n</think>\n\nLook.\n{says}\nSo.")
    client = connect(family_server("hermes"))
    said = ask(client, tools=CUSTOM, output_config={"format": form}, thinking={"type": "adaptive"})
    thought, look, call, so = said.content
    assert (thought.type, thought.thinking, look.text, so.text) == ("thinking", "Hm.", "Look.", "So.")
    assert call.input == {"city": "Paris"} and said.stop_reason == "tool_use"
    messages: list[Any] = [{"role": "user", "content": "the cat?"}, {"role": "assistant", "content": said.content}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "is_error": True}]}
    again = ask(client, messages=[*messages, result], max_tokens=1)
    assert again.usage.input_tokens > 0
    plain = ask(client, tools=CUSTOM, tool_choice={"type": "none"}, output_config={"format": form_of("hermes", "Yes.")})
    assert [block.text for block in plain.content] == ["Yes."]


def test_thinking_is_switched_off_where_there_is_none(family_server: FamilyServer, client: Any, connect: Connect) -> None:
    import anthropic

    assert ask(client, **ASKED, thinking={"type": "disabled"}).content
    with pytest.raises(anthropic.BadRequestError, match="thinking cannot be disabled here: set chat_template_kwargs"):
        ask(connect(family_server("hermes")), thinking={"type": "disabled"})


def test_tokens_are_counted_as_they_will_be_read(post: Post, target: Target) -> None:
    counted = post(COUNT, system=CHAT[0]["content"], messages=CHAT[1:]).json()
    assert counted == {"input_tokens": len(target.encode(CHAT))}
    blocks = [{"type": "text", "text": "the dog sat "}, {"type": "text", "text": "on the mat"}]
    assert post(COUNT, system=blocks, messages=CHAT[1:]).json() == counted
    refused = post(COUNT, messages=CHAT[1:], max_tokens=5)
    assert refused.status_code == 400 and "max_tokens is not a field" in refused.json()["error"]["message"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_failing_engine_is_told(server: LiveServer, post: Post, monkeypatch: pytest.MonkeyPatch, is_stream: bool) -> None:
    monkeypatch.setattr(server.engine._scheduler, "round", lambda: (_ for _ in ()).throw(RuntimeError("a bug")))
    answer = post(PATH, **ASKED, stream=is_stream)
    monkeypatch.undo()
    told = events_of(answer)[-1] if is_stream else answer.json()
    assert told["type"] == "error" and told["error"]["type"] == "api_error"
    assert "the server failed on this request" in told["error"]["message"]
    assert answer.status_code == (200 if is_stream else 500)
    assert post(PATH, **ASKED).status_code == 200


def test_keys_are_taken_in_both_forms_and_refusals_have_the_apis_shape(start: Start) -> None:
    server = start(api_key=("key",), max_batch=1, max_waiting=0)
    version = {"anthropic-version": "2023-06-01"}
    for headers in ({"x-api-key": "key"}, {"Authorization": "Bearer key"}):
        assert httpx.post(server.url + PATH, json=ASKED, headers={**headers, **version}, timeout=30).status_code == 200
    refused = httpx.post(server.url + PATH, json=ASKED, headers={"x-api-key": "wrong"})
    assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    assert refused.json()["type"] == "error"
    endless = {"model": "tiny", "messages": CHAT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    key = {"x-api-key": "key"}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=endless, headers=key, timeout=30):
        full = httpx.post(server.url + PATH, json=ASKED, headers=key, timeout=30)
    assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error") and full.headers["retry-after"]


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [CHAT[1], {"role": "assistant", "content": list(blocks)}, CHAT[1]]}


# Changes to a good request, and a part of the sentence.
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"stop": ["x"]}, "stop is not a field of this request"),
    "no length": ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
    "no tokens": ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    "more tokens than the context": ({"max_tokens": 4097}, "max_tokens=4097 is not allowed: prompt and answer share"),
    "no messages": ({"messages": []}, "messages: List should have at least 1 item"),
    "message is text": ({"messages": ["a"]}, "messages.0: Input should be a valid dictionary"),
    "role nobody knows": ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role: 'tool' is not known"),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0.content: give text, or a list of parts"),
    "no blocks": (user([]), "messages.0.content: the list of blocks is empty"),
    "block is text": (user(["a"]), "messages.0.content.0: a block of type None is not served"),
    "image": (user([{"type": "image", "source": {}}]), "a block of type 'image' is not served in a message of the user"),
    "document": (user([{"type": "document", "source": {}}]), "'document' is not served"),
    "image in a result": (
        user([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]),
        "messages.0.content.0.content.0: a part of type 'image' is not served: send text",
    ),
    "call of the user": (user([{"type": "tool_use", "id": "1", "name": "a", "input": {}}]), "'tool_use' is not served in"),
    "call without arguments": (assistant({"type": "tool_use", "id": "1", "name": "a"}), "messages.1.content.0.input"),
    "call without a name": (assistant({"type": "tool_use", "id": "1", "input": {}}), "messages.1.content.0.name: this"),
    "redacted thought": (assistant({"type": "redacted_thinking", "data": "x"}), "'redacted_thinking' is not served"),
    "result without an id": (user([{"type": "tool_result", "content": "a"}]), "messages.0.content.0.tool_use_id"),
    "half a character": (user("\ud800"), "send valid Unicode"),
    "half a character in the system's": ({"system": "\ud800"}, "send valid Unicode"),
    "system of another type": ({"system": 5}, "system: give text, or a list of objects"),
    "system with an image": ({"system": [{"type": "image"}]}, "system.0: a part of type 'image' is not served"),
    "answer to go on": (
        {"messages": [CHAT[1], {"role": "assistant", "content": "So"}]},
        "messages ends with one of the assistant, which is not continued here",
    ),
    "longer than the context": (user("xyz" * 2000), "shorten the prompt"),
    "cannot fit": (user("x" * 200_000), "cannot fit"),
    "thinking": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking of type 'enabled' is not served here"),
    "effort": ({"output_config": {"effort": "low"}}, "output_config has effort, which is not served here"),
    "form nobody knows": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    "form without a schema": ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    "tool of the server": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    "tool without a schema": ({"tools": [{"name": "a"}]}, "tools.0.input_schema: a tool needs the schema"),
    "tool without a name": ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
    "tools that the template does not read": ({"tools": CUSTOM}, "tools are not read by this model's chat template"),
    "forced tool": ({"tool_choice": {"type": "any"}}, "tool_choice forces a call, and tools lacks the tool"),
    "tool choice nobody knows": ({"tool_choice": {"type": "some"}}, "tool_choice.type: 'some' is not known"),
    "too many stops": ({"stop_sequences": ["a"] * 17}, "stop_sequences: List should have at most 16 items"),
    "empty stop": ({"stop_sequences": [""]}, "stop_sequences"),
    "temperature": ({"temperature": 3}, "temperature: Input should be less than or equal to 2"),
    "top_k": ({"top_k": -2}, "top_k: Input should be greater than or equal to -1"),
    "container": ({"container": "x"}, "container is not served here, because the server runs no code: leave it out"),
    "tools of other servers": ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not served here"),
    "drafter": ({"drafter": "oracle"}, "drafter 'oracle' is not loaded"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_is_named(server: LiveServer, name: str) -> None:
    changes, message = MISTAKES[name]
    content = json.dumps({"model": "tiny", "messages": CHAT[1:], "max_tokens": 4, **changes})
    answer = httpx.post(server.url + PATH, content=content, headers={"Content-Type": "application/json"}, timeout=30)
    told = answer.json()
    assert answer.status_code == 400 and set(told) == {"type", "error"} and told["type"] == "error", answer.text
    assert told["error"]["type"] == "invalid_request_error" and set(told["error"]) == {"type", "message"}
    assert message in told["error"]["message"] and "\n" not in told["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", PATH, 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", 404, "not_found_error"),
        ("POST", COUNT, 400, "invalid_request_error"),
    ],
)
def test_other_refusals_have_the_apis_shape_too(server: LiveServer, method: str, path: str, status: int, kind: str) -> None:
    answer = httpx.request(method, server.url + path)
    assert answer.status_code == status
    assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == kind


def test_the_package_raises_its_own_errors(client: Any, start: Start, connect: Connect) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="'claude' is not served here: ask for 'tiny'"):
        client.messages.create(**{**ASKED, "model": "claude"})
    with pytest.raises(anthropic.InternalServerError, match="is being loaded"):
        connect(start(is_loaded=False)).messages.create(**ASKED)
