"""Models that transformers placed: whole on one device, spread over several, or each weight split over processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import accumulate, count
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import SamplingParams, Target, generate
from selfspec.drafters import NgramDrafter
from selfspec.loop import group
from selfspec.loop.decode import decode
from selfspec.loop.sequence import Request

PROMPTS = ["the cat sat", "one two three"]
REPETITIVE = "one two three one two three one two"
SAMPLING = SamplingParams(max_new_tokens=24, ignore_eos=True)


def texts(target: Target) -> list[list[int]]:
    answers = generate(target, PROMPTS, drafter=NgramDrafter(4), sampling=SAMPLING)
    return [answer.token_ids for answer in answers]


class Clock:
    """A clock of a machine of its own: what it measures is chance, and a cost guard that goes by it decides at random."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.perf_counter = accumulate(chance.expovariate(1.0) for _ in count()).__next__


def steps(target: Target, prompt: str) -> list[tuple[int, list[int]]]:
    """Nodes and emitted tokens of each step of an answer with the cost guard on."""
    request = Request(target.encode(prompt), SAMPLING.with_(max_new_tokens=120), 0)
    return [(taken.tree.num_nodes, taken.emitted[0]) for taken in decode(target, [request], drafter=NgramDrafter(6))]


def test_a_device_map_to_one_device_is_served(tiny_target_dir: Path) -> None:
    pytest.importorskip("accelerate", reason="device_map needs accelerate: pip install 'selfspec[train]'")
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, device_map={"": "cpu"})
    target = Target(model, AutoTokenizer.from_pretrained(tiny_target_dir))
    assert texts(target) == texts(Target.from_pretrained(tiny_target_dir, device="cpu"))


@pytest.mark.parametrize(("module", "devices"), [("model.layers.1", "cpu and meta"), ("", "meta")])
def test_weights_elsewhere_are_named(tiny_target_dir: Path, module: str, devices: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    model.get_submodule(module).to("meta")
    with pytest.raises(ValueError, match=f"the model's weights are on {devices}: selfspec keeps one KV cache on one device"):
        Target(model)


def test_a_tensor_parallel_model_is_served_by_every_process(tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, half of the heads in each: both take the steps that one alone does, by the first one's clock."""
    pytest.importorskip("accelerate", reason="tp_plan needs accelerate: pip install 'selfspec[train]'")
    alone = Target.from_pretrained(tiny_target_dir, device="cpu")
    by_clock = []
    for rank in (0, 1):
        monkeypatch.setattr(group, "time", Clock(rank))
        by_clock.append(steps(alone, REPETITIVE))
    expected, otherwise = by_clock
    assert [num_nodes for num_nodes, _ in expected] != [num_nodes for num_nodes, _ in otherwise], "clocks decide"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tiny_target_dir)], capture_output=True, text=True, env=environment, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank}: 1 of 2 KV heads, {expected}" for rank in (0, 1)]


def main(source: str) -> None:
    """What each of the processes does."""
    model = AutoModelForCausalLM.from_pretrained(source, tp_plan="auto", dtype=torch.float32).eval()
    target = Target(model, AutoTokenizer.from_pretrained(source))
    heads = f"{target.kv_shape.num_kv_heads} of {model.config.num_key_value_heads} KV heads"
    group.time = Clock(int(os.environ["RANK"]))  # type: ignore[assignment]
    sys.stdout.write(f"{os.environ['RANK']}: {heads}, {steps(target, REPETITIVE)}\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
