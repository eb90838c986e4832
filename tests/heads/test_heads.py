"""Heads: positions in training are positions in serving, and a folder with a head loads strictly or not at all.

The targets here are automata (the next token is a function of the present one), so a head that is aligned reaches full
acceptance and one that is off by a position does not. [H6] [T2]
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import eagle_head, identity, random_prompts, tiny_model, tiny_target

from selfspec import SamplingParams, Target, generate
from selfspec.drafters.eagle import EagleDrafter
from selfspec.drafters.medusa import MedusaDrafter
from selfspec.heads.base import DraftHead, TargetIdentity, installed_version
from selfspec.heads.eagle import Eagle1Config, Eagle1Head, EagleHead
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.loop.batch import Batch
from selfspec.loop.drafter import Proposal
from selfspec.model.fuse import fuse
from selfspec.model.graphs import Graphs
from selfspec.model.linear_layout import PACKED, lay_out_linear_layers
from selfspec.model.packed_linear import can_pack
from selfspec.model.target import FINAL
from selfspec.train.batch import TargetEnds, TrainBatch
from selfspec.train.losses import LossSettings, TargetStates, eagle_loss, medusa_loss
from selfspec.train.module import HeadTraining
from selfspec.tree import CandidateTree

V = 32


def automaton() -> tuple[Target, torch.Tensor]:
    """A Llama of one layer that says nothing but the successor of the present token under a random cycle of all tokens."""
    model = tiny_model("llama", vocab_size=V, hidden_size=V, num_hidden_layers=1, initializer_range=0.2)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(3))
    successor = torch.empty(V, dtype=torch.int64)
    successor[order] = order.roll(-1)
    layer = model.model.layers[0]
    layer.self_attn.o_proj.weight.data.zero_()
    layer.mlp.down_proj.weight.data.zero_()
    model.model.embed_tokens.weight.data.copy_(torch.eye(V))
    model.lm_head.weight.data.zero_()
    model.lm_head.weight.data[successor, torch.arange(V)] = 1.0
    return Target(model, name="automaton"), successor


def text_of(successor: torch.Tensor, size: int) -> list[int]:
    """A prompt in the automaton's own words."""
    text = [3]
    while len(text) < size:
        text.append(int(successor[text[-1]]))
    return text


GREEDY = SamplingParams(max_new_tokens=25, ignore_eos=True)


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_medusa_accepts_everything_if_and_only_if_it_is_aligned(shift: int) -> None:
    """[H6] head i at position t predicts token t + 2 + i."""
    target, successor = automaton()
    head = MedusaHead(MedusaConfig(target=identity(target), num_heads=4, has_output_layer=True))
    token = torch.arange(V)
    for i, output in enumerate(head.outputs):
        reached = token
        for _ in range(2 + i + shift):
            reached = successor[reached]
        output.weight.data.zero_()
        output.weight.data[reached, token] = 9.0
    drafter = MedusaDrafter(target, head, num_nodes=5, width=1)
    prompt = text_of(successor, 2)
    (completion,) = generate(target, [prompt], drafter=drafter, sampling=GREEDY, use_cost_guard=False)
    assert completion.token_ids == generate(target, [prompt], sampling=GREEDY)[0].token_ids
    assert completion.acceptance_length == (5.0 if shift == 0 else 1.0)


def trained_on(target: Target, head: DraftHead, steps: int, num_steps: int = 4) -> None:
    """Fit a head to texts of the automaton's own."""
    with torch.no_grad():
        rows = [[int(start)] for start in torch.arange(0, V, 2)]
        texts = [row + c.token_ids for row, c in zip(rows, generate(target, rows, sampling=GREEDY), strict=True)]
    ids = torch.tensor(texts)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    training = HeadTraining(head, target, LossSettings(num_steps=num_steps))
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        training(ids, torch.ones_like(ids, dtype=torch.bool), positions)["loss"].backward()
        optimizer.step()


