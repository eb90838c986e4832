"""What a run reads: everything that is left out is counted, shown and recorded, and texts that share a row stay apart."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import tiny_target

from selfspec.model.target import Target
from selfspec.traffic.masking import Sample
from selfspec.train.data import LeftOut, keeps_texts_apart
from selfspec.train.rows import pack

pytest.importorskip("accelerate", reason="training needs accelerate: pip install 'selfspec[train]'")

Recipe = Callable[[str], ModuleType]
Flags = Callable[..., list[str]]


def conversation(question: str, answer: str) -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}) + "\n"


def write(file: Path, *rows: str) -> Path:
    file.write_text("".join(rows))
    return file


def record(output: Path) -> dict[str, Any]:
    return json.loads((output / "run.json").read_text())


THINKING = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and enable_thinking is false %}so {% endif %}"
    "{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("way", ["flag", "rows", "mixed rows"])
def test_a_head_records_the_templates_arguments_that_it_was_trained_with(
    recipe: Recipe, flags: Flags, tmp_path: Path, way: str
) -> None:
    """From the flag, or from the rows where all agree."""
    arguments = {"enable_thinking": False}
    rows = [json.loads(conversation(f"say {i}", "one two three")) for i in range(12)]
    for row in rows if way == "rows" else rows[:6] if way == "mixed rows" else []:
        row["chat_template_kwargs"] = arguments
    file = write(tmp_path / "rows.jsonl", *(json.dumps(row) + "\n" for row in rows))
    given = flags(tmp_path / "run", train_file=file, max_steps=1, chat_template=write(tmp_path / "thinking.jinja", THINKING))
    recipe("medusa").main([*given, "--chat_template_kwargs", json.dumps(arguments)] if way == "flag" else given)
    trained_with = json.loads((tmp_path / "run/head/config.json").read_text())["chat_template_kwargs"]
    assert trained_with == (None if way == "mixed rows" else arguments)


def test_rows_that_a_file_loses_are_counted_shown_and_recorded(
    recipe: Recipe, flags: Flags, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = [conversation(f"say {i}", "one two three") for i in range(12)]
    late = [conversation("the cat sat " * 30, f"answer {i}") for i in range(6)]
    cut = [conversation("say", "one two three " * 30)]
    bad = ["hello\n", '{"messages": 3}\n', json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n"]
    mixed = write(tmp_path / "mixed.jsonl", *short, *late, *cut, *bad)
    output = tmp_path / "run"
    with caplog.at_level(logging.INFO, "selfspec"):
        recipe("medusa").main(flags(output, train_file=mixed, max_steps=1))
    left_out = record(output)["left_out"]["mixed.jsonl"]
    assert left_out.pop("tokens beyond row_length=64") > 6 * 64
    assert left_out == {
        "not JSON": 1,
        "messages is not a list": 1,
        "no answer to train on": 1,
        "samples whose answers begin after row_length=64 tokens": 6,
        "ends of samples longer than row_length=64 tokens": 1,
    }
    assert "mixed.jsonl: 1 left out: not JSON (such as mixed.jsonl:20: hello)" in caplog.text
    [advice] = [line for line in caplog.messages if "--row_length" in line]
    longer = int(advice.split("--row_length ")[1].split()[0])

    caplog.clear()
    recipe("medusa").main(flags(tmp_path / "longer", train_file=mixed, max_steps=1, row_length=longer))
    assert record(tmp_path / "longer")["left_out"]["mixed.jsonl"].keys() == {
        "not JSON",
        "messages is not a list",
        "no answer to train on",
    }


def test_an_empty_held_out_file_warns_that_nothing_is_evaluated(
    recipe: Recipe, flags: Flags, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty = write(tmp_path / "heldout.jsonl")
    assert recipe("medusa").main(flags(tmp_path / "run", held_out_file=empty)) == {}
    [warning] = [line for line in caplog.messages if line.startswith("held_out_file=")]
    assert warning.startswith(f"held_out_file={empty} is empty, so nothing is evaluated on it: hold out more with")
    assert record(tmp_path / "run")["final"] == {}


def test_bad_rows_and_unused_prompts_of_the_held_out_file_are_counted(recipe: Recipe, flags: Flags, tmp_path: Path) -> None:
    rows = [conversation(f"say {i}", "one") for i in range(5)]
    held_out = write(tmp_path / "heldout.jsonl", *rows, "hello\n", conversation("one two " * 2500, "long"))
    recipe("medusa").main(flags(tmp_path / "run", held_out_file=held_out, max_steps=1))
    assert record(tmp_path / "run")["left_out"]["heldout.jsonl"] == {
        "not JSON": 1,
        "prompts too long, or refused by the chat template": 1,
        "prompts beyond num_eval_prompts=2": 3,
    }


def test_answer_tokens_outside_a_draft_vocabulary_are_counted(recipe: Recipe, flags: Flags, tmp_path: Path) -> None:
    shape = ["--feature_layers", "0", "1"]
    for size in (8, 300):
        output = tmp_path / str(size)
        recipe("eagle").main([*flags(output, max_steps=1, draft_vocab_size=size), *shape])
        missed = record(output)["left_out"].get("draft vocabulary", {}).get("answer tokens that it lacks", 0)
        assert (missed > 0) == (size == 8)


def test_a_reason_is_counted_once_for_each_thing_left_out() -> None:
    left_out = LeftOut()
    left_out.add("folder/a.jsonl", "late", 2)
    left_out.add("folder/a.jsonl", "late", 3)
    left_out.add("folder/a.jsonl", "never", 0)
    assert left_out.counts == {"a.jsonl": {"late": 5}}


def samples(*sizes: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [Sample(torch.randint(3, 61, (size,), generator=generator).tolist(), [True] * size) for size in sizes]


@pytest.fixture
def leak(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes every target take a row for one text."""
    hidden_states = Target.hidden_states

    def leaking(target: Target, input_ids: torch.Tensor, position_ids: torch.Tensor, features: Any) -> Any:
        return hidden_states(target, input_ids, torch.arange(input_ids.shape[1]).expand_as(input_ids), features)

    return lambda: monkeypatch.setattr(Target, "hidden_states", leaking)


@pytest.mark.parametrize("family", ["llama", "gpt-oss", "opt", "gemma3"])
def test_a_target_that_lets_texts_see_each_other_is_noticed(family: str, leak: Callable[[], None]) -> None:
    target = tiny_target(family)
    rows = pack(samples(20, 25, 15), 64)
    assert len(rows) == 1
    assert keeps_texts_apart(target, rows)
    leak()
    assert not keeps_texts_apart(target, rows)


def test_rows_without_a_second_text_have_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(Target, "hidden_states", None)
    # The second text of the first row is padding.
    assert keeps_texts_apart(target, pack(samples(20), 64))


def test_texts_that_change_each_other_get_rows_of_their_own(
    recipe: Recipe, flags: Flags, tmp_path: Path, leak: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    leak()
    recipe("medusa").main(flags(tmp_path / "run", max_steps=1))
    assert "llama: texts that share a row change each other's hidden states, so every row holds one text" in caplog.text
    assert record(tmp_path / "run")["num_rows"] == 56
