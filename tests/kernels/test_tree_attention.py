"""Tree attention on CPU and by the kernel against their twin, and the twin against code that shares nothing with it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    BLOCK_SIZE,
    DEVICE,
    DTYPES,
    FLOAT32,
    HEADS,
    KERNEL_TOLERANCES,
    LENGTHS,
    NEEDS_TRITON,
    PARENTS,
    SMALL_HEADS,
    TOLERANCES,
    Case,
    make_case,
    make_splits_small,
    random_parents,
)
from strategies import PROPERTY, parent_lists, path_to

from selfspec.kernels import tree_attention as tree_attention_file
from selfspec.kernels.tree_attention import Tile, launch_tree_attention
from selfspec.kernels.tree_layout import TreeLayout


def attend_along_paths(
    case: Case, *, sliding_window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention of every node as the last token of an ordinary sequence, prefix and path; float64, by key."""
    B, H, N, _ = case.query.shape
    _, G, Dv = case.value_cache.shape
    out = torch.zeros(B, N, H, Dv, dtype=torch.float64)
    for b, length in enumerate(case.layout.host_lengths):
        for i in range(N):
            path = path_to(case.parents[b], i)
            sequence = [*range(length), *(length + node for node in path)]
            if sliding_window is not None:
                sequence = sequence[-sliding_window:]
            slots = [case.slot(b, index) for index in sequence]
            for h in range(H):
                query = case.query[b, h, i].double()
                scores = [float(query @ case.key_cache[slot, h * G // H].double()) * case.scaling for slot in slots]
                if softcap is not None:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                weights = [math.exp(score) for score in scores]
                total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[h])))
                for weight, slot in zip(weights, slots, strict=True):
                    out[b, i, h] += weight / total * case.value_cache[slot, h * G // H].double()
    return out


@pytest.mark.parametrize("options", [{}, {"sliding_window": 1}, {"sliding_window": 4}, {"sliding_window": 9}], ids=str)
@pytest.mark.parametrize("tree", PARENTS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_reference_is_causal_attention_along_each_nodes_path(lengths: str, tree: str, options: dict[str, int]) -> None:
    """[K3] siblings never see each other; [K4] the window is crossed inside the prefix, at its end and in the tree."""
    rows = LENGTHS[lengths]
    case = make_case([PARENTS[tree]] * len(rows), rows, (2, 1, 8, 5))
    expected = attend_along_paths(case, **options).float()
    torch.testing.assert_close(case.run_reference(**options), expected, **FLOAT32)


@pytest.mark.parametrize("heads", HEADS)
def test_reference_caps_scores_and_adds_sinks_to_the_denominator(heads: str) -> None:
    H = HEADS[heads][0]
    case = make_case([PARENTS["random"], PARENTS["random"]], [3, 10], HEADS[heads])
    sinks = torch.linspace(-1.0, 2.0, H)
    for options in ({"softcap": 0.8}, {"sinks": sinks}, {"softcap": 1.5, "sinks": sinks, "sliding_window": 5}):
        expected = attend_along_paths(case, **options).float()  # type: ignore[arg-type]
        torch.testing.assert_close(case.run_reference(**options), expected, **FLOAT32)
        torch.testing.assert_close(case.run(**options), expected, **FLOAT32)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tree", PARENTS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_tree_attention_equals_its_reference(lengths: str, tree: str, heads: str, dtype: torch.dtype) -> None:
    """Over consecutive and scattered blocks; what no row owns is NaN and must not be read."""
    rows = LENGTHS[lengths]
    for is_scattered in (False, True):
        case = make_case([PARENTS[tree]] * len(rows), rows, HEADS[heads], dtype=dtype, is_scattered=is_scattered)
        for window in (None, 1, 3, 8):
            out = case.run(sliding_window=window)
            expected = case.run_reference(sliding_window=window)
            assert out.shape == (len(rows), len(PARENTS[tree]), HEADS[heads][0], HEADS[heads][3])
            assert out.dtype == dtype and out.isfinite().all()
            torch.testing.assert_close(out, expected, **TOLERANCES[dtype])


@PROPERTY
@given(
    parent_lists(min_nodes=9, max_nodes=9),
    parent_lists(min_nodes=9, max_nodes=9),
    st.integers(0, 18),
    st.integers(1, 14),
)
def test_tree_attention_equals_its_reference_on_random_trees(
    first: list[int], second: list[int], length: int, window: int
) -> None:
    """[K4] two rows with trees of their own; one may lie wholly inside the window while the other does not."""
    case = make_case([first, second], [length, 2], seed=length)
    for sliding_window in (None, window):
        expected = case.run_reference(sliding_window=sliding_window)
        torch.testing.assert_close(case.run(sliding_window=sliding_window), expected, **FLOAT32)


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["fused", "reference"])
@pytest.mark.parametrize("tree", PARENTS)
def test_a_tree_key_reaches_its_own_node_and_descendants_only(tree: str, softcap: float | None) -> None:
    """[K3] changing one node's key and value changes, bit for bit, nothing at a node that does not descend from it."""
    parents = PARENTS[tree]
    case = make_case([parents], [6])
    before = case.run(softcap=softcap)
    for changed in range(len(parents)):
        slot = case.slot(0, 6 + changed)
        kept = case.key_cache[slot].clone(), case.value_cache[slot].clone()
        case.key_cache[slot] += 3.0
        case.value_cache[slot] -= 50.0
        after = case.run(softcap=softcap)
        for node in range(len(parents)):
            is_seen = changed in path_to(parents, node)
            assert torch.equal(before[0, node], after[0, node]) != is_seen, (changed, node)
        case.key_cache[slot], case.value_cache[slot] = kept


def test_one_layout_serves_layers_of_different_windows() -> None:
    """[K4] masks are cached for a pass: a sliding layer's must not be a full layer's."""
    case = make_case([PARENTS["chain"]], [12])
    outs = {window: case.run(sliding_window=window) for window in (None, 2, 15, None, 2)}
    for window, out in outs.items():
        torch.testing.assert_close(out, case.run_reference(sliding_window=window), **FLOAT32)
    assert not torch.allclose(outs[None], outs[2])


@pytest.fixture
def _small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    make_splits_small(monkeypatch)


def assert_equals_twin(case: Case, **options: object) -> None:
    out = case.run_kernel(**options)
    expected = case.run_reference(**options)
    assert out.shape == expected.shape and out.dtype == expected.dtype
    if case.layout.is_chain:
        # Of a chain's padding only finiteness is promised.
        assert out.isfinite().all()
        is_real = case.layout.depths == torch.arange(out.shape[1], device=DEVICE)
        out, expected = out[is_real], expected[is_real]
    torch.testing.assert_close(out, expected, **KERNEL_TOLERANCES[case.query.dtype])


@NEEDS_TRITON
@pytest.mark.usefixtures("_small_splits")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tree", PARENTS)
@pytest.mark.parametrize("lengths", [[0, 21], [31], [90]], ids=str)
def test_tree_attention_equals_its_twin(lengths: list[int], tree: str, dtype: torch.dtype) -> None:
    """[K3] on, before and after the ends of tiles and splits; slots that no row owns are NaN."""
    case = make_case([PARENTS[tree]] * len(lengths), lengths, SMALL_HEADS["grouped"], dtype=dtype, device=DEVICE)
    assert_equals_twin(case)


@NEEDS_TRITON
@pytest.mark.usefixtures("_small_splits")
@pytest.mark.parametrize("parents", [PARENTS["root"], PARENTS["chain"], [-1, 0, 1, 2, -1, -1]], ids=str)
def test_a_chain_needs_no_path(parents: list[int]) -> None:
    case = make_case([parents, parents], [28, 61], SMALL_HEADS["grouped"], is_chain=True, device=DEVICE)
    for window in (None, 3, 40):
        assert_equals_twin(case, sliding_window=window)


@NEEDS_TRITON
@pytest.mark.usefixtures("_small_splits")
@pytest.mark.parametrize("heads", SMALL_HEADS)
def test_windows_caps_and_sinks(heads: str) -> None:
    """[K4] a window may begin in the tree, in an earlier tile or in an earlier split, at its end or inside."""
    case = make_case([PARENTS["random"]], [62], SMALL_HEADS[heads], device=DEVICE)
    sinks = torch.linspace(-1.0, 2.0, SMALL_HEADS[heads][0], device=DEVICE)
    for window in (1, 2, 20, 31, 32, 65):
        assert_equals_twin(case, sliding_window=window)
    assert_equals_twin(case, softcap=0.8)
    assert_equals_twin(case, softcap=1.5, sinks=sinks.bfloat16(), sliding_window=33)


@NEEDS_TRITON
@pytest.mark.usefixtures("_small_splits")
def test_more_query_heads_than_a_tile_has_rows() -> None:
    case = make_case([PARENTS["padded"][:4]], [30], (40, 2, 16, 16), device=DEVICE)
    assert_equals_twin(case)


@NEEDS_TRITON
@pytest.mark.usefixtures("_small_splits")
def test_the_newest_nodes_of_a_growing_tree_attend_alone() -> None:
    """A drafter's pass queries the last N of M stored nodes."""
    whole = make_case([PARENTS["random"]] * 2, [3, 40], SMALL_HEADS["grouped"], device=DEVICE)
    expected = whole.run_kernel()
    layout = whole.layout
    newest = TreeLayout(
        layout.block_tables,
        layout.lengths,
        layout.host_lengths,
        layout.depths,
        layout.ancestor_mask[:, -4:],
        layout.block_size,
    )
    # The lengths are unknown on the host where a graph is captured; the blocks bound them.
    newest.host_lengths = None
    out = launch_tree_attention(whole.query[:, :, -4:], whole.key_cache, whole.value_cache, newest, whole.scaling)
    assert torch.equal(out, expected[:, -4:])


@NEEDS_TRITON
def test_the_shipped_tiles() -> None:
    """The constants that the other tests make small, past a split's end."""
    parents = [-1, 0, 0, 1, 1]
    for dtype in DTYPES:
        assert_equals_twin(make_case([parents], [254], (2, 1, 80, 64), dtype=dtype, device=DEVICE))


@NEEDS_TRITON
@pytest.mark.usefixtures("_small_splits")
@pytest.mark.parametrize("heads", SMALL_HEADS)
@pytest.mark.parametrize("many_programs", [1, 1000])
def test_a_long_chain_has_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch, heads: str, many_programs: int) -> None:
    """Both of its tiles, on and off the ends of splits; windows that begin in the prefix, in the chain, and in both."""
    monkeypatch.setattr(tree_attention_file, "MIN_CHAIN_NODES", 30)
    monkeypatch.setattr(tree_attention_file, "MANY_PROGRAMS", many_programs)
    choose, tiles = tree_attention_file._chain_tile, []

    def note(*args: object) -> Tile:
        tiles.append(choose(*args))
        return tiles[-1]

    monkeypatch.setattr(tree_attention_file, "_chain_tile", note)
    rows = [[-1, *range(size - 1), *[-1] * (45 - size)] for size in (45, 30)]
    case = make_case(rows, [0, 61], SMALL_HEADS[heads], dtype=DTYPES[1], is_chain=True, device=DEVICE)
    sinks = torch.linspace(-1.0, 2.0, SMALL_HEADS[heads][0], device=DEVICE)
    for options in ({}, {"sliding_window": 5}, {"sliding_window": 50, "softcap": 1.5, "sinks": sinks}):
        assert_equals_twin(case, **options)
    assert {tile.rows for tile in tiles} == {64 if many_programs == 1 else 32}


