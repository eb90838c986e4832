"""OpenAI's Responses API: as OpenAI's own package sees it, and as raw events; it says what a chat says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from live_server import LiveServer
from serve.writers import TOOLS

from selfspec import SamplingParams, Target, generate

Post = Callable[..., httpx.Response]
FamilyServer = Callable[..., LiveServer]
Form = Callable[[str, str], dict[str, Any]]

PATH = "/v1/responses"
MESSAGES = [{"role": "system", "content": "the dog sat on the mat"}, {"role": "user", "content": "one two the cat"}]
ASKED: dict[str, Any] = {
    "model": "tiny",
    "instructions": MESSAGES[0]["content"],
    "input": MESSAGES[1]["content"],
    "max_output_tokens": 24,
    "temperature": 0,
}
FUNCTIONS = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]


class Color(pydantic.BaseModel):
    name: Literal["red", "blue"]


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def connect(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def without_names(item: Any) -> dict[str, Any]:
    """An item without what is new in every answer."""
    return {name: value for name, value in item.model_dump().items() if name not in ("id", "call_id")}


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each of which is called what its type says."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def ask(client: openai.OpenAI, **body: Any) -> Any:
    """One response, whole; its stream must have the same items."""
    call = {"model": "tiny", "input": "the cat?", "max_output_tokens": 300, "temperature": 0, **body}
    whole = client.responses.create(**call)
    *_, last = client.responses.create(**call, stream=True)
    assert list(map(without_names, last.response.output)) == list(map(without_names, whole.output))
    assert last.type == f"response.{whole.status}" and last.response.status == whole.status
    return whole


@pytest.mark.parametrize("drafter", ["ngram", "draft", "none"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}])
def test_a_response_says_what_generate_says(
    client: openai.OpenAI, target: Target, settings: dict[str, Any], drafter: str
) -> None:
    [expected] = generate(target, [MESSAGES], sampling=SamplingParams(max_new_tokens=24, **settings))
    extra = {"drafter": drafter, **{name: settings[name] for name in ("seed",) if name in settings}}
    given = {name: value for name, value in settings.items() if name not in extra}
    whole = ask(client, **{**ASKED, **given}, extra_body=extra)
    assert whole.output_text == expected.text
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (len(target.encode(MESSAGES)), len(expected.token_ids))
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert whole.usage.speculation["drafter"] == drafter
    is_cut = expected.finish_reason == "length"
    assert whole.status == whole.output[0].status == ("incomplete" if is_cut else "completed")
    assert (whole.incomplete_details and whole.incomplete_details.reason) == ("max_output_tokens" if is_cut else None)


def test_a_response_repeats_what_was_asked(post: Post) -> None:
    asked = {**ASKED, "metadata": {"run": "7"}, "store": False, "top_p": 0.5, "user": "ann", "truncation": "disabled"}
    record = post(PATH, **asked).json()
    assert record["object"] == "response" and record["id"].startswith("resp_") and record["store"] is False
    for name in ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user", "model"):
        assert record[name] == asked[name], name
    assert record["text"] == {"format": {"type": "text"}} and record["tools"] == [] and record["tool_choice"] == "auto"
    bare = post(PATH, input="the cat", max_output_tokens=1, metadata=None, temperature=None).json()
    assert (bare["metadata"], bare["temperature"], bare["top_p"], bare["instructions"]) == ({}, 1.0, 1.0, None)


def test_a_shared_beginning_was_in_the_cache(post: Post) -> None:
    usages = [
        post(PATH, instructions="one mat and two dogs " * 20, input=text, max_output_tokens=1).json()["usage"]
        for text in ("one", "two")
    ]
    cached = [usage["input_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0 < cached[1] < usages[1]["input_tokens"]


def test_every_event_comes_in_its_order(post: Post) -> None:
    answer = post(PATH, **ASKED, stream=True, stream_options={"include_obfuscation": False})
    created, started, opened, part, *deltas, done, part_done, item_done, last = events_of(answer)
    names = [event["type"] for event in (created, started, opened, part, done, part_done, item_done, last)]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert {event["type"] for event in deltas} == {"response.output_text.delta"} and len(deltas) > 2
    assert (opened["item"]["status"], opened["item"]["content"]) == ("in_progress", [])
    assert created["response"]["usage"] is None
    assert {event["item_id"] for event in (part, *deltas, done, part_done)} == {opened["item"]["id"]}
    text = "".join(event["delta"] for event in deltas)
    assert text == done["text"] == part_done["part"]["text"] == item_done["item"]["content"][0]["text"]
    assert last["response"]["output"] == [item_done["item"]]
    assert {event["response"]["id"] for event in (created, started, last)} == {created["response"]["id"]}


def test_the_package_parses_forms_whole_and_streamed(client: openai.OpenAI) -> None:
    call: dict[str, Any] = {"model": "tiny", "input": "the cat", "text_format": Color, "temperature": 0}
    parsed = client.responses.parse(**call).output_parsed
    assert isinstance(parsed, Color)
    with client.responses.stream(**call) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_parsed == parsed == Color.model_validate_json(text)
    said = client.responses.create(
        model="tiny", input="the cat", text={"format": {"type": "json_object"}}, extra_body={"seed": 1}, max_output_tokens=60
    )
    assert said.output_text.lstrip().startswith("{")


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama3"])
def test_forced_calls_come_as_items_and_go_back_as_they_came(family_server: FamilyServer, family: str) -> None:
    """The next prompt is the one that a chat with the same messages has."""
    server = family_server(family)
    client = connect(server)
    said = ask(client, tools=FUNCTIONS, tool_choice="required", parallel_tool_calls=False)
    [call] = said.output
    assert (call.type, call.status) == ("function_call", "completed") and call.name in ("weather", "time")
    named = ask(client, tools=FUNCTIONS, tool_choice={"type": "function", "name": "time"}, parallel_tool_calls=False)
    assert named.output[0].name == "time" and set(json.loads(named.output[0].arguments)) == {"days"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "18 C"}]}
    question: Any = {"role": "user", "content": [{"type": "input_text", "text": "the cat?"}]}
    later = client.responses.create(
        model="tiny", input=[question, *said.output, result], tools=FUNCTIONS, max_output_tokens=1
    )
    function = {"name": call.name, "arguments": call.arguments}
    messages: list[Any] = [
        {"role": "user", "content": "the cat?"},
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "18 C"},
    ]
    chat = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=1)
    assert later.usage.input_tokens == chat.usage.prompt_tokens


def test_the_package_sees_calls_as_they_come(family_server: FamilyServer) -> None:
    call: dict[str, Any] = {"model": "tiny", "input": "the cat?", "tools": FUNCTIONS, "tool_choice": "required"}
    with connect(family_server("hermes")).responses.stream(**call, temperature=0, parallel_tool_calls=False) as stream:
        events = list(stream)
        [item] = stream.get_final_response().output
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas) == deltas[-1].snapshot == item.arguments
    assert item.parsed_arguments == json.loads(item.arguments)
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done.arguments == item.arguments


def test_reasoning_text_and_calls_are_items_in_their_order(family_server: FamilyServer, form_of: Form) -> None:
    says = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    form = form_of("hermes", f"<think>\nHm.\n</think>\n\nLook.\n{says}\nSo.{says}")
    client = connect(family_server("hermes"))
    said = ask(client, tools=FUNCTIONS, text={"format": form})
    assert [item.type for item in said.output] == ["reasoning", "message", "function_call", "message", "function_call"]
    thought, look, call, so, _ = said.output
    assert thought.content[0].text == "Hm." and thought.summary == []
    assert (look.content[0].text, so.content[0].text, said.output_text) == ("Look.", "So.", "Look.So.")
    assert json.loads(call.arguments) == {"city": "Paris"}
    again = ask(client, input=[{"role": "user", "content": "the cat?"}, *said.output], tools=FUNCTIONS, max_output_tokens=1)
    assert again.usage.input_tokens > said.usage.input_tokens
    plain = ask(client, input="the cat?", tools=FUNCTIONS, tool_choice="none", text={"format": form_of("hermes", "Yes.")})
    assert plain.output_text == "Yes." and len(plain.output) == 1


def test_an_answer_without_text_still_has_a_message(post: Post) -> None:
    bodies = [{**ASKED, "text": {"format": {"type": "regex", "pattern": "()"}}, "stream": each} for each in (False, True)]
    whole, last = post(PATH, **bodies[0]).json(), events_of(post(PATH, **bodies[1]))[-1]["response"]
    assert whole["output"][0]["content"][0]["text"] == "" == last["output"][0]["content"][0]["text"]
    assert whole["status"] == last["status"] == "completed"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_failing_engine_is_told(server: LiveServer, post: Post, monkeypatch: pytest.MonkeyPatch, is_stream: bool) -> None:
    scheduler = server.engine._scheduler
    monkeypatch.setattr(scheduler, "round", lambda: (_ for _ in ()).throw(RuntimeError("a bug")))
    answer = post(PATH, **ASKED, stream=is_stream)
    monkeypatch.undo()
    if is_stream:
        last = events_of(answer)[-1]
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "server_error"
        assert "the server failed on this request" in last["response"]["error"]["message"]
    else:
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert post(PATH, **ASKED).status_code == 200


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": content, **more}]}


def calls(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "a"}, {"type": "function_call", **fields}]}


# Changes to a good request, the field that is to be named, and a part of the sentence.
MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown field": ({"stop": "x"}, "stop", "is not a field of this request"),
    "a field of chats": ({"messages": []}, "messages", "is not a field of this request"),
    "no input": ({"input": None}, "input", "input: give text, or a list of objects"),
    "input of another type": ({"input": 5}, "input", "input: give text, or a list of objects"),
    "no items": ({"input": []}, "input", "input: give text, or a list of objects that is not empty"),
    "too many items": ({"input": [{"role": "user", "content": "a"}] * 2049}, "input", "2049 entries: give at most 2048"),
    "item nested deeply": ({"input": [nested(500)]}, "input", "nested too deeply"),
    "half a character": ({"input": "\ud800"}, "input", "send valid Unicode"),
    "half a character in an item": (said("\ud800"), "input", "send valid Unicode"),
    "half a character in instructions": ({"instructions": "\ud800"}, "instructions", "send valid Unicode"),
    "item is text": ({"input": ["a"]}, "input", "input: entry 0 is no object"),
    "item nobody knows": ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "'item_reference' is not served"),
    "role nobody knows": ({"input": [{"role": "tool", "content": "a"}]}, "input", "input.0.role: 'tool' is not known"),
    "no content": ({"input": [{"role": "user"}]}, "input", "input.0.content: give text, or a list of parts"),
    "image": (said([{"type": "input_image", "image_url": "x"}]), "input", "'input_image' is not served: send input_text"),
    "file": (said([{"type": "input_file", "file_id": "x"}]), "input", "'input_file' is not served"),
    "part without its text": (said([{"type": "input_text"}]), "input", "input.0.content.0.text"),
    "call without a name": (calls(arguments="{}", call_id="1"), "input", "input.1.name: this function_call needs it"),
    "call without an id": (calls(arguments="{}", name="a"), "input", "input.1.call_id"),
    "result without an id": ({"input": [{"type": "function_call_output", "output": "1"}]}, "input", "input.0.call_id"),
    "input longer than the context": ({"input": "xyz" * 2000}, "input", "shorten the prompt"),
    "input that cannot fit": ({"input": "x" * 200_000}, "input", "cannot fit"),
    "kept": ({"store": True}, "store", "store is not served here, because no response is kept: send false"),
    "kept, of another type": ({"store": 1}, "store", "send false"),
    "previous response": ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
    "conversation": ({"conversation": "conv_1"}, "conversation", "send the whole conversation as input"),
    "background": ({"background": True}, "background", "leave it out"),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt", "send its text as instructions or input"),
    "truncation": ({"truncation": "auto"}, "truncation", "refused and never cut: leave it out"),
    "log-probabilities": ({"top_logprobs": 2}, "top_logprobs", "only /v1/chat/completions gives log-probabilities"),
    "included": ({"include": ["message.output_text.logprobs"]}, "include", "'message.output_text.logprobs'"),
    "most calls": ({"max_tool_calls": 2}, "max_tool_calls", "runs no tools itself"),
    "reasoning": ({"reasoning": {"summary": "auto"}}, "reasoning", "chat template decides how it thinks"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text", "text.verbosity"),
    "built-in tool": (
        {"tools": [{"type": "web_search"}]},
        "tools",
        "'web_search' is not served, because the server",
    ),
    "tool without a name": ({"tools": [{"type": "function"}]}, "tools", "tools.0.name: this function needs it as text"),
    "tools that the template does not read": ({"tools": FUNCTIONS}, "tools", "leave them out, or serve another model"),
    "forced tool": ({"tool_choice": "required"}, "tool_choice", "tools lacks the tool: add it"),
    "tool choice of another kind": ({"tool_choice": {"type": "file_search"}}, "tool_choice", "'file_search' is not served"),
    "tool choice without a name": ({"tool_choice": {"type": "function"}}, "tool_choice", "tool_choice.name"),
    "form nobody knows": ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format.type"),
    "form without a schema": ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "text.format"),
    "form that cannot be": ({"text": {"format": {"type": "regex", "pattern": "("}}}, "text.format", "invalid regex"),
    "no tokens": ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    "more tokens than the context": ({"max_output_tokens": 4097}, "max_output_tokens", "share a context of 4096 tokens"),
    "temperature": ({"temperature": 3}, "temperature", "less than or equal to 2"),
    "top_p": ({"top_p": 0}, "top_p", "greater than 0"),
    "seed": ({"seed": 2**63}, "seed", "64-bit"),
    "drafter": ({"drafter": "oracle"}, "drafter", "'oracle' is not loaded"),
    "metadata": ({"metadata": {"a": 1}}, "metadata", "valid string"),
    "much metadata": ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "give at most 16"),
    "stream options": ({"stream_options": {}}, "stream_options", "goes with a stream"),
    "template arguments": ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "does not read"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_is_named(server: LiveServer, name: str) -> None:
    changes, param, message = MISTAKES[name]
    content = json.dumps({"model": "tiny", "input": "one two", "max_output_tokens": 4, **changes})
    answer = httpx.post(server.url + PATH, content=content, headers={"Content-Type": "application/json"}, timeout=30)
    error = answer.json()["error"]
    assert answer.status_code == 400 and set(error) == {"message", "type", "param", "code"}, answer.text
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert message in error["message"] and "\n" not in error["message"]


def test_what_is_missing_and_what_is_not_there_is_told(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError, match="input: this field is missing: add it"):
        client.post(PATH.removeprefix("/v1"), body={"model": "tiny"}, cast_to=object)
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here: ask for 'tiny'"):
        client.responses.create(model="gpt", input="a")
    with pytest.raises(openai.NotFoundError, match="the routes are"):
        client.responses.retrieve("resp_1")


def test_what_asks_for_nothing_is_taken(post: Post) -> None:
    nothing: dict[str, Any] = {
        "reasoning": {"effort": None},
        "include": ["reasoning.encrypted_content"],
        "background": False,
    }
    nothing |= {"top_logprobs": 0, "service_tier": "auto", "prompt_cache_key": "a", "previous_response_id": None}
    assert post(PATH, **ASKED, **nothing).status_code == 200
