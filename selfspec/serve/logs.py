"""Where a server's processes write their logs, and which lines."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what stderr is when it writes, not to what it was when the server started."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def log_config(level: str) -> dict[str, Any]:
    """Lines on stderr; of uvicorn's own only what went wrong, because it does not know what a drain is."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
        "handlers": {"stderr": {"()": _StderrHandler, "formatter": "line"}},
        "loggers": {
            "selfspec": {"handlers": ["stderr"], "level": level.upper()},
            # transformers imports torchao if it is installed, and torchao then logs kernels of other devices.
            "torchao": {"level": "ERROR"},
            "torch.utils._pytree": {"level": "ERROR"},
            "uvicorn": {"handlers": ["stderr"], "level": max("WARNING", level.upper(), key=logging.getLevelName)},
        },
    }
