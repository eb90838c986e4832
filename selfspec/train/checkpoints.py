"""Which checkpoint a run continues from: the newest whole one in its output folder, of the same head and target.

The trainer writes a checkpoint elsewhere and moves it to its name when it is complete. Damage done afterwards, by a full
disk, a copy or a power cut, is noticed here, because transformers would load half a checkpoint without a word.
"""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path
from textwrap import shorten

from safetensors import SafetensorError, safe_open

from selfspec.heads.base import HeadConfig

logger = logging.getLogger(__name__)

# Folder of checkpoints being written. It is inside the output folder, because moving one out is then a rename.
PARTIAL = "partial"
IDENTITY_NAME = "identity.json"

# A part may be a file or, if the head is sharded, a folder.
PARTS = ("*model*", "optimizer*", "scheduler.pt", "rng_state*", "trainer_state.json")


def last_checkpoint(output_dir: Path) -> Path | None:
    """The newest whole checkpoint. Damaged ones are passed over with a warning."""
    for checkpoint in _newest_first(output_dir):
        damage = find_damage(checkpoint)
        if damage is None:
            return checkpoint
        logger.warning("%s is passed over: %s", checkpoint, damage)
    return None


def find_damage(checkpoint: Path) -> str | None:
    """What is missing from a checkpoint; None if it is whole."""
    for part in PARTS:
        if not any(checkpoint.glob(part)):
            return f"it has no {part}"
    for file in sorted(checkpoint.iterdir()):
        if _is_cut_off(file):
            return f"{file.name} is cut off"
    return None


def check_identity(output_dir: Path, config: HeadConfig, *, is_writer: bool) -> None:
    """Refuse an output folder that belongs to another head or target. A new folder becomes this head's.

    Args:
        is_writer: whether this process marks a new folder.

    Raises:
        ValueError: the folder is another's; the sentence names the first difference.
    """
    file = output_dir / IDENTITY_NAME
    remedy = "choose another --output_dir, or remove it"
    if not file.exists():
        if _newest_first(output_dir):
            raise ValueError(f"{output_dir} holds checkpoints of an unknown head (it has no {IDENTITY_NAME}): {remedy}")
        if is_writer:
            output_dir.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(config.to_dict(), indent=1) + "\n", encoding="utf-8")
            partial.replace(file)
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(config.to_dict()))
    if before["head_type"] != now["head_type"]:
        raise ValueError(f"{output_dir} was begun for a {before['head_type']} head, not a {now['head_type']} head: {remedy}")
    try:
        type(config).from_dict(before).target.check(config.target)
    except ValueError as error:
        raise ValueError(f"{output_dir} was begun for another target ({error}): {remedy}") from error
    for name in now:
        if name not in ("selfspec_version", "target") and before.get(name) != now[name]:
            values = [shorten(json.dumps(record.get(name)), 60) for record in (before, now)]
            raise ValueError(f"{output_dir} was begun with {name} {values[0]}, not {values[1]}: {remedy}")


def _newest_first(output_dir: Path) -> list[Path]:
    found = [path for path in output_dir.glob("checkpoint-*") if path.is_dir() and path.name[11:].isdigit()]
    return sorted(found, key=lambda path: -int(path.name[11:]))


def _is_cut_off(file: Path) -> bool:
    """Whether a file's end is missing: torch's files end in a zip directory, and safetensors files know their length."""
    try:
        if file.suffix in (".pt", ".pth", ".bin"):
            return not zipfile.is_zipfile(file)
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                return False
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
    except (SafetensorError, ValueError):
        return True
    return False
