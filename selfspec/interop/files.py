"""A foreign checkpoint's folder: its config and all its tensors, each checked for damage."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from selfspec.files import save_file
from selfspec.heads.base import CONFIG_NAME, DraftHead, find_head

UNPICKLE = Path(__file__).with_name("unpickle.py")

# The names under which weights are published. Folders may also hold pickles of training arguments or optimisers.
SAFE = ("*.safetensors",)
PICKLES = ("pytorch_model*.bin", "medusa_lm_head.pt")

# Trained weights are never this large, and only a few are this small. Uninitialised memory often is.
LARGEST = 1e4
SMALLEST = 1e-30


@dataclass(frozen=True)
class Checkpoint:
    """A config and the tensors in the same folder, by the names under which they were saved."""

    source: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def refuse(self, reason: str) -> ValueError:
        """An error that names the checkpoint, to be raised."""
        return ValueError(f"{self.source}: {reason}")

    def renamed(self, aliases: Mapping[str, str]) -> Checkpoint:
        """Rename the tensors, and drop the rotary frequencies that old versions of transformers saved.

        Args:
            aliases: patterns in a name and their replacements, applied in this order.
        """
        tensors: dict[str, torch.Tensor] = {}
        for name, value in self.tensors.items():
            ours = rename(name, aliases)
            if ours.endswith("rotary_emb.inv_freq"):
                continue
            if ours in tensors:
                raise self.refuse(f"{name} is also there under another name: remove one of them")
            tensors[ours] = value
        return Checkpoint(self.source, self.config, tensors)


@dataclass(frozen=True)
class Export:
    """What an engine loads.

    Attributes:
        commands: commands that serve it there.
        weights_name: the name of the weights file that the engine looks for.
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    commands: list[str]
    weights_name: str = "model.safetensors"

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.tensors.items()}
        save_file(tensors, directory / self.weights_name)
        (directory / CONFIG_NAME).write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")


def read_checkpoint(source: str, revision: str | None = None) -> Checkpoint:
    """Read the checkpoint in a folder or on the Hub.

    Raises:
        ValueError: there is no checkpoint, or a file cannot be read or holds damaged tensors; the message names the file.
    """
    directory = find_head(source, revision, patterns=(CONFIG_NAME, *SAFE, *PICKLES))
    try:
        config = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: {CONFIG_NAME} cannot be read ({error}): it must describe the weights") from error
    if not isinstance(config, dict):
        raise ValueError(f"{source}: {CONFIG_NAME} holds no JSON object: fetch the checkpoint again")
    tensors: dict[str, torch.Tensor] = {}
    for path in _weight_files(directory, source):
        for name, value in _load(path, source).items():
            if name in tensors:
                raise ValueError(f"{source}: {name} is in {path.name} and in another file: remove one of them")
            tensors[name] = value
    check_tensors(source, tensors)
    return Checkpoint(source, config, tensors)


def check_tensors(source: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise a ValueError that names the damaged tensors: those that cannot result from training."""
    damaged = [f"{name} {damage}" for name, value in tensors.items() if (damage := _damage(name, value))]
    if damaged:
        raise ValueError(f"{source}: {'; '.join(first(damaged))}: fetch or export the checkpoint again")


def rename(name: str, aliases: Mapping[str, str]) -> str:
    for pattern, replacement in aliases.items():
        name = re.sub(pattern, replacement, name)
    return name


def fill(head: DraftHead, state: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> DraftHead:
    """Put the tensors, by our names, into the head. Each keeps its dtype.

    Raises:
        ValueError: tensors are missing, left over or of another shape; the message names the first few.
    """
    own = head.state_dict()
    faults = [f"{name} is missing" for name in own if name not in state]
    faults += [f"{name} has no place in the head" for name in state if name not in own]
    for name, value in own.items():
        if name in state and state[name].shape != value.shape:
            faults.append(f"{name} is {list(state[name].shape)} and should be {list(value.shape)}")
    if faults:
        raise checkpoint.refuse("; ".join(first(faults)))
    head.load_state_dict(dict(state), assign=True)
    return head.eval().requires_grad_(False)


def is_same_weight(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether another weight equals ours in the lower of the two precisions; both of any one shape."""
    if ours.shape != theirs.shape:
        return False
    lower = min((ours.dtype, theirs.dtype), key=lambda dtype: torch.finfo(dtype).bits)
    # Equal up to rounding, because a bfloat16 value stored as float32 may have no exact float16.
    gap = (ours.to(lower).float() - theirs.to(lower).to(ours.device).float()).norm() / ours.float().norm()
    return bool(gap < 1e-3)


def _weight_files(directory: Path, source: str) -> list[Path]:
    """All safetensors files, or all pickles if there are none."""
    for patterns in (SAFE, PICKLES):
        if files := sorted(path for pattern in patterns for path in directory.glob(pattern)):
            return files
    raise ValueError(f"{source}: there are no weights: no {listed([*SAFE, *PICKLES])}")


def _load(path: Path, source: str) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{source}: {path.name}: the file is damaged ({error}): fetch it again") from error
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "model.safetensors"
        command = [sys.executable, "-I", str(UNPICKLE), str(path.resolve()), str(output)]
        result = subprocess.run(command, cwd=folder, env={}, capture_output=True, text=True, check=False)
        if result.returncode:
            reason = (result.stderr.strip().splitlines() or ["the process died"])[-1]
            raise ValueError(
                f"{source}: {path.name}: this pickle could not be read as weights alone ({reason}): fetch a checkpoint in "
                "safetensors"
            )
        # Copy the tensors, because the folder is deleted.
        return {name: value.clone() for name, value in load_file(output).items()}


def _damage(name: str, value: torch.Tensor) -> str | None:
    if not value.is_floating_point() or not value.numel():
        return None
    magnitude = value.float().abs()
    if not bool(magnitude.isfinite().all()):
        return "holds values that are not finite"
    if value.ndim == 1:
        # An untrained norm is all ones and an untrained bias all zeros; neither is damage.
        is_zero_norm = not name.endswith("bias") and not bool(magnitude.any())
        return "is all zeros" if is_zero_norm else _uninitialised(magnitude)
    if not bool(magnitude.any()):
        return "is all zeros"
    if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
        return "holds one value throughout"
    return _uninitialised(magnitude)


def _uninitialised(magnitude: torch.Tensor) -> str | None:
    is_tiny = (magnitude > 0) & (magnitude < SMALLEST)
    if bool((magnitude > LARGEST).any()) or float(is_tiny.float().mean()) > 0.01:
        return "looks like memory that was never written to"
    return None


def first(faults: Sequence[str], most: int = 3) -> list[str]:
    """The first few faults, and how many more there are."""
    return [*faults[:most], *([f"and {len(faults) - most} more"] if len(faults) > most else [])]


def listed(values: Iterable[str], word: str = "and") -> str:
    """Join the values as `a, b and c`."""
    *others, last = values
    return f"{', '.join(others)} {word} {last}" if others else last
