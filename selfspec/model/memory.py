"""What a process holds of the machine's memory, and giving back what it has freed."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

# Bytes of freed weights after which they are given back.
RELEASE_EVERY = 8 << 20


def release_free_memory() -> None:
    """Give memory that was freed back to the system, where the C library is glibc.

    glibc keeps a freed weight whose neighbours live on. The next one often does not fit in, because it must be aligned, so
    memory would grow by nearly all that was freed.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


class Releases:
    """Gives freed memory back each time that enough has been freed, because each time takes milliseconds."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def note(self, num_bytes: int) -> None:
        """So many more bytes have been freed."""
        self._num_bytes += num_bytes
        if self._num_bytes >= RELEASE_EVERY:
            release_free_memory()
            self._num_bytes = 0


@dataclass(frozen=True)
class Memory:
    """This process's memory in bytes, as Linux counts it.

    Attributes:
        resident: all that is in RAM now (VmRSS), `anonymous` and `file` together.
        peak: the most that was ever resident (VmHWM).
        anonymous: what only this process holds: weights, caches, Python's objects (RssAnon).
        file: pages of libraries and mapped files, which the system may drop and read again (RssFile).
    """

    resident: int
    peak: int
    anonymous: int
    file: int

    @classmethod
    def now(cls) -> Self:
        """What this process holds at this moment.

        Raises:
            ValueError: the system is not Linux.
        """
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError as error:
            raise ValueError("a process's memory can be read on Linux only") from error
        fields = dict(line.split(":", 1) for line in lines)
        return cls(*(int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM", "RssAnon", "RssFile")))