@NEEDS_TRITON
@pytest.mark.usefixtures("_small_splits")
@pytest.mark.parametrize("tree", PARENTS)
def test_a_node_gets_in_the_tree_what_it_gets_alone(tree: str) -> None:
    """[N1] the order of every sum, in the interpreter's arithmetic; the device's has a test of its own."""
    case = make_case([PARENTS[tree]] * 2, [29, 104], SMALL_HEADS["grouped"], device=DEVICE)
    for window in (None, 41):
        out = case.run_kernel(sliding_window=window)
        for row in range(2):
            for node in range(len(PARENTS[tree])):
                assert torch.equal(out[row, node], case.run_kernel_alone(row, node, sliding_window=window)), (row, node)


@NEEDS_TRITON
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8, 128, 128), (9, 3, 64, 64)], ids=str)
@pytest.mark.parametrize("num_nodes", [1, 2, 5, 16, 33, 64])
@pytest.mark.parametrize("kind", ["chain", "star", "random"])
def test_bits_do_not_depend_on_speculation(kind: str, num_nodes: int, heads: tuple[int, int, int, int]) -> None:
    """[N1] bfloat16: a row alone and committed, and the same row in trees, chains and batches: not one bit differs."""
    num_bits = 0
    for lengths in ([1], [63], [192], [255], [256, 1000, 3, 511], [5000, 4095, 4096, 700]):
        if kind == "random":
            rows = [random_parents(num_nodes, seed) for seed in range(len(lengths))]
        else:
            rows = [[-1, *((i if kind == "chain" else 0) for i in range(num_nodes - 1))]] * len(lengths)
        for is_chain in {False, kind == "chain"}:
            case = make_case(rows, lengths, heads, dtype=torch.bfloat16, is_chain=is_chain, device=DEVICE)
            for options in ({}, {"sliding_window": 300, "softcap": 20.0}):
                out = case.run_kernel(**options)
                for row in range(len(lengths)):
                    for node in {0, 1, num_nodes // 2, num_nodes - 2, num_nodes - 1} & set(range(num_nodes)):
                        expected = case.run_kernel_alone(row, node, **options)
                        num_bits += int((out[row, node].view(torch.int16) != expected.view(torch.int16)).sum())
    assert num_bits == 0


@NEEDS_TRITON
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(30, 10, 128, 128), (9, 3, 64, 64), (8, 8, 80, 80), (4, 2, 256, 256)], ids=str)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """[N1] a chunk of any size, and the tokens one by one: not one bit differs, whichever kernel runs."""
    for length, num_nodes in ((0, 128), (700, 300), (5000, 2048)):
        case = make_case([[-1, *range(num_nodes - 1)]], [length], heads, dtype=dtype, is_chain=True, device=DEVICE)
        for options in ({}, {"sliding_window": 300, "softcap": 20.0}):
            out = case.run_kernel(**options)
            for node in (0, 1, 63, 64, 127, num_nodes // 2, num_nodes - 1):
                alone = case.run_kernel_alone(0, node, **options)
                assert torch.equal(out[0, node].view(torch.int16), alone.view(torch.int16)), (length, node, options)


@NEEDS_TRITON
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KERNEL_TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "heads",
    [
        (32, 8, 128, 128),
        (9, 3, 64, 64),
        (8, 8, 80, 80),
        (16, 4, 96, 96),
        (4, 1, 192, 128),
        (4, 2, 256, 256),
        (71, 1, 64, 64),
    ],
    ids=str,
)
def test_tree_attention_equals_its_twin_at_real_sizes(heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    for lengths, num_nodes in (([32_000], 64), ([1, 300, 2047, 2048], 16), ([4096], 128)):
        rows = [random_parents(num_nodes, seed) for seed in range(len(lengths))]
        case = make_case(rows, lengths, heads, dtype=dtype, device=DEVICE)
        for options in ({}, {"sliding_window": 1024}, {"softcap": 5.0}):
            assert_equals_twin(case, **options)
    rows = [[-1, *range(511)]]
    assert_equals_twin(make_case(rows, [700], heads, dtype=dtype, is_chain=True, device=DEVICE))


@NEEDS_TRITON
@pytest.mark.gpu
def test_a_captured_pass_serves_longer_prefixes() -> None:
    """The grid is fixed by the blocks a row may have; lengths and tables change under the graph."""
    longer, shorter = (make_case([PARENTS["random"]], [length], (8, 2, 64, 64), device=DEVICE) for length in (900, 40))
    table = longer.layout.block_tables.clone()
    layout = TreeLayout(
        table,
        longer.layout.lengths.clone(),
        None,
        longer.layout.depths,
        longer.layout.ancestor_mask,
        BLOCK_SIZE,
        max_depth=longer.layout.max_depth,
    )
    keys, values, query = longer.key_cache.clone(), longer.value_cache.clone(), longer.query.clone()

    def attend() -> torch.Tensor:
        layout.__dict__.pop("path_slots", None)
        return launch_tree_attention(query, keys, values, layout, longer.scaling)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for case in (shorter, longer):
        table[:, : case.layout.block_tables.shape[1]] = case.layout.block_tables
        layout.lengths.copy_(case.layout.lengths)
        keys[: len(case.key_cache)] = case.key_cache
        values[: len(case.value_cache)] = case.value_cache
        query.copy_(case.query)
        graph.replay()
        torch.testing.assert_close(out, case.run_reference(), **KERNEL_TOLERANCES[torch.float32])
