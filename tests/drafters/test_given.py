"""What a drafter is given stays as it was: the head can be saved, trained and served again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import eagle_head, identity, random_prompts, tiny_target

from selfspec import SamplingParams, generate
from selfspec.drafters import drafter_of
from selfspec.drafters.names import HEADS
from selfspec.heads.base import DraftHead
from selfspec.heads.early_exit import DistilledDraft, EarlyExitHead
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.model.layers import decoder_layers, private_copy, with_layers
from selfspec.model.target import Target

MAKERS: dict[str, Callable[[Target], DraftHead]] = {
    "eagle": eagle_head,
    "eagle with the target's rows": lambda target: eagle_head(target, has_lm_head=False),
    "medusa": lambda target: MedusaHead(MedusaConfig(target=identity(target), num_heads=3)),
    "early exit": lambda target: EarlyExitHead.for_target(identity(target), target.model, exit_layer=1, blocks=(2,)),
    "distilled draft": lambda target: DistilledDraft.for_target(identity(target), target.model, blocks=(0,)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_head_that_was_served_is_the_head_that_was_given(name: str, tmp_path: Path) -> None:
    """On a CPU layers are packed for decoding, and packed layers have no weights to save."""
    target = tiny_target("llama")
    head = MAKERS[name](target).train()
    before = {key: value.clone() for key, value in head.state_dict().items()}
    kinds = [type(module) for module in head.modules()]
    places = [parameter.data_ptr() for parameter in head.parameters()]
    drafter = drafter_of(head, target)
    generate(target, random_prompts(2, (3, 9)), drafter=drafter, sampling=SamplingParams(max_new_tokens=8), batch_size=2)
    assert [type(module) for module in head.modules()] == kinds and head.training
    assert [parameter.data_ptr() for parameter in head.parameters()] == places
    assert all(parameter.requires_grad for parameter in head.parameters() if parameter.is_floating_point())
    head.save_pretrained(tmp_path)
    again = HEADS[head.config.head_type].from_pretrained(tmp_path)
    assert again.state_dict().keys() == before.keys()
    for key, value in again.state_dict().items():
        torch.testing.assert_close(value, before[key].to(value.dtype), msg=key)


def test_a_copy_shares_memory_until_it_is_changed() -> None:
    linear = torch.nn.Linear(4, 4)
    tied = torch.nn.ModuleDict({"a": linear, "b": torch.nn.Linear(4, 4)})
    tied["b"].weight = linear.weight
    copy = private_copy(tied)
    assert copy["a"].weight is copy["b"].weight, "what was tied stays tied"
    assert copy["a"].weight.data_ptr() == linear.weight.data_ptr() and copy["a"].weight is not linear.weight
    copy.to(torch.float64)
    copy["a"].register_forward_hook(lambda *args: None)
    assert linear.weight.dtype == torch.float32 and linear.weight.requires_grad and not linear._forward_hooks


def test_a_hook_on_a_model_of_other_layers_is_no_hook_on_the_model() -> None:
    """And hooks that the model has stay where they are."""
    target = tiny_target("llama")
    model, layers = target.model, list(decoder_layers(target.model)[1])
    calls: list[str] = []
    handle = model.base_model.register_forward_hook(lambda *args: calls.append("model"))
    twin = with_layers(model, layers[:2], range(2))
    twin.base_model.register_forward_hook(lambda *args: calls.append("twin"))
    ids = torch.tensor([[3, 4, 5]])
    model(input_ids=ids, use_cache=False)
    assert calls == ["model"]
    handle.remove()
    calls.clear()
    model(input_ids=ids, use_cache=False)
    assert not calls
    assert twin.config.num_hidden_layers == 2 and model.config.num_hidden_layers == 3
