"""Triton kernels against their twins: compiled where there is a CUDA device, elsewhere in Triton's interpreter.

The interpreter shows the logic, not the device's rounding: the tests marked `gpu` add real sizes, and equality of bits.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_cases import BLOCK_SIZE, PARENTS, Case, make_case
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from selfspec.kernels import linear as linear_file
from selfspec.kernels import row_sample as row_sample_file
from selfspec.kernels import tree_attention as tree_attention_file
from selfspec.kernels import tree_growth as tree_growth_file
from selfspec.kernels.gated_activation import BLOCK_F, launch_gated_silu
from selfspec.kernels.jit import jit, tl
from selfspec.kernels.kv_compaction import MAX_PATH, launch_kv_compaction
from selfspec.kernels.linear import launch_linear, launch_linear_before_norm
from selfspec.kernels.noise import Stream, gumbel, uniform
from selfspec.kernels.reference import (
    gated_silu_reference,
    grow_layer_reference,
    kv_compaction_reference,
    linear_reference,
    rms_norm_reference,
    rotary_store_reference,
    row_argmax_reference,
    row_sample_reference,
    tree_accept_reference,
)
from selfspec.kernels.rms_norm import Norm, launch_rms_norm
from selfspec.kernels.rotary import launch_rotary_store
from selfspec.kernels.row_argmax import BLOCK_V, launch_row_argmax
from selfspec.kernels.row_sample import launch_row_sample
from selfspec.kernels.tree_accept import launch_tree_accept
from selfspec.kernels.tree_attention import Tile, TreeLayout, launch_tree_attention
from selfspec.kernels.tree_growth import launch_grow_layer
from selfspec.tree import from_parents

pytest.importorskip("triton", reason="Triton is not installed")
HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
pytestmark = pytest.mark.skipif(
    not HAS_CUDA and os.environ.get("TRITON_INTERPRET") != "1",
    reason="no CUDA device, and TRITON_INTERPRET=1 was not set before triton was imported",
)

# In float32 the exponentials of two libraries differ in the last place and long sums add up in another order. Low precision
# rounds the probabilities and the output, 11 bits and 8, of values of unit variance.
TOLERANCES = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-4},
    torch.float16: {"atol": 3e-3, "rtol": 3e-3},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}
# The interpreter multiplies bfloat16's bit patterns as integers.
DTYPES = [torch.float32, torch.bfloat16 if HAS_CUDA else torch.float16]
# Query heads, key-value heads, key dim, value dim. In the interpreter a program takes milliseconds.
SMALL_HEADS = {"multi-head": (2, 2, 16, 16), "grouped": (3, 1, 8, 8), "unequal": (4, 2, 12, 5)}


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """`torch.empty` comes filled with NaN or the greatest integer: what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=DEVICE).new_empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many splits and tiles in short texts."""
    monkeypatch.setattr(tree_attention_file, "SPLIT", 32)
    for name, rows in (("TILE", 16), ("FLOAT32_TILE", 16), ("BATCH_TILE", 32)):
        monkeypatch.setattr(tree_attention_file, name, Tile(rows, 16, 4, 2))
    monkeypatch.setattr(tree_attention_file, "BLOCK_P", 2)
    monkeypatch.setattr(tree_attention_file, "MAX_NODES", 5)


def assert_equals_twin(case: Case, **options: object) -> None:
    out = case.run_kernel(**options)
    expected = case.run_reference(**options)
    assert out.shape == expected.shape and out.dtype == expected.dtype
    if case.layout.is_chain:
        # Of a chain's padding only finiteness is promised.
        assert out.isfinite().all()
        is_real = case.layout.depths == torch.arange(out.shape[1], device=DEVICE)
        out, expected = out[is_real], expected[is_real]
    torch.testing.assert_close(out, expected, **TOLERANCES[case.query.dtype])


@pytest.mark.usefixtures("_small_splits")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tree", PARENTS)
@pytest.mark.parametrize("lengths", [[0, 21], [31], [90]], ids=str)
def test_tree_attention_equals_its_twin(lengths: list[int], tree: str, dtype: torch.dtype) -> None:
    """[K3] on, before and behind the ends of tiles and splits; slots that no row owns are NaN."""
    case = make_case([PARENTS[tree]] * len(lengths), lengths, SMALL_HEADS["grouped"], dtype=dtype, device=DEVICE)
    assert_equals_twin(case)


@pytest.mark.usefixtures("_small_splits")
@pytest.mark.parametrize("parents", [PARENTS["root"], PARENTS["chain"], [-1, 0, 1, 2, -1, -1]], ids=str)
def test_a_chain_needs_no_path(parents: list[int]) -> None:
    case = make_case([parents, parents], [28, 61], SMALL_HEADS["grouped"], is_chain=True, device=DEVICE)
    for window in (None, 3, 40):
        assert_equals_twin(case, sliding_window=window)


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


@pytest.mark.usefixtures("_small_splits")
def test_more_query_heads_than_a_tile_has_rows() -> None:
    case = make_case([PARENTS["padded"][:4]], [30], (40, 2, 16, 16), device=DEVICE)
    assert_equals_twin(case)


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


def test_the_shipped_tiles() -> None:
    """The constants that the other tests make small, past a split's end."""
    parents = [-1, 0, 0, 1, 1]
    for dtype in DTYPES:
        assert_equals_twin(make_case([parents], [254], (2, 1, 80, 64), dtype=dtype, device=DEVICE))


