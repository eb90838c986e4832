"""Finished runs beside each other, from the records that they left in run.json: a picture, and figures for a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec.train.curves import Chart, Line, draw

RECORD_NAME = "run.json"


@dataclass(frozen=True)
class Run:
    """A run's record under the name that tells it from others."""

    name: str
    record: Mapping[str, Any]

    @property
    def losses(self) -> list[tuple[float, float]]:
        """(step, loss); empty for records from before losses were kept."""
        return [(entry["step"], entry["loss"]) for entry in self.record.get("losses", [])]

    @property
    def lengths(self) -> list[tuple[float, float]]:
        """(step, acceptance length on the held-out prompts)."""
        return [(entry["step"], entry["acceptance_length"]) for entry in self.record.get("history", [])]

    @property
    def rates(self) -> list[tuple[float, float]]:
        """(depth, acceptance rate) of the last evaluation."""
        final = self.record.get("final") or {}
        prefix = "acceptance_rate_"
        return sorted((int(name.removeprefix(prefix)), rate) for name, rate in final.items() if name.startswith(prefix))

    @property
    def length(self) -> float | None:
        """Acceptance length of the last evaluation."""
        return (self.record.get("final") or {}).get("acceptance_length")

    @property
    def num_steps(self) -> int | None:
        """Optimizer steps, those before a restart included."""
        steps = [step for points in (self.losses, self.lengths) for step, _ in points]
        return int(max(steps)) if steps else None


def read_runs(places: Sequence[Path]) -> list[Run]:
    """The runs in some output folders, or in records by their own names.

    Raises:
        ValueError: a place has no record, or one that cannot be read.
    """
    files = [place / RECORD_NAME if place.is_dir() else place for place in places]
    for place, file in zip(places, files, strict=True):
        if not file.is_file():
            raise ValueError(f"{place} holds no {RECORD_NAME}: name the output folder of a training that has ended")
    names = _names([file.parent if file.name == RECORD_NAME else file for file in files])
    runs = []
    for name, file in zip(names, files, strict=True):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise ValueError(f"{file} is not the record of a training ({error}): name another") from error
        if not isinstance(record, dict) or not record.keys() & {"history", "losses"}:
            raise ValueError(f"{file} is not the record of a training: name another")
        runs.append(Run(name, record))
    return runs


def picture(runs: Sequence[Run]) -> str:
    """The runs' curves as SVG: loss, acceptance length over the steps, and the acceptance of each depth at the end."""
    return draw(
        [
            Chart("Loss", "step", [Line(run.name, run.losses) for run in runs if run.losses]),
            Chart(
                "Tokens per pass, held-out prompts",
                "step",
                [Line(run.name, run.lengths) for run in runs if run.lengths],
            ),
            Chart(
                "Drafts accepted, share",
                "depth",
                [Line(run.name, run.rates) for run in runs if run.rates],
                from_zero=True,
            ),
        ]
    )


def _names(places: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [place.resolve().parts for place in places]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    # The same run twice.
    return [str(place) for place in places]
