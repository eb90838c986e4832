"""Which checkpoint a run continues from: the newest whole one in its output folder.

The trainer writes a checkpoint elsewhere and moves it to its name when it is complete. Damage done afterwards, by a full
disk, a copy or a power cut, is noticed here, because transformers would load half a checkpoint without a word.
"""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

logger = logging.getLogger(__name__)

# Folder of checkpoints being written. It is inside the output folder, because moving one out is then a rename.
PARTIAL = "partial"

# A part may be a file or, if the head is sharded, a folder.
PARTS = ("*model*", "optimizer*", "scheduler.pt", "rng_state*", "trainer_state.json")


def last_checkpoint(output_dir: Path) -> Path | None:
    """The newest whole checkpoint. Damaged ones are passed over with a warning."""
    for checkpoint in newest_first(output_dir):
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


def newest_first(output_dir: Path) -> list[Path]:
    """The checkpoints of an output folder, whole or not."""
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
