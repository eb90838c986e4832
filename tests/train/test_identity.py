"""The same line again continues its run, and a folder that was begun otherwise is refused with what changed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from selfspec.train.module import HeadTraining

pytest.importorskip("accelerate", reason="training needs accelerate: pip install 'selfspec[train]'")

Recipe = Callable[[str], ModuleType]
Flags = Callable[..., list[str]]

REMEDY = "choose another --output_dir, or remove it to begin anew"


@pytest.fixture
def other(data: Path, tmp_path: Path) -> Path:
    """The same conversations but for a question and an answer."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows[0]["messages"][0]["content"] = rows[3]["messages"][1]["content"] = "dog"
    file = tmp_path / "other.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def begun(recipe: Recipe, flags: Flags, tmp_path: Path) -> Path:
    output = tmp_path / "run"
    recipe("medusa").main(flags(output))
    return output


def files(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"train_file": "other"}, "begun with other training rows (train_file, its content or the chat template)"),
    ({"held_out_file": "other"}, "begun with other held-out prompts (held_out_file, its content or num_eval_prompts)"),
    ({"chat_template": "template"}, "begun with other training rows (train_file, its content or the chat template)"),
    ({"row_length": 72}, "begun with row_length 64, not 72"),
    ({"learning_rate": 0.002}, "begun with learning_rate 0.001, not 0.002"),
    ({"lr_scheduler_type": "cosine"}, 'begun with lr_scheduler_type "linear", not "cosine"'),
    ({"per_device_train_batch_size": 4}, "begun with rows of a step 2, not 4"),
    ({"decay": 0.5}, "begun with decay 0.8, not 0.5"),
    ({"seed": 1}, "begun with seed 42, not 1"),
    ({"init_seed": 1}, "begun with init_seed 0, not 1"),
]


@pytest.mark.parametrize(("changes", "sentence"), CHANGES, ids=[str(change[0]) for change in CHANGES])
def test_a_run_that_was_begun_otherwise_is_refused_and_stays_as_it_was(
    changes: dict[str, Any],
    sentence: str,
    begun: Path,
    other: Path,
    recipe: Recipe,
    flags: Flags,
    tmp_path: Path,
    tiny_target_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = tmp_path / "other.jinja"
    template.write_text((tiny_target_dir / "chat_template.jinja").read_text().replace("<|im_start|>", "<|im_start|> "))
    named = {"other": other, "template": template}
    before = files(begun)
    monkeypatch.setattr(HeadTraining, "forward", None)
    with pytest.raises(ValueError, match=rf"^{re.escape(f'{begun} was {sentence}: {REMEDY}')}$"):
        recipe("medusa").main(flags(begun, max_steps=8, **{k: named.get(v, v) for k, v in changes.items()}))
    assert files(begun) == before


def test_the_same_data_elsewhere_is_the_same_run(
    begun: Path, data: Path, recipe: Recipe, flags: Flags, tmp_path: Path
) -> None:
    moved = tmp_path / "moved.jsonl"
    shutil.copy(data, moved)
    recipe("medusa").main(flags(begun, train_file=moved, held_out_file=moved, max_steps=6))
    assert (begun / "checkpoint-6").exists()


def test_a_folder_without_a_trained_step_is_any_runs(
    begun: Path, other: Path, recipe: Recipe, flags: Flags, monkeypatch: pytest.MonkeyPatch
) -> None:
    for checkpoint in begun.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(ValueError, match="begun with other training rows"):
        # Its head is there.
        recipe("medusa").main(flags(begun, train_file=other))
    shutil.rmtree(begun / "head")
    recipe("medusa").main(flags(begun, train_file=other))
    assert json.loads((begun / "run.json").read_text())["settings"]["data"]["train_file"] == str(other)


def test_no_file_of_a_run_has_the_hubs_token(recipe: Recipe, flags: Flags, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'selfspec[tensorboard]'")
    token = "hf_secretsecretsecret"
    recipe("medusa").main(flags(tmp_path / "run", hub_token=token, report_to="tensorboard"))
    written = files(tmp_path / "run")
    assert any(name.endswith("training_args.bin") for name in written) and any("events" in name for name in written)
    assert not [name for name, content in written.items() if token.encode() in content]


def test_every_file_of_a_run_has_the_umasks_mode(recipe: Recipe, flags: Flags, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    recipe("draft").main(
        [*flags(tmp_path / "run", features_dir=tmp_path / "run" / "features"), "--save_model=true", "--blocks=0"]
    )
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert modes.keys() >= {"model.safetensors", "features-00000.safetensors", "optimizer.pt", "tokenizer.json", "run.json"}
    assert set(modes.values()) == {plain.stat().st_mode}
