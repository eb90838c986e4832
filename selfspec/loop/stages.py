"""Which part of a step failed, so the right one is blamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum


class Stage(Enum):
    """Who does a part of a step: the drafter or the target."""

    DRAFT = "draft"
    TARGET = "target"


class StageError(Exception):
    """A stage failed with `error`."""

    def __init__(self, stage: Stage, error: Exception) -> None:
        super().__init__(f"{stage.value}: {error}")
        self.stage = stage
        self.error = error


@contextmanager
def blamed(stage: Stage) -> Iterator[None]:
    """Turn an error inside the block into this stage's `StageError`, unless a part of it has its own stage."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        raise StageError(stage, error) from error
