"""A fused model is the model it was: the same names, weights and logits; on a GPU, the same bits for any number of rows."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch
from support import FAMILIES, OracleTreeDrafter, random_prompts, tiny_model
from torch import nn

from selfspec import SamplingParams, Target, generate
from selfspec.cache.blocks import CacheRow
from selfspec.drafters import DraftModelDrafter
from selfspec.model import fuse as fusing
from selfspec.model.fuse import (
    RMS_NORM_RULES,
    FusedGatedMLP,
    FusedLinear,
    FusedRMSNorm,
    MergedLinear,
    can_fuse,
    fuse,
)
from selfspec.model.layers import decoder_layers
from selfspec.model.target import FINAL
from selfspec.tree import chain, from_parents

# Relative. Float32 sums in another order; in bfloat16 two roundings of every layer's.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# Merged layers, other linear layers, norms and MLPs of three layers.
COUNTS = {
    "llama": (15, 7, 7, 3),
    "llama-tied": (15, 7, 7, 3),
    "qwen2": (15, 7, 7, 3),
    "qwen3": (15, 7, 13, 3),
    "gemma2": (15, 7, 13, 0),
    "phi3": (0, 13, 7, 0),
    "olmo2": (15, 7, 13, 3),
    "mixtral": (9, 4, 7, 0),
    "gpt-oss": (9, 4, 7, 0),
    "opt": (9, 10, 0, 0),
    "gpt2": (0, 1, 0, 0),
}


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids, use_cache=False).logits.float()


def relative_gap(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("family", COUNTS)
def test_a_fused_model_says_the_same(family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """Also for a second, longer input and a batch, so that nothing of the first is left."""
    model = tiny_model(family).to(dtype)
    inputs = [torch.arange(3, 12)[None], torch.arange(20, 50)[None], torch.arange(1, 25).view(2, 12)]
    expected = [logits(model, ids) for ids in inputs]
    with caplog.at_level(logging.WARNING, logger="selfspec"):
        fuse(model)
    assert not [record for record in caplog.records if record.name == fusing.__name__]
    for ids, before in zip(inputs, expected, strict=True):
        assert relative_gap(logits(model, ids), before) < TOLERANCES[dtype]
    count = Counter(type(module) for module in model.modules())
    assert tuple(count[kind] for kind in (MergedLinear, FusedLinear, FusedRMSNorm, FusedGatedMLP)) == COUNTS[family]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_fused_target_verifies_trees(family: str) -> None:
    """`Target` checks a tree pass against the plain one as it adopts a model."""
    model = tiny_model(family)
    prompts = random_prompts(3, (1, 20), seed=1)
    sampling = SamplingParams(max_new_tokens=8)
    expected = [completion.token_ids for completion in generate(Target(model), prompts, sampling=sampling)]
    fuse(model)
    target = Target(model)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
    got = generate(target, prompts, drafter=OracleTreeDrafter(answers), sampling=sampling, use_cost_guard=False)
    assert [completion.token_ids for completion in got] == expected


@pytest.mark.parametrize("family", ["llama-tied", "qwen2"])
def test_parameters_keep_names_values_objects_and_ties(family: str) -> None:
    """No weight is held twice: merged layers' parameters are views of what is multiplied."""
    model = tiny_model(family)
    parameters = dict(model.named_parameters())
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    fuse(model)
    assert {name: id(weight) for name, weight in model.named_parameters()} == {n: id(w) for n, w in parameters.items()}
    assert model.lm_head.weight is model.get_input_embeddings().weight
    after = model.state_dict()
    assert list(after) == list(state) and all(torch.equal(after[name], state[name]) for name in state)
    attention = model.model.layers[1].self_attn
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert part.weight.untyped_storage().data_ptr() == part.merged.weight.untyped_storage().data_ptr()
    # Views: a change of one is a change of the other.
    model.load_state_dict({name: 2 * weight for name, weight in state.items()})
    assert torch.equal(attention.q_proj.merged.weight[: attention.q_proj.out_features], attention.q_proj.weight)


