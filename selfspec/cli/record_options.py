"""Where a benchmark's measurements and its picture go, checked before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from selfspec.bench.pictures import check_picture
from selfspec.bench.records import RecordWriter


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """A benchmark's files."""

    output: Path | None = field(
        default=None, metadata={"help": "file of JSON lines, one for every measurement, written as soon as it is made"}
    )
    resume: bool = field(default=False, metadata={"help": "keep the output, and measure only what is not in it"})
    overwrite: bool = field(default=False, metadata={"help": "replace the output if it exists"})
    plot: Path | None = field(default=None, metadata={"help": "picture to draw, PNG or SVG; needs matplotlib"})

    def writer(self, kind: str, settings: Mapping[str, object], num_rows: Mapping[str | int, int]) -> RecordWriter:
        """The file to add to. `kind` is the command, `num_rows` the rows that each id will have."""
        if self.plot is not None:
            check_picture(self.plot)
        return RecordWriter(self.output, kind, settings, num_rows, overwrite=self.overwrite, resume=self.resume)
