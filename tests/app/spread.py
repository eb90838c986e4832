"""How much a race's speed-ups vary from race to race, with level clocks and each alone: `python tests/app/spread.py`.

It races plain decoding, ngram and EAGLE over the default target, 7 times each way in turn, 32 tokens each. It prints the
median of each drafter's decoding speed over plain decoding, its range, and its spread: the median distance from the median.
"""

from __future__ import annotations

import argparse
import os
from statistics import median

import typer

from selfspec import Target
from selfspec.app.lanes import speedup
from selfspec.app.local_races import LocalRaces
from selfspec.app.settings import ALONE, EXAMPLES, LEVEL, Settings
from selfspec.model.default_target import default_target

DRAFTERS = ("ngram", "eagle")


def speedups(races: LocalRaces, settings: Settings) -> list[float]:
    """Each drafter's decoding speed over that of plain decoding in one race."""
    *_, end = races.race(settings, [], "spread")
    assert end.race is not None
    plain, *others = end.race.columns
    return [speedup(column, plain, is_level=settings.timing == LEVEL) or 0.0 for column in others]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--races", type=int, default=7, help="races each way")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--example", choices=list(EXAMPLES), default="Rainbows", help="which of the page's examples")
    options = parser.parse_args()

    races = LocalRaces(Target.from_pretrained(default_target()))
    races.prepare()
    found: dict[str, list[list[float]]] = {ALONE: [], LEVEL: []}
    for number in range(options.races):
        for timing, rows in found.items():
            settings = Settings(
                prompt=EXAMPLES[options.example], drafters=DRAFTERS, timing=timing, max_new_tokens=options.max_new_tokens
            )
            rows.append(speedups(races, settings))
            typer.echo(f"race {number + 1}, {timing}, load {os.getloadavg()[0]:.1f}: {rows[-1]}")
    for timing, rows in found.items():
        for name, values in zip(DRAFTERS, zip(*rows, strict=True), strict=True):
            middle = median(values)
            spread = median(abs(value - middle) for value in values) / middle
            typer.echo(
                f"{timing:6} {name:6} median {middle:.2f}, {min(values):.2f} to {max(values):.2f}, spread {spread:.1%}"
            )


if __name__ == "__main__":
    main()
