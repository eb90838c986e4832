"""Every common form of row is read, and a bad row is counted without stopping the others."""

import gzip
import json
import random
import sys

import pytest

from selfspec.traffic.conversations import NUM_EXAMPLES, Conversation, Report
from selfspec.traffic.sources import read_conversations

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
CHAT = [USER, ANSWER]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def read(*sources) -> tuple[list[Conversation], Report]:
    report = Report()
    return list(read_conversations(sources, report)), report


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": CHAT}, CHAT),
        ({"messages": [{"role": "developer", "content": ""}, *CHAT]}, [{"role": "system", "content": ""}, *CHAT]),
        ({"conversations": SHAREGPT}, CHAT),
        ({"conversations": CHAT}, CHAT),
        ({"turns": ["Hi", "Bye"]}, [USER, {"role": "user", "content": "Bye"}]),
        ({"prompt": "Hi"}, [USER]),
        ({"text": "Hi", "messages": None}, [USER]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]},
            [USER],
        ),
        ({"messages": [USER, {**ANSWER, "weight": 0, "refusal": None}]}, [USER, {**ANSWER, "weight": 0}]),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]},
                    {**USER, "role": "tool"},
                ]
            },
            [USER, {"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}, {**USER, "role": "tool"}],
        ),
    ],
)
def test_forms(tmp_path, record, messages):
    [conversation], report = read(write_lines(tmp_path / "a.jsonl", {"id": 7, "category": "qa", **record}))
    assert conversation == Conversation("7", messages, "qa")
    assert not report.skipped
    assert conversation.record() == {"id": "7", "category": "qa", "messages": messages}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "x"', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ('{"prompt": "café"}'.encode("latin-1"), "not UTF-8"),
        (b'["x"]', "not an object"),
        (b'{"question": "x"}', "none of messages, conversations, turns, prompt, text, instruction, body, request"),
        (b'{"messages": "x"}', "messages is not a list"),
        (b'{"messages": []}', "does not begin with a user turn"),
        (b'{"messages": ["x"]}', "a message that is not an object"),
        (b'{"messages": [{"role": "alien", "content": "x"}]}', "unknown role 'alien'"),
        (b'{"messages": [{"role": ["user"], "content": "x"}]}', "unknown role \"['user']\""),
        (b'{"messages": [{"role": "user", "content": null}]}', "content that is not text"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "content that is not text"),
        (b'{"prompt": " "}', "an empty user turn"),
        (b'{"prompt": "\\ud800"}', "cannot be written as UTF-8 JSON"),
        (b'{"conversations": [{"from": "gpt", "value": "x"}]}', "does not begin with a user turn"),
        (json.dumps({"messages": [USER, ANSWER, ANSWER]}).encode(), "two assistant turns in a row"),
        (json.dumps({"messages": [USER, {**USER, "role": "system"}]}).encode(), "a system turn after the first message"),
        (json.dumps({"messages": [USER, {**USER, "role": "tool"}]}).encode(), "a tool's answer to no call"),
    ],
)
def test_bad_rows_are_counted_and_skipped(tmp_path, line, reason):
    good = json.dumps({"messages": CHAT}).encode()
    file = tmp_path / "log.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + good + b"\r\n\n" + (line + b"\n") * 5 + good)
    conversations, report = read(file)
    assert [conversation.id for conversation in conversations] == ["log.jsonl:1", "log.jsonl:8"]
    assert report.skipped == {reason: 5}
    assert report.num_kept == 2
    [examples] = report.examples.values()
    assert len(examples) == NUM_EXAMPLES
    assert examples[0].startswith("log.jsonl:3: ")