@pytest.mark.parametrize("has_root_input", [False, True])
def test_medusa_training_aligns_with_serving(has_root_input: bool) -> None:
    """[T2] what training fits, serving accepts."""
    target, successor = automaton()
    head = MedusaHead(MedusaConfig(target=identity(target), num_heads=3, has_root_input=has_root_input))
    trained_on(target, head, steps=120)
    (completion,) = generate(
        target,
        [text_of(successor, 2)],
        drafter=MedusaDrafter(target, head, num_nodes=16),
        sampling=GREEDY,
        use_cost_guard=False,
    )
    assert completion.acceptance_length > 3.5


@pytest.mark.parametrize("changes", [{}, {"has_fc_norm": False, "feeds_normed": False, "norm_before_residual": True}])
def test_eagle_training_aligns_with_serving_and_a_shift_does_not(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """[T2] [H6] [K5] the draft cache follows the target's features; entries shifted by one are of no use."""
    target, successor = automaton()
    prompt = text_of(successor, 3)
    head = eagle_head(target, **changes)
    trained_on(target, head, steps=150)
    drafter = EagleDrafter(target, head.eval(), num_draft_tokens=4, width=1, num_nodes=5)

    def acceptance() -> float:
        (completion,) = generate(target, [prompt], drafter=drafter, sampling=GREEDY, use_cost_guard=False)
        assert completion.token_ids == generate(target, [prompt], sampling=GREEDY)[0].token_ids
        return completion.acceptance_length

    assert acceptance() == 5.0
    # Off by one: an entry gets the embedding of its own token instead of the next one's.
    embed, predecessor = drafter._embed, successor.argsort()
    monkeypatch.setattr(drafter, "_embed", lambda tokens: embed(predecessor[tokens]))
    assert acceptance() < 2.5


def test_medusa_reads_the_root_where_it_is_asked_to() -> None:
    """The root's embedding, and no other token's: heads that hear little else know its successors."""
    target, successor = automaton()
    head = MedusaHead(MedusaConfig(target=identity(target), num_heads=4, has_output_layer=True, has_root_input=True))
    head.root_proj.weight.data.copy_(torch.eye(V) * 100)  # type: ignore[union-attr]
    reached = torch.arange(V)
    for output in head.outputs:
        # Head i predicts the token i + 1 after the root.
        reached = successor[reached]
        output.weight.data.zero_()
        output.weight.data[reached, torch.arange(V)] = 1.0
    drafter = MedusaDrafter(target, head, num_nodes=5, width=1)
    (completion,) = generate(target, [text_of(successor, 2)], drafter=drafter, sampling=GREEDY, use_cost_guard=False)
    assert completion.acceptance_length == 5.0


def test_eagle1_training_aligns_with_serving_and_a_shift_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """[T2] [H6] [H7] it drafts on from the features it estimates."""
    target, successor = automaton()
    torch.manual_seed(1)
    head = Eagle1Head(Eagle1Config(target=identity(target), intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8))
    head.initialise(target.model)
    names = set(head.state_dict())
    assert "fc.weight" in names and not any("input_layernorm" in name or name.startswith("norm") for name in names)
    trained_on(target, head, steps=200)
    drafter = EagleDrafter(target, head.eval(), num_draft_tokens=4, width=1, num_nodes=5)

    def acceptance() -> float:
        (completion,) = generate(target, [text_of(successor, 3)], drafter=drafter, sampling=GREEDY, use_cost_guard=False)
        return completion.acceptance_length

    assert acceptance() == 5.0
    # Off by one: an entry gets the feature of the token before its own.
    monkeypatch.setattr(drafter.head, "fuse", lambda features: features[0][..., successor])
    assert acceptance() < 2.5


def test_eagle_drafts_in_serving_are_the_ones_that_training_scores() -> None:
    """Training's step s at row t is serving's draft of depth s + 1 with the root at t + 1, for any head and text."""
    target = tiny_target("llama")
    head = eagle_head(target, feature_layers=(1, 2, 3)).eval()
    drafted: dict[int, list[int]] = {}
    drafter = EagleDrafter(target, head, num_draft_tokens=4, width=1, num_nodes=5)
    propose = drafter.propose

    def spy(batch, num_draft_tokens):  # type: ignore[no-untyped-def]
        proposal = propose(batch, num_draft_tokens)
        drafted[batch.sequences[0].num_tokens] = proposal.tree.tokens[0, 1:].tolist()
        return proposal

    drafter.propose = spy  # type: ignore[method-assign]
    prompt = list(range(3, 15))
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
    (completion,) = generate(target, [prompt], drafter=drafter, sampling=sampling, use_cost_guard=False)
    text = prompt + completion.token_ids
    assert len(drafted) > 3
    for num_tokens, drafts in drafted.items():
        if len(drafts) < 4:
            continue
        # The text as the head saw it: the truth up to the root, then its own drafts.
        ids = torch.tensor([text[:num_tokens] + drafts])
        positions = torch.arange(ids.shape[1])[None]
        states = target.hidden_states(ids, positions, (1, 2, 3, FINAL))
        row = num_tokens - 2
        with torch.no_grad():
            seen = _argmax_of_each_step(head, states, target, ids, positions, row, 4)
        assert seen == drafts, num_tokens


def _argmax_of_each_step(
    head: EagleHead,
    states: dict[int, torch.Tensor],
    target: Target,
    ids: torch.Tensor,
    positions: torch.Tensor,
    row: int,
    num_steps: int,
) -> list[int]:
    """Run the training loss and read what the head predicts at `row` in each unrolled step."""
    outputs: list[torch.Tensor] = []
    hook = head.norm.register_forward_hook(lambda module, args, out: outputs.append(out))
    eagle_loss(
        head,
        TargetStates([states[k] for k in head.features], states[FINAL]),
        TargetEnds.of(target),
        TrainBatch(ids, torch.ones_like(ids, dtype=torch.bool), positions),
        LossSettings(num_steps=num_steps, decay=1.0),
    )
    hook.remove()
    return [int(head.draft_ids[head.lm_head(out[0, row]).argmax()]) for out in outputs]


def test_trees_of_heads_change_nothing_in_any_batch() -> None:
    target = tiny_target("llama")
    prompts = [[5], [6, 7], list(range(3, 30)), list(range(20, 40)), [9, 8, 7]]
    for temperature in (0.0, 0.8):
        sampling = [SamplingParams(max_new_tokens=20, temperature=temperature, seed=i) for i in range(len(prompts))]
        expected = [c.token_ids for c in generate(target, prompts, sampling=sampling)]
        for drafter in (
            MedusaDrafter(target, MedusaHead(MedusaConfig(target=identity(target), num_heads=3)), num_nodes=9),
            EagleDrafter(target, eagle_head(target, feature_layers=(1, 2, 3)), num_draft_tokens=4, num_nodes=12),
            EagleDrafter(target, reduced_head(target), num_draft_tokens=3, num_nodes=7, width=2),
        ):
            for batch_size, use_guard in ((1, False), (5, False), (3, True)):
                got = generate(
                    target,
                    prompts,
                    drafter=drafter,
                    sampling=sampling,
                    batch_size=batch_size,
                    use_cost_guard=use_guard,
                )
                assert [c.token_ids for c in got] == expected, (drafter.name, batch_size)


def reduced_head(target: Target) -> EagleHead:
    head = eagle_head(target, feature_layers=(2,), draft_vocab_size=20)
    head.initialise(target.model, torch.arange(20) * 3)
    return head


def test_d2t_is_an_offset() -> None:
    """[H4]"""
    head = reduced_head(tiny_target("llama"))
    assert head.d2t.tolist() == [2 * i for i in range(20)]
    assert head.draft_ids.tolist() == [3 * i for i in range(20)]
    with pytest.raises(ValueError, match="draft_ids must say which"):
        head.initialise(tiny_model("llama"))


def test_future_mask_stays_in_its_text_and_on_the_assistants_tokens() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1]], dtype=torch.bool)
    batch = TrainBatch(torch.zeros_like(positions), mask, positions)
    assert batch.may_learn(1).int().tolist() == [[0, 1, 1, 0, 1, 1, 0, 0]]
    assert batch.may_learn(2).int().tolist() == [[1, 1, 0, 0, 1, 0, 0, 0]]
    assert not batch.may_learn(9).any()


