"""The recipe from logs to data: it goes on as logs come and go, answers nothing twice, and reports all runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfspec.heads.base import tokenizer_hash
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.prepare import count_answered, unanswered
from selfspec.traffic.prompt_files import OutputWriter

ROOT = Path(__file__).parents[2]
WORDS = ["cat", "dog", "hat", "mat", "rat", "bat"]


def asking(name: str, *turns: str, **fields: Any) -> Conversation:
    return Conversation(name, [{"role": "user", "content": turn} for turn in turns], **fields)


def test_what_is_answered_is_known_by_what_users_say() -> None:
    answered = [asking("log:1", "a"), asking("log:2", "b"), asking("log:3", "c", left_out="later turns too long")]
    # The first line has gone, and the others have moved up.
    now = [asking("log:1", "b"), asking("log:2", "c", "d"), asking("log:3", "e"), asking("log:4", "a", "f")]
    pending = unanswered(now, answered)
    assert [c.user_turns for c in pending] == [["e"], ["a", "f"]]
    assert pending[0].id.startswith("log:3#") and pending[1].id == "log:4"
    assert not unanswered(now, [*answered, *pending])
    report = Report()
    count_answered(answered, report)
    assert (report.num_kept, report.examples) == (3, {"later turns too long": ["log:3"]})


@pytest.fixture(scope="module")
def recipe() -> Any:
    spec = importlib.util.spec_from_file_location("prepare_data", ROOT / "recipes" / "prepare_data.py")
    assert spec is not None and spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up there.
    sys.modules[spec.name] = recipe
    spec.loader.exec_module(recipe)
    return recipe


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log without ids: its rows are named by their lines."""
    pytest.importorskip("datasketch")
    (tmp_path / "log").mkdir()
    file = tmp_path / "log" / "chats.jsonl"
    write(file, [[f"tell me of the {word}", f"more of the {word}"] for word in WORDS[:4]])
    return file


def write(file: Path, rows: list[list[str]]) -> None:
    file.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in rows))


@pytest.fixture
def run(recipe: Any, log: Path, tmp_path: Path, tiny_target_dir: Path) -> Callable[..., dict[str, Any]]:
    def run(*more: object) -> dict[str, Any]:
        command = [log.parent, "--output-dir", tmp_path / "data", "--target", tiny_target_dir, "--held-out", 0]
        recipe.main([str(part) for part in (*command, "--max-new-tokens", 6, "--batch-size", 2, *more)])
        return json.loads((tmp_path / "data" / "report.json").read_text())

    return run


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]


def test_rows_carry_what_the_target_wrote(run: Callable[..., Any], tmp_path: Path, tiny_tokenizer: Any) -> None:
    run()
    for row in rows(tmp_path):
        assert row["tokenizer_hash"] == tokenizer_hash(tiny_tokenizer)
        answers = [message for message in row["messages"] if message["role"] == "assistant"]
        assert answers and all(0 < len(answer["token_ids"]) <= 6 for answer in answers)


def test_rows_that_left_the_log_stay_and_stop_nothing(run: Callable[..., Any], log: Path, tmp_path: Path) -> None:
    run()
    first = rows(tmp_path)
    write(log, [[f"tell me of the {word}", f"more of the {word}"] for word in WORDS[2:]])
    log.rename(log.with_name("rotated.jsonl"))
    report = run()
    now = rows(tmp_path)
    assert now[:4] == first
    assert [row["messages"][0]["content"].split()[-1] for row in now] == WORDS
    assert len({row["id"] for row in now}) == 6
    assert report["answering"]["kept"] == 6 and report["cleaning"]["kept"] == 4


def test_the_report_has_the_totals_of_all_runs(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = OutputWriter.write

    def interrupted(self: OutputWriter, rows: list[dict[str, Any]]) -> None:
        write(self, rows)
        if self.path.name == "train.jsonl" and self.path.read_bytes().count(b"\n") == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OutputWriter, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    resumed = run()
    cut = sum(row["finish_reason"] == "length" and "left_out" in row for row in rows(tmp_path))
    assert cut > 0
    assert resumed["answering"]["kept"] == 4
    assert resumed["answering"]["skipped"] == {"later turns after an answer that max_new_tokens cut": cut}
    assert run() == resumed, "a run that answers nothing"
    assert run("--overwrite") == resumed


def test_another_directory_or_overwrite_for_other_settings(run: Callable[..., Any], tmp_path: Path) -> None:
    run()
    before = rows(tmp_path)
    with pytest.raises(ValueError, match="begun with another sampling: choose another --output-dir, or pass --overwrite"):
        run("--temperature", 1, "--seed", 1)
    assert rows(tmp_path) == before
    run("--temperature", 1, "--seed", 1, "--overwrite")
    assert len(rows(tmp_path)) == 4 and rows(tmp_path) != before


def test_arguments_of_the_template_reach_the_target_and_the_rows(run: Callable[..., Any], tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ style }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    run("--chat-template", template)
    plain = rows(tmp_path)
    with pytest.raises(ValueError, match="begun with another chat_template_kwargs"):
        run("--chat-template", template, "--chat-template-kwargs", '{"style": "one two"}')
    run("--chat-template", template, "--chat-template-kwargs", '{"style": "one two"}', "--overwrite")
    styled = rows(tmp_path)
    assert all(row["chat_template_kwargs"] == {"style": "one two"} for row in styled)
    assert [row["messages"] for row in styled] != [row["messages"] for row in plain], "the target read them"
    with pytest.raises(ValueError, match="chat_template_kwargs='x' is not JSON"):
        run("--chat-template-kwargs", "x")
