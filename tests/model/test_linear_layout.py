"""How a CPU's linear layers are held: right products and weights in every form, the fastest form, one copy of each."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from support import tiny_model
from torch import nn

from selfspec.model import half_linear
from selfspec.model.half_linear import GROUP, MAX_STRAYS, HalfLinear, can_halve, padded, row_counts
from selfspec.model.linear_layout import (
    HALF,
    NUM_COPIES,
    NUM_REPEATS,
    PACKED,
    PLAIN,
    ROUNDED,
    ROWS,
    Layout,
    lay_out_linear_layers,
    layouts,
    rank,
    ranking,
    time_forms,
)
from selfspec.model.load import lay_out
from selfspec.model.packed_linear import can_pack
from selfspec.model.stored_linear import StoredLinear

# Sums of a few hundred float32 products, added in another order.
TOLERANCE = 1e-5

halves = pytest.mark.skipif(not can_halve(), reason="this torch build has no float16 weights for float32 products")
packs = pytest.mark.skipif(not can_pack(), reason="this torch build has no oneDNN packed linear layers")
FORMS = [
    pytest.param(HALF, marks=halves, id="half"),
    pytest.param(PACKED, marks=packs, id="packed"),
    pytest.param(PLAIN, id="plain"),
]


def plain_layer(
    num_inputs: int, num_outputs: int, *, has_bias: bool = False, dtype: torch.dtype = torch.bfloat16
) -> nn.Linear:
    """A float32 layer whose weights are numbers of `dtype`, of the size that trained ones have."""
    generator = torch.Generator().manual_seed(num_inputs + num_outputs)
    layer = nn.Linear(num_inputs, num_outputs, bias=has_bias).requires_grad_(False)
    layer.weight.copy_((0.03 * torch.randn(num_outputs, num_inputs, generator=generator)).to(dtype))
    return layer


def rows_of(num_rows: int, width: int) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(num_rows))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [(64, 48), (600, 33), (7, 1)])
def test_every_form_gives_the_plain_products_and_weight(form: Layout, has_bias: bool, size: tuple[int, int]) -> None:
    plain = plain_layer(*size, has_bias=has_bias)
    layer = form.build(plain, None)
    assert layer is not None
    for shape in [(1,), (3,), (2, 5), (1, 9), (250,)]:
        x = rows_of(torch.Size(shape).numel(), size[0]).view(*shape, size[0])
        torch.testing.assert_close(layer(x), plain(x), atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(layer.weight, plain.weight)


@halves
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 14, 31, 32, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP + 2])
def test_a_rows_bits_do_not_depend_on_the_other_rows(count: int) -> None:
    layer = HalfLinear.of(plain_layer(576, 40, has_bias=True))
    assert layer is not None
    x = rows_of(3 * GROUP, 576)
    expected = layer(x)
    assert torch.equal(layer(x[:count]), expected[:count])
    assert torch.equal(layer(x[5 : 5 + count]), expected[5 : 5 + count])


@halves
def test_numbers_of_rows_that_sum_in_another_order_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors without AVX-512, where one and two rows do."""
    real = torch.ops.quantized.linear_dynamic_fp16.default

    def multiply(x: torch.Tensor, packed: object) -> torch.Tensor:
        out = real(x, packed)
        return out * (1 + 1e-6) if len(x) % GROUP in (1, 2, 7) else out

    row_counts.cache_clear()
    try:
        monkeypatch.setattr(half_linear, "multiply", multiply)
        assert [padded(n) for n in (1, 2, 3, 6, 7, 8, GROUP, GROUP + 1, 3 * GROUP + 7)] == [
            3, 3, 3, 6, 8, 8, GROUP, GROUP + 3, 3 * GROUP + 8,
        ]  # fmt: skip
        layer = HalfLinear.of(plain_layer(576, 40))
        assert layer is not None
        x = rows_of(2 * GROUP, 576)
        for count in (1, 2, 7, GROUP + 1):
            assert torch.equal(layer(x[:count]), layer(x)[:count])
    finally:
        row_counts.cache_clear()


@halves
def test_small_weights_are_kept_by_a_larger_exponent_and_stray_ones_one_by_one() -> None:
    plain = plain_layer(64, 48, has_bias=True)
    # A float16 has no bits left for the first; the second is too small at every exponent that the largest weight allows.
    plain.weight[0, 0], plain.weight[1, 1], plain.weight[2, 2] = 1.5 * 2**-20 + 2**-26, 1.25 * 2**-60, 1.5
    layer = HalfLinear.of(plain)
    assert layer is not None and torch.equal(layer.weight, plain.weight)
    x = torch.zeros(2, 64)
    x[0, 0] = x[1, 1] = 2.0**30
    torch.testing.assert_close(layer(x), plain(x), atol=0, rtol=1e-6)
    assert torch.equal(layer(x[1:]), layer(x)[1:])


@halves
def test_weights_of_32_bits_are_not_halved_unless_they_may_be_rounded() -> None:
    plain = plain_layer(64, 48, dtype=torch.float32)
    assert 64 * 48 > MAX_STRAYS and HALF.build(plain, None) is None
    rounded = ROUNDED.build(plain, None)
    assert rounded is not None
    torch.testing.assert_close(rounded.weight, plain.weight, rtol=2**-11, atol=0)
    for value in (0.0, torch.inf, torch.nan):
        plain.weight.fill_(value)
        assert HALF.build(plain, None) is None


