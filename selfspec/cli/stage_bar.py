"""A bar for work of several stages, each with a count of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def stage_bar(message: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr, which the yielded function sets to a stage, how much of it is done, and how much there is.

    Without a terminal each stage is a line.
    """
    from selfspec.cli.display import stderr

    if not stderr.is_terminal:
        last = ""

        def say(stage: str, done: int, total: int) -> None:
            nonlocal last
            if stage != last:
                last = stage
                stderr.print(stage, markup=False, soft_wrap=True)

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(message, total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)
