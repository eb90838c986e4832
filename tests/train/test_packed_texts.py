"""Texts that share a row train as they would alone, with every family of targets and every head that runs a model."""

from __future__ import annotations

import pytest
import torch
from support import FAMILIES, draft_head, exit_head, tiny_target

from selfspec.heads.early_exit import EarlyExitHead
from selfspec.model.target import FINAL
from selfspec.train.module import HeadTraining

SIZES = (21, 27)
FEATURES = (0, 1, FINAL)


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(3, 61, (size,), generator=generator) for size in SIZES]


def row(*texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions, each [1, T]."""
    return torch.cat(texts)[None], torch.cat([torch.arange(len(text)) for text in texts])[None]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_text_has_the_hidden_states_of_the_text_alone(family: str) -> None:
    target = tiny_target(family)
    packed = target.hidden_states(*row(*texts()), FEATURES)
    start = 0
    for text in texts():
        alone = target.hidden_states(*row(text), FEATURES)
        for name in FEATURES:
            torch.testing.assert_close(packed[name][:, start : start + len(text)], alone[name], rtol=1e-3, atol=1e-4)
        start += len(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_has_the_hidden_states_of_the_models_own_forward(family: str) -> None:
    target = tiny_target(family)
    ids, positions = row(texts()[1])
    taken: dict[str, torch.Tensor] = {}
    target.model.base_model.register_forward_hook(lambda module, args, output: taken.update(own=output.last_hidden_state))
    with torch.no_grad():
        target.model.base_model(input_ids=ids, use_cache=False)
    own = taken["own"]
    torch.testing.assert_close(target.hidden_states(ids, positions, (FINAL,))[FINAL], own, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt-oss", "gemma3"])
@pytest.mark.parametrize("kind", ["early_exit", "early_exit with LoRA", "draft"])
def test_a_head_that_runs_layers_learns_from_packed_texts_as_from_texts_alone(family: str, kind: str) -> None:
    if "LoRA" in kind:
        pytest.importorskip("peft", reason="LoRA needs peft: pip install 'selfspec[train]'")
    target = tiny_target(family)
    head: EarlyExitHead
    if kind == "draft":
        head = draft_head(target, 0, 1)
    else:
        head = exit_head(target, 1, 2, lora_rank=2 if "LoRA" in kind else 0)
    training = HeadTraining(head, target)

    def loss(*texts: torch.Tensor) -> float:
        ids, positions = row(*texts)
        mask = torch.ones_like(ids, dtype=torch.bool)
        one = torch.tensor(1)
        return float(training(input_ids=ids, loss_mask=mask, position_ids=positions, num_pairs=one)["loss"])

    with torch.no_grad():
        assert loss(*texts()) == pytest.approx(sum(loss(text) for text in texts()), rel=1e-4)
