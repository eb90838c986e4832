"""Expansion changes what a target costs and nothing that it says; its heads draft what they drafted."""

from __future__ import annotations

import pytest
import torch
from support import random_prompts, tiny_model, tiny_target

from selfspec import SamplingParams, Target, generate
from selfspec.bench.expand import (
    ExpandedShape,
    expand,
    expand_head,
    expanded_drafter,
    expanded_feature,
    layer_positions,
    logit_gap,
    serve_expanded,
)
from selfspec.drafters import drafter_of
from selfspec.drafters.shipped import identity
from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import EagleConfig, EagleHead
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.model.load import lay_out

# Two queries to a key-value head, as the tiny Llama has; heads of 8 become heads of 24.
SHAPE = ExpandedShape(96 * 3, 7, 160, 24, context_length=512)
# Sums in another order; float32 keeps about seven digits.
TOLERANCE = 1e-5
PROMPTS = random_prompts(4, (1, 30), seed=5)
GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True)


def randomise(module: torch.nn.Module) -> None:
    """No weight is left at a value that hides an error, norms included."""
    torch.manual_seed(2)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5)
        else:
            parameter.data.normal_(0, 0.2)


def original(family: str = "llama") -> Target:
    # An eps as large as the hidden state's squares, or its scaling would not be noticed.
    model = tiny_model(family, rms_norm_eps=0.05)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return Target(model, name=family)


def expanded_target(source: Target, shape: ExpandedShape) -> Target:
    return serve_expanded(source, expand(source.model, shape), shape)


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_logits_and_features_are_the_originals(family: str) -> None:
    source = original(family)
    target = expanded_target(source, SHAPE)
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        expected, got = source.model(ids).logits, target.model(ids).logits
    assert ((got - expected).norm() / expected.norm()) < TOLERANCE
    positions = torch.arange(ids.shape[1])[None]
    features = range(-1, source.num_layers + 1)
    numbers = {k: expanded_feature(k, source.num_layers, target.num_layers) for k in features}
    theirs = source.hidden_states(ids, positions, list(numbers))
    ours = target.hidden_states(ids, positions, list(numbers.values()))
    E = source.config.hidden_size
    for k, number in numbers.items():
        assert not ours[number][..., E:].any()
        assert (ours[number][..., :E] - theirs[k]).norm() < TOLERANCE * theirs[k].norm()
    assert "expanded" in target.name
    assert target.context_length == 512
    # The real layers are where the numbers say: the ones between them add nothing.
    real = layer_positions(source.num_layers, target.num_layers)
    assert real == [0, 2, 4]
    is_idle = [not layer.mlp.down_proj.weight.any() for layer in target.model.model.layers]
    assert [index for index, idle in enumerate(is_idle) if not idle] == real


def test_low_precision_is_filled_in_place_and_weights_are_not_sparse_where_they_need_not_be() -> None:
    model = expand(tiny_model("llama").to(torch.bfloat16), SHAPE)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    layer = model.model.layers[1]
    for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj, model.lm_head):
        assert (linear.weight != 0).float().mean() > 0.95
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_shape_that_does_not_fit_is_refused() -> None:
    model = tiny_model("llama")
    for shape, word in (
        (ExpandedShape(16, 7, 160, 8), "hidden_size"),
        (ExpandedShape(96, 2, 160, 24), "num_hidden_layers"),
        (ExpandedShape(96, 7, 40, 24), "intermediate_size"),
        (ExpandedShape(96, 7, 160, 12), "head_dim"),
        (ExpandedShape(72, 7, 160, 24), "2 heads"),
    ):
        with pytest.raises(ValueError, match=word):
            expand(model, shape)
    with pytest.raises(ValueError, match="qwen2"):
        expand(tiny_model("qwen2"), SHAPE)
    with pytest.raises(ValueError, match="8b or"):
        ExpandedShape.parse("70b")
    assert ExpandedShape.parse("8b") == ExpandedShape()
    assert str(ExpandedShape.parse("96x7x160x24")) == "96x7x160x24"


def eagle(source: Target, **changes: object) -> EagleHead:
    settings: dict[str, object] = {
        "feature_layers": (0, 2, 3),
        "intermediate_size": 40,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "draft_vocab_size": 40,
        "rms_norm_eps": 0.05,
        **changes,
    }
    head = EagleHead(EagleConfig(target=identity(source), **settings))  # type: ignore[arg-type]
    head.initialise(source.model, torch.arange(20, 60))
    randomise(head)
    return head


