"""What a benchmark writes: JSON lines, each as soon as it is measured, so an interrupted run keeps all and can go on.

The first row says what was measured and where. Every other row is one measurement. Rows of one `id` belong together, because
ratios are taken between them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec.traffic.prompt_files import OutputWriter

NO_RECORD = "is no benchmark's record: give what --output of bench or bench-engine, or --json of bench-runtime wrote"
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Record:
    """A benchmark's file.

    Attributes:
        kind: the command that wrote it.
        settings: what was asked for.
        environment: what a reader needs to judge the numbers.
    """

    kind: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    rows: Rows


class RecordWriter:
    """Adds to a benchmark's file, which is checked before anything is measured.

    Args:
        path: None writes no file.
        kind: the command.
        settings: a resumed file must have the same.
        num_rows: how many rows each id will have.

    Attributes:
        rows: what a resumed file holds, without an id whose rows are not complete.
        finished: the ids of these rows.
        environment: where they were measured; empty for a new file.
    """

    def __init__(
        self,
        path: Path | None,
        kind: str,
        settings: Mapping[str, object],
        num_rows: Mapping[str | int, int],
        *,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        self.rows: Rows = []
        self.finished: set[str | int] = set()
        self.environment: dict[str, Any] = {}
        self._kind = kind
        self._settings = dict(settings)
        self._writer: OutputWriter | None = None
        if path is None:
            if resume or overwrite:
                raise ValueError("--resume and --overwrite concern the file of --output: name it")
            return
        self._writer = OutputWriter(path, {kind: 1, **num_rows}, overwrite=overwrite, resume=resume)
        self.finished = self._writer.finished - {kind}
        if self._writer.finished:
            record = read_record(path)
            self._check("settings", record.settings, self._settings)
            self.rows = [row for row in record.rows if row["id"] in self.finished]
            self.environment = record.environment

    @contextmanager
    def open(self, environment: Mapping[str, object]) -> Iterator[None]:
        """Write while the `with` statement runs; the environment must be that of a resumed file."""
        if self._writer is None:
            yield
            return
        if self.environment:
            self._check("environment", self.environment, environment)
        with self._writer as writer:
            if not self.environment:
                writer.write([{"id": self._kind, "settings": self._settings, "environment": dict(environment)}])
            yield

    def write(self, row_id: str | int, rows: Sequence[Mapping[str, object]]) -> None:
        """Add the rows of one id."""
        if self._writer is not None:
            self._writer.write([{"id": row_id, **row} for row in rows])

    def _check(self, what: str, before: Mapping[str, object], now: Mapping[str, object]) -> None:
        assert self._writer is not None
        # As they read in a file, where tuples are lists.
        now = json.loads(json.dumps(now))
        for name in dict.fromkeys([*before, *now]):
            if before.get(name) != now.get(name):
                raise ValueError(
                    f"{self._writer.path} cannot be resumed: its {what} has {name} {before.get(name)!r}, and this run has "
                    f"{now.get(name)!r}. Choose another --output, or pass --overwrite to replace it"
                )


def read_record(path: Path) -> Record:
    """Read a benchmark's file, complete or not.

    Raises:
        ValueError: it cannot be read, or no benchmark wrote it.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} {NO_RECORD}") from error
    try:
        head, *rows = map(json.loads, lines)
        return Record(head["id"], head["settings"], head["environment"], rows)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} {NO_RECORD}") from error