@halves
def test_only_large_drafters_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = nn.Sequential(plain_layer(64, 48, dtype=torch.float32))
    weight = draft[0].weight.clone()
    assert "half" not in lay_out_linear_layers(draft, may_round=True) and torch.equal(draft[0].weight, weight)
    monkeypatch.setattr("selfspec.model.linear_layout.MIN_TIMED_BYTES", 1)
    monkeypatch.setattr("selfspec.model.linear_layout.ranking", lambda sizes, forms, num_threads: {sizes[0]: forms})
    assert "half" not in lay_out_linear_layers(nn.Sequential(plain_layer(64, 48, dtype=torch.float32)))
    draft = nn.Sequential(plain_layer(64, 48, dtype=torch.float32))
    assert lay_out_linear_layers(draft, may_round=True) == {"half": 1}


@packs
def test_a_layer_that_the_best_form_cannot_hold_gets_the_next_one() -> None:
    model = nn.Sequential(plain_layer(64, 48), plain_layer(64, 48, dtype=torch.float32))
    before = [layer.weight.clone() for layer in model]
    assert lay_out_linear_layers(model, forms=[HALF, PACKED]) == ({"half": 1, "packed": 1} if can_halve() else {"packed": 2})
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(model, before, strict=True))


class Clock:
    """Time that passes only while layers run, so much for each form."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def slow_form(clock: Clock, name: str, seconds: Callable[[int, int], float]) -> Layout:
    """A form that takes seconds(size of the weight, rows)."""

    class Slow(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.size = linear.weight.numel()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock.now += seconds(self.size, len(x))
            return x

    return Layout(name, lambda linear, table: Slow(linear), 1.0)


def test_forms_are_timed_by_size_and_rows_and_noise_is_left_out() -> None:
    clock = Clock()
    # Other work slows the first round.
    noise: Iterator[float] = iter([100.0] * 2 * NUM_COPIES * len(ROWS) + [0.0] * 1000)
    calm = slow_form(clock, "calm", lambda size, rows: size * rows)
    noisy = slow_form(clock, "noisy", lambda size, rows: 1.0 + next(noise))
    times = time_forms([(8, 4), (4, 2)], [calm, noisy], clock)
    assert times[8, 4]["calm"] == [NUM_COPIES * 32 * rows for rows in ROWS]
    assert times[4, 2]["calm"] == [NUM_COPIES * 8 * rows for rows in ROWS]
    assert times[8, 4]["noisy"] == times[4, 2]["noisy"] == [NUM_COPIES] * len(ROWS)
    assert NUM_REPEATS >= 2


def test_the_fastest_form_is_taken_and_a_preferred_one_within_its_margin() -> None:
    forms = [HALF, PACKED, PLAIN]

    def best(half: float, packed: float, plain: float) -> str:
        return rank({"half": [half] * 3, "packed": [packed] * 3, "plain": [plain] * 3}, forms)[0].name

    assert best(1, 1, 1) == "half" and best(1.2, 1, 1) == "half" and best(1.3, 1, 1.2) == "packed"
    assert best(3, 1.05, 1) == "packed" and best(3, 1.2, 1) == "plain"
    # No number of rows counts more than another, although more rows take longer.
    times = {"half": [3.0, 3.0, 50.0], "packed": [9.0, 9.0, 49.0], "plain": [9.0, 9.0, 49.0]}
    assert rank(times, forms)[0] is HALF


@packs
def test_each_machine_is_timed_once_and_small_models_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def timed(
        sizes: tuple[tuple[int, int], ...], forms: tuple[Layout, ...]
    ) -> dict[tuple[int, int], dict[str, list[float]]]:
        calls.append(sizes)
        return {size: {form.name: [1.0 + (form is not PLAIN)] * 3 for form in forms} for size in sizes}

    monkeypatch.setattr("selfspec.model.linear_layout.time_forms", timed)
    ranking.cache_clear()
    try:
        for _ in range(2):
            model = nn.Sequential(plain_layer(64, 48), plain_layer(64, 48))
            assert lay_out_linear_layers(model, forms=[PACKED, PLAIN]) == {"packed": 2}
        assert not calls
        monkeypatch.setattr("selfspec.model.linear_layout.MIN_TIMED_BYTES", 1)
        for _ in range(2):
            model = nn.Sequential(plain_layer(64, 48), plain_layer(64, 48), plain_layer(48, 64))
            assert lay_out_linear_layers(model, forms=[PACKED, PLAIN]) == {"plain": 3}
        assert calls == [((64, 48), (48, 64))]
    finally:
        ranking.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_plain_weight_stays_beside_a_form(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype).float()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weights = [weakref.ref(linear.weight) for linear in linears]
    num_weights = sum(linear.weight.numel() for linear in linears)
    del linears
    lay_out(model)
    gc.collect()
    if layouts()[0] is PLAIN:
        pytest.skip("this machine has plain layers only")
    assert all(weight() is None for weight in weights)
    forms = [module for module in model.modules() if isinstance(module, StoredLinear)]
    size = 2 if can_halve() and dtype == torch.bfloat16 else 4
    assert sum(form.num_bytes for form in forms) == size * num_weights