def test_a_batch_without_assistant_tokens_gives_a_zero_loss_with_a_gradient() -> None:
    """[T3]"""
    target = tiny_target("llama")
    ids = torch.arange(3, 19)[None]
    for head in (MedusaHead(MedusaConfig(target=identity(target))), eagle_head(target, feature_layers=(1, 2))):
        training = HeadTraining(head, target, LossSettings(num_steps=2))
        loss = training(ids, torch.zeros_like(ids, dtype=torch.bool), torch.arange(16)[None])["loss"]
        loss.backward()
        assert float(loss.detach()) == 0.0


def test_a_head_of_lower_precision_than_its_features_trains() -> None:
    """FSDP's mixed precision: the weights of a forward pass are in bfloat16, and no autocast is on."""
    target = tiny_target("llama")
    ids = torch.arange(3, 19)[None]
    heads: list[DraftHead] = [
        MedusaHead(MedusaConfig(target=identity(target), has_root_input=True)),
        eagle_head(target, feature_layers=(1, 2)),
        eagle_head(target, feature_layers=(1, 2), draft_vocab_size=20, has_lm_head=False),
    ]
    for head in heads:
        training = HeadTraining(head.bfloat16(), target, LossSettings(num_steps=2))
        training(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(16)[None])["loss"].backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in head.parameters())


