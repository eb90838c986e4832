"""A recipe, imported or in a process of its own, on a tiny target and a file of short conversations."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["the cat sat", "on the mat and the dog sat on the cat", "one two", "three four five six seven one two three"]


def recipe_file(kind: str) -> Path:
    names = {"draft": "distill_draft", "prepare_data": "prepare_data"}
    return ROOT / "recipes" / f"{names.get(kind, f'train_{kind}')}.py"


@pytest.fixture(scope="session")
def recipe() -> Callable[[str], ModuleType]:
    """The recipe of a kind of head, as a module."""

    def load(kind: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"train_{kind}", recipe_file(kind))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Dataclasses look their module up there.
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """56 conversations whose answers differ in length, so no two batches hold the same number of answer tokens."""
    file = tmp_path / "train.jsonl"
    rows = [
        {
            "id": str(i),
            "category": "odd" if i % 2 else "even",
            "messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": WORDS[i * i % 7 % 4]}],
        }
        for i in range(56)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def flags(tiny_target_dir: Path, data: Path) -> Callable[..., list[str]]:
    """The arguments of a short run, some of them changed."""

    def make(output: Path, **changes: Any) -> list[str]:
        settings = {
            "target": tiny_target_dir,
            "train_file": data,
            "held_out_file": data,
            "output_dir": output,
            "row_length": 64,
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "logging_steps": 2,
            "save_steps": 2,
            "eval_steps": 2,
            "num_eval_prompts": 2,
            "num_eval_tokens": 8,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
        }
        return [f"--{name}={value}" for name, value in (settings | changes).items()]

    return make


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """Start a recipe in a process, or in several that work together."""

    def run(kind: str, arguments: list[str], *, num_processes: int = 1, script: Path | None = None) -> subprocess.Popen[str]:
        # A script can break something, and then run the recipe that it is given.
        command = [sys.executable, *([str(script)] if script else []), str(recipe_file(kind)), *arguments]
        if num_processes > 1:
            # What accelerate launch starts on several devices; on CPUs accelerate itself would need MPI.
            command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
            command += ["--ddp_backend=gloo"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, text=True, stderr=subprocess.PIPE, env=environment, cwd=ROOT)

    return run
