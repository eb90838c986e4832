"""Heads by short names: those in the package, as `eagle` or `smollm2-135m-instruct/eagle`.

A folder of the same name comes first, because the reader sees it.
"""

from __future__ import annotations

from pathlib import Path

from selfspec.drafters.names import HEADS, kind_of_head
from selfspec.drafters.shipped import identity, shipped_heads
from selfspec.heads.base import read_config
from selfspec.model.target import Target


def shipped_as(name: str) -> list[Path]:
    """The folders of the shipped heads that a name may mean, for any target; none for the name of a folder."""
    if Path(name).is_dir():
        return []
    found = []
    for directory in shipped_heads():
        names = (directory.name, f"{directory.parent.name}/{directory.name}", _kind(directory))
        if name in names:
            found.append(directory)
    return found


def check_name(name: str) -> None:
    """Refuse what is neither a folder, nor a shipped head, nor the id of a repository. Nothing is fetched or loaded.

    Raises:
        ValueError: the sentence lists the names of shipped heads.
    """
    is_id = name.count("/") == 1 and not name.startswith(("/", ".", "~")) and not name.endswith("/")
    if not is_id and not Path(name).is_dir() and not shipped_as(name):
        known = ", ".join(sorted({_kind(directory) for directory in shipped_heads()}))
        raise ValueError(f"{name}: no such folder, and no shipped head of this name ({known}): check the spelling")


def named_head(name: str, target: Target) -> str:
    """The folder of the shipped head that a name means for this target; the name itself if it is no shipped head's."""
    found = shipped_as(name)
    return str(next((directory for directory in found if _fits(directory, target)), found[0])) if found else name


def _kind(directory: Path) -> str:
    return kind_of_head(read_config(directory)["head_type"]).name


def _fits(directory: Path, target: Target) -> bool:
    record = read_config(directory)
    try:
        HEADS[record["head_type"]].config_class.from_dict(record).target.check(identity(target))
    except ValueError:
        return False
    return True
