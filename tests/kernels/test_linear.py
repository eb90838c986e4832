"""Linear layers, and the norm and the gate that go with them: the kernel against its twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, DTYPES, HAS_CUDA, KERNEL_TOLERANCES, NEEDS_TRITON

from selfspec.kernels import linear as linear_file
from selfspec.kernels import wide_linear as wide_file
from selfspec.kernels.linear import NormedRows, launch_linear, launch_linear_before_norm
from selfspec.kernels.reference import gated_silu_reference, linear_reference, rms_norm_reference
from selfspec.kernels.rms_norm import Norm

pytestmark = NEEDS_TRITON

REAL_SHAPES = [(576, 576), (4096, 4096), (6144, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096)]


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of tile in small weights; the shipped table is for the device."""
    if not HAS_CUDA:
        tiles = [tile._replace(min_outputs=size) for tile, size in zip(linear_file.TILES, (60, 45, 30, 0), strict=True)]
        monkeypatch.setattr(linear_file, "TILES", tiles)


def test_every_tile_fits_cards_with_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """99 KiB a program, as compute capability 8.9 has, against the 227 of 9.0."""
    x = torch.zeros(256, 8, dtype=torch.bfloat16)
    for kib, largest in ((97, 64), (225, 128)):
        monkeypatch.setattr(linear_file, "shared_memory", lambda device, kib=kib: kib << 10)
        for num_outputs in (100, 3000, 6000, 30_000):
            for num_rows in (1, 16, 17, 64, 65, 256):
                tile, block_in, block_r, num_stages = linear_file._tile(x, num_outputs, num_rows)
                assert num_stages >= 2 and num_stages * (tile.block_out + block_r) * block_in * 2 <= kib << 10
                assert block_r >= min(num_rows, largest)


@pytest.mark.parametrize(("kib", "stages"), [(225, [5, 4, 4, 4]), (97, [3, 3, 2, 3]), (60, [None, None, None, None])])
def test_tiles_for_many_rows_have_the_stages_that_fit(
    kib: int, stages: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some cards have a copy engine and little shared memory, such as those of compute capability 12.0."""
    monkeypatch.setattr(wide_file, "shared_memory", lambda device: kib << 10)
    x, weight = torch.zeros(300, 64, dtype=torch.bfloat16), torch.zeros(128, 64, dtype=torch.bfloat16)
    tiles = [wide_file.tile_of(x, weight, num_parts=n, is_gated=g) for g in (False, True) for n in (1, 2)]
    assert [tile and tile.num_stages for tile in tiles] == stages


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"),
    [(1, 1), (13, 40), (33, 130), (70, 257), *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in REAL_SHAPES)],
)
def test_linear_equals_its_twin(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    """Sizes on and off the tiles in all three directions; every tile of the table."""
    for num_rows in (1, 2, 7, 16, 17, 33, 64, 65, 130):
        x, weight, bias = linear_case(num_rows, num_outputs, num_inputs, dtype)
        for operands in ((x, weight, bias), (x[None, ::2], weight)):
            out, expected = launch_linear(*operands), linear_reference(*operands)
            assert out.shape == expected.shape and out.dtype == dtype
            # A sum of 14,336 numbers in another order.
            tolerance = {"atol": 5e-5, "rtol": 1e-4} if dtype == torch.float32 else KERNEL_TOLERANCES[dtype]
            torch.testing.assert_close(out, expected, **tolerance)


def linear_case(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Outputs of unit variance."""
    generator = torch.Generator(DEVICE).manual_seed(num_rows)
    shapes = (num_rows, num_inputs), (num_outputs, num_inputs), (num_outputs,)
    x, weight, bias = (torch.randn(shape, generator=generator, dtype=dtype, device=DEVICE) for shape in shapes)
    return x, weight * num_inputs**-0.5, bias


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"),
    [(33, 300), *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in REAL_SHAPES)],
)
def test_a_row_of_linear_is_the_same_in_any_company(num_outputs: int, num_inputs: int) -> None:
    """[N1] not one bit depends on the number of rows, on the other rows, or on a row's place among them."""
    for dtype in DTYPES[1:] if num_outputs > 576 else DTYPES:
        x, weight, bias = linear_case(2048 if HAS_CUDA else 130, num_outputs, num_inputs, dtype)
        alone = torch.cat([launch_linear(row, weight, bias) for row in x[:8, None]])
        for num_rows in (2, 8, 9, 16, 17, 32, 33, 64, 65, 130, 257, 1000, 2048) if HAS_CUDA else (2, 17, 33, 65):
            for rows in (x[:num_rows], x[:num_rows].flip(0)):
                out = launch_linear(rows, weight, bias)
                out = out if rows[0].equal(x[0]) else out.flip(0)
                num_same = min(8, num_rows)
                assert torch.equal(out[:num_same], alone[:num_same]), (dtype, num_rows)


