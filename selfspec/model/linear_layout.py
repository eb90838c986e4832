"""Lays the linear layers of a model on a CPU out for prefill, draft and verify, each in the form that is fastest there.

Which form that is depends on the processor, the threads and the layer's shape. So a layer of each shape is timed in every
form that can hold it, with the numbers of rows that decoding multiplies. A layer has one form for all numbers of rows, so
each weight is held once.

Invariant: every layer gives its plain weight back bit for bit, except where weights may be rounded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from selfspec.model import threads
from selfspec.model.half_linear import HalfLinear, can_halve
from selfspec.model.memory import Releases, release_free_memory
from selfspec.model.packed_linear import PackedLinear, can_pack
from selfspec.model.shared_input import is_plain

# The numbers of rows that are timed: plain decoding's, and those of small trees and of larger ones.
ROWS = (1, 4, 8)
# Weights of each shape that are timed in turn, because decoding finds no weight in the processor's cache.
NUM_COPIES = 2
# The least of so many times counts, because other work on the machine only adds to them.
NUM_REPEATS = 3
# Of a larger weight only the first rows are timed.
MAX_TIMED_BYTES = 4 << 20
# Smaller models fit into a processor's cache, and their layers' times say little.
MIN_TIMED_BYTES = 32 << 20


@dataclass(frozen=True)
class Layout:
    """One form that a linear layer may have.

    Attributes:
        build: the layer in this form, from a plain one and the 16-bit table that shares its weight; None where the form
            cannot hold the weight.
        margin: a form with a margin of m comes before one with a margin of n that is less than m / n times faster.
    """

    name: str
    build: Callable[[nn.Linear, torch.Tensor | None], nn.Module | None]
    margin: float


# The more memory a form saves, and the more it promises of a row's bits, the larger its margin.
PACKED = Layout("packed", PackedLinear, 1.1)
PLAIN = Layout("plain", lambda linear, table: linear, 1.0)
HALF = Layout("half", HalfLinear.of, 1.4)
ROUNDED = Layout("half", lambda linear, table: HalfLinear.of(linear, table, may_round=True), 1.4)

# The inputs and outputs of a layer.
Size = tuple[int, int]


def layouts(*, may_round: bool = False) -> tuple[Layout, ...]:
    """The forms that this machine has, the preferred one first.

    Args:
        may_round: float16 may round weights. This is for drafters alone, because a draft cannot change the text.
    """
    half = ROUNDED if may_round else HALF
    return (*([half] if can_halve() else []), *([PACKED] if can_pack() else []), PLAIN)


def lay_out_linear_layers(
    model: nn.Module,
    tables: Mapping[int, torch.Tensor] | None = None,
    *,
    may_round: bool = False,
    forms: Sequence[Layout] | None = None,
) -> Counter[str]:
    """Replace every plain float32 `nn.Linear` on the CPU by its fastest form, in place.

    Args:
        tables: 16-bit tables by the `id` of a weight that a layer may share, from `compact_embeddings`.
        may_round: see `layouts`; the weights of a small model are never rounded, because nothing would be gained.
        forms: to choose from, the preferred one first; by default all that this machine has.

    Returns:
        How many layers have each form, by its name.
    """
    # Names and not the layers themselves, because a list of layers would keep every plain weight until the last is replaced.
    places = [(parent, name) for parent in model.modules() for name, child in parent.named_children() if is_plain(child)]
    sizes = [_size(parent.get_submodule(name)) for parent, name in places]
    is_large = sum(torch.float32.itemsize * width * height for width, height in sizes) >= MIN_TIMED_BYTES
    forms = tuple(forms or layouts(may_round=may_round and is_large))
    distinct = tuple(dict.fromkeys(sizes))
    if is_large and not may_round:
        # The target decides, and its drafters follow.
        choose_num_threads(distinct, forms[0])
    ranked = ranking(distinct, forms, torch.get_num_threads()) if is_large else {}
    counts: Counter[str] = Counter()
    releases = Releases()
    # The LM head, which is often the largest, comes last, when the others have given back what they freed.
    for (parent, name), size in reversed(list(zip(places, sizes, strict=True))):
        linear: Any = parent.get_submodule(name)
        form = _replace(parent, name, linear, ranked.get(size, forms), (tables or {}).get(id(linear.weight)))
        counts[form] += 1
        num_bytes = linear.weight.nbytes
        del linear
        releases.note(num_bytes)
    release_free_memory()
    return counts


def _replace(parent: nn.Module, name: str, linear: nn.Linear, forms: Sequence[Layout], table: torch.Tensor | None) -> str:
    """Give a layer the first form that can hold it; returns the form's name."""
    for form in forms:
        if (layer := form.build(linear, table)) is not None:
            setattr(parent, name, layer)
            return form.name
    return PLAIN.name


