"""Records of several engines and modes as tables: speeds, what they are to the peer's, first tokens, and equal answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Any

from selfspec.bench.peers_suite import HARD_TEMPERATURE, PLAIN

JSON = dict[str, Any]
MISSING = "–"


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    head: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return f"## {self.title}\n\n{self.note}\n\n{table}\n"


def compare(records: Sequence[JSON]) -> tuple[list[Table], JSON]:
    """The tables, and their figures as plain numbers.

    Raises:
        ValueError: two records are of one engine in one mode, or there is none.
    """
    # Ours first, and plain decoding before the others of its engine.
    records = sorted(records, key=lambda of: (not of["is_ours"], of["engine"], of["mode"] != PLAIN, of["mode"]))
    names = [name_of(record) for record in records]
    if not names:
        raise ValueError("no records to compare: run an engine first")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two records are of {twice[0]}: compare one of each")
    figures: JSON = {name: figures_of(record, records) for name, record in zip(names, records, strict=True)}
    relative = {part: _relative([record for record in records if part in record], part) for part in ("speed", "hard")}
    tables = [table for part in ("speed", "hard") for table in _speed_tables(figures, relative[part], part)]
    tables += [*_prompt_table(figures), *_equality_table(figures), *_jump_table(figures)]
    return tables, {"records": figures, "relative": relative}


def name_of(record: JSON) -> str:
    return f"{record['engine']}, {record['mode']}"


def figures_of(record: JSON, records: Sequence[JSON]) -> JSON:
    """One record's figures: medians over the repeats, without the answers."""
    out: JSON = {}
    for part in ("speed", "hard"):
        if part in record:
            out[part] = {str(streams): _speed(runs) for streams, runs in _by_streams(record[part])}
    if "speed" in record:
        out["equal"] = {
            str(streams): {
                "plain": _equal(record, records, "speed", streams),
                "alone": _equal_alone(record, records, streams),
            }
            for streams, _ in _by_streams(record["speed"])
        }
    if "prompts" in record:
        out["prompts"] = {
            length: {"first": seconds[0], "median": median(seconds)} for length, seconds in record["prompts"].items()
        }
    if "jump" in record:
        out["jump"] = record["jump"]
    return out


def _by_streams(runs: Sequence[JSON]) -> list[tuple[int, list[JSON]]]:
    return [
        (streams, [run for run in runs if run["streams"] == streams])
        for streams in dict.fromkeys(run["streams"] for run in runs)
    ]


def _speed(runs: Sequence[JSON]) -> JSON:
    counted = [run for run in runs if run["repeat"]]
    first = next((run for run in runs if run["is_first"]), None)
    lengths = [run["acceptance_length"] for run in counted if run["acceptance_length"] is not None]
    return {
        "tokens_per_second": median(run["tokens_per_second"] for run in counted) if counted else None,
        "repeats": [run["tokens_per_second"] for run in counted],
        "first": None if first is None else first["tokens_per_second"],
        "acceptance_length": median(lengths) if lengths else None,
    }


def _plain(record: JSON, records: Sequence[JSON]) -> JSON | None:
    """The record of the same engine without drafts."""
    return next((other for other in records if (other["engine"], other["mode"]) == (record["engine"], PLAIN)), None)


def _equal(record: JSON, records: Sequence[JSON], part: str, streams: int) -> list[int] | None:
    """How many answers have the tokens of plain decoding at the same number of streams, and how many there are."""
    plain = _plain(record, records)
    if plain is None or plain is record or part not in plain:
        return None
    return _count(record[part], plain[part], streams)


def _equal_alone(record: JSON, records: Sequence[JSON], streams: int) -> list[int] | None:
    """How many answers have the tokens of plain decoding when nothing else runs, and how many have been tried."""
    plain = _plain(record, records)
    return None if plain is None or "alone" not in plain else _count(record["speed"], plain["alone"], streams)


def _count(runs: Sequence[JSON], expected: Sequence[JSON], streams: int) -> list[int] | None:
    answers = {run["repeat"]: run["answers"] for run in runs if run["streams"] == streams}
    pairs = [
        pair
        for run in expected
        if run["streams"] == streams and run["repeat"] in answers
        # Alone, only the first of them have been asked.
        for pair in zip(answers[run["repeat"]], run["answers"], strict=False)
    ]
    return [sum(ours == theirs for ours, theirs in pairs), len(pairs)] if pairs else None


