"""A log of real traffic, in the form that `selfspec data` reads: the way from serving back to training.

The log is opt-in. A share of the conversations goes to JSON lines in a directory of bounded size: a full file is closed, a
new one begun, and the oldest are deleted. A thread of its own writes, and an error there costs log lines only. A line is
written in one piece and never continued, so a crash tears the last line at most, and readers count and skip that one.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selfspec.traffic.conversations import Conversation

logger = logging.getLogger(__name__)

# Conversations that may wait to be written. More are dropped, because a slow disk must not fill the memory.
MAX_WAITING = 1024
PREFIX = "traffic-"


class Capture:
    """Writes conversations to a directory.

    Args:
        directory: made if needed, readable by its owner only.
        share: share of the conversations to keep, above 0 and at most 1.
        max_bytes: most bytes of all files together; the oldest files are deleted.
        redact: applied to a conversation before it is written, such as `selfspec.traffic.redact.Redactor`.

    Raises:
        OSError: the directory cannot be written to.
    """

    def __init__(
        self,
        directory: Path,
        *,
        share: float = 1.0,
        max_bytes: int = 1 << 30,
        redact: Callable[[Conversation], Conversation] | None = None,
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share} is not allowed: use a number above 0, up to 1")
        if max_bytes < 1 << 16:
            raise ValueError(f"max_bytes={max_bytes} is not allowed: use {1 << 16} or more")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory
        self.share = share
        self.max_bytes = max_bytes
        self.num_written = 0
        self.num_dropped = 0
        self._redact = redact
        self._file: int | None = None
        self._file_bytes = 0
        self._open_file()
        self._records: queue.Queue[tuple[Conversation, dict[str, Any]] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="selfspec-capture", daemon=True)
        self._thread.start()

    def record(self, conversation: Conversation, facts: dict[str, Any]) -> None:
        """Keep a conversation and facts about it, if it falls into the share. Never waits, never fails."""
        if random.random() >= self.share:
            return
        try:
            self._records.put_nowait((conversation, facts))
        except queue.Full:
            self._drop("the disk is too slow")

    def close(self) -> None:
        """Write the conversations that wait, and end."""
        self._records.put(None)
        self._thread.join()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _run(self) -> None:
        while (item := self._records.get()) is not None:
            try:
                self._write(*item)
            except Exception as error:
                self._drop(f"{type(error).__name__}: {error}")

    def _write(self, conversation: Conversation, facts: dict[str, Any]) -> None:
        if self._redact is not None:
            conversation = self._redact(conversation)
        line = json.dumps({**conversation.record(), **facts}, ensure_ascii=False).encode(errors="replace") + b"\n"
        if self._file is None or self._file_bytes + len(line) > self.max_bytes // 8:
            self._open_file()
        assert self._file is not None
        num_written = os.write(self._file, line)
        self._file_bytes += num_written
        if num_written < len(line):
            # The rest, in the same file, would look like a line of its own.
            os.close(self._file)
            self._file = None
            raise OSError("the disk is full")
        self.num_written += 1

    def _open_file(self) -> None:
        """Begin a new file, and delete the oldest files until there is room for it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        # An eighth of the room is for the new file.
        room = self.max_bytes - self.max_bytes // 8
        for path in sorted(self.directory.glob(f"{PREFIX}*.jsonl"), reverse=True):
            room -= path.stat().st_size
            if room < 0:
                path.unlink()
        # Names sort by age, and no two servers share a file.
        name = f"{PREFIX}{time.time_ns():020d}-{os.getpid()}.jsonl"
        self._file = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._file_bytes = 0

    def _drop(self, reason: str) -> None:
        self.num_dropped += 1
        # Logged again each time the number has doubled.
        if self.num_dropped & (self.num_dropped - 1) == 0:
            logger.warning("%d conversations were not captured: %s", self.num_dropped, reason)
