"""`verify_head` passes a head that fits, and tells of each misreading which one it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from selfspec import SamplingParams, Target, generate
from selfspec.drafters.shipped import identity
from selfspec.heads.eagle import EagleConfig, EagleHead
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.interop.verify import verify_head
from selfspec.train.losses import LossSettings
from selfspec.train.module import HeadTraining

PROMPTS = [[5, 9], [7, 3, 12], [30, 31, 8], [44, 4]]


def fitted(head: Any, target: Target, steps: int) -> Any:
    """The head, trained on the target's answers to the very prompts."""
    sampling = SamplingParams(max_new_tokens=48, ignore_eos=True)
    texts = [p + c.token_ids for p, c in zip(PROMPTS, generate(target, PROMPTS, sampling=sampling), strict=True)]
    ids = torch.cat([torch.tensor(text) for text in texts])[None]
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
    training = HeadTraining(head, target, LossSettings(num_steps=4))
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        training(ids, torch.ones_like(ids, dtype=torch.bool), positions)["loss"].backward()
        optimizer.step()
    return head.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def eagle(target: Target) -> EagleHead:
    torch.manual_seed(0)
    config = EagleConfig(
        target=identity(target),
        feature_layers=(2, 4, 5),
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        draft_vocab_size=60,
    )
    head = EagleHead(config)
    # All tokens but one: every map that is off by something is off for most tokens.
    head.initialise(target.model, torch.arange(1, 61))
    return fitted(head, target, 120)


def changed(head: EagleHead, offsets: torch.Tensor | None = None, **changes: Any) -> EagleHead:
    other = EagleHead(replace(head.config, **changes))
    other.load_state_dict(head.state_dict())
    if offsets is not None:
        other.d2t.copy_(offsets)
    return other.eval().requires_grad_(False)


def test_a_head_that_fits_passes(eagle: EagleHead, target: Target) -> None:
    report = verify_head(eagle, target, PROMPTS)
    assert report.problem is None
    assert min(report.serving.rates) > 0.4 and report.serving.acceptance_length > 2
    own, *others = report.readings
    # What is asked at every token is what serving does at some: not the same sample, but nothing like a misread head's.
    assert own.hits.float().mean(0) == pytest.approx(report.serving.rates, abs=0.4)
    assert len(others) == 5 and all(own.is_better_than(other) for other in others)


@pytest.mark.parametrize(
    ("changes", "reading"),
    [
        ({"feature_layers": (1, 3, 4)}, "feature layers one higher: 2,4,5"),
        ({"feature_layers": (3, 5, 6)}, "feature layers one lower: 2,4,5"),
        ({"norm_before_residual": True}, "norm_before_residual the other way"),
        ({"feeds_normed": False}, "the other of normed and plain output fed back"),
    ],
)
def test_a_misread_convention_is_named(changes: dict[str, Any], reading: str, eagle: EagleHead, target: Target) -> None:
    """[H5] [H9]"""
    report = verify_head(changed(eagle, **changes), target, PROMPTS)
    assert report.problem is not None
    assert report.problem.startswith(f"the head drafts better when it is read another way ({reading}:")


def test_a_map_of_ids_taken_for_offsets_is_named(eagle: EagleHead, target: Target) -> None:
    """[H4] the head's ids are 1 … 60; read as offsets from 0, they would be the odd ones, up to 60 of a larger target."""
    half = EagleHead(replace(eagle.config, draft_vocab_size=30))
    state = {name: value for name, value in eagle.state_dict().items() if name not in ("d2t", "lm_head.weight")}
    half.load_state_dict({**state, "lm_head.weight": eagle.lm_head.weight[:30], "d2t": torch.arange(1, 31)})
    report = verify_head(half.eval().requires_grad_(False), target, PROMPTS)
    assert report.problem is not None and "(d2t taken for target ids:" in report.problem


def test_medusa_heads_that_are_off_by_one_are_named(target: Target) -> None:
    """[H6] a head that begins with the LM head's own token is read one position too late."""
    torch.manual_seed(0)
    head = fitted(MedusaHead(MedusaConfig(target=identity(target), num_heads=3, has_output_layer=True)), target, 80)
    report = verify_head(head, target, PROMPTS)
    assert report.problem is None
    # Three heads have three depths, and the misread ones two: no rate of a head that is not there.
    assert (len(report.serving.rates), [r.hits.shape[1] for r in report.readings]) == (3, [3, 2])
    late = copy.deepcopy(head)
    late.config = replace(head.config, num_heads=4)
    # As trained by a tool that counts the next token as the first head's.
    first = copy.deepcopy(head.heads[0])
    first[0].linear.weight.copy_(torch.randn(32, 32) * 1e-4)  # type: ignore[index, union-attr, operator]
    first[0].linear.bias.copy_(torch.randn(32) * 1e-4)  # type: ignore[index, union-attr, operator]
    output = copy.deepcopy(head.outputs[0])
    output.weight.copy_(target.model.get_output_embeddings().weight)  # type: ignore[operator]
    late.heads, late.outputs = nn.ModuleList([first, *head.heads]), nn.ModuleList([output, *head.outputs])
    report = verify_head(late, target, PROMPTS)
    assert report.problem is not None
    assert "(heads one position on: the first repeats the LM head:" in report.problem


def test_an_untrained_head_fails_by_its_acceptance(make_eagle: Callable[..., EagleHead], target: Target) -> None:
    report = verify_head(make_eagle(), target, PROMPTS)
    assert report.problem is not None and report.problem.startswith("position 1 has ")
    assert "no more than the answers' most frequent token would have" in report.problem


def test_damage_other_targets_and_too_few_drafts_are_told(eagle: EagleHead, target: Target) -> None:
    broken = copy.deepcopy(eagle)
    broken.fc.weight.zero_()
    with pytest.raises(ValueError, match=r"the eagle head: fc\.weight is all zeros"):
        verify_head(broken, target, PROMPTS)
    elsewhere = changed(eagle, target=replace(eagle.config.target, num_layers=9))
    with pytest.raises(ValueError, match="num_layers 9; llama has 8"):
        verify_head(elsewhere, target, PROMPTS)
    report = verify_head(eagle, target, PROMPTS[:1], max_new_tokens=6)
    assert report.problem is not None and "drafts were made, too few to judge the head" in report.problem