REQUEST = {"model": "m", "messages": [USER], "temperature": 0, "tools": [{"type": "function"}]}
RESPONSE = {"choices": [{"message": {**ANSWER, "refusal": None, "tool_calls": None}, "finish_reason": "length"}]}


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": REQUEST}, "body"),
        ({"custom_id": "a", "id": "x", "body": REQUEST, "response": {"status_code": 200, "body": RESPONSE}}, "body"),
        ({"id": "a", "request": REQUEST, "response": RESPONSE}, "request"),
        ({"id": "a", "request": {"url": "/", "body": REQUEST}, "response": {"body": RESPONSE}}, "request"),
        ({"id": "a", "request": json.dumps(REQUEST), "response": json.dumps(RESPONSE)}, "request"),
        ({"id": "a", "request": {"body": json.dumps(REQUEST)}, "response": None}, "request"),
        ({"id": "a", "request": REQUEST, "response": {"error": "busy"}}, "request"),
        ({"id": "a", "request": REQUEST, "response": {"choices": []}}, "request"),
    ],
)
def test_requests_with_their_responses(tmp_path, record, form):
    """As OpenAI's batch files and proxies log them."""
    [conversation], report = read(write_lines(tmp_path / "a.jsonl", record))
    is_answered = "Hello" in json.dumps(record)
    assert conversation.messages == (CHAT if is_answered else [USER])
    assert (conversation.id, conversation.tools) == ("a", [{"type": "function"}])
    assert conversation.finish_reason == ("length" if is_answered else None)
    assert report.forms == {form: 1}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"instruction": "Hi", "input": "", "output": "Hello"}, CHAT),
        ({"instruction": "Sum", "input": "1 2"}, [{"role": "user", "content": "Sum\n\n1 2"}]),
    ],
)
def test_instructions(tmp_path, record, messages):
    [conversation], report = read(write_lines(tmp_path / "a.jsonl", record))
    assert conversation.messages == messages
    assert report.forms == {"instruction": 1}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"body": {"prompt": "Hi"}}, "body has no messages"),
        ({"request": "GET /"}, "request has no messages"),
        ({"request": {"messages": "Hi"}}, "request has no messages"),
        ({"messages": CHAT, "tools": "x"}, "tools that are not a list of objects"),
        ({"messages": CHAT, "tools": ["x"]}, "tools that are not a list of objects"),
        ({"messages": CHAT, "chat_template_kwargs": "x"}, "chat_template_kwargs that are not an object"),
        ({"messages": [USER, {**ANSWER, "token_ids": "x"}]}, "token_ids that are not whole numbers from 0 on"),
        ({"messages": [USER, {**ANSWER, "token_ids": [1, -1]}]}, "token_ids that are not whole numbers from 0 on"),
        ({"messages": [USER, {**ANSWER, "token_ids": [True]}]}, "token_ids that are not whole numbers from 0 on"),
        ({"messages": [USER, {**ANSWER, "reasoning_content": 1}]}, "content that is not text"),
        ({"instruction": 1, "input": "x"}, "content that is not text"),
    ],
)
def test_bad_fields_are_counted_and_skipped(tmp_path, record, reason):
    conversations, report = read(write_lines(tmp_path / "a.jsonl", record, {"messages": CHAT}))
    assert [conversation.id for conversation in conversations] == ["a.jsonl:2"]
    assert report.skipped == {reason: 1}
    assert report.examples[reason][0].startswith("a.jsonl:1: ")


def test_every_field_survives_a_file(tmp_path):
    answer = {**ANSWER, "reasoning_content": "Greet.", "token_ids": [5, 0, 7]}
    row = Conversation("a", [USER, answer], "qa", "stop", [{"type": "function"}], {"enable_thinking": False}, "hash")
    [again], report = read(write_lines(tmp_path / "a.jsonl", row.record()))
    assert again == row and not report.skipped


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.txt"])
def test_compressed_files(tmp_path, name):
    rows = {"a.txt": b"Hi\n\nBye\n", "a.json": json.dumps([{"prompt": "Hi"}, {"prompt": "Bye"}], indent=1).encode()}
    content = rows.get(name, b'{"prompt": "Hi"}\n{"prompt": "Bye"}\n')
    file = tmp_path / "folder" / f"{name}.gz"
    file.parent.mkdir()
    file.write_bytes(gzip.compress(content))
    conversations, report = read(file)
    assert [c.user_turns for c in conversations] == [["Hi"], ["Bye"]]
    assert conversations[0].id == f"{name}.gz:1" and not report.skipped
    in_folder, _ = read(file.parent)
    assert [c.user_turns for c in in_folder] == ([["Hi\n\nBye"]] if name == "a.txt" else [["Hi"], ["Bye"]])