@cache
def choose_num_threads(sizes: tuple[Size, ...], form: Layout) -> None:
    """Let torch use the number of threads that is fastest for these sizes; see `threads` for when."""
    layers = samples(sizes, [form]) if threads.are_free() else {}
    threads.settle(lambda: sum(time_samples(layers).values()))


@cache
def ranking(sizes: tuple[Size, ...], forms: tuple[Layout, ...], num_threads: int) -> dict[Size, list[Layout]]:
    """For each size of layer the forms, the best one first, as measured once in this process with so many threads."""
    return {size: rank(times, forms) for size, times in time_forms(sizes, forms).items()}


def rank(times: Mapping[str, Sequence[float]], forms: Iterable[Layout]) -> list[Layout]:
    """The forms in the order of their cost, the cheapest first.

    A form's cost is the sum, over the numbers of rows, of its time relative to the fastest form's, divided by its margin.

    Args:
        times: by the form's name, the seconds for each number of rows.
    """
    fastest = [min(of) for of in zip(*times.values(), strict=True)]

    def cost(form: Layout) -> float:
        relative = sum(own / least for own, least in zip(times[form.name], fastest, strict=True))
        return relative / form.margin

    return sorted(forms, key=cost)


# By size, form and copy.
Samples = dict[tuple[Size, str, int], nn.Module]


def time_forms(
    sizes: Sequence[Size], forms: Sequence[Layout], clock: Callable[[], float] = time.perf_counter
) -> dict[Size, dict[str, list[float]]]:
    """For each size of layer, and each form by name, the seconds that products take with each of `ROWS` rows."""
    least = time_samples(samples(sizes, forms), clock)
    copies = range(NUM_COPIES)
    return {
        size: {form.name: [sum(least[size, form.name, copy, n] for copy in copies) for n in ROWS] for form in forms}
        for size in sizes
    }


def samples(sizes: Sequence[Size], forms: Sequence[Layout]) -> Samples:
    """Layers of each size in each form, to be timed."""
    layers: Samples = {}
    for copy in range(NUM_COPIES):
        for size in sizes:
            plain = _sample(size)
            for form in forms:
                layer = form.build(plain, None)
                assert layer is not None, "every form holds a half"
                layers[size, form.name, copy] = layer
    return layers


def time_samples(layers: Samples, clock: Callable[[], float] = time.perf_counter) -> dict[tuple[Size, str, int, int], float]:
    """The seconds of each layer's product with each of `ROWS` rows.

    All are timed in turn, so that a slow spell of the machine meets all of them, and so that no weight is still in the
    processor's cache when its turn comes again.
    """
    inputs = {(size[0], num_rows): torch.ones(num_rows, size[0]) for size, _, _ in layers for num_rows in ROWS}
    least: dict[tuple[Size, str, int, int], float] = {}
    with torch.inference_mode():
        for _ in range(NUM_REPEATS):
            for num_rows in ROWS:
                for key, layer in layers.items():
                    x = inputs[key[0][0], num_rows]
                    start = clock()
                    layer(x)
                    seconds = clock() - start
                    least[*key, num_rows] = min(seconds, least.get((*key, num_rows), seconds))
    return least


def _sample(size: Size) -> nn.Linear:
    """A plain layer of this size, or of its first outputs."""
    num_inputs, num_outputs = size
    most = max(MAX_TIMED_BYTES // (torch.float32.itemsize * num_inputs), 1)
    layer = nn.Linear(num_inputs, min(num_outputs, most), bias=False, device="meta")
    layer.weight = nn.Parameter(torch.full(layer.weight.shape, 0.5), requires_grad=False)
    return layer


def _size(linear: Any) -> Size:
    return linear.in_features, linear.out_features
