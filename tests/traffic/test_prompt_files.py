"""Prompt files: an error names the line. Result files: they survive a crash, and are never replaced unasked."""

import json
from pathlib import Path

import pytest

from selfspec.traffic.prompt_files import OutputWriter, PromptRow, read_prompts

DATA = Path(__file__).parents[2] / "selfspec" / "data"


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_three_forms_of_a_row(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    file = write(
        tmp_path / "prompts.jsonl",
        '{"prompt": "Once upon\u2028a time"}',
        "",
        json.dumps({"id": "m", "messages": messages}),
        '{"id": 7, "turns": ["One?", "Two?"], "category": "qa"}',
    )
    assert read_prompts(file) == [
        PromptRow(1, "Once upon\u2028a time"),
        PromptRow("m", messages),
        PromptRow(7, [{"role": "user", "content": "One?"}], turns=["One?", "Two?"], category="qa"),
    ]


def test_windows_file_with_byte_order_mark(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"id": "a", "prompt": "Hello"}\r\n')
    assert read_prompts(file) == [PromptRow("a", "Hello")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "x"', "not JSON"),
        ('["x"]', "a list where an object"),
        ('{"text": "x"}', "none of prompt, messages, turns"),
        ('{"prompt": "x", "turns": ["x"]}', "both prompt and turns"),
        ('{"prompt": " "}', "prompt is empty"),
        ('{"prompt": 3}', "prompt is 3"),
        ('{"messages": []}', "messages is"),
        ('{"messages": [{"content": "x"}]}', "messages[0] is not an object with role"),
        ('{"messages": [{"role": "user", "content": null}]}', "messages[0].content is None"),
        ('{"turns": "x"}', "turns is 'x'"),
        ('{"turns": ["x", ""]}', "turns[1] is empty"),
        ('{"id": 1.5, "prompt": "x"}', "id is 1.5"),
        ('{"id": "first", "prompt": "x"}', "id 'first' is already that of line 1"),
    ],
)
def test_bad_row_is_named_with_its_line(tmp_path, line, problem):
    file = write(tmp_path / "prompts.jsonl", '{"id": "first", "prompt": "fine"}', line)
    with pytest.raises(ValueError, match="prompts.jsonl, line 2: ") as caught:
        read_prompts(file)
    assert problem in str(caught.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*absent.jsonl: No such file"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(write(tmp_path / "empty.jsonl", "", " "))
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "café"}'.encode("latin-1"))
    with pytest.raises(ValueError, match="line 1: not UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")


@pytest.mark.parametrize(
    ("name", "num_rows", "num_categories"),
    [("demo_prompts.jsonl", 12, 6), ("spec_bench.jsonl", 480, 6), ("humaneval.jsonl", 164, 1)],
)
def test_packaged_prompts(name, num_rows, num_categories):
    rows = read_prompts(DATA / name)
    assert len(rows) == num_rows
    assert len({row.category for row in rows}) == num_categories


def test_rows_are_on_disk_as_soon_as_written(tmp_path):
    file = tmp_path / "out.jsonl"
    with OutputWriter(file, {"a": 1}) as writer:
        writer.write([{"id": "a", "text": "café"}])
        assert file.read_text(encoding="utf-8") == '{"id": "a", "text": "café"}\n'


def test_existing_results_are_kept_unless_asked(tmp_path):
    file = write(tmp_path / "out.jsonl", '{"id": "a"}')
    with pytest.raises(ValueError, match=r"holds results already: pass --resume .* or --overwrite"):
        OutputWriter(file, {"a": 1})
    with pytest.raises(ValueError, match="exclude each other"):
        OutputWriter(file, {"a": 1}, overwrite=True, resume=True)
    writer = OutputWriter(file, {"a": 1}, overwrite=True)
    assert file.read_text() == '{"id": "a"}\n', "nothing changes before the writer is entered"
    with writer:
        writer.write([{"id": "a", "new": True}])
    assert file.read_text() == '{"id": "a", "new": true}\n'


def test_unusable_outputs(tmp_path):
    with pytest.raises(ValueError, match="it is a directory"):
        OutputWriter(tmp_path, {})
    with pytest.raises(ValueError, match="is not a directory"):
        OutputWriter(tmp_path / "absent" / "out.jsonl", {})


@pytest.mark.parametrize(
    "torn_tail",
    ["", '{"id": "b", "te', '{"id": "b", "sample": 0}', '{"id": "b", "sample": 0}\n', '{"id": "b", "sample": 0}\n{"id'],
)
def test_resume_drops_the_unfinished_prompt(tmp_path, torn_tail):
    done = '{"id": "a", "sample": 0}\n{"id": "a", "sample": 1}\n'
    file = tmp_path / "out.jsonl"
    file.write_text(done + torn_tail)
    with OutputWriter(file, {"a": 2, "b": 2}, resume=True) as writer:
        assert writer.finished == {"a"}
        writer.write([{"id": "b"}, {"id": "b"}])
    assert file.read_text() == done + '{"id": "b"}\n{"id": "b"}\n'


@pytest.mark.parametrize(
    "content",
    [
        '{"id": "elsewhere"}\n',
        "not a result\n",
        '{"id": "a"}\n{"id": "b"}\n{"id": "b"}\n',
        '{"id": "a"}\n{"id": "a"}\n{"id": "a"}\n',
    ],
)
def test_resume_refuses_results_of_another_run(tmp_path, content):
    file = tmp_path / "out.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match="cannot be resumed"):
        OutputWriter(file, {"a": 2, "b": 2}, resume=True)
    assert file.read_text() == content


def test_a_line_nested_too_deeply_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_prompts(file)