def test_a_compressed_file_that_ends_too_early_costs_its_end(tmp_path):
    """As one that is being written does."""
    rows = [{"prompt": f"{i} {random.Random(i).random()}"} for i in range(4000)]
    content = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(content[: len(content) // 2])
    (tmp_path / "b.jsonl.gz").write_bytes(b"no gzip at all")
    (tmp_path / "c.jsonl").write_text('{"prompt": "Hi"}')
    (tmp_path / "d.tar.gz").write_bytes(content)
    conversations, report = read(tmp_path)
    assert 1000 < len(conversations) < 3000 and conversations[-1].user_turns == ["Hi"]
    assert report.skipped["a compressed file that cannot be read to its end"] == 2
    assert report.examples["a file of unknown format"] == ["d.tar.gz"]


def test_csv(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "a.csv").write_text('instruction,input,output\nHi,,Hello\n"Sum, please",1 2,3\n')
    conversations, report = read(tmp_path / "a.csv")
    assert [c.user_turns for c in conversations] == [["Hi"], ["Sum, please\n\n1 2"]]
    assert conversations[0].messages == CHAT and not report.skipped


def test_json_list_and_json_with_lines(tmp_path):
    rows = [{"id": "a", "conversations": SHAREGPT}, {"id": "b", "conversations": SHAREGPT}]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "one.json").write_text(json.dumps(rows[0], indent=1))
    write_lines(tmp_path / "lines.json", *rows)
    for name, ids in ("list", "ab"), ("one", "a"), ("lines", "ab"):
        conversations, _ = read(tmp_path / f"{name}.json")
        assert "".join(conversation.id for conversation in conversations) == ids


def test_plain_text_by_line_and_by_file(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("One\n\nTwo\n")
    (folder / "b.txt").write_text("Three\u2028four\n")
    (folder / "notes.md").write_text("x")
    assert [c.user_turns for c in read(folder / "a.txt")[0]] == [["One"], ["Two"]]
    conversations, report = read(folder)
    assert [c.user_turns for c in conversations] == [["One\n\nTwo"], ["Three\u2028four"]]
    assert report.examples == {"a file of unknown format": ["notes.md"]}


def test_ids_are_unique_over_all_sources(tmp_path):
    rows = [{"id": name, "prompt": "x"} for name in ("a", "a#2", "a", "a")]
    file = write_lines(tmp_path / "a.jsonl", *rows)
    conversations, _ = read(file, file)
    ids = [conversation.id for conversation in conversations]
    assert ids[:4] == ["a", "a#2", "a#3", "a#4"]
    assert len(set(ids)) == 8


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_tables(tmp_path, suffix):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(
        [{"id": "a", "messages": CHAT, "text": "x"}, {"id": "b", "messages": None, "text": "Hi"}]
    )
    if suffix == "parquet":
        file = tmp_path / "table.parquet"
        table.to_parquet(file)
    else:
        table.save_to_disk(tmp_path / "table")
        file = next((tmp_path / "table").glob("*.arrow"))
    conversations, report = read(file)
    assert conversations == [Conversation("a", CHAT), Conversation("b", [USER])]
    assert report.forms == {"messages": 1, "text": 1}
    file.write_bytes(b"PAR1" * 10)
    with pytest.raises(ValueError, match="cannot read"):
        read(file)


def test_hub_datasets_are_named_with_configuration_and_split(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(name, config, *, split, streaming):
        calls.append((name, config, split, streaming))
        return [{"messages": CHAT}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    conversations, _ = read("org/chats", "org/chats:test", "org/chats:small:test")
    assert calls == [("org/chats", *rest, True) for rest in [(None, "train"), (None, "test"), ("small", "test")]]
    assert conversations[0] == Conversation("org/chats:1", CHAT)


def test_unreadable_sources(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="there is no such file"):
        read(tmp_path / "absent.jsonl")
    (tmp_path / "table.xlsx").write_text("a,b")
    with pytest.raises(ValueError, match=r"no known format: call it \.jsonl"):
        read(tmp_path / "table.xlsx")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs datasets: pip install 'selfspec\[train\]'"):
        read("org/chats")
