"""Where the engine's process begins. Nothing heavy is imported before it is set what is logged."""

from __future__ import annotations

import logging.config
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from selfspec.serve.logs import log_config

if TYPE_CHECKING:
    from selfspec.serve.engine_process import MakeEngine


def start_engine(connection: Connection, make: MakeEngine, log_level: str) -> None:
    """All that the process does."""
    logging.config.dictConfig(log_config(log_level))
    from selfspec.serve.engine_process import run_engine

    run_engine(connection, make)
