"""Draws: the kernel against its twin, and its noise against torch's."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, DTYPES, KERNEL_TOLERANCES, NEEDS_TRITON

from selfspec.kernels import row_sample as row_sample_file
from selfspec.kernels.jit import jit, tl
from selfspec.kernels.noise import Stream, gumbel, uniform
from selfspec.kernels.reference import row_sample_reference
from selfspec.kernels.row_sample import launch_row_sample

pytestmark = NEEDS_TRITON


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, and several parts of a row, in small vocabularies."""
    monkeypatch.setattr(row_sample_file, "BLOCK_V", 64)
    monkeypatch.setattr(row_sample_file, "BLOCK_ROW", 128)


@jit()
def _noise_kernel(keys_ptr, positions_ptr, out_ptr, SIZE, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    state = row_sample_file._noise_state(tl.load(keys_ptr + row), tl.load(positions_ptr + row))
    tl.store(out_ptr + row * SIZE + offs, row_sample_file._gumbel(state, offs), mask=offs < SIZE)


def test_noise_is_the_torch_functions() -> None:
    """Equal integers; the logarithms may round differently in the last place."""
    keys = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63), 987654321], device=DEVICE)
    positions = torch.tensor([0, 1, 131_071, 77, 5, 2**31], device=DEVICE)
    out = torch.empty(6, 5000, device=DEVICE)
    _noise_kernel[(6,)](keys, positions, out, 5000, BLOCK=8192)
    expected = gumbel(keys, positions, Stream.TARGET, 5000)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    # No two of these numbers share a logarithm's rounding: order is as fine a test of the integers as there is.
    assert torch.equal(out.argmax(1), uniform(keys, positions, Stream.TARGET, 5000).argmin(1))


# top-k, temperature, top-p, min-p. The first is greedy, so its filters must be ignored.
LAWS = [
    (3, 0.0, 0.5, 0.3),
    (0, 0.8, 1.0, 0.0),
    (1, 1.0, 1.0, 0.0),
    (7, 1.0, 1.0, 0.0),
    (0, 1.0, 0.9, 0.0),
    (0, 2.0, 0.3, 0.0),
    (0, 1.0, 1e-4, 0.0),
    (0, 0.7, 1.0, 0.2),
    (0, 3.0, 1.0, 1.0),
    (20, 0.8, 0.9, 0.05),
    (5, 1.5, 0.6, 0.0),
    (10**6, 0.9, 0.7, 0.1),
]


def laws_of(rows: list[tuple[int, float, float, float]], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**62), 2**62, (len(rows),), generator=generator)
    num_tokens = torch.randint(1, 5000, (len(rows),), generator=generator)
    integers = torch.stack([keys, num_tokens, torch.tensor([row[0] for row in rows])], dim=1)
    return integers.to(DEVICE), torch.tensor([row[1:] for row in rows]).to(DEVICE)


