"""The losses' building blocks against autograd, plain attention and the model's own logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import FAMILIES, VOCAB_SIZE, eagle_head, identity, tiny_target
from torch.nn.attention import flex_attention

from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import Eagle1Config, Eagle1Head
from selfspec.heads.early_exit import DistilledDraft, EarlyExitHead
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.model.output import LogitShape
from selfspec.model.target import FINAL, Target
from selfspec.train import cross_entropy as ce
from selfspec.train import losses, unrolled
from selfspec.train.batch import TargetEnds, TrainBatch
from selfspec.train.cross_entropy import Teacher, cross_entropy
from selfspec.train.losses import LossSettings
from selfspec.train.module import HeadTraining

SHAPES = {
    "plain": LogitShape(),
    "scaled": LogitShape(scale=0.25),
    "capped": LogitShape(cap=2.0),
    "scaled and capped": LogitShape(1.5, 3.0),
}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("chunk_logits", [1, 37 * 4, 1 << 27], ids=["row by row", "uneven chunks", "one chunk"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_cross_entropy_and_its_gradients_are_autograds(
    has_bias: bool, chunk_logits: int, shape: LogitShape, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_compiled:
        # As on a GPU, with a backend that needs no C compiler.
        step = torch.compile(ce._loss_and_gradient("cpu", shape), backend="aot_eager", dynamic=True)
        monkeypatch.setattr(ce, "_loss_and_gradient", lambda *args: step)
    monkeypatch.setattr(ce, "CHUNK_LOGITS", chunk_logits)
    torch.manual_seed(0)
    hidden = torch.randn(11, 8, requires_grad=True)
    output = torch.nn.Linear(8, 37, bias=has_bias)
    teacher, rows = torch.randn(5, 37) * 3, torch.randint(0, 5, (11,))
    leaves = [hidden, *output.parameters()]
    loss, num_hits = cross_entropy(hidden, output, teacher, rows, shape)
    (0.3 * loss).backward()
    got = [leaf.grad.clone() for leaf in leaves]  # type: ignore[union-attr]
    for leaf in leaves:
        leaf.grad = None
    logits = shape(output(hidden))
    expected = F.cross_entropy(logits, teacher[rows].softmax(-1), reduction="sum")
    (0.3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    assert int(num_hits) == int((logits.argmax(-1) == teacher[rows].argmax(-1)).sum())
    for ours, leaf in zip(got, leaves, strict=True):
        torch.testing.assert_close(ours, leaf.grad, atol=1e-5, rtol=1e-5)


# OPT does not show its last hidden state, so no head reads it.
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "opt"])
def test_the_teachers_distribution_is_the_targets(family: str) -> None:
    target = tiny_target(family)
    ids = torch.randint(3, VOCAB_SIZE, (2, 19), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(19).expand_as(ids)
    batch = TrainBatch(ids, torch.ones_like(ids, dtype=torch.bool), positions)
    final = target.hidden_states(ids, positions, (FINAL,))[FINAL]
    with torch.no_grad():
        expected = target.model(input_ids=ids, use_cache=False).logits
    draft_ids = torch.arange(2, VOCAB_SIZE, 3)
    for chosen in (None, draft_ids):
        teacher = Teacher.of(final, TargetEnds.of(target), batch, chosen)
        logits = expected if chosen is None else expected[..., chosen]
        taught = teacher.logits[teacher.index[:, 1:]].softmax(-1)
        assert (taught - logits[:, :-1].softmax(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "granite", "cohere", "gemma2"])
def test_a_head_drafts_through_the_targets_lm_head_as_the_target_does(family: str) -> None:
    """A new Medusa head repeats the target's logits, so what its loss must be is known from the model alone."""
    target = tiny_target(family)
    head = MedusaHead(MedusaConfig(target=identity(target), num_heads=1))
    ids = torch.randint(3, VOCAB_SIZE, (2, 19), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(19).expand_as(ids)
    loss = HeadTraining(head, target)(ids, torch.ones_like(ids, dtype=torch.bool), positions)["loss"]
    with torch.no_grad():
        logits = target.model(input_ids=ids, use_cache=False).logits
    # The head at position t learns the distribution of token t + 2, which the target gives at t + 1.
    expected = F.cross_entropy(logits[:, :-2].flatten(0, 1), logits[:, 1:-1].flatten(0, 1).softmax(-1), reduction="sum")
    torch.testing.assert_close(loss.detach(), expected / ids.numel(), rtol=1e-5, atol=1e-5)


def heads_of(target: Target) -> dict[str, DraftHead]:
    """Every kind of head, by whether it drafts through an output layer of its own."""
    of = {"target": identity(target)}
    layer = {"intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return {
        "medusa": MedusaHead(MedusaConfig(**of, num_heads=2)),
        "medusa, own": MedusaHead(MedusaConfig(**of, num_heads=2, has_output_layer=True)),
        "eagle": eagle_head(target, has_lm_head=False),
        "eagle, own": eagle_head(target, has_lm_head=True),
        "eagle1": Eagle1Head(Eagle1Config(**of, **layer)),
        "early exit": EarlyExitHead.for_target(identity(target), target.model, exit_layer=1, blocks=(2,)),
        "draft model": DistilledDraft.for_target(identity(target), target.model, blocks=(0,)),
    }


def test_only_the_targets_own_output_layer_has_its_logit_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("granite")
    shapes: list[LogitShape] = []

    def recorded(hidden: torch.Tensor, output: Any, logits: torch.Tensor, rows: torch.Tensor, shape: LogitShape) -> Any:
        shapes.append(shape)
        return cross_entropy(hidden, output, logits, rows, shape)

    monkeypatch.setattr(losses, "cross_entropy", recorded)
    ids = torch.arange(3, 19)[None]
    for name, head in heads_of(target).items():
        shapes.clear()
        training = HeadTraining(head, target, LossSettings(num_steps=2))
        training(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(16)[None])["loss"].backward()
        assert set(shapes) == {LogitShape() if "own" in name else LogitShape(scale=0.5)}, name


def test_a_frozen_output_layer_gets_no_gradient_and_no_rows_give_zero() -> None:
    output = torch.nn.Linear(4, 9).requires_grad_(False)
    hidden = torch.randn(3, 4, requires_grad=True)
    cross_entropy(hidden, output, torch.randn(2, 9), torch.tensor([0, 1, 1]))[0].backward()
    assert hidden.grad is not None and output.weight.grad is None
    empty = torch.randn(0, 4, requires_grad=True)
    loss, _ = cross_entropy(empty, output, torch.randn(2, 9), torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert float(loss.detach()) == 0 and empty.grad is not None


def test_the_teacher_pairs_a_token_with_the_position_that_chose_it() -> None:
    """Over the draft vocabulary only, and never across texts."""
    torch.manual_seed(0)
    final, lm_head = torch.randn(1, 6, 4), torch.nn.Linear(4, 10, bias=False)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    mask = torch.tensor([[False, True, True, True, False, True]])
    draft_ids = torch.tensor([1, 4, 7])
    batch = TrainBatch(torch.zeros_like(positions), mask, positions)
    teacher = Teacher.of(final, TargetEnds(lm_head, LogitShape(), torch.nn.Embedding(10, 4)), batch, draft_ids)
    # Token 3 opens a text: nothing in its text chose it.
    assert (teacher.index >= 0).tolist() == [[False, True, True, False, False, True]]
    for u in (1, 2, 5):
        expected = lm_head(final[0, u - 1])[draft_ids]
        torch.testing.assert_close(teacher.logits[teacher.index[0, u]], expected)
    _, time, rows = teacher.rows(batch, 2)
    assert time.tolist() == [0, 3] and rows.tolist() == teacher.index[0, [2, 5]].tolist()


def unrolled_case(device: str, num_steps: int) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Positions [B, L] of packed texts, and queries, keys and values of each step."""
    B, L, H, G, D = 2, 256, 4, 2, 16
    torch.manual_seed(0)
    positions = torch.cat([torch.arange(100), torch.arange(L - 100)]).repeat(B, 1)
    positions[1] = torch.cat([torch.arange(37), torch.arange(150), torch.arange(L - 187)])
    steps = [[torch.randn(B, heads, L, D, device=device) for heads in (H, G, G)] for _ in range(num_steps)]
    return positions.to(device), steps


def test_flex_and_plain_unrolled_attention_are_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """On packed texts. The tiles that are computed are exactly those with something visible."""
    monkeypatch.setattr(unrolled, "_flex", lambda: flex_attention.flex_attention)
    positions, steps = unrolled_case("cpu", 3)
    plain, flex = unrolled._PlainAttention(positions, 0.3), unrolled._FlexAttention(positions, 0.3, 3)
    for step in steps:
        torch.testing.assert_close(flex(*step), plain(*step), atol=1e-5, rtol=1e-4)
    B, L = positions.shape
    tiles, size = L // unrolled.BLOCK, unrolled.BLOCK
    queries, keys = torch.arange(L)[:, None], torch.arange(L * 3)
    for num_entered in (1, 2, 3):
        mask = flex._block_mask(num_entered)
        visible = torch.stack([mask.mask_mod(torch.tensor(b), torch.tensor(0), queries, keys) for b in range(B)])
        needed = visible.view(B, tiles, size, tiles * 3, size).any(-1).any(2)
        assert torch.equal(mask.to_dense()[:, 0].bool(), needed), num_entered


@pytest.mark.gpu
def test_flex_and_plain_unrolled_attention_have_the_same_gradients() -> None:
    """Compiled, as in training; on CPU flex attention has no backward pass."""
    positions, steps = unrolled_case("cuda", 3)
    leaves = [tensor.requires_grad_() for step in steps for tensor in step]
    results = []
    for attend in (unrolled._PlainAttention(positions, 0.3), unrolled._FlexAttention(positions, 0.3, 3)):
        outputs = torch.stack([attend(*step) for step in steps])
        weights = torch.linspace(-1, 1, outputs.shape[-1], device="cuda")
        results.append([outputs.detach(), *torch.autograd.grad((outputs * weights).sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_a_compiled_head_has_the_same_loss_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one graph before attention and one after it, for all steps, new texts and other lengths."""
    target = tiny_target("llama")
    head = eagle_head(target, feature_layers=(1, 2), draft_vocab_size=20, has_lm_head=False)
    head.initialise(target.model, torch.arange(3, 23))
    whole = losses.unrolled_attention
    # As on a GPU, where attention is compiled separately.
    monkeypatch.setattr(losses, "unrolled_attention", lambda *args: torch.compiler.disable(whole(*args).__call__))
    trainings = [HeadTraining(copy.deepcopy(head), target, LossSettings(num_steps=4)) for _ in range(2)]
    trainings[1].head.compile(backend="aot_eager")
    for length in (24, 24, 40):
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(3, 23, (2, length), generator=generator)
        positions = torch.cat([torch.arange(length - 9), torch.arange(9)]).expand(2, length)
        results = []
        for training in trainings:
            training.zero_grad()
            loss = training(ids, torch.ones_like(ids, dtype=torch.bool), positions)["loss"]
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in training.parameters() if p.grad is not None)])
        for plain, compiled in zip(*results, strict=True):
            torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-4)
