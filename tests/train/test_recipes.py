"""The recipes as a user runs them: a few steps on a tiny target, and a head that serving loads."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from selfspec import SamplingParams, Target, generate, load_drafter

pytest.importorskip("accelerate", reason="training needs accelerate: pip install 'selfspec[train]'")
ROOT = Path(__file__).resolve().parents[2]


def recipe(kind: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"train_{kind}", ROOT / "recipes" / f"train_{kind}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    rows = [
        {
            "id": str(i),
            "messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "the cat sat"}],
        }
        for i in range(60)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def flags(target: Path, data: Path, output: Path) -> list[str]:
    settings = {
        "target": target,
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
    return [f"--{name}={value}" for name, value in settings.items()]


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_recipe_trains_a_head_that_serving_loads(kind: str, tiny_target_dir: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    shape = ["--feature_layers", "0", "1", "2", "--draft_vocab_size", "64"] if kind == "eagle" else []
    final = recipe(kind).main([*flags(tiny_target_dir, data, output), *shape])
    assert final["acceptance_length"] >= 1
    record = json.loads((output / "run.json").read_text())
    assert [entry["step"] for entry in record["history"]] == [2, 4]
    target = Target.from_pretrained(tiny_target_dir)
    drafter = load_drafter(f"{kind}:{output / 'head'}", target)
    sampling = SamplingParams(max_new_tokens=16)
    expected = generate(target, ["the dog"], sampling=sampling)[0].token_ids
    assert generate(target, ["the dog"], drafter=drafter, sampling=sampling)[0].token_ids == expected
    # The same line again finds its work done and changes nothing.
    before = (output / "head" / "model.safetensors").read_bytes()
    recipe(kind).main([*flags(tiny_target_dir, data, output), *shape])
    assert (output / "head" / "model.safetensors").read_bytes() == before


def test_fewer_rows_than_a_batch_is_one_sentence(tiny_target_dir: Path, data: Path, tmp_path: Path) -> None:
    arguments = [*flags(tiny_target_dir, data, tmp_path / "run"), "--gradient_accumulation_steps=500"]
    with pytest.raises(ValueError, match="fewer than the 1000 of one step"):
        recipe("medusa").main(arguments)


def test_a_yaml_file_and_flags_that_override_it(tiny_target_dir: Path, data: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    lines = [flag.removeprefix("--").replace("=", ": ", 1) for flag in flags(tiny_target_dir, data, tmp_path / "run")]
    config.write_text("\n".join(lines) + "\nnum_heads: 2\n")
    recipe("medusa").main([str(config), "--num_heads=3", "--max_steps=1"])
    assert json.loads((tmp_path / "run" / "head" / "config.json").read_text())["num_heads"] == 3
