"""Features on disk are what the target computes for these rows; those of another target are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import tiny_model, tiny_target
from torch.utils.data import DataLoader

from selfspec.model.target import FINAL, Target
from selfspec.traffic.masking import Sample
from selfspec.train import features
from selfspec.train.features import RECORD_NAME, FeatureRows, dump_features
from selfspec.train.rows import PackedRows, pack

L, E = 16, 32
NAMES = (0, 2, FINAL)
ROW_BYTES = len(NAMES) * L * E * 2
# Seven rows are four files.
SETTINGS: dict[str, Any] = {"batch_size": 3, "shard_bytes": 2 * ROW_BYTES}
# bfloat16 keeps eight bits; the rest is what float32 differs by in batches of other sizes.
CLOSE = {"rtol": 2**-8, "atol": 1e-4}


def packed(num_rows: int = 7, seed: int = 0) -> PackedRows:
    """Rows of two samples and a little padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(3, 61, (size,), generator=generator).tolist() for size in [9, 6] * num_rows]
    return pack([Sample(ids, [True] * len(ids)) for ids in tokens], L)


def computed(rows: PackedRows, target: Target) -> torch.Tensor:
    """[R, F, L, E]"""
    states = target.hidden_states(rows.input_ids, rows.position_ids, NAMES)
    return torch.stack([states[name] for name in NAMES], dim=1)


def stored(rows: FeatureRows) -> torch.Tensor:
    return torch.stack([rows[i]["states"] for i in range(len(rows))]).float()


def times(directory: Path) -> dict[str, int]:
    """When each shard was written."""
    return {file.name: file.stat().st_mtime_ns for file in directory.glob("*.safetensors")}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_gets_what_the_target_computes(tmp_path: Path, target: Target, num_workers: int) -> None:
    rows = packed()
    dumped = dump_features(rows, target, NAMES, tmp_path, **SETTINGS)
    assert sorted(times(tmp_path)) == [f"features-{i:05d}.safetensors" for i in range(4)]
    batches = list(DataLoader(dumped, batch_size=3, num_workers=num_workers))
    assert [tuple(batch["states"].shape) for batch in batches] == [(B, len(NAMES), L, E) for B in (3, 3, 1)]
    for name in ("input_ids", "loss_mask", "position_ids"):
        assert torch.equal(torch.cat([batch[name] for batch in batches]), getattr(rows, name))
    states = torch.cat([batch["states"] for batch in batches])
    assert states.dtype == torch.bfloat16
    torch.testing.assert_close(states.float(), computed(rows, target), **CLOSE)


def test_states_are_stored_in_the_dtype_asked_for(tmp_path: Path, target: Target) -> None:
    rows = packed(2)
    dumped = dump_features(rows, target, NAMES, tmp_path, dtype=torch.float32)
    assert dumped[0]["states"].dtype == torch.float32
    torch.testing.assert_close(stored(dumped), computed(rows, target))


@pytest.mark.parametrize("interrupted", ["hidden_states", "save_file"])
def test_an_interrupted_dump_goes_on(tmp_path: Path, target: Target, monkeypatch, interrupted: str) -> None:
    rows = packed()
    num_calls = 0

    def failing(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            # What a process leaves that is killed while it writes.
            if interrupted == "save_file":
                args[1].write_bytes(b"half")
            raise KeyboardInterrupt
        return original(*args)

    owner = Target if interrupted == "hidden_states" else features
    original = getattr(owner, interrupted)
    monkeypatch.setattr(owner, interrupted, failing)
    with pytest.raises(KeyboardInterrupt):
        dump_features(rows, target, NAMES, tmp_path, **SETTINGS)
    kept = times(tmp_path)
    assert len(kept) == 2

    # Nothing is computed or saved again: one row is computed to compare, then two files' worth, one batch each.
    num_calls = 10
    dumped = dump_features(rows, target, NAMES, tmp_path, **SETTINGS)
    assert num_calls == 10 + (3 if interrupted == "hidden_states" else 2)
    assert kept.items() < times(tmp_path).items()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([RECORD_NAME, *times(tmp_path)])
    torch.testing.assert_close(stored(dumped), computed(rows, target), **CLOSE)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_computed(tmp_path, target, monkeypatch, caplog) -> None:
    rows = packed()
    disk = SimpleNamespace(free=7 * ROW_BYTES - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    with monkeypatch.context() as patch:
        patch.setattr(Target, "hidden_states", lambda *args: pytest.fail("computed"))
        with pytest.raises(ValueError, match=r"need 0\.00 GiB more .* larger disk"):
            dump_features(rows, target, NAMES, tmp_path, **SETTINGS)
    # The folder can still take fewer rows, and files that exist need no room.
    disk.free = 4 * ROW_BYTES
    dump_features(packed(4), target, NAMES, tmp_path, **SETTINGS)
    disk.free = 0
    with caplog.at_level("INFO"):
        dump_features(packed(4), target, NAMES, tmp_path, **SETTINGS)
    assert "features of 4 rows take 0.00 GiB in 2 files, of which 0.00 GiB are still to be written" in caplog.text


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"rows": packed(seed=1)}, "rows"),
        ({"rows": packed(6)}, "rows"),
        ({"names": (0, 1, FINAL)}, "hidden states"),
        ({"dtype": torch.float16}, "settings"),
        ({"target": tiny_target(seed=1)}, "target"),
        ({"target": tiny_target("qwen2"), "rows": packed(6)}, "target and rows"),
    ],
)
def test_features_of_anything_else_are_refused(tmp_path: Path, target: Target, change: dict[str, Any], what: str) -> None:
    made = {"rows": packed(), "target": target, "names": NAMES, "directory": tmp_path, **SETTINGS}
    dump_features(**made)
    before = times(tmp_path)
    with pytest.raises(ValueError, match=f"holds features of other {what}: choose another folder"):
        dump_features(**{**made, **change})
    assert times(tmp_path) == before
    dump_features(**made)


def test_other_positions_are_other_rows_and_another_loss_mask_is_not(tmp_path: Path, target: Target) -> None:
    whole = pack([Sample(list(range(3, 3 + L)), [True] * L)], L)
    halves = pack([Sample(list(range(3, 3 + L)), [False] * 4 + [True] * (L - 4))], L)
    split = pack([Sample(list(range(start, start + L // 2)), [True] * (L // 2)) for start in (3, 3 + L // 2)], L)
    assert torch.equal(whole.input_ids, split.input_ids)
    dump_features(whole, target, NAMES, tmp_path)
    assert not dump_features(halves, target, NAMES, tmp_path)[0]["loss_mask"].all()
    with pytest.raises(ValueError, match="other rows"):
        dump_features(split, target, NAMES, tmp_path)


def test_a_fine_tuned_copy_is_another_target_and_a_renamed_one_is_not(tmp_path: Path, target: Target) -> None:
    rows = packed()
    dump_features(rows, target, NAMES, tmp_path, **SETTINGS)
    dump_features(rows, Target(tiny_model("llama"), name="elsewhere"), NAMES, tmp_path, **SETTINGS)
    tuned = tiny_model("llama")
    with torch.no_grad():
        # A weight that the target's identity does not sample.
        tuned.model.layers[0].mlp.down_proj.weight.mul_(1.3)
    with pytest.raises(ValueError, match="features of another target"):
        dump_features(rows, Target(tuned, name="llama"), NAMES, tmp_path, **SETTINGS)
