"""Settings for people who name none, and heads that start from trained weights."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import draft_head, eagle_head, exit_head, tiny_target

from selfspec.drafters.shipped import identity
from selfspec.heads.base import DraftHead
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.train.choices import KINDS, MOST_EPOCHS, MOST_EPOCHS_ON, Length, Measured, Situation, as_flags
from selfspec.train.settings import CONFIGS, DataArgs
from selfspec.train.start import start_from

pytest.importorskip("accelerate", reason="training needs accelerate: pip install 'selfspec[train]'")

MEASURED = Measured(seconds=2.0, evaluation_seconds=20.0, num_rows=40, memory_gib=1.0)


def heads() -> dict[str, DraftHead]:
    target = tiny_target()
    medusa = MedusaHead(MedusaConfig(target=identity(target), num_heads=3, has_root_input=True))
    return {
        "eagle": eagle_head(target),
        "medusa": medusa,
        "early_exit": exit_head(target, 1, 0),
        "draft": draft_head(target, 0),
    }


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_every_setting_is_one_of_its_recipe(name: str, has_gpu: bool, recipe: Any) -> None:
    module: ModuleType = recipe(name)
    [shape] = [value for key, value in vars(module).items() if key.endswith("Args") and key != "DataArgs"]
    known = {setting.name for setting in (*fields(shape), *fields(DataArgs))}
    known |= {"per_device_train_batch_size", "learning_rate"}
    for start in (None, heads()[name].config):
        settings = Situation(has_gpu, 30, 2048, 20_000, 700, start).settings(name)
        assert settings.keys() <= known
    assert (CONFIGS / KINDS[name].config_file).is_file()


@pytest.mark.parametrize("num_tokens", [1, 400, 5_000, 10_000_000])
def test_a_step_never_needs_more_rows_than_there_are(num_tokens: int) -> None:
    for has_gpu in (False, True):
        settings = Situation(has_gpu, 2, 256, num_tokens, 300, None).settings("medusa")
        assert settings["row_length"] <= 256
        assert 1 <= settings["per_device_train_batch_size"] <= max(1, num_tokens // settings["row_length"])


def test_the_minutes_or_the_data_end_a_run() -> None:
    short = Length.fitting(MEASURED, 2, 5, goes_on=False)
    assert short.num_steps == (300 - 4 * 20) // 2 // 3 * 3 and 290 < short.seconds <= 300
    long = Length.fitting(MEASURED, 2, 500, goes_on=False)
    assert long.num_epochs == pytest.approx(MOST_EPOCHS, rel=0.02)
    assert Length.fitting(MEASURED, 2, 500, goes_on=True).num_epochs == pytest.approx(MOST_EPOCHS_ON, rel=0.02)
    # However little time there is, something is trained, and evaluated at its end.
    least = Length.fitting(MEASURED, 2, 0.01, goes_on=False)
    assert (least.num_steps, least.num_evaluations, least.settings()["eval_steps"]) == (1, 1, 1)
    for minutes in (0.1, 3, 30, 3000):
        length = Length.fitting(MEASURED, 2, minutes, goes_on=False)
        assert all(1 <= value <= length.num_steps for value in length.settings().values())
        assert length.num_steps % length.settings()["eval_steps"] == 0, "the last step is evaluated"


def test_rows_are_as_long_as_the_texts_within_reason() -> None:
    lengths = [
        Situation(False, 2, 8192, 20_000, longest, None).settings("medusa")["row_length"] for longest in (90, 790, 5000)
    ]
    assert lengths == [512, 896, 1024]


def test_settings_become_a_command_line() -> None:
    assert as_flags({"blocks": [1, 2], "row_length": 8, "target": None}) == ["--blocks", "1", "2", "--row_length=8"]


@pytest.mark.parametrize("name", KINDS)
def test_a_head_has_the_weights_it_starts_from(name: str, tmp_path: Path) -> None:
    start, new = heads()[name], heads()[name]
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.normal_()
    start.save_pretrained(tmp_path)
    start_from(new, tmp_path)
    state = new.state_dict()
    assert all(torch.equal(state[key], value) for key, value in start.state_dict().items())


def test_a_start_that_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    found = heads()
    medusa = found["medusa"]
    with torch.no_grad():
        for parameter in medusa.parameters():
            parameter.normal_()
    medusa.save_pretrained(tmp_path / "medusa")
    with pytest.raises(ValueError, match=r"is of type medusa, and this run trains heads of type eagle: name another"):
        start_from(found["eagle"], tmp_path / "medusa")
    smaller = MedusaHead(MedusaConfig(target=medusa.config.target, num_heads=2, has_root_input=True))
    with pytest.raises(ValueError, match=r"has num_heads 3, and this run 2: give the run its shape"):
        start_from(smaller, tmp_path / "medusa")
    other = tiny_target(seed=1)
    elsewhere = MedusaHead(MedusaConfig(target=identity(other), num_heads=3, has_root_input=True))
    with pytest.raises(ValueError, match="the head was trained for"):
        start_from(elsewhere, tmp_path / "medusa")
    with pytest.raises(ValueError, match="no such folder"):
        start_from(medusa, tmp_path / "nowhere")
