"""Files for others: what selfspec writes gets the mode that the umask gives, and what may not be read is told as such.

safetensors, and so transformers, makes files that only their owner can read. A head that one user trains and another
serves would be useless, and its loader says that there is no such file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    import torch


# heads/pretrained/TARGET/NAME, installed with the package.
SHIPPED_HEADS = Path(__file__).parent / "heads" / "pretrained"


def shipped_heads() -> list[Path]:
    """The folders of all heads in the package, for any target."""
    return sorted(path.parent for path in SHIPPED_HEADS.glob("*/*/config.json"))


def save_file(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write tensors of any shapes as safetensors, readable by whom the umask lets read."""
    # Commands read this module, and torch takes seconds to import.
    from safetensors.torch import save_file as write

    write(dict(tensors), file, metadata={"format": "pt"})
    share(file)


def share(path: Path) -> None:
    """Give a file, or every file in a folder, the mode of a new file there."""
    directory, files = (path, path.rglob("*")) if path.is_dir() else (path.parent, [path])
    # The umask can only be read by changing it for all threads, so a new file shows it.
    probe = directory / f".mode-{uuid4().hex}"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in files:
        if file.is_file():
            file.chmod(mode)


def check_readable(files: Iterable[Path]) -> None:
    """Raise a PermissionError with a remedy for the first file that exists and may not be read.

    Readers of weights report such a file as absent.
    """
    for file in files:
        try:
            file.open("rb").close()
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise PermissionError(
                    f"{file} may not be read by this user: let its owner run `chmod a+r {file}`"
                ) from error


def check_is_there(source: str | Path) -> None:
    """Refuse a path to nothing. Any other name may be a Hub id.

    Raises:
        ValueError: the name can only be a path, because it begins like one, and nothing is there.
    """
    text = str(source)
    if (text.startswith((".", "~")) or Path(text).is_absolute()) and not os.path.lexists(text):
        raise ValueError(f"{text}: no such folder")


def cache_folder() -> Path:
    """Where files are kept that can be made again: $SELFSPEC_CACHE, $XDG_CACHE_HOME/selfspec or ~/.cache/selfspec."""
    if cache := os.environ.get("SELFSPEC_CACHE"):
        return Path(cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfspec"