def test_packed_texts_train_like_texts_alone() -> None:
    target = tiny_target("llama")
    one, two = torch.arange(3, 15), torch.arange(20, 40)
    packed = torch.cat([one, two])[None]
    packed_positions = torch.cat([torch.arange(12), torch.arange(20)])[None]
    head = eagle_head(target, feature_layers=(1, 2, 3))

    def accuracies_and_loss(ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> float:
        return float(HeadTraining(head, target, LossSettings(num_steps=3))(ids, mask, positions)["loss"].detach())

    only_two = torch.cat([torch.zeros(12, dtype=torch.bool), torch.ones(20, dtype=torch.bool)])[None]
    alone = accuracies_and_loss(two[None], torch.arange(20)[None], torch.ones(1, 20, dtype=torch.bool))
    assert accuracies_and_loss(packed, packed_positions, only_two) == pytest.approx(alone, rel=1e-4)
    medusa = MedusaHead(MedusaConfig(target=identity(target)))
    states = target.hidden_states(packed, packed_positions, (FINAL,))[FINAL]
    alone_states = target.hidden_states(two[None], torch.arange(20)[None], (FINAL,))[FINAL]
    torch.testing.assert_close(states[:, 12:], alone_states, atol=1e-4, rtol=1e-4)
    ends, settings = TargetEnds.of(target), LossSettings(decay=0.8)
    batch = TrainBatch(packed, only_two, packed_positions)
    loss, _ = medusa_loss(medusa, TargetStates([states], states), ends, batch, settings)
    alone_batch = TrainBatch(two[None], torch.ones(1, 20, dtype=torch.bool), torch.arange(20)[None])
    expected, _ = medusa_loss(medusa, TargetStates([alone_states], alone_states), ends, alone_batch, settings)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


def test_training_changes_no_bit_of_the_target() -> None:
    target, _ = automaton()
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    trained_on(target, eagle_head(target), steps=3)
    for name, value in target.model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_head_comes_back_as_it_was_saved(kind: str, tmp_path: Path) -> None:
    target = tiny_target("llama")
    head = MedusaHead(MedusaConfig(target=identity(target), num_blocks=2)) if kind == "medusa" else reduced_head(target)
    head.save_pretrained(tmp_path)
    again = type(head).from_pretrained(tmp_path)
    assert again.config == head.config
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    again.config.target.check(identity(target))


def test_blocks_do_not_share_weights() -> None:
    """[H10]"""
    head = MedusaHead(MedusaConfig(target=identity(tiny_target("llama")), num_blocks=3))
    pointers = {p.data_ptr() for p in head.parameters()}
    assert len(pointers) == len(list(head.parameters())) == 4 * 3 * 2


def test_int8_storage_is_a_scale_for_each_output_channel(tmp_path: Path) -> None:
    """Matrices in 8 bits, the rest in bfloat16; a lost scale is a lost weight."""
    head = reduced_head(tiny_target("llama"))
    head.save_pretrained(tmp_path, dtype=torch.int8)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.int8 and stored["fc.weight.scale"].shape == (32, 1)
    assert stored["norm.weight"].dtype == torch.bfloat16 and stored["d2t"].dtype == torch.int64
    again = EagleHead.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in head.state_dict().items():
        step = value.abs().amax(-1, keepdim=True) / 127 if value.ndim == 2 else value.abs() / 128
        assert bool(((again.state_dict()[name] - value).abs() <= step).all()), name
    assert EagleHead.from_pretrained(tmp_path).fc.weight.dtype == torch.bfloat16
    save_file({k: v for k, v in stored.items() if k != "fc.weight.scale"}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc\.weight"):
        EagleHead.from_pretrained(tmp_path)


def test_loading_is_strict(tmp_path: Path) -> None:
    """[H11] a missing, extra or damaged weight, another type, or no head at all is one clear error."""
    target = tiny_target("llama")
    reduced_head(target).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")

    def rewrite(changed: dict[str, torch.Tensor]) -> None:
        save_file(changed, tmp_path / "model.safetensors")

    for name in ("d2t", "fc.weight", "lm_head.weight"):
        rewrite({k: v for k, v in weights.items() if k != name})
        with pytest.raises(ValueError, match=name):
            EagleHead.from_pretrained(tmp_path)
    rewrite({**weights, "extra": torch.zeros(2)})
    with pytest.raises(ValueError, match="extra"):
        EagleHead.from_pretrained(tmp_path)
    rewrite({**weights, "fc.weight": torch.full_like(weights["fc.weight"], float("nan"))})
    with pytest.raises(ValueError, match=r"fc\.weight holds values that are not finite"):
        EagleHead.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a head of type eagle, not medusa"):
        MedusaHead.from_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**record, "wings": 2}))
    with pytest.raises(ValueError, match="of a head of type eagle has unknown keys: wings$"):
        EagleHead.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="holds no head"):
        EagleHead.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        EagleHead.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("written_by", "is_newer"), [("0.0.9", False), (installed_version(), False), ("0.10.0", True), ("99", True)]
)
@pytest.mark.parametrize("place", ["head", "target"])
def test_a_key_of_a_newer_version_names_that_version(place: str, written_by: str, is_newer: bool, tmp_path: Path) -> None:
    reduced_head(tiny_target("llama")).save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["selfspec_version"] == installed_version()
    record["selfspec_version"] = written_by
    (record if place == "head" else record["target"])["wings"] = 2
    (tmp_path / "config.json").write_text(json.dumps(record))
    advice = f"; selfspec {written_by} wrote it and this is version {installed_version()}, so update selfspec"
    with pytest.raises(ValueError, match=rf"has unknown keys: wings{advice if is_newer else ''}$"):
        EagleHead.from_pretrained(tmp_path)


