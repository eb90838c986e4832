"""On a CPU a laid out model is the model it was, in fewer operations, and says the same for any tree and batch."""

from __future__ import annotations

import logging

import pytest
import torch
from support import FAMILIES, OracleTreeDrafter, random_prompts, tiny_model
from torch import nn

from selfspec import SamplingParams, Target, generate
from selfspec.model.cpu_layer import speed_up_layers
from selfspec.model.layers import decoder_layers
from selfspec.model.linear_layout import PACKED, PLAIN, Layout, layouts
from selfspec.model.load import lay_out
from selfspec.model.packed_linear import can_pack
from selfspec.model.shared_input import MergedLayer, merge_layers
from selfspec.model.stored_linear import StoredLinear

# Relative: float32 sums in another order.
TOLERANCE = 1e-5
# Families whose layers are of the common kind.
SHORT = {"llama", "llama-tied", "mistral-window", "qwen2", "qwen2-window", "qwen3", "granite", "smollm3"}
SAMPLING = SamplingParams(max_new_tokens=12, ignore_eos=True)


def test_merged_layers_give_their_own_weights_and_outputs() -> None:
    attention = nn.ModuleDict({name: nn.Linear(12, size) for name, size in [("q_proj", 8), ("k_proj", 4), ("v_proj", 4)]})
    before = {name: (layer.weight.detach().clone(), layer.bias.detach().clone()) for name, layer in attention.items()}
    x, other = torch.randn(2, 3, 12), torch.randn(1, 12)
    expected = {name: (layer(x), layer(other)) for name, layer in attention.items()}
    merge_layers(attention)
    for name, layer in attention.items():
        assert isinstance(layer, MergedLayer) and layer.out_features == len(before[name][0])
        assert torch.equal(layer.weight, before[name][0]) and torch.equal(layer.bias, before[name][1])
    for k, given in enumerate((x, other, x)):
        for name in ("k_proj", "q_proj", "v_proj"):
            torch.testing.assert_close(attention[name](given), expected[name][k % 2])


def test_layers_of_other_inputs_or_with_hooks_stay_apart() -> None:
    gated = nn.ModuleDict({"gate_proj": nn.Linear(12, 8), "up_proj": nn.Linear(8, 8)})
    merge_layers(gated)
    assert type(gated["gate_proj"]) is type(gated["up_proj"]) is nn.Linear
    hooked = nn.ModuleDict({"gate_proj": nn.Linear(12, 8), "up_proj": nn.Linear(12, 8)})
    hooked["up_proj"].register_forward_hook(lambda *args: None)
    merge_layers(hooked)
    assert type(hooked["gate_proj"]) is type(hooked["up_proj"]) is nn.Linear


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_laid_out_model_says_the_same(family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """In its own forward and in tree passes, which `Target` compares as it adopts a model."""
    model = tiny_model(family).to(dtype).float()
    ids = torch.arange(1, 25).view(2, 12)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        lay_out(model)
        got = model(ids, use_cache=False).logits
    assert float((got - expected).norm() / expected.norm()) < TOLERANCE
    with caplog.at_level(logging.WARNING, logger="selfspec"):
        Target(model)
    assert not [record for record in caplog.records if "fused layers" in record.message]
    is_short = all("forward" in layer.__dict__ for layer in decoder_layers(model)[1])
    assert is_short == (family in SHORT)


@pytest.mark.parametrize(("place", "name", "value"), [("", "residual_multiplier", 0.5), ("self_attn", "use_rope", False)])
def test_layers_that_scale_their_branches_or_rotate_nothing_keep_their_own_forward(
    place: str, name: str, value: object
) -> None:
    """As Granite and SmolLM3 do."""
    model = tiny_model("llama")
    lay_out(model)
    layers = list(decoder_layers(model)[1])
    setattr(layers[1].get_submodule(place), name, value)
    assert speed_up_layers(layers, {}) is None and not any("forward" in layer.__dict__ for layer in layers)


@pytest.mark.parametrize("form", [pytest.param(None, id="chosen"), PLAIN, PACKED], ids=lambda form: form and form.name)
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3", "gemma2", "mixtral"])
def test_speculation_changes_no_token_in_any_form(family: str, form: Layout | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees, batches and prompts of many sizes give each layer many numbers of rows."""
    if form is PACKED and not can_pack():
        pytest.skip("this torch build has no oneDNN packed linear layers")
    model = tiny_model(family).bfloat16().float()
    prompts = random_prompts(5, (1, 40), seed=2)
    plain = Target(tiny_model(family).bfloat16().float())
    expected = [completion.token_ids for completion in generate(plain, prompts, sampling=SAMPLING)]
    if form is not None:
        monkeypatch.setattr("selfspec.model.linear_layout.layouts", lambda may_round: (form,))
    lay_out(model)
    if form is not PLAIN and layouts()[0] is not PLAIN:
        assert any(isinstance(module, StoredLinear) for module in model.modules())
    target = Target(model)
    for batch_size in (1, 5):
        drafter = OracleTreeDrafter(dict(zip(map(tuple, prompts), expected, strict=True)))
        got = generate(target, prompts, drafter=drafter, sampling=SAMPLING, batch_size=batch_size, use_cost_guard=False)
        assert [completion.token_ids for completion in got] == expected