def medusa(source: Target, **changes: object) -> MedusaHead:
    head = MedusaHead(MedusaConfig(target=identity(source), num_heads=3, **changes))  # type: ignore[arg-type]
    randomise(head)
    return head


HEADS = {
    "eagle": lambda source: eagle(source),
    "eagle-targets-lm-head": lambda source: eagle(source, has_lm_head=False),
    "eagle-other-trainers": lambda source: eagle(
        source,
        has_fc_norm=False,
        feeds_normed=False,
        has_input_norm=True,
        norm_before_residual=True,
        has_fc_bias=True,
        has_qkv_bias=True,
        has_o_bias=True,
    ),
    "medusa": lambda source: medusa(source),
    "medusa-root": lambda source: medusa(source, has_root_input=True, num_blocks=2),
    "medusa-outputs": lambda source: medusa(source, has_output_layer=True),
}


@pytest.mark.parametrize("kind", HEADS)
def test_heads_draft_the_same_trees_and_the_text_is_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = original()
    head = HEADS[kind](source)
    target = expanded_target(source, SHAPE)
    expanded = expand_head(head, target)
    expanded.config.target.check(identity(target))
    assert expanded.num_parameters > 3 * head.num_parameters

    def run(target: Target, head: DraftHead) -> tuple[list[list[int]], list[torch.Tensor]]:
        drafter = drafter_of(head, target)
        trees = []
        propose = drafter.propose

        def kept(*args, **kwargs):
            proposal = propose(*args, **kwargs)
            trees.append(torch.stack([proposal.tree.tokens, proposal.tree.parents]))
            return proposal

        monkeypatch.setattr(drafter, "propose", kept)
        completions = generate(target, PROMPTS, drafter=drafter, sampling=GREEDY, use_cost_guard=False)
        return [c.token_ids for c in completions], trees

    expected, their_trees = run(source, head)
    got, our_trees = run(target, expanded)
    assert got == expected == [c.token_ids for c in generate(source, PROMPTS, sampling=GREEDY)]
    assert len(our_trees) == len(their_trees)
    for ours, theirs in zip(our_trees, their_trees, strict=True):
        assert torch.equal(ours, theirs)


def test_feature_numbers_follow_the_real_layers() -> None:
    source = original()
    head = expand_head(eagle(source), expanded_target(source, SHAPE))
    # Entering layers 0 and 2, and after the last.
    assert head.features == (0, 4, 7)
    assert [expanded_feature(k, 30, 32) for k in (-1, 0, 2, 15, 27, 30)] == [-1, 0, 2, 16, 28, 32]


def test_what_cannot_be_expanded_is_refused() -> None:
    source = original()
    target = expanded_target(source, SHAPE)
    with pytest.raises(ValueError, match="rotary scaling"):
        expand_head(eagle(source, rope_scaling={"rope_type": "linear", "factor": 2.0}), target)
    with pytest.raises(ValueError, match="early_exit"):
        expanded_drafter("early_exit", source, target)
    assert expanded_drafter("none", source, target) is None
    assert expanded_drafter("ngram:4", source, target).num_draft_tokens == 4


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-3), (torch.bfloat16, 0.15)], ids=str)
def test_a_big_model_is_filled_on_the_device(dtype: torch.dtype, most: float) -> None:
    """No weight passes through the CPU in its large form, and the words stay; random layers let rounding grow."""
    source = Target(tiny_model("llama", hidden_size=64, num_attention_heads=8, num_key_value_heads=4).to("cuda", dtype))
    target = expanded_target(source, ExpandedShape(512, 8, 1024, 32))
    assert {(p.device.type, p.dtype) for p in target.model.parameters()} == {("cuda", dtype)}
    assert logit_gap(source, target) < most
    head = expand_head(medusa(source, has_root_input=True), target)
    assert {(p.device.type, p.dtype) for p in head.parameters()} == {("cuda", dtype)}


def test_a_tiny_target_is_its_own_expansion() -> None:
    """Bit for bit, once its layers are laid out as those of the expansion are."""
    source = tiny_target("llama")
    expanded = expanded_target(source, ExpandedShape(32, 3, 48, 8, context_length=256))
    model = tiny_model("llama")
    lay_out(model)
    with torch.no_grad():
        ids = torch.tensor([PROMPTS[0]])
        assert torch.equal(Target(model).model(ids).logits, expanded.model(ids).logits)
