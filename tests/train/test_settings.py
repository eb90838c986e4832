"""Settings: what a device decides, what a YAML file may hold, and where a config is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from transformers import HfArgumentParser

from selfspec.train import settings
from selfspec.train.settings import CONFIGS, DataArgs, RecipeArguments, parse

pytest.importorskip("accelerate", reason="training needs accelerate: pip install 'selfspec[train]'")


@pytest.mark.parametrize(
    ("has_bf16", "flags", "expected"),
    [
        (False, [], False),
        (True, [], True),
        (True, ["--use_cpu=true"], False),
        (True, ["--fp16=true"], False),
        (True, ["--bf16=false"], False),
        (False, ["--use_cpu=true", "--bf16=true"], True),
    ],
)
def test_bfloat16_is_used_where_the_device_has_it(
    has_bf16: bool, flags: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("selfspec.train.settings", "transformers.training_args"):
        monkeypatch.setattr(f"{module}.is_torch_bf16_gpu_available", lambda: has_bf16)
    parser = HfArgumentParser((RecipeArguments,))
    [args] = parse(parser, [f"--output_dir={tmp_path}", *flags])
    assert args.bf16 is expected


def test_a_launcher_that_asks_for_the_cpu_is_heard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(settings, "is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    [args] = parse(HfArgumentParser((RecipeArguments,)), [f"--output_dir={tmp_path}"])
    assert args.bf16 is False and args.device.type == "cpu"


def test_a_mapping_in_a_yaml_file_reaches_the_schedule(
    recipe: Callable[[str], ModuleType], flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    lines = [flag.removeprefix("--").replace("=", ": ", 1) for flag in flags(tmp_path / "run", max_steps=2)]
    lines += ["lr_scheduler_type: cosine_with_restarts", "lr_scheduler_kwargs: {num_cycles: 2}", "final_eval_file:"]
    config = tmp_path / "run.yaml"
    config.write_text("\n".join(lines) + "\n")
    recipe("medusa").main([str(config)])
    training = json.loads((tmp_path / "run" / "run.json").read_text())["training"]
    assert training["lr_scheduler_kwargs"] == {"num_cycles": 2}


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_of_the_recipes_is_found_by_its_name_and_fits_every_machine(
    config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    parser = HfArgumentParser((DataArgs, RecipeArguments))
    monkeypatch.setattr(parser, "parse_args_into_dataclasses", lambda flags, **options: (flags, []))
    [flags] = parse(parser, [config.name, "--max_steps=3"])
    names = {flag.removeprefix("--").partition("=")[0] for flag in flags if flag.startswith("--")}
    assert flags[-1] == "--max_steps=3" and "train_file" in names
    # These the machine decides.
    assert not names & {"target", "bf16", "target_dtype"}
