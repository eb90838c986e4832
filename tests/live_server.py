"""A server of the API on a port of this machine, for tests that talk to it as clients do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from selfspec.engine import SpecEngine
from selfspec.serve.app import create_app
from selfspec.serve.service import Service
from selfspec.serve.sockets import listen


class LiveServer:
    """A server on a port of this machine, in threads of this process.

    Args:
        mount: mounts a page that is given the server's address and keys.
    """

    def __init__(self, service: Service, mount: Callable[..., None] | None = None) -> None:
        listener = listen("127.0.0.1", 0)
        self.service = service
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        add_page = None if mount is None else partial(mount, url=self.url, api_keys=service.api_keys)
        lifespan = "off" if mount is None else "on"
        app = create_app(service, add_page)
        config = uvicorn.Config(app, lifespan=lifespan, log_config=None, timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()

    @property
    def engine(self) -> SpecEngine:
        return self.service.engine

    def wait_until_busy(self) -> None:
        deadline = time.monotonic() + 10
        while not self.engine.num_running:
            assert time.monotonic() < deadline, "nothing runs"
            time.sleep(0.01)

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 10
        while self.engine.num_used_blocks or self.engine.num_running or self.engine.num_waiting:
            assert time.monotonic() < deadline, "something is still held"
            time.sleep(0.005)

    def metrics(self) -> dict[str, float]:
        """Every sample by its name, summed over its labels."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self.service.close()
        assert not self._thread.is_alive()
