"""Prompt lookup: the kernels against the twin, which the drafters' tests compare with a naive search."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, HAS_CUDA, NEEDS_TRITON

from selfspec.kernels import ngram_lookup as ngram_lookup_file
from selfspec.kernels.ngram_lookup import launch_ngram_lookup
from selfspec.kernels.reference import ngram_lookup_reference

pytestmark = NEEDS_TRITON


@pytest.mark.parametrize("max_match", [1, 3, 8])
@pytest.mark.parametrize(
    "width", [1, 2, 15, 40, 70, 200, *(pytest.param(C, marks=pytest.mark.gpu) for C in (16_384, 131_072))]
)
def test_a_lookup_is_the_twins(width: int, max_match: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of every length, empty ones too, in rows of any order; more blocks than programs; what is left after an end."""
    if not HAS_CUDA:
        monkeypatch.setattr(ngram_lookup_file, "BLOCK_T", 16)
        monkeypatch.setattr(ngram_lookup_file, "MAX_PARTS", 3)
    generator = torch.Generator().manual_seed(width)
    all_rows = (None, torch.arange(6).roll(2).to(DEVICE), torch.tensor([4, 2, 2, 1, 1, 0]).to(DEVICE))
    for vocab_size, rows, num_drafts in zip((2, 12, 1 << 40), all_rows, (7, 5, 1), strict=True):
        # As wide as the texts, but a part of wider rows.
        history = torch.randint(0, vocab_size, (6, width + 3), generator=generator)[:, :width].to(DEVICE)
        history[1] = history[1, 0]
        history[2, width // 2 :] = history[2, : width - width // 2].clone()
        num_tokens = torch.tensor([0, 1, min(2, width), width - 1, width, width // 2 + 1]).to(DEVICE)
        arguments = (history, rows, num_tokens, num_drafts, max_match)
        for got, expected in zip(launch_ngram_lookup(*arguments), ngram_lookup_reference(*arguments), strict=True):
            assert got.dtype == expected.dtype and torch.equal(got, expected)


def test_a_lookup_prefers_length_to_place() -> None:
    """A long match at the beginning to a short one near the end, in the programs' parts of a text and among them."""
    history = torch.arange(100, 4100)[None].repeat(2, 1)
    history[:, 5:9] = history[:, -4:]
    history[0, 3000:3003] = history[0, -3:]
    history[1, 3000:3004] = history[1, -4:]
    drafts, matched = launch_ngram_lookup(history.to(DEVICE), None, torch.tensor([4000, 4000]).to(DEVICE), 2, 8)
    assert matched.tolist() == [4, 4]
    assert drafts.tolist() == [[109, 110], [3104, 3105]]


@pytest.mark.gpu
def test_a_lookup_runs_in_a_graph() -> None:
    """And follows what the tensors hold when the graph runs, empty texts included."""
    history = torch.randint(0, 50, (4, 20_000), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rows, num_tokens = torch.tensor([3, 1, 0], device=DEVICE), torch.tensor([9, 20_000, 0], device=DEVICE)
    launch_ngram_lookup(history, rows, num_tokens, 15, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts, matched = launch_ngram_lookup(history, rows, num_tokens, 15, 8)
    for lengths in ([15_000, 0, 2_000], [0, 0, 0], [400, 20_000, 1]):
        num_tokens.copy_(torch.tensor(lengths))
        graph.replay()
        expected_drafts, expected_matched = ngram_lookup_reference(history, rows, num_tokens, 15, 8)
        assert torch.equal(drafts, expected_drafts) and torch.equal(matched, expected_matched)