def merged_layers() -> tuple[list[nn.Linear], nn.Module]:
    parent = nn.Module()
    parent.gate_proj, parent.up_proj = nn.Linear(5, 3), nn.Linear(5, 4)
    parent.requires_grad_(False)
    originals = [parent.gate_proj, parent.up_proj]
    fuse(parent)
    return originals, parent


def test_one_product_serves_all_siblings_and_no_other_input(monkeypatch: pytest.MonkeyPatch) -> None:
    (gate, up), parent = merged_layers()
    calls: list[torch.Tensor] = []

    def counted(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return torch.nn.functional.linear(x, *weights)

    monkeypatch.setattr(fusing, "linear", counted)
    first, second = torch.randn(2, 5), torch.randn(2, 5)
    assert torch.allclose(parent.gate_proj(first), gate(first)) and torch.allclose(parent.up_proj(first), up(first))
    assert len(calls) == 1
    # What was taken is gone, even for the same tensor with other contents.
    first += 1
    assert torch.allclose(parent.up_proj(first), up(first)) and len(calls) == 2
    assert torch.allclose(parent.up_proj(first), up(first)) and len(calls) == 3
    # An interrupted pass leaves a slice behind; another tensor must not get it, equal or not.
    assert torch.allclose(parent.gate_proj(second), gate(second)) and len(calls) == 4
    assert torch.allclose(parent.up_proj(second.clone() + 1), up(second + 1)) and len(calls) == 5
    assert torch.allclose(parent.gate_proj(second[None]), gate(second[None])) and len(calls) == 6


def test_layers_that_differ_are_not_merged() -> None:
    parent = nn.Module()
    parent.q_proj, parent.k_proj, parent.v_proj = nn.Linear(5, 3), nn.Linear(5, 4, bias=False), nn.Linear(5, 4)
    parent.gate_proj, parent.up_proj = nn.Linear(5, 3), nn.Linear(6, 3)
    fuse(parent.requires_grad_(False))
    assert {type(child) for child in parent.children()} == {FusedLinear}


class ScaledRMSNorm(nn.Module):
    """Looks like a norm that the kernel knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight * 1.1


class ScaledMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 6, bias=False), nn.Linear(8, 6, bias=False)
        self.down_proj, self.act_fn = nn.Linear(6, 8, bias=False), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(1.1 * self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_a_kind_that_computes_something_else_stays_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleList([ScaledRMSNorm(), ScaledRMSNorm(), ScaledMLP(), ScaledMLP()]).requires_grad_(False)
    with caplog.at_level(logging.WARNING, logger="selfspec"):
        fuse(model)
    assert [type(module) for module in model] == [ScaledRMSNorm, ScaledRMSNorm, ScaledMLP, ScaledMLP]
    assert [record.message.split(":")[0] for record in caplog.records] == ["ScaledRMSNorm", "2 of ModuleList"]


class OtherEpsRMSNorm(ScaledRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def test_what_shows_in_small_numbers_or_in_a_later_layer_only_is_noticed() -> None:
    """An eps of another size; an MLP that adds nothing in the first layer, as expanded and pruned models have."""
    model = nn.ModuleList([OtherEpsRMSNorm(), ScaledMLP(), ScaledMLP()]).requires_grad_(False)
    model[1].down_proj.weight.zero_()
    fuse(model)
    assert [type(module) for module in model] == [OtherEpsRMSNorm, FusedGatedMLP, ScaledMLP]


@pytest.mark.parametrize(("family", "rule"), [("llama", 0), ("olmo2", 1), ("gpt-oss", 1), ("gemma2", 2)])
def test_the_order_of_roundings_is_found(family: str, rule: int) -> None:
    model = tiny_model(family).to(torch.bfloat16)
    fuse(model)
    norms = [module for module in model.modules() if isinstance(module, FusedRMSNorm)]
    assert norms and all(norm.rule == RMS_NORM_RULES[rule] for norm in norms)


def test_nothing_is_fused_on_cpu_by_itself() -> None:
    assert not can_fuse(tiny_model("llama"))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_logits_on_a_gpu(family: str) -> None:
    model = tiny_model(family).to("cuda", torch.bfloat16)
    assert can_fuse(model)
    ids = torch.arange(3, 35, device="cuda")[None]
    expected = logits(model, ids)
    fuse(model)
    # As in `Target`: other kernels round otherwise, and experts may switch.
    assert relative_gap(logits(model, ids), expected) < 0.2


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3", "gemma2"])
def test_a_fused_target_gives_the_same_bits_for_any_number_of_nodes(family: str) -> None:
    """[N1] a token decoded alone, and the same token in passes of 2 to 128 nodes."""
    model = tiny_model(family).to("cuda", torch.bfloat16)
    fuse(model)
    target = Target(model)
    ids = (torch.arange(129, device="cuda") * 7 + 3) % 61
    cache = target.new_cache()
    row = cache.open_row()
    target.prefill(ids[:1], row, cache)
    for num_nodes in (2, 5, 16, 17, 33, 64, 128):
        together = target.verify(chain(ids[1:2], ids[None, 2 : num_nodes + 1]), [row], cache).logits[0]
        other = cache.open_row()
        target.prefill(ids[:1], other, cache)
        for node in range(num_nodes):
            alone = target.verify(chain(ids[node + 1 : node + 2], ids[None, :0]), [other], cache).logits[0, 0]
            assert torch.equal(together[node], alone), (num_nodes, node)
            cache.advance(other, 1)
        cache.release(other)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3", "gemma2"])
def test_a_prefix_has_the_same_bits_however_it_is_cut(family: str) -> None:
    """[N1] read at once, in chunks, or partly by decoding: the next tree's logits do not tell."""
    model = tiny_model(family, max_position_embeddings=2048).to("cuda", torch.bfloat16)
    fuse(model)
    target = Target(model)
    ids = (torch.arange(700, device="cuda") * 7 + 3) % 61
    tree = from_parents(ids[None, :4] + 1, torch.tensor([[-1, 0, 0, 1]], device="cuda"))
    logits = []
    for sizes in ([700], [64] * 10 + [60], [255, 1, 257, 187], [1, 512, 187]):
        cache = target.new_cache()
        row = cache.open_row()
        for part in ids.split(sizes):
            target.prefill(part, row, cache)
        logits.append(target.verify(tree, [row], cache).logits)
    assert all(torch.equal(each, logits[0]) for each in logits[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3", "gemma2"])
def test_fused_low_precision_is_lossless(family: str) -> None:
    """[N1] bfloat16: token for token what plain decoding gives, with trees and in batches."""
    model = tiny_model(family).to("cuda", torch.bfloat16)
    fuse(model)
    target = Target(model)
    prompts = random_prompts(7, (1, 40), seed=3)
    sampling = SamplingParams(max_new_tokens=48, ignore_eos=True)
    expected = [completion.token_ids for completion in generate(target, prompts, sampling=sampling)]
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
    for batch_size in (1, 7):
        drafter = OracleTreeDrafter(answers)
        got = generate(target, prompts, drafter=drafter, sampling=sampling, batch_size=batch_size, use_cost_guard=False)
        assert [completion.token_ids for completion in got] == expected


COMMON = ("llama", "llama-tied", "mistral-window", "qwen2", "qwen2-window", "qwen3")


@pytest.mark.parametrize("family", [*COMMON, "granite", "smollm3", "gemma2", "opt"])
def test_a_fused_pass_says_the_same(family: str) -> None:
    """Prefill, trees, and the layers' own outputs, which drafters read."""
    plain = Target(tiny_model(family))
    model = tiny_model(family)
    fuse(model)
    target = Target(model)
    layers = decoder_layers(target.model)[1]
    assert all("forward" in layer.__dict__ for layer in layers) is (family in (*COMMON, "granite", "smollm3"))
    ids = torch.arange(5, 30)
    tree = from_parents(torch.tensor([[7, 8, 9, 10, 11]]), torch.tensor([[-1, 0, 0, 1, 3]]))
    results = []
    for each in (plain, target):
        cache, row = each.new_cache(), CacheRow()
        prefix = each.prefill(ids, row, cache, features=(1, 2) if family == "opt" else (1, 2, FINAL))
        verified = each.verify(tree, [row], cache, features=(1, 3))
        results.append([*prefix.values(), verified.logits, *verified.features.values()])
    for ours, theirs in zip(*results, strict=True):
        assert relative_gap(ours, theirs) < 1e-5
    # Outside tree passes the modeling file's own forward runs.
    assert relative_gap(logits(target.model, ids[None]), logits(plain.model, ids[None])) < 1e-5


@pytest.mark.parametrize(
    ("family", "changes"), [("granite", {"residual_multiplier": 0.5}), ("smollm3", {"no_rope_layers": [1, 0, 1]})]
)
def test_layers_that_only_look_common_keep_their_own_pass(
    family: str, changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """Granite weighs its branches by a factor, SmolLM3 has layers without positions."""
    model = tiny_model(family, **changes)
    expected = Target(tiny_model(family, **changes))
    fuse(model)
    with caplog.at_level(logging.WARNING, logger="selfspec"):
        target = Target(model)
    assert "fused layers give other logits" in caplog.text
    assert not any("forward" in layer.__dict__ for layer in decoder_layers(target.model)[1])
    sampling = SamplingParams(max_new_tokens=12)
    prompts = random_prompts(2, (3, 9))
    ours, theirs = (generate(each, prompts, sampling=sampling) for each in (target, expected))
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]


def test_a_last_hidden_state_that_cannot_be_read_is_said_so() -> None:
    target = Target(tiny_model("opt"))
    with pytest.raises(ValueError, match="opt does not show its last hidden state"):
        target.prefill(torch.arange(3, 6), CacheRow(), target.new_cache(), features=(FINAL,))


def test_targets_that_share_layers_share_their_pass() -> None:
    model = tiny_model("llama")
    fuse(model)
    target = Target(model)
    drafter = DraftModelDrafter(target.truncated(2), target.vocab_size, num_draft_tokens=3)
    prompts, sampling = random_prompts(3, (3, 20)), SamplingParams(max_new_tokens=20)
    plain = generate(Target(tiny_model("llama")), prompts, sampling=sampling)
    got = generate(target, prompts, drafter=drafter, sampling=sampling, batch_size=3, use_cost_guard=False)
    assert [c.token_ids for c in got] == [c.token_ids for c in plain]


@pytest.mark.parametrize("place", ["layers", "projections"])
def test_a_hook_that_copies_what_passes_through_breaks_nothing_but_speed(place: str) -> None:
    """A norm begun by the layer before, and a product shared by siblings, are found again by the tensor's identity."""
    ids, tree = torch.arange(5, 30), from_parents(torch.tensor([[7, 8, 9]]), torch.tensor([[-1, 0, 0]]))
    results = []
    for is_hooked in (False, True):
        model = tiny_model("llama")
        fuse(model)
        target = Target(model)
        for layer in decoder_layers(target.model)[1] if is_hooked else ():
            attention = layer.self_attn
            modules = [layer] if place == "layers" else [attention.q_proj, attention.k_proj, attention.v_proj]
            for module in modules:
                module.register_forward_pre_hook(
                    lambda module, args, kwargs: (tuple(each.clone() for each in args), kwargs), with_kwargs=True
                )
        cache, row = target.new_cache(), CacheRow()
        target.prefill(ids, row, cache)
        # The projections are called one by one outside tree passes.
        results.append([target.verify(tree, [row], cache).logits, logits(target.model, ids[None])])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_decoder_of_a_model_of_several_towers_is_its_text_model() -> None:
    """A vision tower may have as many layers as the text model, and come first."""
    model = tiny_model("llama")

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    modules = dict(model._modules)
    model._modules.clear()
    model.vision = Tower()
    model._modules.update(modules)
    path, stack = decoder_layers(model)
    assert path == ["model", "layers"] and stack is model.model.layers
