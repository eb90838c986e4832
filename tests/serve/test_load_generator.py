"""A public load generator for language model servers drives the command as it stands, and counts what was asked for."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("guidellm", reason="needs guidellm: pip install -c constraints.txt guidellm")


def test_guidellm_measures_every_request(start: Callable[..., Any], tiny_target_dir: Path, tmp_path: Path) -> None:
    server = start(max_batch=4)
    report = tmp_path / "report.json"
    data = {"prompt_tokens": 24, "output_tokens": 12, "samples": 32}
    command = [sys.executable, "-m", "guidellm", "benchmark", "--target", server.url, "--processor", str(tiny_target_dir)]
    command += ["--data", json.dumps(data), "--rate-type", "throughput", "--max-requests", "12"]
    command += ["--disable-console-outputs", "--disable-progress", "--output-path", str(report)]
    # One process, which sends all: this machine's cores are the server's.
    environment = {**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"] and len(requests["successful"]) == 12
    assert all(request["output_tokens"] == 12 for request in requests["successful"])
    server.wait_until_idle()
    assert server.metrics()["selfspec:request_success_total"] >= 12