@pytest.mark.usefixtures("_small_splits")
def test_a_large_batch_has_a_tile_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention_file, "MAX_ROWS", 10)
    case = make_case([PARENTS["chain"]] * 2, [29, 104], SMALL_HEADS["grouped"], dtype=DTYPES[1], device=DEVICE)
    assert case.run_kernel().shape[:2].numel() > 10
    assert_equals_twin(case)


def random_parents(num_nodes: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [-1, *(draw.randrange(max(0, i - 8), i) for i in range(1, num_nodes))]


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
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
        torch.testing.assert_close(out, case.run_reference(), **TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("H", "G", "D"), [(2, 2, 8), (9, 3, 16), (4, 1, 20)])
def test_rotary_store_equals_its_twin(H: int, G: int, D: int, dtype: torch.dtype) -> None:
    """And the twin is what transformers does; one row of angles serves several texts, or each has its own."""
    generator = torch.Generator().manual_seed(H)
    B, N = 2, 3
    qkv = torch.randn(B, N, (H + 2 * G) * D, generator=generator).to(DEVICE, dtype)
    slots = torch.tensor([4, 0, 7, 2, 9, 5], device=DEVICE)
    for rows, rule in ((1, None), (B, None), (1, {}), (B, {"is_rounded_first": True}), (1, {"offset": 1.0})):
        angles = torch.randn(rows, N, D // 2, generator=generator).to(DEVICE).repeat(1, 1, 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        weights = torch.randn(2, D, generator=generator).to(DEVICE, dtype)
        norms = None if rule is None else tuple(Norm.of(weight, 1e-2, **rule) for weight in weights)
        results = []
        for run in (launch_rotary_store, rotary_store_reference):
            keys, values = torch.full((2, 11, G, D), torch.nan, dtype=dtype, device=DEVICE)
            results.append((run(qkv, cos, sin, slots, keys, values, norms), keys, values))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True, **TOLERANCES[dtype])
        assert int(results[0][1].isnan().sum()) == 5 * G * D
        query, key, value = (each.unflatten(2, (-1, D)) for each in qkv.split([H * D, G * D, G * D], dim=2))
        if rule is not None:
            query, key = (
                rms_norm_reference(x, weight, 1e-2, **rule) for x, weight in zip((query, key), weights, strict=True)
            )
        query, key = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
        assert torch.equal(results[1][0], query)
        assert torch.equal(results[1][1][slots], key.flatten(0, 1)) and torch.equal(
            results[1][2][slots], value.flatten(0, 1)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path_length", [1, 2, 5, 17])
def test_compaction_equals_its_twin(path_length: int, dtype: torch.dtype) -> None:
    """[K2] two rows of a batch, ascending paths whose destinations are other nodes' sources, layers and odd widths."""
    generator = torch.Generator().manual_seed(path_length)
    num_nodes = 2 * path_length
    for G, D, Dv in ((1, 5, 3), (3, 20, 8)):
        keys = torch.randn(3, 4 + 2 * num_nodes, G, D, generator=generator).to(DEVICE, dtype)
        values = torch.randn(3, 4 + 2 * num_nodes, G, Dv, generator=generator).to(DEVICE, dtype)
        first = torch.tensor([[2], [2 + num_nodes]])
        nodes = torch.rand(2, num_nodes, generator=generator).argsort(1)[:, :path_length].sort(1).values
        source, target = (first + nodes).to(DEVICE), (first + torch.arange(path_length)).to(DEVICE)
        # The end of a shorter path: its last move is named again.
        source[1, path_length // 2 :], target[1, path_length // 2 :] = (
            source[1, path_length // 2],
            target[1, path_length // 2],
        )
        expected_keys, expected_values = keys.clone(), values.clone()
        kv_compaction_reference(expected_keys, expected_values, source, target)
        launch_kv_compaction(keys, values, source, target)
        assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)


@pytest.mark.gpu
@pytest.mark.parametrize("path_length", [2, 9, 64, MAX_PATH])
def test_compaction_reads_everything_first(path_length: int) -> None:
    """[K2] every destination but the first is another node's source, repeatedly: a race would show."""
    keys, values = torch.randn(2, 8, 600, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    source = torch.arange(101, 101 + path_length, device=DEVICE)
    expected_keys, expected_values = keys.clone(), values.clone()
    for _ in range(200):
        kv_compaction_reference(expected_keys, expected_values, source, source - 1)
        launch_kv_compaction(keys, values, source, source - 1)
    assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 33, 130])
def test_tree_accept_equals_its_twin(num_nodes: int) -> None:
    """[K7] equal siblings, padding anywhere, more depth in the shape than in the trees."""
    generator = torch.Generator().manual_seed(num_nodes)
    parents = torch.tensor([random_parents(num_nodes, seed) for seed in range(3)])
    is_leaf = ~(parents[:, :, None] == torch.arange(num_nodes)).any(1)
    is_padding = is_leaf & (torch.rand(3, num_nodes, generator=generator) < 0.3) & (torch.arange(num_nodes) > 0)
    tokens = torch.randint(0, 2, (3, num_nodes), generator=generator).masked_fill(is_padding, -1)
    tree = from_parents(tokens, parents.masked_fill(is_padding, -1))
    for round in range(8):
        chosen = torch.randint(-1, 2, (3, num_nodes), generator=generator)
        # Padding must be told by its token as well as by its parent.
        arguments = (tokens, tree.parents if round % 2 else parents, chosen)
        for max_depth in (num_nodes, tree.max_depth):
            path, num_accepted = launch_tree_accept(*(x.to(DEVICE) for x in arguments), max_depth)
            expected_path, expected_num = tree_accept_reference(*arguments, max_depth)
            assert torch.equal(path.cpu(), expected_path)
            assert torch.equal(num_accepted.cpu(), expected_num)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 33, BLOCK_V, BLOCK_V + 1, pytest.param(128_256, marks=pytest.mark.gpu)])
