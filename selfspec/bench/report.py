"""The runtime benchmark's results: tables, and one JSON record."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from selfspec.bench.compare import BASELINE, PLAIN
from selfspec.bench.steps import AnswerTime, Floor, PrefillTime, Promise, StageTimes, StepTime

GIB = 1 << 30


@dataclass
class RuntimeReport:
    """Everything measured so far, in the order of measuring.

    Attributes:
        environment: target, device, dtype and versions; the name of an expanded target says "expanded".
        peak_bytes: by part of the run; None if the device does not count.
        notes: what was left out, and why.
    """

    environment: dict[str, object]
    floor: Floor | None = None
    steps: list[StepTime] = field(default_factory=list)
    prefills: list[PrefillTime] = field(default_factory=list)
    stages: list[StageTimes] = field(default_factory=list)
    answers: list[AnswerTime] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    peak_bytes: dict[str, int | None] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the record and the figures derived from it as JSON. Times are in seconds unless a key says ms."""
        record = asdict(self)
        if self.floor is not None:
            record["floor"]["seconds"] = self.floor.seconds
            for step, row in zip(self.steps, record["steps"], strict=True):
                row["host_gap_seconds"] = step.host_gap_seconds
                row["times_floor"] = step.wall_seconds / self.floor.seconds
                row["times_floor_with_kv"] = step.wall_seconds / self.floor.seconds_at(step.context)
        for stages, row in zip(self.stages, record["stages"], strict=True):
            row["total"] = stages.total
        record["modes"] = [asdict(mode) for mode in self.modes]
        # A reader finds the whole new file or the whole old one.
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> RuntimeReport | None:
        """The report in a file that `save` wrote; None if something else did."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(record, dict) or not {"environment", "floor", "steps"} <= record.keys():
            return None

        def made(kind: type, row: dict[str, Any]) -> Any:
            # What is derived from the fields is in the file, too.
            return kind(**{own.name: row[own.name] for own in fields(kind)})

        lists = {
            "steps": StepTime,
            "prefills": PrefillTime,
            "stages": StageTimes,
            "answers": AnswerTime,
            "promises": Promise,
        }
        given: dict[str, Any] = {name: [made(kind, row) for row in record.get(name, [])] for name, kind in lists.items()}
        given |= {name: record[name] for name in ("peak_bytes", "kernels", "notes") if name in record}
        return cls(record["environment"], made(Floor, record["floor"]) if record["floor"] else None, **given)

    @property
    def modes(self) -> list[ModeRate]:
        """The end-to-end answers of each mode, compared with plain decoding of the same prompts."""
        by_mode: dict[str, dict[int, AnswerTime]] = {}
        for each in self.answers:
            by_mode.setdefault(each.mode, {})[each.prompt_index] = each
        plain, baseline = by_mode.get(PLAIN, {}), by_mode.get(BASELINE, {})
        return [_mode_rate(mode, list(answers.values()), plain, baseline) for mode, answers in by_mode.items()]


@dataclass(frozen=True)
class ModeRate:
    """A mode's figures over its prompts. Ratios are medians over the prompts.

    Attributes:
        tokens_per_second: with prefill.
        decode_tokens_per_second: without prefill and the first step.
        total_speedup, decode_speedup: over plain decoding, with and without prefill.
        baseline_speedup: over transformers' generate, with prefill; None if that did not run.
    """

    mode: str
    num_prompts: int
    tokens_per_second: float
    decode_tokens_per_second: float | None
    acceptance_length: float
    total_speedup: float | None
    decode_speedup: float | None
    baseline_speedup: float | None
    num_identical: int


def _mode_rate(
    mode: str, answers: list[AnswerTime], plain: dict[int, AnswerTime], baseline: dict[int, AnswerTime]
) -> ModeRate:
    num_tokens = sum(each.num_tokens for each in answers)
    decode = [each.decode_seconds_per_token for each in answers if each.decode_seconds_per_token is not None]

    def speedup(others: dict[int, AnswerTime]) -> float | None:
        ratios = [
            (other.seconds / other.num_tokens) / (each.seconds / each.num_tokens)
            for each in answers
            if (other := others.get(each.prompt_index)) is not None
        ]
        return median(ratios) if ratios else None

    pairs = [(plain[each.prompt_index], each) for each in answers]
    decode_ratios = [
        before.decode_seconds_per_token / after.decode_seconds_per_token
        for before, after in pairs
        if before.decode_seconds_per_token is not None and after.decode_seconds_per_token is not None
    ]
    return ModeRate(
        mode=mode,
        num_prompts=len(answers),
        tokens_per_second=num_tokens / sum(each.seconds for each in answers),
        decode_tokens_per_second=1 / median(decode) if decode else None,
        acceptance_length=num_tokens / sum(each.num_target_passes for each in answers),
        total_speedup=speedup(plain),
        decode_speedup=median(decode_ratios) if decode_ratios else None,
        baseline_speedup=speedup(baseline),
        num_identical=sum(each.is_identical for each in answers),
    )


def show(report: RuntimeReport, console: Console) -> None:
    """Print the tables. Every title names the target."""
    name = report.environment["target"]
    if report.floor is not None:
        _show_steps(report, report.floor, console)
    if report.stages:
        table = _table(f"{name}: where a step's time goes (ms; the host waits for the device around each stage)")
        for heading in ("mode", "nodes", "draft", "verify", "commit", "step"):
            table.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=True)
        for each in report.stages:
            times = (each.draft, each.verify, each.commit, each.total)
            table.add_row(each.mode, str(each.num_nodes), *map(_ms, times))
        console.print(table)
    if report.answers:
        table = _table(f"{name}: end to end, batch 1")
        headings = ("prompts", "tokens\nper\nsecond", "decoding\ntokens/s", "acceptance\nlength", "decoding\nvs plain")
        table.add_column("mode", overflow="fold")
        for heading in (*headings, "whole\nanswer\nvs plain", "vs\ntransformers", "same"):
            table.add_column(heading, justify="right", no_wrap=True)
        for mode in report.modes:
            table.add_row(
                mode.mode,
                str(mode.num_prompts),
                f"{mode.tokens_per_second:.1f}",
                "" if mode.decode_tokens_per_second is None else f"{mode.decode_tokens_per_second:.1f}",
                f"{mode.acceptance_length:.2f}",
                _ratio(mode.decode_speedup),
                _ratio(mode.total_speedup),
                _ratio(mode.baseline_speedup),
                f"{mode.num_identical}/{mode.num_prompts}",
            )
        console.print(table)
        console.print(
            "Speeds compared are medians over prompts. Decoding leaves out reading the prompt; a whole answer includes it, "
            "and so does the comparison with transformers."
        )
    if report.promises:
        table = _table(f"{name}: drafters with a set acceptance length, and what the cost model promises for them")
        for heading in ("set", "nodes", "acceptance\nlength", "promised", "measured", "reached"):
            table.add_column(heading, justify="right", no_wrap=True)
        for promise in report.promises:
            table.add_row(
                str(promise.set_length),
                str(promise.num_nodes),
                f"{promise.acceptance_length:.2f}",
                f"{promise.promised:.2f}x",
                f"{promise.measured:.2f}x",
                f"{promise.measured / promise.promised:.0%}",
            )
        console.print(table)
    for part, size in report.peak_bytes.items():
        if size is not None:
            console.print(f"peak memory, {part}: {size / GIB:.2f} GiB")
    for note in report.notes:
        console.print(note)
    console.print(", ".join(f"{key} {value}" for key, value in report.environment.items()))


def _show_steps(report: RuntimeReport, floor: Floor, console: Console) -> None:
    console.print(
        f"floor {floor.seconds * 1000:.3f} ms: {floor.weight_bytes / 1e9:.3f} GB of weights at "
        f"{floor.copy_bytes_per_second / 1e9:.0f} GB/s (a large copy, bytes read and written)"
    )
    if not report.steps:
        return
    table = _table(f"{report.environment['target']}: a verify pass at batch 1 (ms, medians)")
    for heading in ("context", "nodes", "wall", "device", "host gap", "x floor", "x floor\nwith KV", "x one\nnode"):
        table.add_column(heading, justify="right", no_wrap=True)
    first: dict[int, float] = {}
    for step in report.steps:
        first.setdefault(step.context, step.wall_seconds)
        table.add_row(
            str(step.context),
            str(step.num_nodes),
            _ms(step.wall_seconds),
            _ms(step.device_seconds),
            _ms(step.host_gap_seconds),
            f"{step.wall_seconds / floor.seconds:.2f}",
            f"{step.wall_seconds / floor.seconds_at(step.context):.2f}",
            f"{step.wall_seconds / first[step.context]:.2f}",
        )
    console.print(table)
    for each in report.prefills:
        rate = (each.context - each.start) / each.seconds
        console.print(f"prefill {each.start} to {each.context}: {each.seconds * 1000:.0f} ms, {rate:.0f} tokens/s")


def _table(title: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", padding=(0, 1, 0, 0))


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.3f}"
