"""Requests that cannot be met: one sentence that says what to do, exit code 1, and nothing half-written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from selfspec.cli.main import app
from selfspec.failures import reported_failures

pytest.importorskip("accelerate", reason="training needs accelerate: pip install 'selfspec[train]'")
pytest.importorskip("datasketch", reason="cleaning needs datasketch: pip install 'selfspec[train]'")

Recipe = Callable[[str], ModuleType]
Flags = Callable[..., list[str]]

BROKEN_TEMPLATE = "{% for message in messages %}{{ message['content'] }"


def said(capsys: pytest.CaptureFixture[str], run: Callable[[], Any]) -> str:
    """The one line that a person at a terminal gets from a recipe that gives up."""
    with pytest.raises(SystemExit) as ended, reported_failures():
        run()
    assert ended.value.code == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("selfspec: ")]
    return line.removeprefix("selfspec: ")


@pytest.fixture
def place(tmp_path: Path, tiny_target_dir: Path) -> Path:
    """A folder with whatever a bad request may name."""
    messages = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "one two"}]
    files = {
        "empty.jsonl": "",
        "blank.jsonl": "\n\n",
        "not-json.jsonl": "hello\n",
        "questions.jsonl": json.dumps({"messages": messages[:1]}) + "\n",
        "long.jsonl": json.dumps({"messages": [messages[0], {"role": "assistant", "content": "one two " * 3000}]}) + "\n",
        "late.jsonl": json.dumps({"messages": [{"role": "user", "content": "one two " * 99}, messages[1]]}) + "\n",
        "one.jsonl": json.dumps({"messages": messages}) + "\n",
        "notes.docx": "hello",
        "broken.jinja": BROKEN_TEMPLATE,
        "list.yaml": "- one\n- two\n",
        "blank.yaml": "# nothing yet\n",
        "broken.yaml": "target: [\n",
        "latin.jinja": "",
        "file": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.jinja").write_bytes("ä".encode("latin-1"))
    (tmp_path / "nothing").mkdir()
    shutil.copytree(tiny_target_dir, tmp_path / "mute")
    for file in (tmp_path / "mute").glob("*token*"):
        file.unlink()
    shutil.copytree(tiny_target_dir, tmp_path / "unparsed")
    (tmp_path / "unparsed" / "chat_template.jinja").write_text(BROKEN_TEMPLATE)
    return tmp_path


# The recipe, what is changed of a good request ({} is the folder of `place`), more flags, and the sentence.
TRAINING: list[tuple[str, dict[str, Any], list[str], str]] = [
    (
        "medusa",
        {"train_file": "{}/empty.jsonl"},
        [],
        "no conversation is left to train on (none was found): give other files",
    ),
    (
        "medusa",
        {"train_file": "{}/blank.jsonl"},
        [],
        "no conversation is left to train on (none was found): give other files",
    ),
    (
        "medusa",
        {"train_file": "{}/not-json.jsonl"},
        [],
        "no conversation is left to train on (1 not JSON): give other files",
    ),
    ("medusa", {"train_file": "{}/nothing"}, [], "no conversation is left to train on (none was found): give other files"),
    ("medusa", {"train_file": "{}/notes.docx"}, [], "notes.docx has a name of no known format: call it .jsonl"),
    ("medusa", {"train_file": "{}/absent.jsonl"}, [], "absent.jsonl does not exist: check the spelling"),
    (
        "medusa",
        {"train_file": "{}/questions.jsonl"},
        [],
        "no conversation has an assistant token to train on: let `selfspec data",
    ),
    ("medusa", {"train_file": "{}/late.jsonl"}, [], "no answer begins within row_length=64 tokens: use longer rows"),
    (
        "medusa",
        {"train_file": "{}/long.jsonl", "row_length": 8192},
        [],
        "longer than the target's context of 4096 tokens: use row_length",
    ),
    (
        "medusa",
        {"train_file": "{}/one.jsonl"},
        [],
        "1 packed rows are fewer than the 2 of one step: use smaller batches or more data",
    ),
    ("medusa", {"held_out_file": "{}/not-json.jsonl"}, [], "not-json.jsonl has no prompt to decode: "),
    (
        "medusa",
        {"report_to": "wandb"},
        [],
        "report_to=wandb cannot be used, because wandb is not installed: pip install wandb",
    ),
    ("medusa", {"report_to": "pigeon"}, [], "report_to=pigeon is not known: use none, all or "),
    ("medusa", {"eval_strategy": "epoch"}, [], "eval_strategy=epoch is not known here: use eval_steps, a number of steps"),
    ("medusa", {"resume_from_checkpoint": "x"}, [], "resume_from_checkpoint has no effect here, because a run continues"),
    ("medusa", {"activation_checkpointing": True}, [], "activation_checkpointing has no effect here, because only the head"),
    ("medusa", {"label_smoothing_factor": 0.1}, [], "label_smoothing_factor has no effect here, because the label is the"),
    ("medusa", {"bf16": True, "use_cpu": False}, [], "bf16=True needs a GPU that computes in bfloat16: leave it out"),
    ("medusa", {"adapter": "{}/nothing"}, [], "nothing cannot be read: "),
    ("medusa", {"num_eval_tokens": 4096}, [], "has no prompt to decode: each must leave room for num_eval_tokens=4096"),
    ("medusa", {"final_eval_file": "{}/empty.jsonl"}, [], "empty.jsonl holds no prompt: write one per line"),
    ("medusa", {"final_eval_file": "{}/not-json.jsonl"}, [], "not-json.jsonl, line 1: not JSON"),
    ("medusa", {"target": "{}/absent"}, [], "absent"),
    ("medusa", {"target": "{}/mute"}, [], "mute has no tokenizer that can be read: save the target's tokenizer there"),
    ("medusa", {"target": "{}/unparsed"}, [], "the chat template cannot be parsed (line 1: "),
    ("medusa", {"chat_template": "{}/broken.jinja"}, [], "the chat template cannot be parsed (line 1: "),
    ("medusa", {"chat_template": "{}/latin.jinja"}, [], "latin.jinja is not UTF-8 text: save it as UTF-8"),
    ("medusa", {"target_dtype": "float7"}, [], "dtype='float7' is not known: use auto"),
    ("medusa", {"output_dir": "{}/file"}, [], "file is a file: choose another --output_dir"),
    ("medusa", {"row_length": 0}, [], "row_length=0 is not allowed: use at least 1"),
    ("medusa", {"num_eval_tokens": 0}, [], "num_eval_tokens=0 is not allowed: use at least 1"),
    ("medusa", {"num_eval_prompts": -1}, [], "num_eval_prompts=-1 is not allowed: use at least 0"),
    ("medusa", {"max_steps": -3}, [], "max_steps=-3 is not allowed: use at least 1"),
    ("medusa", {"max_steps": 0}, [], "max_steps=0 is not allowed: use at least 1"),
    ("medusa", {"eval_steps": -2}, [], "eval_steps=-2.0 is not allowed: use at least 0"),
    ("medusa", {"save_steps": -2}, [], "save_steps=-2.0 is not allowed: use at least 0"),
    ("medusa", {"learning_rate": -1}, [], "learning_rate=-1.0 is not allowed: use at least 0"),
    ("medusa", {"per_device_train_batch_size": 0}, [], "per_device_train_batch_size=0 is not allowed: use at least 1"),
    ("medusa", {"gradient_accumulation_steps": 0}, [], "gradient_accumulation_steps"),
    ("medusa", {}, ["--num_heads=0"], "num_heads=0"),
    ("medusa", {}, ["--decay=-1"], "decay=-1.0 is not allowed: use a number above 0"),
    ("medusa", {}, ["--colour=red"], "--colour=red is not a setting of this recipe: see --help"),
    ("eagle", {}, ["--num_steps=-1"], "num_steps=-1 is not allowed: use at least 1"),
    ("eagle", {}, ["--feature_layers", "0", "9"], "feature_layers=(0, 9): tiny-target0 has hidden states 0 to 2"),
    ("eagle", {}, ["--version=2"], "version=2 is not known: use 3 or 1"),
    ("eagle", {}, ["--version=1", "--noise=-1"], "noise=-1.0 is not allowed: use 0 or more"),
    ("eagle", {}, ["--version=1", "--token_weight=-1"], "token_weight=-1.0 is not allowed: use 0 or more"),
    ("eagle", {}, ["--draft_vocab_size=0"], "draft_vocab_size=0: use 1 to"),
    ("early_exit", {}, ["--exit_layer=7"], "exit_layer=7: tiny-target0 has 2 layers, so use 1 to 1"),
    ("draft", {}, ["--blocks", "5"], "blocks=(5,): tiny-target0 has layers 0 to 1"),
]


@pytest.mark.parametrize(("kind", "changes", "extra", "sentence"), TRAINING, ids=[f"{t[0]} {t[1]} {t[2]}" for t in TRAINING])
def test_a_training_that_cannot_be(
    kind: str,
    changes: dict[str, Any],
    extra: list[str],
    sentence: str,
    recipe: Recipe,
    flags: Flags,
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = set(place.iterdir())
    named = {name: value.format(place) if isinstance(value, str) else value for name, value in changes.items()}
    line = said(capsys, lambda: recipe(kind).main([*flags(place / "run", **named), *extra]))
    assert sentence in line
    assert set(place.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("absent.yaml", "absent.yaml cannot be read (No such file or directory): check the path"),
        ("broken.yaml", "broken.yaml is not YAML (line 2"),
        ("list.yaml", "list.yaml is no list of settings: write one `name: value` per line"),
        ("blank.yaml", "blank.yaml holds no settings: write one `name: value` per line"),
    ],
)
def test_a_yaml_file_that_cannot_be(
    name: str, sentence: str, recipe: Recipe, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in said(capsys, lambda: recipe("medusa").main([str(place / name)]))


PREPARING: list[tuple[list[str], str]] = [
    (["{}/empty.jsonl"], "no conversation is left to train on (none was found): give other files"),
    (["{}/not-json.jsonl"], "no conversation is left to train on (1 not JSON): give other files"),
    (["{}/nothing"], "no conversation is left to train on (none was found): give other files"),
    (["{}/one.jsonl", "{}/absent.jsonl"], "absent.jsonl: there is no such file"),
    (["{}/one.jsonl", "{}/notes.docx"], "notes.docx has a name of no known format: call it .jsonl"),
    (["{}/one.jsonl", "--held-out=2"], "held_out=2.0 is not allowed: use a share from 0 to 1"),
    (["{}/one.jsonl", "--similarity=0"], "similarity=0.0 is not allowed: use a number above 0"),
    (["{}/one.jsonl", "--exclude", "{}/not-json.jsonl"], "a prompt to exclude cannot be read (not JSON): mend or remove"),
]


@pytest.mark.parametrize(("arguments", "sentence"), PREPARING, ids=[" ".join(case[0]) for case in PREPARING])
def test_a_cleaning_that_cannot_be(arguments: list[str], sentence: str, place: Path) -> None:
    before = set(place.iterdir())
    result = CliRunner().invoke(
        app, ["data", "clean", "--output-dir", str(place / "out"), *(each.format(place) for each in arguments)]
    )
    assert result.exit_code == 1 and sentence in " ".join(result.stderr.split())
    assert set(place.iterdir()) == before


def test_a_misspelt_source_does_not_cost_the_output_that_was_to_be_replaced(place: Path) -> None:
    output = place / "out"
    output.mkdir()
    (output / "train.jsonl").write_text("precious\n")
    result = CliRunner().invoke(
        app, ["data", "clean", "--overwrite", "--output-dir", str(output), str(place / "one.jsonl"), "./misspelt.jsonl"]
    )
    assert result.exit_code == 1 and (output / "train.jsonl").read_text() == "precious\n"


WRITING: list[tuple[list[str], str]] = [
    (["--batch-size=0"], "batch_size=0 is not allowed: use at least 1"),
    (["--chat-template={}/absent.jinja"], "absent.jinja cannot be read (No such file or directory)"),
    (["--chat-template={}/broken.jinja"], "the chat template cannot be parsed (line 1: "),
    (["--target={}/mute"], "mute has no tokenizer that can be read"),
    (["--target={}/unparsed"], "the chat template cannot be parsed (line 1: "),
    (["--target={}/absent"], "absent"),
    (["--max-new-tokens=0"], "max_new_tokens=0 is not allowed: use a whole number of at least 1"),
    (["--n=2"], "training takes one whole answer a prompt: leave out n"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRITING, ids=[" ".join(case[0]) for case in WRITING])
@pytest.mark.parametrize("command", ["regenerate", "prompts", "prepare_data"])
def test_a_writing_that_cannot_be(
    command: str,
    arguments: list[str],
    sentence: str,
    recipe: Recipe,
    place: Path,
    tiny_target_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = set(place.iterdir())
    options = [f"--target={tiny_target_dir}", *(each.format(place) for each in arguments)]
    if command == "prepare_data":
        preparing = [str(place / "one.jsonl"), "--output-dir", str(place / "out"), *options]
        line = said(capsys, lambda: recipe("prepare_data").main(preparing))
    else:
        given = [str(place / "one.jsonl")] if command == "regenerate" else ["--number=2", "--temperature=1"]
        result = CliRunner().invoke(app, ["data", command, *given, "--output", str(place / "out.jsonl"), *options])
        assert result.exit_code == 1
        line = " ".join(result.stderr.split())
    assert sentence in line
    assert set(place.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{}/empty.jsonl"], "no conversation is left to train on (none was found): give other files"),
        (["{}/not-json.jsonl"], "no conversation is left to train on (1 not JSON): give other files"),
        (["{}/notes.docx"], "notes.docx has a name of no known format"),
        (["{}/one.jsonl", "--self-prompts=-1"], "self_prompts=-1 is not allowed: use 0 (none) or more"),
        (["{}/one.jsonl", "--held-out=2"], "held_out=2.0 is not allowed"),
        (["{}/one.jsonl", "--colour=red"], "--colour=red is not a setting of this recipe: see --help"),
    ],
)
def test_a_preparation_that_cannot_be(
    arguments: list[str],
    sentence: str,
    recipe: Recipe,
    place: Path,
    tiny_target_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = set(place.iterdir())
    options = [each.format(place) for each in arguments]
    options += ["--output-dir", str(place / "out"), "--target", str(tiny_target_dir)]
    assert sentence in said(capsys, lambda: recipe("prepare_data").main(options))
    assert set(place.iterdir()) == before


def test_greedy_prompts_are_refused_before_the_target_is_loaded(place: Path) -> None:
    (place / "empty").mkdir()
    options = ["--number=2", "--output", str(place / "out.jsonl"), "--target", str(place / "empty")]
    result = CliRunner().invoke(app, ["data", "prompts", *options])
    assert result.exit_code == 1 and "pass a --temperature above 0" in " ".join(result.stderr.split())
    assert not (place / "out.jsonl").exists()