def test_row_argmax_equals_its_twin(vocab_size: int, dtype: torch.dtype) -> None:
    """The first of equal greatest logits, in one chunk or two; a NaN or an infinity anywhere is told."""
    logits = torch.randn(2, 5, vocab_size).to(dtype)
    logits[0, 0] = 1.0
    logits[0, 1] = -torch.inf
    logits[0, 2, [vocab_size // 2, -1]] = 9.0
    logits[0, 3, -1] = torch.nan
    logits[0, 4, vocab_size // 3] = torch.inf
    logits[1, 0, 0] = -torch.inf
    logits[1, 1] = torch.nan
    logits = logits.to(DEVICE)
    for rows in (logits, logits[:, 1], logits[0, ::2]):
        best, is_valid = launch_row_argmax(rows)
        expected_best, expected_valid = row_argmax_reference(rows)
        assert torch.equal(best, expected_best) and torch.equal(is_valid, expected_valid)
    assert torch.equal(is_valid, logits[0, ::2].amax(-1).isfinite())


def test_row_argmax_is_torchs_where_rows_are_sound() -> None:
    logits = torch.randint(0, 9, (7, 300), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(row_argmax_reference(logits)[0], logits.argmax(-1))


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
        monkeypatch.setattr(linear_file, "_shared_memory", lambda device, kib=kib: kib << 10)
        for num_outputs in (100, 3000, 6000, 30_000):
            for num_rows in (1, 16, 17, 64, 65, 256):
                tile, block_in, block_r, num_stages = linear_file._tile(x, num_outputs, num_rows)
                assert num_stages >= 2 and num_stages * (tile.block_out + block_r) * block_in * 2 <= kib << 10
                assert block_r >= min(num_rows, largest)


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
            tolerance = {"atol": 5e-5, "rtol": 1e-4} if dtype == torch.float32 else TOLERANCES[dtype]
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
        x, weight, bias = linear_case(130, num_outputs, num_inputs, dtype)
        alone = torch.cat([launch_linear(row, weight, bias) for row in x[:8, None]])
        for num_rows in (2, 8, 9, 16, 17, 32, 33, 64, 65, 130) if HAS_CUDA else (2, 17, 33, 65):
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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("width", "num_inputs"),
    [(1, 1), (40, 24), (130, 33), *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in NORM_SHAPES)],
)
def test_a_norm_between_two_layers(width: int, num_inputs: int, dtype: torch.dtype) -> None:
    """From a layer, and from rows that no layer wrote, into a plain and into a gated layer: as with a norm of its own."""
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
        for ours, theirs in ((begun.hidden, hidden), (begun.weighted, normed.weighted), (begun.squares, normed.squares)):
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
    """The sum of squares, and what a plain and a gated layer make of rows whose norm a layer began, or nobody."""
    normed = launch_linear_before_norm(x, weight, None, residual, norm)
    nothing = norm.weight.new_empty(len(norm.weight), 0)
    begun = launch_linear_before_norm(normed.hidden[:, :0], nothing, None, normed.hidden, norm)
    assert normed.squares is not None and begun.squares is not None and torch.equal(normed.squares, begun.squares)
    squares = normed.squares
    # Programs of many rows have twice the outputs; neighbours are added first, so that it is one sum.
    while squares.shape[1] > 1:
        squares = torch.nn.functional.pad(squares, (0, squares.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)
    return squares, launch_linear(normed, after), launch_linear(begun, after, is_gated=True)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize(
    ("width", "num_inputs"), [(40, 24), (130, 33), *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in NORM_SHAPES)]
)
def test_a_normed_row_is_the_same_in_any_company(width: int, num_inputs: int) -> None:
    """[N1] through both layers, and whoever began the norm."""
    for dtype in DTYPES[1:] if width > 576 else DTYPES:
        norm = norm_case(width, dtype)
        x, weight, _ = linear_case(256, width, num_inputs, dtype)
        residual = x[:, :1].expand(-1, width).contiguous()
        _, after, _ = linear_case(256, 2 * num_inputs, width, dtype)
        singles = [through_both(x[i, None], weight, residual[i, None], after, norm) for i in range(4)]
        alone = [torch.cat(parts) for parts in zip(*singles, strict=True)]
        for num_rows in (2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256) if HAS_CUDA else (2, 17, 33, 65):
            together = through_both(x[:num_rows], weight, residual[:num_rows], after, norm)
            for ours, theirs in zip(together, alone, strict=True):
                assert torch.equal(ours[:4], theirs[:num_rows]), (dtype, num_rows)


def test_a_norms_divisor_holds_its_weight() -> None:
    """A power of two, so that it rounds nothing, and half precision cannot overflow."""
    for weight, offset, divisor in (([0.1, -3.0], 0.0, 4.0), ([4.0], 0.0, 4.0), ([0.5], 1.0, 2.0), ([0.0], 0.0, 1.0)):
        assert Norm.of(torch.tensor(weight), 1e-5, offset=offset).divisor == divisor
    norm = Norm.of(torch.full((8,), 60.0, dtype=torch.float16, device=DEVICE), 1e-5)
    rows = torch.full((2, 8), 60_000.0, dtype=torch.float16, device=DEVICE)
    begun = launch_linear_before_norm(rows[:, :0], norm.weight.new_empty(8, 0), None, rows, norm)
    ones = torch.full((3, 8), 1 / 8, dtype=torch.float16, device=DEVICE)
    torch.testing.assert_close(launch_linear(begun, ones), torch.full_like(ones[:2, :3], 60.0))


RMS_NORM_RULES = [{}, {"is_rounded_first": True}, {"offset": 1.0}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 5, 64, 576, pytest.param(4096, marks=pytest.mark.gpu)])
def test_rms_norm_equals_its_twin(width: int, dtype: torch.dtype) -> None:
    """Rows of a slice, heads of a slice, heads with another order of dimensions, and shapes of one to five dimensions."""
    generator = torch.Generator().manual_seed(width)
    merged = torch.randn(2, 3, 5 * width, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(width, generator=generator).to(DEVICE, dtype)
    heads = merged[..., width : 3 * width].unflatten(-1, (2, width))
    for x in (merged[0, 0, :width], merged[0, :, :width], merged[..., :width], heads, heads.transpose(1, 2), heads[None]):
        for options in RMS_NORM_RULES:
            out, expected = launch_rms_norm(x, weight, 1e-5, **options), rms_norm_reference(x, weight, 1e-5, **options)
            assert out.is_contiguous() and out.dtype == dtype
            # One unit in the last place where the two round a tie's neighbourhood apart, twice if they round twice.
            eps = 2.1 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
            torch.testing.assert_close(out, expected, atol=eps / 10, rtol=eps)


@pytest.mark.parametrize("width", [72, 75, pytest.param(4096, marks=pytest.mark.gpu)])
def test_a_row_of_rms_norm_is_the_same_in_any_company(width: int) -> None:
    """[N1]"""
    for dtype in DTYPES:
        x = torch.randn(130 if HAS_CUDA else 34, width).to(DEVICE, dtype)
        weight = torch.randn(width).to(DEVICE, dtype)
        alone = torch.cat([launch_rms_norm(row, weight, 1e-5) for row in x[:, None]])
        for num_rows in (2, 7, 16, 33, len(x) - 1, len(x)):
            assert torch.equal(launch_rms_norm(x[:num_rows], weight, 1e-5), alone[:num_rows])
            assert torch.equal(launch_rms_norm(x[None, 1:num_rows], weight, 1e-5)[0], alone[1:num_rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 48, BLOCK_F, BLOCK_F + 5])
def test_gated_silu_equals_its_twin(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 7, 2 * width, generator=torch.Generator().manual_seed(width)).to(DEVICE, dtype) * 4
    x[0, 0, :width] = -80.0
    for rows in (x, x[:, ::3], x[0, 0]):
        out, expected = launch_gated_silu(rows), gated_silu_reference(rows)
        assert out.shape == expected.shape and out.dtype == dtype
        eps = 2.1 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
        torch.testing.assert_close(out, expected, atol=eps / 10, rtol=eps)


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


# top-k, temperature, top-p, min-p; the first is greedy, of which the filters must be ignored.
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
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
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