def test_a_key_that_the_target_lacks_is_named(tmp_path: Path) -> None:
    reduced_head(tiny_target("llama")).save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    del record["target"]["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="the target in config.json lacks keys: hidden_size"):
        EagleHead.from_pretrained(tmp_path)


@pytest.mark.skipif(not can_pack(), reason="this torch build has no packed linear layers")
def test_a_head_laid_out_for_decoding_is_not_saved(tmp_path: Path) -> None:
    """Its state has fewer weights than a head of its config, and nothing could load it."""
    head = eagle_head(tiny_target("llama"), feature_layers=(1, 2, 3))
    assert lay_out_linear_layers(head, forms=[PACKED])["packed"] > 0
    with pytest.raises(ValueError, match=r"has no fc\.weight to save \(\d+ of \d+ weights are missing\) because its layers"):
        head.save_pretrained(tmp_path / "head")
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_head_of_any_rotary_scaling_is_saved(kind: str, tmp_path: Path) -> None:
    scaling: dict[str, object] = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 64}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    head = eagle_head(tiny_target("llama"), rope_scaling=scaling)
    head.save_pretrained(tmp_path)
    assert torch.equal(EagleHead.from_pretrained(tmp_path).midlayer.self_attn.inv_freq, head.midlayer.self_attn.inv_freq)


