"""A grown layer, and the likeliest tokens of rows: the kernels against their twins."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import DEVICE, DTYPES, HAS_CUDA, NEEDS_TRITON

from selfspec.kernels import tree_growth as tree_growth_file
from selfspec.kernels.reference_growth import LEAST, grow_layer_reference, likeliest_reference
from selfspec.kernels.tree_growth import launch_grow_layer, launch_likeliest

pytestmark = NEEDS_TRITON

GROWTH_SIZES = [(1, 1, 1), (12, 4, 4), (33, 3, 5), (70, 6, 6)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("vocab_size", "width", "num_children"),
    [*GROWTH_SIZES, *(pytest.param(V, 10, 10, marks=pytest.mark.gpu) for V in (12_288, 128_256, 151_936))],
)
def test_a_grown_layer_is_the_twins(
    vocab_size: int, width: int, num_children: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the root and from a full beam; vocabularies on and off the chunk, with words that cannot be; other ids."""
    if not HAS_CUDA:
        monkeypatch.setattr(tree_growth_file, "BLOCK_V", 16)
    generator = torch.Generator(DEVICE).manual_seed(vocab_size)
    for num_beam, shift in ((1, 0.0), (width, 300.0 if dtype == torch.float32 else 0.0)):
        # The greatest lie half a unit apart, in another order for each node, and no two paths are equally likely: which of
        # equals comes first is another test's.
        rank = torch.rand(3, num_beam, vocab_size, generator=generator, device=DEVICE).argsort(-1).argsort(-1)
        logits = ((rank - vocab_size) * 0.5).clamp(min=-20).to(dtype) + shift
        if vocab_size > 20:
            logits[:, :, 3] = -torch.inf
        beam = torch.arange(num_beam, device=DEVICE).expand(3, num_beam) + 7
        beam_scores = -0.03 * torch.arange(num_beam, device=DEVICE).expand(3, num_beam).float()
        ids = torch.randperm(2 * vocab_size, generator=generator, device=DEVICE)[:vocab_size]
        for token_ids in (None, ids):
            arguments = {"num_children": num_children, "width": width, "first_node": 50, "depth": 3, "token_ids": token_ids}
            ours = launch_grow_layer(logits, beam, beam_scores, **arguments)
            theirs = grow_layer_reference(logits, beam, beam_scores, **arguments)
            for got, expected in zip(ours, theirs, strict=True):
                assert got.dtype == expected.dtype
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
            assert (ours[1] <= beam_scores.repeat_interleave(num_children, dim=1)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("vocab_size", "num_tokens"), [(1, 1), (33, 5), (70, 8), pytest.param(128_256, 10, marks=pytest.mark.gpu)]
)
def test_the_likeliest_are_the_twins(
    vocab_size: int, num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_CUDA:
        monkeypatch.setattr(tree_growth_file, "BLOCK_V", 16)
    generator = torch.Generator(DEVICE).manual_seed(vocab_size)
    rank = torch.rand(2, 3, vocab_size, generator=generator, device=DEVICE).argsort(-1).argsort(-1)
    logits = ((rank - vocab_size) * 0.5).clamp(min=-20).to(dtype)
    if vocab_size > 20:
        logits[:, :, 3] = torch.nan
    ours, theirs = launch_likeliest(logits, num_tokens), likeliest_reference(logits, num_tokens)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-4, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_the_likeliest_are_the_first_of_equals_and_finite() -> None:
    logits = torch.zeros(5, 40, device=DEVICE)
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[3, 1:] = -torch.inf
    logits[4, 30] = torch.inf
    tokens, log_probs = launch_likeliest(logits, 3)
    assert tokens.tolist() == [*[[0, 1, 2]] * 4, [30, 0, 1]]
    torch.testing.assert_close(log_probs[:3], torch.full_like(log_probs[:3], -math.log(40)))
    assert torch.equal(log_probs[3:].cpu(), torch.tensor([[0.0, LEAST, LEAST], [LEAST, LEAST, LEAST]]))
    torch.testing.assert_close(log_probs, likeliest_reference(logits, 3)[1])


def test_a_grown_layer_takes_the_first_of_equals() -> None:
    """Among words, among children, and where nothing can be."""
    logits = torch.zeros(1, 2, 9, device=DEVICE)
    logits[0, 1] = torch.nan
    beam = torch.tensor([[1, 2]], device=DEVICE)
    nodes, scores, next_beam, next_scores = launch_grow_layer(
        logits, beam, torch.zeros(1, 2, device=DEVICE), num_children=3, width=4, first_node=3, depth=2
    )
    assert nodes.tolist() == [[[0, 1, 2, 0, 1, 2]], [[1, 1, 1, 2, 2, 2]], [[2] * 6]]
    torch.testing.assert_close(scores, torch.full_like(scores, -math.log(9)))
    assert next_beam.tolist() == [[[3, 4, 5, 6]], [[0, 1, 2, 0]], [[0, 0, 0, 1]]]
    assert torch.equal(next_scores, scores[:, :4])


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_what_cannot_be_is_least_in_kernel_and_twin() -> None:
    """NaN and -inf among the logits, paths that cannot be already, and a width that takes them all."""
    logits = torch.arange(4 * 3 * 9, device=DEVICE).remainder(17).view(4, 3, 9).float()
    logits[0, 0, 1:] = -torch.inf
    logits[0, 1, 2:7] = torch.nan
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[3, 0, 4] = -3.3e38
    logits[3, 1, 4] = torch.inf
    beam = torch.arange(3, device=DEVICE).expand(4, 3)
    beam_scores = torch.tensor([0.0, -1.0, LEAST], device=DEVICE).expand(4, 3)
    logits[0, 2, 1:] = -torch.inf
    arguments = {"num_children": 5, "width": 15, "first_node": 40, "depth": 3}
    results = [grow(logits, beam, beam_scores, **arguments) for grow in (launch_grow_layer, grow_layer_reference)]
    for nodes, scores, next_beam, next_scores in results:
        assert (scores >= LEAST).all() and (next_scores >= LEAST).all()
        # Every child is in the next beam, once.
        assert torch.equal(next_beam[0].sort(1).values, torch.arange(40, 55, device=DEVICE).expand(4, 15))
        assert torch.equal(next_scores, scores.gather(1, next_beam[0] - 40))
        assert torch.equal(next_beam[1], nodes[0].gather(1, next_beam[0] - 40))
    (nodes, scores, _, next_scores), (twin_nodes, twin_scores, _, twin_next_scores) = results
    torch.testing.assert_close(scores, twin_scores, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(next_scores, twin_next_scores, atol=1e-4, rtol=1e-5)
    assert torch.equal(nodes[1:], twin_nodes[1:])
    # Which of several equal ones the twin takes is torch's choice.
    is_first = torch.zeros_like(scores, dtype=torch.bool)
    is_first[0, 0], is_first[0, 5:9], is_first[3, :5] = True, True, True
    assert torch.equal(nodes[0][is_first], twin_nodes[0][is_first])
