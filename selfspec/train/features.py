"""The target's hidden states of all training rows, on disk, because running the target in every epoch is expensive.

A dump is a folder of shards and a record that identifies target, rows and settings. A shard is a safetensors file with the
states of consecutive rows, and it is complete once it has its name. An interrupted dump continues with the missing shards.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils.data import Dataset

from selfspec.drafters.shipped import identity
from selfspec.files import save_file
from selfspec.model.target import Target
from selfspec.train.rows import PackedRows

logger = logging.getLogger(__name__)

RECORD_NAME = "features.json"
KEY = "states"

# The median gap between stored and computed states stays below this in any batch; a fine-tuned copy's gap is larger.
TOLERANCE = 0.05


@dataclass(frozen=True)
class FeatureRows(Dataset[dict[str, torch.Tensor]]):
    """Packed rows with their `states [F, L, E]`: F hidden states in the order of `names`.

    A row is read from its file when it is asked for, so no shard is in memory whole, and processes share the page cache.
    """

    rows: PackedRows
    directory: Path
    names: tuple[int, ...]
    rows_per_shard: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        shard, place = divmod(index, self.rows_per_shard)
        with safe_open(_shard(self.directory, shard), framework="pt") as file:
            return {**self.rows[index], KEY: file.get_slice(KEY)[place]}


def dump_features(
    rows: PackedRows,
    target: Target,
    names: Sequence[int],
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    batch_size: int = 8,
    shard_bytes: int = 1 << 30,
) -> FeatureRows:
    """The rows with their hidden states from `directory`. Missing states are computed first.

    Args:
        names: which hidden states, as `Target.hidden_states` names them.
        dtype: dtype of the stored states.
        batch_size: rows that the target reads together.
        shard_bytes: about the size of a shard, which is also the most work that an interruption loses.

    Raises:
        ValueError: the disk is too small, or the folder holds states of another target, or of other rows, names or settings.
    """
    directory, names = Path(directory), tuple(names)
    L, E = rows.input_ids.shape[1], target.config.hidden_size
    row_bytes = len(names) * L * E * dtype.itemsize
    rows_per_shard = max(1, shard_bytes // row_bytes)
    num_shards = math.ceil(len(rows) / rows_per_shard)
    directory.mkdir(parents=True, exist_ok=True)
    record = {
        # The names that the target and its adapter were loaded under do not matter.
        "target": {**asdict(identity(target)), "name": None, "revision": None, "adapter": None},
        "hidden states": names,
        "rows": rows.digest("input_ids", "position_ids"),
        "settings": {"dtype": str(dtype), "rows_per_shard": rows_per_shard},
    }
    _check_record(directory, record)
    missing = [shard for shard in range(num_shards) if not _shard(directory, shard).exists()]
    chunks = {shard: range(len(rows))[shard * rows_per_shard :][:rows_per_shard] for shard in missing}
    num_bytes = row_bytes * sum(map(len, chunks.values()))
    logger.info(
        "%s: features of %d rows take %.2f GiB in %d files, of which %.2f GiB are still to be written",
        *(directory, len(rows), row_bytes * len(rows) / 2**30, num_shards, num_bytes / 2**30),
    )
    if num_bytes > (free := shutil.disk_usage(directory).free):
        raise ValueError(
            f"the features need {num_bytes / 2**30:.2f} GiB more in {directory}, where {free / 2**30:.2f} GiB are free: "
            "choose a folder on a larger disk, fewer rows, or train without a features folder"
        )
    (directory / RECORD_NAME).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    features = FeatureRows(rows, directory, names, rows_per_shard)
    if 0 not in chunks:
        _check_states(features, target)
    for shard, chunk in chunks.items():
        states = torch.empty(len(chunk), len(names), L, E, dtype=dtype)  # [C, F, L, E]
        for start in range(0, len(chunk), batch_size):
            batch = slice(chunk[start], min(chunk[start] + batch_size, chunk.stop))
            states[start : start + batch_size] = _compute(rows, batch, target, names)
        # Written under another name until it is complete.
        partial = _shard(directory, shard).with_suffix(".partial")
        save_file({KEY: states}, partial)
        partial.replace(_shard(directory, shard))
        logger.info("%s: %d of %d rows", directory, chunk.stop, len(rows))
    return features


def _shard(directory: Path, number: int) -> Path:
    return directory / f"features-{number:05d}.safetensors"


def _compute(rows: PackedRows, batch: slice, target: Target, names: tuple[int, ...]) -> torch.Tensor:
    """[B, F, L, E] hidden states of some rows."""
    input_ids, position_ids = rows.input_ids[batch].to(target.device), rows.position_ids[batch].to(target.device)
    states = target.hidden_states(input_ids, position_ids, names)
    return torch.stack([states[name] for name in names], dim=1)


def _check_record(directory: Path, record: dict[str, Any]) -> None:
    if not (directory / RECORD_NAME).exists():
        return
    before, record = json.loads((directory / RECORD_NAME).read_text(encoding="utf-8")), json.loads(json.dumps(record))
    if changed := " and ".join(name for name in record if before.get(name) != record[name]):
        raise ValueError(f"{directory} holds features of other {changed}: choose another folder, or remove it")


def _check_states(features: FeatureRows, target: Target) -> None:
    """Check the first row's states, because a target's identity, samples of two weights, may miss that it was fine-tuned."""
    stored = features[0][KEY].float()
    computed = _compute(features.rows, slice(0, 1), target, features.names)[0].float().to(stored.device)
    # The median, because a few positions with huge values would dominate a norm over all.
    gap = ((stored - computed).norm(dim=-1) / computed.norm(dim=-1).clamp(min=1e-12)).median()
    if not gap < TOLERANCE:
        raise ValueError(
            f"{features.directory} holds features of another target (relative gap {gap:.2g}): choose another folder, or "
            "remove it"
        )
