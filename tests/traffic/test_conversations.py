"""Every common form of row is read, and a bad row is counted without stopping the others."""

import json
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
        (b'{"question": "x"}', "none of messages, conversations, turns, prompt, text"),
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
    (tmp_path / "table.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"no known format: call it \.jsonl"):
        read(tmp_path / "table.csv")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs datasets: pip install 'selfspec\[train\]'"):
        read("org/chats")
