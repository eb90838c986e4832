"""Progress: what a run reads and takes, and how long it needs, in lines where there is no bar."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support import tiny_target

from selfspec.drafters.shipped import identity
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.train import progress

pytest.importorskip("accelerate", reason="training needs accelerate: pip install 'selfspec[train]'")

Recipe = Callable[[str], ModuleType]
Flags = Callable[..., list[str]]


def test_lines_come_after_the_first_steps_and_then_by_the_clock(
    recipe: Recipe, flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a clock that goes on by ten seconds at every look, and a step that takes two."""
    now, training = 0.0, 0.0

    def look() -> float:
        nonlocal now
        now += 10
        return now

    def clock(trainer: object) -> float:
        nonlocal training
        training += 2
        return training

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=look))
    monkeypatch.setattr(progress.HeadTrainer, "clock", clock)
    with caplog.at_level(logging.INFO, "selfspec"):
        recipe("medusa").main(flags(tmp_path / "run", max_steps=20, save_steps=20, logging_steps=20, eval_steps=0))
    lines = [line for line in caplog.messages if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["3", "6", "9", "12", "15", "18"]
    assert all("s a step, 0:0" in line and line.endswith("to go, evaluations not counted") for line in lines)


def test_a_bar_is_enough(recipe: Recipe, flags: Flags, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "selfspec"):
        recipe("medusa").main(flags(tmp_path / "run", max_steps=8, save_steps=8, eval_steps=0, disable_tqdm=False))
    assert not [line for line in caplog.messages if line.startswith("step ")]


@pytest.mark.parametrize(
    ("max_steps", "line"),
    [(4, "4 steps of 2 rows read 8 of the 28 rows"), (28, "28 steps of 2 rows read every row 2.0 times")],
)
def test_what_a_run_reads_is_told(
    max_steps: int, line: str, recipe: Recipe, flags: Flags, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "selfspec"):
        recipe("medusa").main(flags(tmp_path / "run", max_steps=max_steps, eval_steps=0))
    assert line in caplog.messages


def test_what_checkpoints_take_is_told_and_a_small_disk_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    head = MedusaHead(MedusaConfig(target=identity(tiny_target()), num_heads=1))
    need = 12 * head.num_parameters * 3
    args = SimpleNamespace(output_dir=str(tmp_path / "a" / "b"), save_total_limit=2, save_strategy="steps")
    disk = SimpleNamespace(free=need)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    with caplog.at_level(logging.INFO, "selfspec"):
        progress.show_disk(head, args)
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert "(3 of them at most)" in caplog.text
        disk.free -= 1
        progress.show_disk(head, args)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING"]
    assert caplog.messages[-1].endswith("make room, or choose another --output_dir or a smaller --save_total_limit")


def test_a_checkpoint_is_as_large_as_told(
    recipe: Recipe, flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(progress, "logger", SimpleNamespace(info=lambda text, *a: told.append(a[0]), warning=None))
    output = tmp_path / "run"
    recipe("medusa").main(flags(output, eval_steps=0, num_blocks=4))
    weights = sum((output / "checkpoint-4" / name).stat().st_size for name in ("model.safetensors", "optimizer.pt"))
    assert told[0] * 2**30 == pytest.approx(weights, rel=0.2)


def test_two_checkpoints_stay(recipe: Recipe, flags: Flags, tmp_path: Path) -> None:
    recipe("medusa").main(flags(tmp_path / "run", max_steps=8, eval_steps=0))
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-8"]
