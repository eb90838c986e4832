"""The tiny target, loaded once; engines and servers that end with their tests, and must have freed everything."""

# ruff: noqa: E402
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before anything that imports them.
for name in ("fastapi", "uvicorn", "prometheus_client", "llguidance", "openai", "httpx"):
    pytest.importorskip(name, reason=f"the server's tests need {name}: pip install openai httpx 'selfspec[serve]'")

import httpx
from live_server import LiveServer

from selfspec.drafters import Drafter, DraftModelDrafter, NgramDrafter
from selfspec.engine import SpecEngine
from selfspec.model.target import Target
from selfspec.serve.options import ServeOptions
from selfspec.serve.service import Service
from selfspec.traffic.capture import Capture


@pytest.fixture(scope="session")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir, dtype="float32", device="cpu")


@pytest.fixture
def make_engine(target: Target) -> Iterator[Callable[..., SpecEngine]]:
    """Builds engines that always draft. When the test is over, their caches must be empty."""
    engines: list[SpecEngine] = []

    def make(*drafters: Drafter, **settings: object) -> SpecEngine:
        engine = SpecEngine(target, drafters or [NgramDrafter(4)], **{"use_cost_guard": False, **settings})
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        assert engine.drain(timeout=30)
        assert engine.num_used_blocks == 0
        engine.close()


def _starting(target: Target) -> Iterator[Callable[..., LiveServer]]:
    """Starts servers of the tiny target that always draft, and ends them."""
    servers: list[LiveServer] = []

    def start(*drafters: Drafter, capture: Capture | None = None, is_loaded: bool = True, **options: object) -> LiveServer:
        service = Service("models/tiny", ServeOptions(**options))
        if is_loaded:
            service.open(target, drafters or [NgramDrafter(4)], use_cost_guard=False, capture=capture)
        servers.append(LiveServer(service))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


# For one test, and for a module's tests.
start = pytest.fixture(_starting, name="start")
module_start = pytest.fixture(_starting, scope="module", name="module_start")


@pytest.fixture(scope="module")
def server(target: Target) -> Iterator[LiveServer]:
    """A server with two drafters for a module's tests. At the end its cache must be empty."""
    draft_model = DraftModelDrafter(target.truncated(1), target.vocab_size, num_draft_tokens=3, name="draft")
    service = Service("models/tiny", ServeOptions(max_batch=8))
    service.open(target, [NgramDrafter(4), draft_model], use_cost_guard=False)
    server = LiveServer(service)
    yield server
    server.wait_until_idle()
    server.close()


@pytest.fixture
def post(server: LiveServer) -> Callable[..., httpx.Response]:
    def post(path: str = "/v1/chat/completions", **body: object) -> httpx.Response:
        return httpx.post(server.url + path, json={"model": "tiny", **body}, timeout=30)

    return post