def test_saving_draws_no_random_number(tmp_path: Path) -> None:
    """A training run that saves goes on as one that does not."""
    head = eagle_head(tiny_target("llama"))
    before = torch.get_rng_state()
    head.save_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_target_is_refused_by_name() -> None:
    ours = identity(tiny_target("llama"))
    ours.check(ours)
    with pytest.raises(ValueError, match="embedding weights differ"):
        ours.check(identity(tiny_target("llama", seed=4)))
    with pytest.raises(ValueError, match="num_layers 3; qwen2 has 2"):
        ours.check(identity(tiny_target("qwen2", num_hidden_layers=2, layer_types=["full_attention"] * 2)))
    # The same weights in another dtype are the same target.
    model = tiny_model("llama").to(torch.bfloat16)
    ours.check(TargetIdentity.of(model, None, name="bf16"))


def proposals(drafter: EagleDrafter, target: Target, monkeypatch: pytest.MonkeyPatch) -> list[CandidateTree]:
    """Every tree that it proposes for a batch of prompts, and for rows that join later."""
    trees: list[CandidateTree] = []
    propose = drafter.propose

    def recorded(batch: Batch, num_draft_tokens: int) -> Proposal:
        proposal = propose(batch, num_draft_tokens)
        # Copies, because a graph's next run overwrites what its last one gave.
        tree = proposal.tree
        copies = {name: getattr(tree, name).clone() for name in ("tokens", "parents", "depths")}
        trees.append(replace(tree, scores=None if tree.scores is None else tree.scores.clone(), **copies))
        return proposal

    monkeypatch.setattr(drafter, "propose", recorded)
    prompts, sampling = random_prompts(5, (1, 40), seed=5), SamplingParams(max_new_tokens=12, ignore_eos=True)
    generate(target, prompts, drafter=drafter, sampling=sampling, batch_size=3, use_cost_guard=False)
    return trees


