"""Which drafters are left out because they failed, and until when. Drafts are a matter of speed alone."""

from __future__ import annotations

import time
from dataclasses import dataclass

# How long a drafter that failed is left out before requests try it again. The time doubles after every further failure.
RETRY_SECONDS = 60.0
MAX_RETRY_SECONDS = 3600.0


@dataclass(frozen=True)
class _Problem:
    """What went wrong with a drafter, until when it is left out, and for how long that is."""

    text: str
    until: float
    seconds: float


class Health:
    """What an engine knows of its drafters' failures."""

    def __init__(self) -> None:
        self._problems: dict[str, _Problem] = {}

    @property
    def problems(self) -> dict[str, str]:
        """Why drafters are left out at present, by name."""
        now = time.monotonic()
        return {name: problem.text for name, problem in list(self._problems.items()) if now < problem.until}

    def note_failure(self, name: str, error: Exception) -> float:
        """Leave a drafter out for a while, which is longer each time; returns the seconds."""
        known = self._problems.get(name)
        seconds = RETRY_SECONDS if known is None else min(2 * known.seconds, MAX_RETRY_SECONDS)
        self._problems[name] = _Problem(f"{type(error).__name__}: {error}", time.monotonic() + seconds, seconds)
        return seconds

    def forget(self, name: str) -> None:
        """A drafter drafts again, or is gone: what went wrong before does not count any more."""
        self._problems.pop(name, None)
