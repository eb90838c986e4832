"""What makes engines in processes of their own, for tests. Such a process imports this file by its name."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from selfspec.drafters import Drafter, NgramDrafter
from selfspec.engine import Listener, SpecEngine
from selfspec.model.target import Target


def tiny_engine(listener: Listener, *, source: Path, **settings: int) -> SpecEngine:
    target = Target.from_pretrained(source, dtype="float32", device="cpu")
    options = {"use_cost_guard": False, "makes_text": False, **settings}
    return SpecEngine(target, [NgramDrafter(4)], listener=listener, **options)


def no_engine(listener: Listener) -> SpecEngine:
    raise ValueError("models/absent: no such folder")


class Odd(Exception):
    """An error that cannot be pickled."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


def dying_engine(listener: Listener) -> SpecEngine:
    os._exit(3)


def prepare_ngram(depth: int, target: Target) -> partial[Drafter]:
    if depth > 8:
        raise ValueError("the head is damaged: fetch it again")
    return partial(NgramDrafter, depth)