def _relative(records: Sequence[JSON], part: str) -> JSON:
    """Our speed divided by the best of the others at each number of streams: plain to plain, and drafted to drafted."""
    out: JSON = {}
    for kind, is_plain in (("plain", True), ("drafted", False)):
        chosen = [record for record in records if (record["mode"] == PLAIN) == is_plain]
        best: dict[bool, dict[int, float]] = {True: {}, False: {}}
        for record in chosen:
            side = best[record["is_ours"]]
            for streams, runs in _by_streams(record[part]):
                if (speed := _speed(runs)["tokens_per_second"]) is not None:
                    side[streams] = max(speed, side.get(streams, 0.0))
        out[kind] = {
            str(streams): best[True][streams] / best[False][streams] for streams in best[True] if streams in best[False]
        }
    return out


def _speed_tables(figures: JSON, relative: JSON, part: str) -> Iterator[Table]:
    measured = {name: of[part] for name, of in figures.items() if part in of}
    if not measured:
        return
    ratios = [kind for kind in relative if relative[kind]]
    heading = "Tokens per second" if part == "speed" else "Text that nobody can draft"
    what = "" if part == "speed" else f" Prompts are random tokens, at temperature {HARD_TEMPERATURE}."
    note = (
        "While all streams were busy, prompts included: the median of the repeats, and in brackets the first run after the "
        f"engine was ready.{what}"
    )
    rows = []
    for streams in _keys(measured.values()):
        cells = [_speed_cell(of.get(streams)) for of in measured.values()]
        rows.append([streams, *cells, *(_number(relative[kind].get(streams), 2) for kind in ratios)])
    yield Table(heading, note, ["streams", *measured, *(f"{kind}, ours to the peer's" for kind in ratios)], rows)
    drafted = {name: of for name, of in measured.items() if not name.endswith(f", {PLAIN}")}
    if drafted:
        rows = [
            [streams, *(_number(of.get(streams, {}).get("acceptance_length"), 2) for of in drafted.values())]
            for streams in _keys(drafted.values())
        ]
        title = "Acceptance length" + (", text that nobody can draft" if part == "hard" else "")
        yield Table(title, "Tokens per target pass, bonus token included.", ["streams", *drafted], rows)


def _speed_cell(of: JSON | None) -> str:
    if of is None:
        return MISSING
    return _number(of["tokens_per_second"], 0) + (f" ({_number(of['first'], 0)})" if of["first"] is not None else "")


def _prompt_table(figures: JSON) -> Iterator[Table]:
    def cell(of: JSON | None) -> str:
        return MISSING if of is None else f"{1000 * of['median']:,.1f} ({1000 * of['first']:,.1f})"

    note = "Milliseconds on an idle engine: the median, and in brackets the first prompt of that length."
    yield from _table("Time to the first token", note, figures, "prompts", "prompt tokens", cell)


def _equality_table(figures: JSON) -> Iterator[Table]:
    def cell(of: JSON | None) -> str:
        parts = [] if of is None else [f"{of[kind][0]}/{of[kind][1]} {kind}" for kind in ("plain", "alone") if of[kind]]
        return ", ".join(parts) or MISSING

    note = (
        "Answers with the tokens of the same engine's plain decoding: at the same number of streams (plain), and of the "
        "same request when nothing else runs (alone)."
    )
    yield from _table("Equal answers", note, figures, "equal", "streams", cell)


def _table(title: str, note: str, figures: JSON, part: str, key: str, cell: Callable[[JSON | None], str]) -> Iterator[Table]:
    measured = {name: of[part] for name, of in figures.items() if part in of}
    if measured:
        rows = [[name, *(cell(of.get(name)) for of in measured.values())] for name in _keys(measured.values())]
        yield Table(title, note, [key, *measured], rows)


def _jump_table(figures: JSON) -> Iterator[Table]:
    measured = {name: of["jump"] for name, of in figures.items() if "jump" in of}
    if not measured:
        return
    phases = zip_longest(*([f"{n} for {s:g} s" for n, s in of["phases"]] for of in measured.values()), fillvalue=MISSING)
    rows = [
        [" / ".join(dict.fromkeys(phase)), *(_number(of["rates"][place], 0) for of in measured.values())]
        for place, phase in enumerate(phases)
    ]
    note = (
        "Tokens per second in windows of half a second: the median of those in the second half of each phase, phase after "
        "phase. The JSON file has every window."
    )
    yield Table("Load that jumps", note, ["streams", *measured], rows)


def _keys(parts: Any) -> list[str]:
    return sorted({key for of in parts for key in of}, key=int)


def _number(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:,.{digits}f}"
