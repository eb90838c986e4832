"""Prompt files in, result files out: JSON lines in the same order.

A prompt row is `{"id", "prompt": TEXT}`, `{"id", "messages": [{"role", "content"}, ...]}` or
`{"id", "turns": [TEXT, ...]}` (what a user says, turn by turn). Every result is written as soon as it is finished, and an
interrupted file can be resumed.
"""

import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

# Standard input or output, in place of a file.
STANDARD = Path("-")
PROMPT_KEYS = ("prompt", "messages", "turns")


@dataclass(frozen=True)
class PromptRow:
    """One prompt: raw text, or chat messages for the target's chat template."""

    id: str | int
    prompt: str | list[dict[str, str]]
    turns: list[str] | None = None
    category: str | None = None


def read_prompts(path: Path) -> list[PromptRow]:
    """All rows of a prompt file, or of standard input for the path `-`. Blank lines are skipped.

    Raises:
        ValueError: a row cannot be used, or there is none; the sentence names the line.
    """
    rows: list[PromptRow] = []
    line_of_id: dict[str | int, int] = {}
    for number, line in _numbered_lines(path):
        try:
            row = parse_prompt(line, number)
            if row.id in line_of_id:
                raise ValueError(f"id {row.id!r} is already that of line {line_of_id[row.id]}: make every id unique")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        line_of_id[row.id] = number
        rows.append(row)
    if not rows:
        raise ValueError(f'{path} holds no prompt: write one per line, such as {{"id": "a", "prompt": "Hello"}}')
    return rows


def parse_prompt(line: bytes, number: int) -> PromptRow:
    """The row in one line. A row without an id gets the line's `number`."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text: save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno}): write one object per line") from error
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply: write one flat object per line") from error
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__} where an object with one of {', '.join(PROMPT_KEYS)} is needed")
    row_id = record.get("id", number)
    if not isinstance(row_id, str | int) or isinstance(row_id, bool):
        raise ValueError(f"id is {row_id!r}: make it a text or a whole number")
    keys = [key for key in PROMPT_KEYS if key in record]
    if len(keys) != 1:
        found = f"both {keys[0]} and {keys[1]}" if keys else f"none of {', '.join(PROMPT_KEYS)}"
        raise ValueError(f"the object has {found}: give exactly one")
    value = record[keys[0]]
    category = record.get("category")
    if keys == ["prompt"]:
        _check_text(value, "prompt")
        return PromptRow(row_id, value, category=category)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{keys[0]} is {value!r}: make it a list with at least one entry")
    if keys == ["turns"]:
        for i, turn in enumerate(value):
            _check_text(turn, f"turns[{i}]")
        return PromptRow(row_id, [{"role": "user", "content": value[0]}], turns=value, category=category)
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}] is not an object with role and content")
        _check_text(message.get("content"), f"messages[{i}].content")
    return PromptRow(row_id, value, category=category)


def _check_text(value: object, name: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}: make it a text")
    if not value.strip():
        raise ValueError(f"{name} is empty: fill it or remove the row")


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank. Only a newline ends a line, because text may hold other separators."""
    try:
        content = sys.stdin.buffer.read() if path == STANDARD else path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield number, line


class OutputWriter:
    """Appends result rows to a file, prompt by prompt, and flushes after each prompt.

    Args:
        path: the file. Unless `overwrite` or `resume` is set, it must be absent or empty.
        num_rows: how many rows each prompt id will have.
        overwrite: replace what is in the file.
        resume: keep what is in the file and list its ids in `finished`. If the last prompt is incomplete (a line or a row is
            missing, as after a crash), it is dropped from the file and left to do again.
        keeps_others: a file to resume may have rows with other ids, which stay.

    Nothing on disk changes before the `with` statement is entered.
    """

    def __init__(
        self,
        path: Path,
        num_rows: Mapping[str | int, int],
        *,
        overwrite: bool = False,
        resume: bool = False,
        keeps_others: bool = False,
    ) -> None:
        if overwrite and resume:
            raise ValueError("overwrite and resume exclude each other: choose one")
        if path.is_dir() or not path.parent.is_dir():
            problem = "it is a directory" if path.is_dir() else f"{path.parent} is not a directory"
            raise ValueError(f"cannot write to {path}: {problem}")
        self.path = path
        self.finished: set[str | int] = set()
        self._num_bytes_kept = 0
        self._file: BinaryIO | None = None
        if overwrite or not path.exists() or path.stat().st_size == 0:
            return
        if not resume:
            raise ValueError(f"{path} holds results already: pass --resume to continue it, or --overwrite")
        self._find_finished(num_rows, keeps_others=keeps_others)

    def _find_finished(self, num_rows: Mapping[str | int, int], *, keeps_others: bool) -> None:
        # A crash cut off what follows the last newline.
        lines = self.path.read_bytes().split(b"\n")[:-1]
        groups = [(row_id, list(group)) for row_id, group in itertools.groupby(lines, key=_id_of_result)]
        for i, (row_id, group) in enumerate(groups):
            expected = 0 if row_id is None else num_rows.get(row_id, len(group) if keeps_others else 0)
            if row_id is None or len(group) > expected or (len(group) < expected and i < len(groups) - 1):
                raise ValueError(
                    f"{self.path} cannot be resumed: it has {len(group)} rows with id {row_id!r} where this run would "
                    f"write {expected}. Choose another output, or pass --overwrite to replace it"
                )
            if len(group) == expected:
                self.finished.add(row_id)
                self._num_bytes_kept += sum(len(line) + 1 for line in group)

    def __enter__(self) -> Self:
        self._file = self.path.open("ab")
        self._file.truncate(self._num_bytes_kept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._file is not None
        self._file.close()

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append all rows of one prompt."""
        assert self._file is not None, "enter the writer first"
        self._file.write(_lines(rows))
        self._file.flush()


class Printer:
    """Writes result rows to standard output, as an `OutputWriter` does to a file."""

    finished: frozenset[str | int] = frozenset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Print all rows of one prompt."""
        sys.stdout.buffer.write(_lines(rows))
        sys.stdout.flush()


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def _id_of_result(line: bytes) -> str | int | None:
    """The id in a result line; None if the line is not a result."""
    try:
        return json.loads(line)["id"]
    except (ValueError, KeyError, TypeError):
        return None
