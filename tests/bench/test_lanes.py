"""Races with level clocks: who takes the next step, what each clock counts, and that transformers races as itself."""

import threading
from collections.abc import Iterator

import pytest
import torch
from support import random_prompts, tiny_model, tiny_target

from selfspec import SamplingParams, generate
from selfspec.bench.baseline import plain_twin, stream_transformers
from selfspec.bench.lanes import Turn, drafter_turns, race_level, transformers_turns
from selfspec.drafters import NgramDrafter

[PROMPT] = random_prompts(1, (12, 12), seed=4)


def test_the_lane_that_is_furthest_behind_takes_the_next_step() -> None:
    now = 0.0

    def turns(seconds: float, count: int) -> Iterator[Turn]:
        nonlocal now
        for _ in range(count):
            now += seconds
            yield Turn([1])

    def clock() -> float:
        return now

    order, behind = [], []
    for lane in race_level({"slow": turns(3.0, 2), "fast": turns(1.0, 5)}, clock):
        order.append(lane.name)
        behind.append(lane.seconds)
        # What happens between the steps is nobody's time.
        now += 100.0
    # The last entry of each lane is its end.
    assert order == ["slow", "fast", "fast", "fast", "slow", "fast", "fast", "fast", "slow"]
    assert behind == [3.0, 1.0, 2.0, 3.0, 6.0, 4.0, 5.0, 5.0, 6.0]


def test_lanes_have_the_tokens_of_generate_and_know_which_were_drafted() -> None:
    target = tiny_target()
    sampling = SamplingParams(max_new_tokens=16)
    drafter = NgramDrafter(4)
    [expected] = generate(target, [PROMPT], sampling=sampling)
    contestants = {
        "ngram": drafter_turns(target, PROMPT, drafter, sampling),
        "none": drafter_turns(target, PROMPT, None, sampling),
        "transformers": transformers_turns(plain_twin(tiny_model("llama")), PROMPT, 16),
    }
    lanes = {lane.name: lane for lane in race_level(contestants)}
    assert all(lane.is_done and lane.seconds > 0 for lane in lanes.values())
    assert {name: lane.token_ids for name, lane in lanes.items()} == dict.fromkeys(contestants, expected.token_ids)
    assert len(lanes["none"].turns) == len(lanes["transformers"].turns) == len(expected.token_ids)
    for turn in lanes["ngram"].turns:
        assert len(turn.token_ids) - 1 <= turn.num_accepted <= len(turn.token_ids)
    answer = lanes["ngram"].answer("text")
    assert (answer.text, answer.num_target_passes) == ("text", len(lanes["ngram"].turns))


def test_transformers_works_only_while_a_token_is_asked_for() -> None:
    model = plain_twin(tiny_model("llama"))
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    model.get_submodule("model").register_forward_pre_hook(count)
    before = threading.active_count()
    stream = stream_transformers(model, PROMPT, 8)
    assert passes == 0
    for number in range(1, 4):
        next(stream)
        assert passes == number
    stream.close()
    assert passes == 3 and threading.active_count() == before


def test_an_error_of_transformers_reaches_the_caller() -> None:
    model = plain_twin(tiny_model("llama"))
    model.get_submodule("model").register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(stream_transformers(model, PROMPT, 4))
    assert torch.is_grad_enabled()
