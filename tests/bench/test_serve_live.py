"""The load on this project's own server: the figures are those that the server's counters have."""

# ruff: noqa: E402
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

for name in ("fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx"):
    pytest.importorskip(name, reason=f"a server needs {name}: pip install httpx 'selfspec[serve]'")

from live_server import LiveServer
from typer.testing import CliRunner

from selfspec import Target
from selfspec.cli.main import app
from selfspec.drafters import NgramDrafter
from selfspec.serve.options import ServeOptions
from selfspec.serve.service import Service


@pytest.fixture
def server(tiny_target_dir: Path) -> Iterator[LiveServer]:
    service = Service("models/tiny", ServeOptions(max_batch=4))
    service.open(Target.from_pretrained(tiny_target_dir, device="cpu"), [NgramDrafter(4)], use_cost_guard=False)
    server = LiveServer(service)
    yield server
    server.close()


def test_the_figures_are_the_servers_own(server: LiveServer, tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": f"the cat sat on the mat and the cat sat on {i}"} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out.json"
    args = [
        "bench-serve",
        server.url,
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--concurrency",
        "3",
        "--num-prompts",
        "6",
    ]
    # Nothing to warm up, because Spec-Bench's prompts are long for the tiny tokenizer.
    args += ["--cold", "--endpoint", "completions", "--max-tokens", "24", "--ignore-eos", "--output", str(output)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    [run] = json.loads(output.read_text())["runs"]
    figures, metrics = run["figures"], server.metrics()
    assert (figures["num_done"], figures["failures"], figures["is_counted"]) == (6, {}, True)
    assert figures["num_tokens"] == 6 * 24 == metrics["selfspec:generation_tokens_total"]
    assert figures["prompt_tokens"] * 6 == metrics["selfspec:prompt_tokens_total"]
    assert run["acceptance_length"] == pytest.approx(6 * 24 / metrics["selfspec:verify_rows_total"])
    server.wait_until_idle()
