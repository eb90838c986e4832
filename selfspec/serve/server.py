"""The server process: its socket answers at once, the model loads in the background, and the end is orderly."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from selfspec.serve.app import create_app
from selfspec.serve.logs import log_config
from selfspec.serve.service import Service

logger = logging.getLogger(__name__)

# How long the last bytes of the answers may take to reach a slow reader.
FLUSH_SECONDS = 5


def run(
    service: Service,
    listener: socket.socket,
    load: Callable[[], None],
    *,
    add_page: Callable[[FastAPI], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then let the running answers end; a second signal ends them at once.

    Args:
        load: opens the service. If it raises, the server ends and the error is raised again.
        add_page: mounts a page at `/`.
    """
    config = uvicorn.Config(
        create_app(service, add_page),
        # The page's queue starts with the application; the API needs no such event.
        lifespan="off" if add_page is None else "on",
        log_config=log_config(service.options.log_level),
        # The gate writes those lines.
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    server = _Server(config, service)
    problems: list[BaseException] = []

    def fail(error: BaseException) -> None:
        problems.append(error)
        server.should_exit = True

    def load_or_end() -> None:
        try:
            load()
            # The model's objects stay, so the collector need not go through them whenever a request brings many.
            gc.collect()
            gc.freeze()
        except BaseException as error:
            fail(error)

    service.on_failure = fail
    loading = threading.Thread(target=load_or_end, name="selfspec-load", daemon=True)
    loading.start()
    try:
        server.run(sockets=[listener])
    finally:
        service.close()
        # The interpreter's end looks for leaks among what is not frozen.
        gc.unfreeze()
    if problems:
        raise problems[0]


class _Server(uvicorn.Server):
    """uvicorn's server, except that a signal lets running answers end before anything is closed."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._is_draining = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_draining:
            self.should_exit = self.force_exit = True
            return
        self._is_draining = True
        logger.info("%s: waiting for the running answers", signal.Signals(sig).name)
        # In a thread, because a signal handler must not block or take locks that the interrupted code may hold.
        threading.Thread(target=self._drain, name="selfspec-drain", daemon=True).start()

    def _drain(self) -> None:
        try:
            self._service.drain()
        finally:
            self.should_exit = True
