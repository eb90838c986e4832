"""The losses' building blocks against what autograd and plain attention give."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support import eagle_head, tiny_target
from torch.nn.attention import flex_attention

from selfspec.train import cross_entropy as ce
from selfspec.train import losses, unrolled
from selfspec.train.cross_entropy import Teacher, cross_entropy
from selfspec.train.module import HeadTraining


@pytest.mark.parametrize("chunk_logits", [1, 37 * 4, 1 << 27], ids=["row by row", "uneven chunks", "one chunk"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_cross_entropy_and_its_gradients_are_autograds(
    has_bias: bool, chunk_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ce, "CHUNK_LOGITS", chunk_logits)
    torch.manual_seed(0)
    hidden = torch.randn(11, 8, requires_grad=True)
    output = torch.nn.Linear(8, 37, bias=has_bias)
    teacher, rows = torch.randn(5, 37) * 3, torch.randint(0, 5, (11,))
    leaves = [hidden, *output.parameters()]
    loss, num_hits = cross_entropy(hidden, output, teacher, rows)
    (0.3 * loss).backward()
    got = [leaf.grad.clone() for leaf in leaves]  # type: ignore[union-attr]
    for leaf in leaves:
        leaf.grad = None
    logits = output(hidden)
    expected = F.cross_entropy(logits, teacher[rows].softmax(-1), reduction="sum")
    (0.3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    assert int(num_hits) == int((logits.argmax(-1) == teacher[rows].argmax(-1)).sum())
    for ours, leaf in zip(got, leaves, strict=True):
        torch.testing.assert_close(ours, leaf.grad, atol=1e-5, rtol=1e-5)


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
    """[H6] over the draft vocabulary only, and never across texts."""
    torch.manual_seed(0)
    final, lm_head = torch.randn(1, 6, 4), torch.nn.Linear(4, 10, bias=False)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    mask = torch.tensor([[False, True, True, True, False, True]])
    draft_ids = torch.tensor([1, 4, 7])
    teacher = Teacher.of(final, lm_head, mask, positions, draft_ids)
    # Token 3 opens a text: nothing in its text chose it.
    assert (teacher.index >= 0).tolist() == [[False, True, True, False, False, True]]
    for u in (1, 2, 5):
        expected = lm_head(final[0, u - 1])[draft_ids]
        torch.testing.assert_close(teacher.logits[teacher.index[0, u]], expected)
    batch, time, rows = teacher.rows(mask, positions, 2)
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
    """On packed texts; and the tiles that are computed are those that hold something visible."""
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
    """In one graph up to attention and one behind it, for all steps, with new texts and other lengths."""
    target = tiny_target("llama")
    head = eagle_head(target, feature_layers=(1, 2), draft_vocab_size=20, has_lm_head=False)
    head.initialise(target.model, torch.arange(3, 23))
    whole = losses.unrolled_attention
    # As on a GPU, where attention is compiled for itself.
    monkeypatch.setattr(losses, "unrolled_attention", lambda *args: torch.compiler.disable(whole(*args).__call__))
    trainings = [HeadTraining(copy.deepcopy(head), target, num_steps=4) for _ in range(2)]
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
