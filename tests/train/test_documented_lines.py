"""Every documented line that starts a recipe works as written, in its smallest form: few rows, few steps, a tiny model.

The lines name no target, or the one that `selfspec fetch` makes; a model of as many layers stands for it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from selfspec.heads.base import read_config
from selfspec.model.default_target import MANIFEST_NAME, default_target
from selfspec.train.settings import CONFIGS

pytest.importorskip("accelerate", reason="training needs accelerate: pip install 'selfspec[train]'")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "recipes").glob("*.py")),
    *sorted(CONFIGS.rglob("*.yaml")),
]
# Later flags overrule those of the line.
SMALLEST = [
    *("--row_length=64", "--per_device_train_batch_size=2", "--max_steps=2", "--save_steps=2", "--eval_steps=2"),
    *("--num_eval_prompts=2", "--num_eval_tokens=4", "--use_cpu=true", "--disable_tqdm=true", "--report_to=none"),
]
PREPARING = ["--max-new-tokens=4", "--batch-size=16"]
RECIPE = r"(?:recipes/|selfspec\.recipes\.)(train_\w+|distill_draft|prepare_data)(?:\.py)?"
# What a page has in place of a path of the reader's own.
PLACEHOLDER = "PATH_OR_ID"


def lines() -> Iterator[list[str]]:
    """The words of every line that starts a recipe; for a target of the reader's own, the default one will do."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^#? *((?:accelerate launch|python) [^`\n]*)", text, re.MULTILINE):
            if re.search(RECIPE, line) and "…" not in line:
                yield shlex.split(line.replace(f" --target {PLACEHOLDER}", ""))


def parted(words: list[str]) -> tuple[list[str], str, tuple[str, ...]]:
    """What starts the recipe, its name, and its arguments."""
    place = next(i for i, word in enumerate(words) if re.fullmatch(RECIPE, word))
    found = re.fullmatch(RECIPE, words[place])
    assert found
    return words[:place], found[1], tuple(words[place + 1 :])


RUNS = sorted({parted(words)[1:] for words in lines() if "CONFIG.yaml" not in words})


@pytest.fixture
def folder(data: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader stands: the recipes, data where the pages put it, and a default target of 30 layers."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=len(tiny_tokenizer), num_hidden_layers=30, max_position_embeddings=2048, **shape)
    target = tmp_path / "cache" / "smollm2-135m-instruct"
    LlamaForCausalLM(config).save_pretrained(target)
    tiny_tokenizer.save_pretrained(target)
    (target / MANIFEST_NAME).write_text("{}")
    monkeypatch.setenv("SELFSPEC_CACHE", str(target.parent))
    reader = tmp_path / "reader"
    for name in ("logs", "log"):
        (reader / name).mkdir(parents=True)
        shutil.copy(data, reader / name)
    for name in ("data", "data/mine"):
        (reader / name).mkdir(parents=True)
        for part in ("train", "heldout"):
            shutil.copy(data, reader / name / f"{part}.jsonl")
    (reader / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(reader)
    return reader


def output_of(arguments: tuple[str, ...]) -> Path:
    """The output folder that the arguments name, or their config."""
    config = CONFIGS / Path(arguments[0]).name
    text = config.read_text() if config.is_file() else " ".join(arguments)
    found = re.findall(r"output_dir[:= ] *(\S+)", f"{text} {' '.join(arguments)}")
    return Path(found[-1])


def test_the_pages_start_every_recipe() -> None:
    # tests/bench/test_bench_peers.py has the lines of the one that trains nothing.
    names = {file.stem for file in (ROOT / "recipes").glob("*.py")} - {"bench_peers"}
    assert {name for name, _ in RUNS} == names
    assert len(RUNS) > 2 * len(names)


def make_adapter(target: Path, directory: Path) -> None:
    peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'selfspec[lora]'")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(LlamaForCausalLM.from_pretrained(target), lora).save_pretrained(directory)


@pytest.mark.parametrize(("name", "arguments"), RUNS, ids=[" ".join((name, *arguments))[:70] for name, arguments in RUNS])
def test_a_documented_line_does_what_its_page_says(
    name: str, arguments: tuple[str, ...], folder: Path, recipe: Callable[[str], ModuleType]
) -> None:
    if PLACEHOLDER in arguments:
        make_adapter(default_target(), folder / PLACEHOLDER)
    if name == "prepare_data":
        pytest.importorskip("datasketch", reason="cleaning needs datasketch: pip install 'selfspec[train]'")
        output = folder / arguments[arguments.index("--output-dir") + 1]
        shutil.rmtree(folder / "data")
        recipe(name).main([*arguments, *PREPARING])
        assert (output / "train.jsonl").stat().st_size > 0
        return
    kind = name.removeprefix("train_").removeprefix("distill_")
    recipe(kind).main([*arguments, *SMALLEST])
    assert read_config(folder / output_of(arguments) / "head")
    record = json.loads((folder / output_of(arguments) / "run.json").read_text())
    assert record["history"][-1]["step"] == 2


def test_accelerate_starts_a_recipe_without_a_checkout(folder: Path) -> None:
    [words] = {tuple(words) for words in lines() if "-m" in words and "selfspec.recipes.train_medusa" in words}
    command = [sys.executable, "-m", "accelerate.commands.launch", *words[2:], *SMALLEST]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert read_config(folder / "runs" / "medusa" / "head")["head_type"] == "medusa"


@pytest.mark.parametrize("words", [words for words in lines() if "CONFIG.yaml" in words], ids=" ".join)
def test_launch_files_are_where_the_lines_say(words: list[str]) -> None:
    launch, _, _ = parted(words)
    assert (ROOT / launch[launch.index("--config_file") + 1]).is_file()
