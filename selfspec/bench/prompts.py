"""The prompts of a benchmark: packaged ones, or a file's, by task or in an order in which every stretch has all tasks.

Nothing here needs torch, because a load generator reads prompts too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from selfspec.traffic.prompt_files import PromptRow, read_prompts

DATA = Path(__file__).parents[1] / "data"
BENCHMARKS = ("spec_bench", "humaneval")
DEMO_PROMPTS = DATA / "demo_prompts.jsonl"
SHORT_DEMO_PROMPTS = DATA / "short_demo_prompts.jsonl"


def read_benchmark(name: str | Path) -> list[PromptRow]:
    """The prompts of a packaged benchmark (`spec_bench`, `humaneval`) or of a file."""
    return read_prompts(DATA / f"{name}.jsonl" if name in BENCHMARKS else Path(name))


def choose_tasks(rows: Sequence[PromptRow], names: str | None) -> list[PromptRow]:
    """The rows of the named categories, which have commas between them; all rows for None.

    Raises:
        ValueError: no row has a category of this name.
    """
    if names is None:
        return list(rows)
    wanted = [name.strip() for name in names.split(",")]
    known = dict.fromkeys(row.category or "all" for row in rows)
    for name in wanted:
        if name not in known:
            raise ValueError(f"--tasks {name!r} is not among the prompts' categories: use {', '.join(known)}")
    return [row for row in rows if (row.category or "all") in wanted]


def choose_prompts(rows: Sequence[PromptRow], num_per_task: int | None) -> dict[str, list[PromptRow]]:
    """Rows by task. `num_per_task` keeps that many of each task, spread evenly over its rows."""
    tasks: dict[str, list[PromptRow]] = {}
    for row in rows:
        tasks.setdefault(row.category or "all", []).append(row)
    if num_per_task is None:
        return tasks
    return {task: spread(of, num_per_task) for task, of in tasks.items() if num_per_task}


def spread(rows: Sequence[PromptRow], count: int) -> list[PromptRow]:
    """At most `count` rows, spread evenly over all."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def mixed(rows: Sequence[PromptRow]) -> list[PromptRow]:
    """The prompts in a fixed order in which every stretch holds each task's share of prompts."""
    shuffled = random.Random(0).sample(rows, len(rows))
    places = {
        row.id: (number + 0.5) / len(task)
        for task in choose_prompts(shuffled, None).values()
        for number, row in enumerate(task)
    }
    return sorted(shuffled, key=lambda row: places[row.id])
