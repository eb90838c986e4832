"""The real default target on real prompts: every drafter's greedy output is transformers' own, token for token, in float32.

Needs the target that `selfspec fetch` makes; skipped, with the reason, where it is missing.
"""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

import pytest
import torch
from support import MadeOnce
from transformers import AutoModelForCausalLM

from selfspec import SamplingParams, Target, generate, load_drafter
from selfspec.bench.prompts import read_benchmark
from selfspec.model.default_target import default_target
from selfspec.model.layers import decoder_layers, with_layers

# How many tokens answer a task's prompts. The first prompt is whole; of the others, the end will do: prefill is not what is
# tested. Rows of a batch end and join at different times.
ANSWER_LENGTHS = (96, 8, 8, 8)
END_LENGTH = 48


@pytest.fixture(scope="module")
def source() -> Path:
    try:
        return default_target()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def target(source: Path) -> Target:
    return Target.from_pretrained(source, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    """The shortest of each Spec-Bench task."""
    tasks: dict[str, list[list[int]]] = {}
    for row in read_benchmark("spec_bench"):
        assert row.category is not None
        tasks.setdefault(row.category, []).append(target.encode(row.prompt))
    assert len(tasks) == 6
    shortest = [sorted(task, key=len)[: len(ANSWER_LENGTHS)] for task in tasks.values()]
    return [ids for whole, *others in shortest for ids in (whole, *(other[-END_LENGTH:] for other in others))]


@pytest.fixture(scope="module")
def expected(source: Path, prompts: list[list[int]], made_once: MadeOnce) -> list[list[int]]:
    """What transformers' generate emits for each prompt alone."""

    def build(directory: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        outputs = []
        for ids, num_tokens in zip(prompts, cycle(ANSWER_LENGTHS), strict=False):
            batch = torch.tensor([ids])
            options = {"attention_mask": torch.ones_like(batch), "max_new_tokens": num_tokens, "do_sample": False}
            with torch.inference_mode():
                out = model.generate(batch, **options)
            outputs.append(out[0, len(ids) :].tolist())
        (directory / "outputs.json").write_text(json.dumps(outputs))

    return json.loads((made_once("smollm2-expected", build) / "outputs.json").read_text())


@pytest.fixture(scope="module")
def draft_dir(source: Path, target: Target, made_once: MadeOnce) -> Path:
    """A draft model with weights of its own on disk: the target's first four layers, saved as a model."""

    def build(directory: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        with_layers(model, list(decoder_layers(model)[1])[:4], range(4)).save_pretrained(directory)
        target.tokenizer.save_pretrained(directory)

    return made_once("smollm2-draft", build)


@pytest.mark.parametrize("batch_size", [1, 7])
@pytest.mark.parametrize("spec", ["none", "ngram", "truncated:6", "draft_model", "medusa", "eagle"])
def test_greedy_equals_transformers_generate(
    spec: str,
    batch_size: int,
    target: Target,
    prompts: list[list[int]],
    expected: list[list[int]],
    draft_dir: Path,
) -> None:
    drafter = load_drafter(f"draft_model:{draft_dir}" if spec == "draft_model" else spec, target)
    sampling = [SamplingParams(max_new_tokens=n) for _, n in zip(prompts, cycle(ANSWER_LENGTHS), strict=False)]
    # What drafts save of one prompt's passes, at the least, where no clock decides how much is drafted.
    most_passes = {"ngram": 0.85, "medusa": 0.7, "eagle": 0.5}.get(spec, 1.0) if batch_size == 1 else 1.0
    settings = {"sampling": sampling, "batch_size": batch_size, "use_cost_guard": most_passes == 1.0}
    got = generate(target, prompts, drafter=drafter, **settings)
    assert len(prompts) >= 24
    assert [c.token_ids for c in got] == expected
    assert sum(c.num_target_passes for c in got) <= most_passes * sum(len(c.token_ids) for c in got)