def sample_logits(kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(shape[2])) * 2
    if kind == "ties":
        logits = logits.round()
        logits[:, 0] = 1.5
    elif kind == "mostly impossible":
        logits[:, :, 5:] = -torch.inf
        logits[:, -1, :-1] = -torch.inf
        logits[:, -1, -1] = 0.5
    elif kind == "peaked":
        logits[:, :, shape[2] // 2] = 30.0
    return logits.to(DEVICE, dtype)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("kind", ["spread", "ties", "mostly impossible", "peaked"])
@pytest.mark.parametrize("vocab_size", [1, 128, 301])
def test_row_sample_equals_its_twin(vocab_size: int, kind: str) -> None:
    """All laws in one batch, vocabularies on and off the chunks, equal logits, tokens that may not be chosen."""
    for dtype in DTYPES:
        logits = sample_logits(kind, (len(LAWS), 2, vocab_size), dtype)
        depths = torch.tensor([[0, 3]] * len(LAWS), device=DEVICE)
        arguments = (logits, depths, *laws_of(LAWS, seed=vocab_size))
        tokens, is_valid = launch_row_sample(*arguments)
        expected_tokens, expected_valid = row_sample_reference(*arguments)
        assert torch.equal(tokens, expected_tokens) and torch.equal(is_valid, expected_valid)
        assert is_valid.all() and torch.equal(tokens[0], logits[0].argmax(-1))


@pytest.mark.usefixtures("_small_chunks")
def test_row_sample_tells_unsound_rows() -> None:
    """They get what `row_argmax` gives, whatever their law."""
    logits = torch.randn(len(LAWS), 4, 70).to(DEVICE)
    logits[:, 0, 66] = torch.nan
    logits[:, 1, [3, 69]] = torch.inf
    logits[:, 2] = -torch.inf
    logits[:, 3, 68] = -torch.inf
    depths = torch.zeros(len(LAWS), 4, dtype=torch.int64, device=DEVICE)
    tokens, is_valid = launch_row_sample(logits, depths, *laws_of(LAWS, seed=0))
    assert tokens[:, :3].tolist() == [[66, 3, 0]] * len(LAWS)
    assert is_valid.tolist() == [[False, False, False, True]] * len(LAWS)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.usefixtures("_small_chunks")
def test_row_sample_ends_where_numbers_overflow() -> None:
    """A temperature so small that every score is infinite: some token with a finite logit, in time."""
    rows = [(0, 1e-39, 0.5, 0.1), (2, 1e-44, 0.5, 0.5), (0, 1e-39, 1.0, 0.3)]
    for sign in (1, -1):
        logits = sign * torch.arange(1.0, 71.0).expand(3, 1, 70).to(DEVICE)
        tokens, is_valid = launch_row_sample(logits, torch.zeros(3, 1, dtype=torch.int64, device=DEVICE), *laws_of(rows, 1))
        assert is_valid.all() and (tokens >= 0).all() and (tokens < 70).all()


@pytest.mark.usefixtures("_small_chunks")
def test_a_node_draws_in_the_tree_what_it_draws_alone() -> None:
    logits = sample_logits("spread", (len(LAWS), 3, 150), DTYPES[1])
    depths = torch.tensor([[0, 1, 1]] * len(LAWS), device=DEVICE)
    integers, fractions = laws_of(LAWS, seed=3)
    tokens, _ = launch_row_sample(logits, depths, integers, fractions)
    for row in range(0, len(LAWS), 3):
        at = slice(row, row + 1)
        for node in (0, 2):
            alone, _ = launch_row_sample(
                logits[at, node : node + 1], depths[at, node : node + 1], integers[at], fractions[at]
            )
            assert alone.item() == tokens[row, node]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KERNEL_TOLERANCES, ids=str)
@pytest.mark.parametrize("vocab_size", [32_000, 128_256, 151_936, 262_144])
def test_row_sample_equals_its_twin_at_real_sizes(vocab_size: int, dtype: torch.dtype) -> None:
    """Up to rounding at a filter's edge, and of scores that are nearly equal: one in a thousand at most."""
    num_wrong, num_tokens = 0, 0
    for kind in ("spread", "ties", "mostly impossible", "peaked"):
        for seed in range(8):
            logits = sample_logits(kind, (len(LAWS), 16, vocab_size), dtype) * (0.5 + seed)
            depths = torch.arange(16, device=DEVICE).expand(len(LAWS), 16)
            arguments = (logits, depths, *laws_of(LAWS, seed=seed))
            tokens, is_valid = launch_row_sample(*arguments)
            num_wrong += int((tokens != row_sample_reference(*arguments)[0]).sum())
            num_tokens += tokens.numel()
            assert is_valid.all()
    assert num_wrong <= num_tokens / 1000, (num_wrong, num_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draws_do_not_depend_on_speculation(dtype: torch.dtype) -> None:
    """A node alone, in trees and in batches: the same token, every time."""
    logits = sample_logits("spread", (len(LAWS), 24, 128_256), dtype)
    depths = torch.arange(24, device=DEVICE).expand(len(LAWS), 24)
    integers, fractions = laws_of(LAWS, seed=1)
    tokens, _ = launch_row_sample(logits, depths, integers, fractions)
    for _ in range(20):
        assert torch.equal(launch_row_sample(logits, depths, integers, fractions)[0], tokens)
    for row in range(len(LAWS)):
        at = slice(row, row + 1)
        for nodes in (slice(0, 1), slice(5, 12), slice(7, 24)):
            alone, _ = launch_row_sample(logits[at, nodes], depths[at, nodes], integers[at], fractions[at])
            assert torch.equal(alone, tokens[at, nodes])


@pytest.mark.gpu
def test_a_captured_choice_serves_other_laws() -> None:
    """Nothing of the rows' settings is part of the graph."""
    logits = sample_logits("spread", (len(LAWS), 4, 128_256), torch.bfloat16)
    depths = torch.arange(4, device=DEVICE).expand(len(LAWS), 4)
    integers, fractions = laws_of(LAWS, seed=1)
    launch_row_sample(logits, depths, integers, fractions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, is_valid = launch_row_sample(logits, depths, integers, fractions)
    for seed in (2, 3):
        others = laws_of(LAWS[seed:] + LAWS[:seed], seed)
        integers.copy_(others[0])
        fractions.copy_(others[1])
        graph.replay()
        assert is_valid.all() and torch.equal(tokens, launch_row_sample(logits, depths, *others)[0])
