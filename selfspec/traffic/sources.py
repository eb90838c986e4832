"""Where conversations come from: JSON lines, a JSON list, plain text, tables, directories of them, the Hub.

Every line of a text file is a user turn; in a directory, every text file is one. JSON and text may be compressed by gzip.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from selfspec.traffic.conversations import BadRow, Conversation, Report
from selfspec.traffic.forms import parse

# Of files that `datasets` reads, and its names for them.
TABLES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
LINES = (".jsonl", ".ndjson", ".json", ".txt")
COMPRESSED = tuple(f"{suffix}.gz" for suffix in LINES)
SUFFIXES = (*LINES, *TABLES)

# A row's place, the function that decodes the row, and the row.
Row = tuple[str, Callable[[Any], object], Any]


def check_sources(sources: Iterable[str | Path]) -> None:
    """Raise a ValueError for a source that is neither a file to read, nor a directory, nor the id of a dataset."""
    for source in sources:
        path = Path(source)
        if not path.exists():
            _hub_dataset(str(source))
        elif path.is_file() and _suffix(path) is None:
            raise _unknown_format(path)


def read_conversations(sources: Iterable[str | Path], report: Report) -> Iterator[Conversation]:
    """The conversations of files, of all files in a directory, and of datasets of the Hub (`ID[:CONFIG][:SPLIT]`).

    Ids are made unique: a second `a` becomes `a#2`. A row without an id gets its file's name and its number.

    Raises:
        ValueError: a source does not exist, or its format is not known.
    """
    unique_id = _UniqueIds()
    for place, decode, raw in (row for source in sources for row in _open(source, report)):
        try:
            form, conversation = parse(decode(raw), place)
        except BadRow as error:
            report.skip(str(error), f"{place}: {_excerpt(raw)}")
            continue
        report.forms[form] += 1
        report.num_kept += 1
        yield replace(conversation, id=unique_id(conversation.id))


class _UniqueIds:
    """Returns an id as it is the first time, and with a number from then on."""

    def __init__(self) -> None:
        self.num_seen: Counter[str] = Counter()

    def __call__(self, row_id: str) -> str:
        candidate = row_id
        while self.num_seen[candidate]:
            self.num_seen[row_id] += 1
            candidate = f"{row_id}#{self.num_seen[row_id]}"
        self.num_seen[candidate] = 1
        return candidate


def _open(source: str | Path, report: Report) -> Iterator[Row]:
    """Every row, with its place and the function that decodes it."""
    path = Path(source)
    suffix = _suffix(path)
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            if (kind := _suffix(file)) is None:
                report.skip("a file of unknown format", file.name)
            elif kind == ".txt":
                yield file.name, _from_text, b"".join(_lines(file, report))
            else:
                yield from _open(file, report)
    elif not path.exists():
        yield from _table_rows(str(source), *_hub_dataset(str(source)))
    elif suffix is None:
        raise _unknown_format(path)
    elif suffix in TABLES:
        yield from _table_rows(path.name, TABLES[suffix], data_files=str(path))
    elif suffix == ".json" and (records := _whole_json(path)) is not None:
        for number, record in enumerate(records, start=1):
            yield f"{path.name}:{number}", lambda raw: raw, record
    else:
        decode = _from_text if suffix == ".txt" else _from_json
        for number, line in enumerate(_lines(path, report), start=1):
            if line := line.removeprefix(b"\xef\xbb\xbf").strip():
                yield f"{path.name}:{number}", decode, line


def _suffix(path: Path) -> str | None:
    """What the name says of the format, without the `.gz` of a compressed file; None if the format is not known."""
    if path.name.endswith(COMPRESSED):
        path = path.with_suffix("")
    return path.suffix if path.suffix in SUFFIXES else None


def _unknown_format(path: Path) -> ValueError:
    return ValueError(f"{path} has a name of no known format: call it {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")


def _lines(path: Path, report: Report) -> Iterator[bytes]:
    """A file's lines. A compressed file that ends too early, as one that is still written does, gives those before."""
    with path.open("rb") as file:
        lines: IO[bytes] = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file  # type: ignore[assignment]
        try:
            yield from lines
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            report.skip("a compressed file that cannot be read to its end", f"{path.name}: {error}")


def _whole_json(path: Path) -> list[object] | None:
    """A JSON file's rows; None if the file is not one JSON text, for example because it has a row on each line."""
    try:
        # What cannot be read of it is told where its lines are read.
        content = json.loads(b"".join(_lines(path, Report())))
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, list) else [content]


def _hub_dataset(source: str) -> tuple[str, str | None, str]:
    """The id, configuration and split in `ID[:CONFIG][:SPLIT]`."""
    name, *rest = source.split(":")
    looks_like_a_path = name.count("/") > 1 or name.startswith(("/", ".", "~")) or name.endswith("/")
    if not name or len(rest) > 2 or _suffix(Path(name)) or looks_like_a_path:
        raise ValueError(f"cannot read {source}: there is no such file or folder, and it is not the id of a dataset")
    return name, rest[0] if len(rest) == 2 else None, rest[-1] if rest else "train"


def _table_rows(place: str, name: str, config: str | None = None, split: str = "train", **options: Any) -> Iterator[Row]:
    # What was meant as a file is misspelt more often than it is meant for the Hub.
    absent = "" if "data_files" in options else "there is no such file or folder, and "
    try:
        from datasets import load_dataset
    except ImportError as error:
        what = "reading a dataset of the Hub" if absent else "reading it"
        raise ValueError(f"cannot read {place}: {absent}{what} needs datasets: pip install 'selfspec[train]'") from error
    try:
        for number, record in enumerate(load_dataset(name, config, split=split, streaming=True, **options), start=1):
            yield f"{place}:{number}", lambda raw: raw, record
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        hub = f"the Hugging Face Hub gave no such dataset ({reason})" if absent else reason
        raise ValueError(f"cannot read {place}: {absent}{hub}") from error


def _from_json(line: bytes) -> object:
    try:
        return json.loads(line)
    except UnicodeDecodeError:
        raise BadRow("not UTF-8") from None
    except (ValueError, RecursionError):
        raise BadRow("not JSON") from None


def _from_text(content: bytes) -> object:
    try:
        return {"text": content.decode().removeprefix("\ufeff").strip()}
    except UnicodeDecodeError:
        raise BadRow("not UTF-8") from None


def _excerpt(raw: object) -> str:
    text = raw[:400].decode(errors="replace") if isinstance(raw, bytes) else str(raw)[:400]
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:79] + "…"