@pytest.mark.parametrize("is_rehearsed", [False, True], ids=["passes", "graphs"])
@pytest.mark.parametrize(
    "changes", [{}, {"has_fc_norm": False, "feeds_normed": False}, {"has_qkv_bias": True, "has_o_bias": True}], ids=str
)
def test_a_fused_head_drafts_the_same_trees(
    changes: dict[str, object], is_rehearsed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a few launches a pass, with paths instead of ancestor masks."""
    target = tiny_target("llama")
    if is_rehearsed:
        target.passes.graphs = Graphs(target.device, is_rehearsal=True)
    head = eagle_head(target, feature_layers=(1, 2, 3), draft_vocab_size=20, has_lm_head=False, **changes).eval()
    head.initialise(target.model, torch.arange(3, 23))
    settings = {"num_draft_tokens": 4, "num_nodes": 12, "width": 3}
    plain = EagleDrafter(target, copy.deepcopy(head), **settings)
    monkeypatch.setattr("selfspec.drafters.eagle.lay_out", lambda layers, may_round: fuse(layers))
    fused = EagleDrafter(target, copy.deepcopy(head), **settings)
    assert plain._pass is None and fused._pass is not None
    theirs, ours = (proposals(drafter, target, monkeypatch) for drafter in (plain, fused))
    assert_same_trees(ours, theirs, tolerance=1e-4)


@pytest.mark.parametrize("is_rehearsed", [False, True], ids=["passes", "graphs"])
def test_features_that_waited_for_many_steps_draft_the_same_trees(
    is_rehearsed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where speculation paused, and where prompts are entered in chunks."""
    target = tiny_target("llama")
    if is_rehearsed:
        target.passes.graphs = Graphs(target.device, is_rehearsal=True)
    head = eagle_head(target, feature_layers=(1, 2, 3)).eval()
    target.passes.chunk_size = 7

    def trees_by_text(drafts_at: Callable[[int], bool]) -> dict[tuple[int, ...], tuple[list[int], list[int]]]:
        """The trees that were drafted, for each text."""
        drafter = EagleDrafter(target, copy.deepcopy(head), num_draft_tokens=3, num_nodes=8, width=2)
        propose, trees, number = drafter.propose, {}, itertools.count()

        def recorded(batch: Batch, num_draft_tokens: int) -> Proposal:
            proposal = propose(batch, 3 if drafts_at(next(number)) else 0)
            tree = proposal.tree
            # The texts on the device, because those of the host may lag behind.
            texts = [row[:size] for row, size in zip(batch.history.tolist(), batch.num_tokens.tolist(), strict=True)]
            for text, tokens, parents in zip(texts, tree.tokens.tolist(), tree.parents.tolist(), strict=True):
                if tree.num_nodes > 1:
                    trees[tuple(text)] = tokens, parents
            return proposal

        monkeypatch.setattr(drafter, "propose", recorded)
        prompts = random_prompts(5, (1, 40), seed=5)
        sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
        generate(target, prompts, drafter=drafter, sampling=sampling, batch_size=3, use_cost_guard=False)
        return trees

    always, seldom = trees_by_text(lambda step: True), trees_by_text(lambda step: step % 13 == 12)
    shared = always.keys() & seldom.keys()
    assert len(shared) > 5 and len(seldom) < len(always)
    assert {text: seldom[text] for text in shared} == {text: always[text] for text in shared}


def assert_same_trees(ours: list[CandidateTree], theirs: list[CandidateTree], *, tolerance: float) -> None:
    assert len(ours) == len(theirs) > 20
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.tokens, other.tokens) and torch.equal(mine.parents, other.parents)
        # Without drafts it is a bare root.
        assert (mine.scores is None) == (other.scores is None) == (mine.num_nodes == 1)
        if mine.scores is not None:
            torch.testing.assert_close(mine.scores, other.scores, atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def aligned() -> tuple[Target, torch.Tensor, EagleHead]:
    """An automaton, its successors, and a head that foresees it."""
    target, successor = automaton()
    head = eagle_head(target)
    trained_on(target, head, steps=150)
    return target, successor, head.eval()


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch_size", [1, 3, 40, 64])
def test_an_aligned_head_is_right_in_any_batch(
    batch_size: int,
    device: str,
    dtype: torch.dtype,
    aligned: tuple[Target, torch.Tensor, EagleHead],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """[T2] By the fused pass and by graphs, with wide trees, on either side of the rows that they are for."""
    source, successor, head = aligned
    if device == "cpu":
        monkeypatch.setattr("selfspec.drafters.eagle.lay_out", lambda layers, may_round: fuse(layers))
    target = Target(copy.deepcopy(source.model).to(device, dtype))
    target.passes.graphs = Graphs(target.device, is_rehearsal=device == "cpu")
    drafter = EagleDrafter(target, copy.deepcopy(head), num_draft_tokens=4, width=6, num_nodes=32)
    assert (drafter._pass is not None) is (device == "cpu" or dtype == torch.bfloat16)
    prompts = [text_of(successor, 3 + number % 29) for number in range(2 * batch_size)]
    got = generate(target, prompts, drafter=drafter, sampling=GREEDY, batch_size=batch_size, use_cost_guard=False)
    lengths = [completion.acceptance_length for completion in got]
    # Many rows have few nodes each on a GPU: a tree of four emits four tokens at most.
    assert sum(lengths) / len(lengths) > (4.8 if target.passes.most_nodes(batch_size) > 4 else 3.5)


@pytest.mark.parametrize("changes", [{"has_qk_norm": True}, {"norm_before_residual": True}], ids=str)
def test_other_kinds_of_heads_keep_their_own_pass(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    monkeypatch.setattr("selfspec.drafters.eagle.lay_out", lambda layers, may_round: fuse(layers))
    assert EagleDrafter(target, eagle_head(target, feature_layers=(1, 2, 3), **changes).eval())._pass is None
