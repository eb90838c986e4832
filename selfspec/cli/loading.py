"""Loading a command's target without the libraries' own output, and making the default target where it is missing."""

from pathlib import Path
from typing import TYPE_CHECKING

from selfspec.cli.options import quiet_libraries
from selfspec.config import TargetOptions
from selfspec.model.default_target import default_target_path
from selfspec.model.default_target import fetch as fetch_default_target

if TYPE_CHECKING:
    from selfspec.model.target import Target


def load_quietly(options: TargetOptions, *, use_packing: bool = True) -> "Target":
    """The target that the options name.

    Args:
        use_packing: lay its weights out for decoding; False keeps them as they are, for commands that write them.
    """
    from selfspec.drafters.options import load_target

    quiet_libraries()
    return load_target(options, use_packing=use_packing)


def fetch_quietly(directory: Path | None = None, gguf: Path | None = None) -> Path:
    """The folder of the default target, made if it is not there yet."""
    from selfspec.cli import display

    quiet_libraries()
    with display.stage(f"looking into {directory or default_target_path()}") as report:
        return fetch_default_target(directory, gguf_file=gguf, report=report)
