"""The tiny target, loaded once; engines and servers that end with their tests, and must have freed everything."""

# ruff: noqa: E402
import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything that imports them.
for name in ("fastapi", "uvicorn", "prometheus_client", "llguidance", "openai", "httpx"):
    pytest.importorskip(name, reason=f"the server's tests need {name}: pip install openai httpx 'selfspec[serve]'")

import httpx
from live_server import LiveServer
from serve.writers import FAMILIES
from support import tiny_model
from transformers import PreTrainedTokenizerFast

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


@pytest.fixture(scope="module")
def tokenizer_of(tiny_tokenizer: PreTrainedTokenizerFast) -> Callable[[str], PreTrainedTokenizerFast]:
    def build(family: str) -> PreTrainedTokenizerFast:
        template, ordinary, special = FAMILIES[family]
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.add_tokens(ordinary)
        tokenizer.add_special_tokens({"additional_special_tokens": special})
        tokenizer.chat_template = template
        return tokenizer

    return build


@pytest.fixture(scope="module")
def form_of(tokenizer_of: Callable[[str], PreTrainedTokenizerFast]) -> Callable[[str, str], dict[str, Any]]:
    """Makes the response format that has one text alone, for a family and the text."""

    def form(family: str, text: str) -> dict[str, Any]:
        special = [*FAMILIES[family][2], *FAMILIES[family][1]]
        ids = tokenizer_of(family).get_added_vocab()
        pieces = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
        parts = [f"<[{ids[piece]}]>" if piece in special else json.dumps(piece) for piece in pieces if piece]
        return {"type": "grammar", "grammar": f"start: {' '.join(parts)}"}

    return form


@pytest.fixture(scope="module")
def family_server(tokenizer_of: Callable[[str], PreTrainedTokenizerFast]) -> Iterator[Callable[..., LiveServer]]:
    """Starts servers whose targets write as one family of models does."""
    servers: dict[str, LiveServer] = {}

    def start(family: str, arguments: dict[str, Any] | None = None, **options: Any) -> LiveServer:
        key = repr((family, arguments, options))
        if key not in servers:
            tokenizer = tokenizer_of(family)
            ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
            model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=2048, **ends)
            target = Target(model, tokenizer)
            target.set_chat_template_kwargs(arguments or {})
            service = Service("models/tiny", ServeOptions(**options))
            service.open(target, [NgramDrafter(4)], use_cost_guard=False)
            servers[key] = LiveServer(service)
        return servers[key]

    yield start
    for server in servers.values():
        server.close()
