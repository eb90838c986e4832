"""Loading a command's target without the libraries' own output, and making the default target where it is missing."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec.cli.options import quiet_libraries
from selfspec.config import TargetOptions
from selfspec.model.default_target import default_target_path, is_made, source_of
from selfspec.model.default_target import fetch as fetch_default_target

if TYPE_CHECKING:
    from selfspec.model.target import Target


@contextlib.contextmanager
def loading(options: TargetOptions) -> Iterator[Callable[[str], None]]:
    """A spinner while the target is loaded in the body; the yielded function replaces its line.

    Whatever needs torch is imported in the body too. In a terminal, lines say which shipped head is taken.
    """
    from selfspec.cli import display

    with display.stage(f"loading {source_of(options)}") as report, _told_choices():
        # A device that is not there is told before transformers is imported.
        from selfspec.model.devices import resolve_device

        resolve_device(options.device)
        yield report


@contextlib.contextmanager
def _told_choices() -> Iterator[None]:
    """Show in a terminal which shipped head is taken, and what `--drafter auto` means."""
    from selfspec.cli import display

    class Teller(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            display.stderr.print(record.getMessage(), markup=False, style="dim")

    logger, teller = logging.getLogger("selfspec.drafters.shipped"), Teller()
    level = logger.level
    if display.stderr.is_terminal:
        logger.addHandler(teller)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(teller)
        logger.setLevel(level)


def load_quietly(options: TargetOptions, *, use_packing: bool = True) -> "Target":
    """The target that the options name.

    Args:
        use_packing: lay its weights out for decoding; False keeps them as they are, for commands that write them.
    """
    from selfspec.drafters.options import load_target

    quiet_libraries()
    return load_target(options, use_packing=use_packing)


def fetch_quietly(directory: Path | None = None, gguf: Path | None = None) -> Path:
    """The folder of the default target, made if it is not there yet, with a bar."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    from selfspec.cli import display

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=display.stderr, transient=True, disable=not display.stderr.is_terminal) as bar:

        def begin(stage: str) -> None:
            # A new task each, because one with a known size cannot go back to an unknown one.
            for task in bar.task_ids:
                bar.remove_task(task)
            bar.add_task(stage, total=None)

        begin(f"looking into {directory or default_target_path()}")
        if not is_made(directory):
            quiet_libraries()
        return fetch_default_target(
            directory,
            gguf_file=gguf,
            report=begin,
            measure=lambda share: bar.update(bar.task_ids[0], total=1, completed=share),
        )