NORM_SHAPES = [(576, 1536), (4096, 14_336), (3840, 16_384)]


def norm_case(width: int, dtype: torch.dtype, **rule: Any) -> Norm:
    weight = torch.randn(width, generator=torch.Generator(DEVICE).manual_seed(2), dtype=dtype, device=DEVICE)
    return Norm.of(5 * weight, 1e-2, **rule)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(48, 136), (34, 264), (150, 40)])
def test_many_rows_are_loaded_by_the_copy_engine(num_outputs: int, num_inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of one part and of two, with and without a gate and norms, on and off the tiles in all directions."""
    monkeypatch.setattr(linear_file, "MAX_NARROW_ROWS", (1, 1))
    launches = []
    launch = linear_file.launch_wide
    monkeypatch.setattr(linear_file, "launch_wide", lambda *args, **kwargs: (launches.append(args), launch(*args, **kwargs)))
    dtype = DTYPES[1]
    for num_rows in (2, 130):
        x, weight, bias = linear_case(num_rows, num_outputs, num_inputs, dtype)
        expected = linear_reference(x, weight, bias)
        torch.testing.assert_close(launch_linear(x[None], weight, bias)[0], expected, **KERNEL_TOLERANCES[dtype])
        gated = launch_linear(x, weight, bias, is_gated=True)
        torch.testing.assert_close(gated, gated_silu_reference(expected), **KERNEL_TOLERANCES[dtype])
        norm = norm_case(num_outputs, dtype)
        residual = torch.randn_like(expected)
        normed = launch_linear_before_norm(x, weight, bias, residual, norm)
        torch.testing.assert_close(normed.hidden, expected + residual, **KERNEL_TOLERANCES[dtype])
        _, after, after_bias = linear_case(num_rows, 40, num_outputs, dtype)
        wanted = linear_reference(rms_norm_reference(normed.hidden, norm.weight, norm.eps, **norm.rule), after, after_bias)
        got = launch_linear(normed, after, after_bias)
        assert (got.float() - wanted.float()).norm() / wanted.float().norm() < 2e-2
    # Rows whose length is no multiple of 16 bytes are out of the copy engine's reach.
    assert len(launches) == 2 * (4 if num_outputs % 8 == 0 else 3)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("width", "num_inputs"),
    [(1, 1), (40, 24), (130, 33), *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in NORM_SHAPES)],
)
def test_a_norm_between_two_layers(width: int, num_inputs: int, dtype: torch.dtype) -> None:
    """The same as with a norm of its own: from a layer or from rows that no layer wrote, into a plain or a gated layer."""
    for num_rows, rule in ((1, {}), (7, {"offset": 1.0}), (17, {"is_rounded_first": True}), (130, {})):
        norm = norm_case(width, dtype, **rule)
        x, weight, bias = linear_case(num_rows, width, num_inputs, dtype)
        residual = torch.randn_like(x[:, :1].expand(-1, width))
        _, after, after_bias = linear_case(num_rows, 2 * num_inputs, width, dtype)
        normed = launch_linear_before_norm(x, weight, bias, residual, norm)
        hidden = launch_linear(x, weight, bias, residual)
        assert torch.equal(normed.hidden, hidden)
        nothing = norm.weight.new_empty(width, 0)
        begun = launch_linear_before_norm(hidden[None, :, :0], nothing, None, hidden[None], norm)
        for ours, theirs in ((begun.hidden, hidden), (begun.weighted, normed.weighted), (row_sums(begun), row_sums(normed))):
            assert torch.equal(ours.view(theirs.shape), theirs)
        middle = rms_norm_reference(hidden, norm.weight, norm.eps, **norm.rule)
        expected = linear_reference(middle, after, after_bias)
        for got, wanted in (
            (launch_linear(normed, after, after_bias), expected),
            (launch_linear(begun, after, after_bias)[0], expected),
            (launch_linear(normed, after, after_bias, is_gated=True), gated_silu_reference(expected)),
        ):
            assert got.shape == wanted.shape and got.dtype == dtype
            # The middle is rounded at another place.
            gap = (got.float() - wanted.float()).norm() / wanted.float().norm()
            assert gap < (1e-5 if dtype == torch.float32 else 2e-2), gap


def through_both(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, after: torch.Tensor, norm: Norm
) -> tuple[torch.Tensor, ...]:
    """The sum of squares, a plain layer's output for rows whose norm a layer began, a gated layer's for rows as they are."""
    normed = launch_linear_before_norm(x, weight, None, residual, norm)
    nothing = norm.weight.new_empty(len(norm.weight), 0)
    begun = launch_linear_before_norm(normed.hidden[:, :0], nothing, None, normed.hidden, norm)
    squares = row_sums(normed)
    assert torch.equal(squares, row_sums(begun))
    return squares, launch_linear(normed, after), launch_linear(begun, after, is_gated=True)


def row_sums(normed: NormedRows) -> torch.Tensor:
    """[R, 1]. Programs of many rows have more outputs. Neighbours are added first, so the sum is the same."""
    squares = normed.squares
    assert squares is not None
    while squares.shape[1] > 1:
        squares = torch.nn.functional.pad(squares, (0, squares.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)
    return squares


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize(
    ("width", "num_inputs"), [(40, 24), (130, 33), *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in NORM_SHAPES)]
)
def test_a_normed_row_is_the_same_in_any_company(width: int, num_inputs: int) -> None:
    """[N1] through both layers, and whoever began the norm."""
    for dtype in DTYPES[1:] if width > 576 else DTYPES:
        norm = norm_case(width, dtype)
        x, weight, _ = linear_case(1000 if HAS_CUDA else 65, width, num_inputs, dtype)
        residual = x[:, :1].expand(-1, width).contiguous()
        _, after, _ = linear_case(1, 2 * num_inputs, width, dtype)
        singles = [through_both(x[i, None], weight, residual[i, None], after, norm) for i in range(4)]
        alone = [torch.cat(parts) for parts in zip(*singles, strict=True)]
        for num_rows in (2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1000) if HAS_CUDA else (2, 17, 33, 65):
            together = through_both(x[:num_rows], weight, residual[:num_rows], after, norm)
            for ours, theirs in zip(together, alone, strict=True):
                assert torch.equal(ours[:4], theirs[:num_rows]), (dtype, num_rows)


def test_a_norms_divisor_holds_its_weight() -> None:
    """It is a power of two, so it rounds nothing, and half precision cannot overflow."""
    for weight, offset, divisor in (([0.1, -3.0], 0.0, 4.0), ([4.0], 0.0, 4.0), ([0.5], 1.0, 2.0), ([0.0], 0.0, 1.0)):
        assert Norm.of(torch.tensor(weight), 1e-5, offset=offset).divisor == divisor
    norm = Norm.of(torch.full((8,), 60.0, dtype=torch.float16, device=DEVICE), 1e-5)
    rows = torch.full((2, 8), 60_000.0, dtype=torch.float16, device=DEVICE)
    begun = launch_linear_before_norm(rows[:, :0], norm.weight.new_empty(8, 0), None, rows, norm)
    ones = torch.full((3, 8), 1 / 8, dtype=torch.float16, device=DEVICE)
    torch.testing.assert_close(launch_linear(begun, ones), torch.full_like(ones[:2, :3], 60.0))
