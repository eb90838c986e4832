"""Attention of ragged passes: every row gets the bits that it gets alone, on CPU and by the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    DEVICE,
    DTYPES,
    NEEDS_TRITON,
    SMALL_HEADS,
    Case,
    make_case,
    make_splits_small,
    random_parents,
)
from strategies import COSTLY_PROPERTY, PROPERTY, parent_lists

from selfspec.kernels import tree_attention as tree_attention_file
from selfspec.kernels.tree_attention import launch_tree_attention, tree_attention
from selfspec.kernels.tree_layout import TreeLayout

# What the result's memory holds before, and must hold after where no row has a node.
POISON = 77.0
NUM_SPARE = 3


# Parents and lengths of a uniform pass's rows, the numbers of nodes that are kept, and whether the rows are chains.
Batch = tuple[list[list[int]], list[int], list[int], bool]


@dataclass
class Ragged:
    """The first `counts[b]` nodes of each row b of a uniform pass, side by side, and `NUM_SPARE` nodes of no row.

    Attributes:
        form: what the layout has: an ancestor "mask", "paths", or neither, as a "chain".
        is_known: the host knows lengths, starts and slots.
    """

    case: Case
    counts: list[int]
    form: str
    is_known: bool = True

    def __post_init__(self) -> None:
        layout = self.case.layout
        self.starts = [0, *accumulate(self.counts)]
        for row, (count, parents) in enumerate(zip(self.counts, self.case.parents, strict=True)):
            for node in range(count, len(parents)):
                slot = self.case.slot(row, layout.host_lengths[row] + node)
                self.case.key_cache[slot] = self.case.value_cache[slot] = torch.nan

    def alone(self, row: int) -> Case:
        """The row's nodes as a uniform pass."""
        layout, one, n = self.case.layout, slice(row, row + 1), self.counts[row]
        row_slots = layout.row_slots[row]
        length = layout.host_lengths[row]
        if isinstance(row_slots, slice):
            row_slots = slice(row_slots.start, row_slots.start + length + n)
        else:
            row_slots = row_slots[: length + n]
        alone = TreeLayout(
            layout.block_tables[one],
            layout.lengths[one],
            [length],
            layout.depths[one, :n],
            layout.ancestor_mask[one, :n, :n],
            layout.block_size,
            row_slots=[row_slots] if self.is_known else None,
            is_chain=layout.is_chain,
        )
        return replace(self.case, query=self.case.query[one, :, :n], layout=alone)

    def rows(self) -> list[tuple[int, slice]]:
        return [(row, slice(*ends)) for row, ends in enumerate(pairwise(self.starts)) if ends[0] < ends[1]]

    def layout(self) -> TreeLayout:
        uniform, num_nodes = self.case.layout, self.starts[-1] + NUM_SPARE
        device = uniform.lengths.device
        # Nothing may be read for nodes of no row.
        depths = torch.full((1, num_nodes), 1 << 40, device=device)
        mask = torch.zeros(num_nodes, num_nodes, dtype=torch.bool, device=device)
        paths = torch.full((1, num_nodes, uniform.path_slots.shape[2]), 1 << 40, device=device)
        for row, nodes in self.rows():
            n = self.counts[row]
            depths[0, nodes] = uniform.depths[row, :n]
            mask[nodes, nodes] = uniform.ancestor_mask[row, :n, :n]
            paths[0, nodes] = uniform.path_slots[row, :n]
        row_slots = [slots for row in range(len(self.counts)) for slots in self.alone(row).layout.row_slots or ()]
        return TreeLayout(
            uniform.block_tables,
            uniform.lengths,
            uniform.host_lengths if self.is_known else None,
            depths,
            mask if self.form == "mask" else None,
            uniform.block_size,
            row_slots=row_slots if self.is_known else None,
            max_depth=uniform.max_depth,
            is_chain=uniform.is_chain,
            paths=paths if self.form == "paths" else None,
            starts=torch.tensor(self.starts, device=device),
            host_starts=self.starts if self.is_known else None,
            # A bound, which no row need reach.
            max_nodes=uniform.depths.shape[1],
        )

    def query(self) -> torch.Tensor:
        """[1, H, F, D], as a part of a longer pass whose nodes lie side by side; NaN where no row has a node."""
        _, H, _, D = self.case.query.shape
        num_nodes = self.starts[-1] + NUM_SPARE
        whole = self.case.query.new_full((1, num_nodes + 5, H, D), torch.nan)
        for row, nodes in self.rows():
            whole[0, 2:][nodes] = self.case.query[row, :, : self.counts[row]].transpose(0, 1)
        return whole.transpose(1, 2)[:, :, 2 : 2 + num_nodes]


def assert_rows_get_what_they_get_alone(ragged: Ragged, *, is_kernel: bool, **options: object) -> None:
    attend = launch_tree_attention if is_kernel else tree_attention
    case, query = ragged.case, ragged.query()
    _, H, num_nodes, _ = query.shape
    whole = query.new_full((1, num_nodes + 5, H, case.value_cache.shape[2]), POISON)
    out = whole[:, 2 : 2 + num_nodes]
    arguments = query, case.key_cache, case.value_cache, ragged.layout(), case.scaling
    assert attend(*arguments, **options, out=out) is out  # type: ignore[arg-type]
    for row, nodes in ragged.rows():
        alone = ragged.alone(row)
        expected = alone.run_kernel(**options) if is_kernel else alone.run(**options)
        assert expected.isfinite().all()
        assert torch.equal(out[:, nodes], expected), (row, ragged.counts, options)
    out[:, : ragged.starts[-1]] = POISON
    assert (whole == POISON).all()


@st.composite
def batches(draw: st.DrawFn, *, max_length: int, max_nodes: int, max_rows: int) -> Batch:
    is_chain, max_nodes = draw(st.booleans()), draw(st.integers(1, max_nodes))
    rows = draw(st.integers(1, max_rows))
    tree = st.just([-1, *range(max_nodes - 1)]) if is_chain else parent_lists(min_nodes=max_nodes, max_nodes=max_nodes)
    parents = [draw(tree) for _ in range(rows)]
    lengths = [draw(st.integers(0, max_length)) for _ in range(rows)]
    return parents, lengths, [draw(st.integers(0, max_nodes)) for _ in range(rows)], is_chain


def make_ragged(
    batch: Batch,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    *,
    form: str | None = None,
    is_known: bool = True,
    is_scattered: bool = True,
    device: str = DEVICE,
) -> Ragged:
    parents, lengths, counts, is_chain = batch
    options = {"dtype": dtype, "is_chain": is_chain, "is_scattered": is_scattered, "device": device, "seed": sum(lengths)}
    case = make_case(parents, lengths, heads, **options)  # type: ignore[arg-type]
    return Ragged(case, counts, form or ("chain" if is_chain else "mask"), is_known)


def some_options(data: st.DataObject, num_heads: int, device: str) -> dict[str, object]:
    sinks = torch.linspace(-1.0, 2.0, num_heads, device=device)
    return {
        "sliding_window": data.draw(st.none() | st.integers(1, 40)),
        "softcap": data.draw(st.sampled_from([None, 1.5])),
        "sinks": data.draw(st.sampled_from([None, sinks])),
    }


@PROPERTY
@given(batches(max_length=20, max_nodes=7, max_rows=4), st.data())
def test_on_a_cpu_every_row_gets_what_it_gets_alone(batch: Batch, data: st.DataObject) -> None:
    """Consecutive and scattered blocks; slots known to the host or not; rows of no node."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    is_known, is_scattered = data.draw(st.booleans()), data.draw(st.booleans())
    options = some_options(data, 4, "cpu")
    for form in ("mask", "paths", "chain") if batch[3] else ("mask", "paths"):
        kinds = {"form": form, "is_known": is_known, "is_scattered": is_scattered}
        ragged = make_ragged(batch, SMALL_HEADS["unequal"], dtype, **kinds, device="cpu")  # type: ignore[arg-type]
        assert_rows_get_what_they_get_alone(ragged, is_kernel=False, **options)


@pytest.fixture(scope="module")
def small_splits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_splits_small(monkeypatch)
        monkeypatch.setattr(tree_attention_file, "MIN_CHAIN_NODES", 4)
        yield


@NEEDS_TRITON
@pytest.mark.usefixtures("small_splits")
@COSTLY_PROPERTY
@given(batches(max_length=40, max_nodes=6, max_rows=3), st.data())
def test_by_the_kernels_every_row_gets_what_it_gets_alone(batch: Batch, data: st.DataObject) -> None:
    """[N1] launches cut rows anywhere; chains have either kernel; what no row owns is NaN in query and cache."""
    form = "chain" if batch[3] else data.draw(st.sampled_from(["mask", "paths"]))
    dtype, is_known = data.draw(st.sampled_from(DTYPES)), data.draw(st.booleans())
    ragged = make_ragged(batch, SMALL_HEADS["grouped"], dtype, form=form, is_known=is_known)
    assert_rows_get_what_they_get_alone(ragged, is_kernel=True, **some_options(data, 3, DEVICE))


@NEEDS_TRITON
@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize(("is_chain", "dtype"), [(False, DTYPES[0]), (True, DTYPES[1])], ids=str)
def test_more_rows_than_a_search_takes_at_once(is_chain: bool, dtype: torch.dtype) -> None:
    """Most have no node or one, the last but one has many."""
    counts = [0, 2, *[0, 0, 1, 0] * 16, 7, 0]
    parents = [[-1, *range(6)] if is_chain else random_parents(7, row) for row in range(len(counts))]
    ragged = make_ragged((parents, [5] * len(counts), counts, is_chain), SMALL_HEADS["grouped"], dtype)
    assert_rows_get_what_they_get_alone(ragged, is_kernel=True)


@NEEDS_TRITON
@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("is_chain", [False, True])
def test_a_pass_in_which_no_row_has_a_node_writes_nothing(is_chain: bool) -> None:
    for dtype in DTYPES:
        ragged = make_ragged(([[-1, *range(7)]] * 2, [3, 9], [0, 0], is_chain), SMALL_HEADS["grouped"], dtype)
        assert_rows_get_what_they_get_alone(ragged, is_kernel=True)


@NEEDS_TRITON
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8, 128, 128), (9, 3, 64, 64), (4, 2, 256, 256)], ids=str)
@pytest.mark.parametrize("is_chain", [False, True])
def test_bits_at_real_sizes(is_chain: bool, heads: tuple[int, int, int, int]) -> None:
    """[N1] bfloat16: long prefixes, few nodes and many, both kernels of chains."""
    for counts in ([1, 0, 16, 7, 40], [64, 1, 300, 129, 2]):
        most = max(counts)
        parents = [[-1, *range(most - 1)] if is_chain else random_parents(most, row) for row in range(len(counts))]
        ragged = make_ragged((parents, [700, 12, 0, 5000, 255], counts, is_chain), heads, torch.bfloat16)
        for options in ({}, {"sliding_window": 300, "softcap": 20.0}):
            assert_rows_get_what_they_get_alone(ragged, is_kernel=True, **options)


@NEEDS_TRITON
@pytest.mark.gpu
@pytest.mark.parametrize("is_chain", [False, True])
def test_a_captured_pass_serves_rows_of_other_sizes(is_chain: bool) -> None:
    """The device is not asked for the rows' ends, which change under the graph."""
    parents = [[-1, *range(199)] if is_chain else random_parents(200, row) for row in range(3)]
    passes = [
        make_ragged((parents, [900, 40, 3], counts, is_chain), (8, 2, 64, 64), torch.bfloat16, is_known=False)
        for counts in ([200, 3, 0], [0, 103, 100], [100, 1, 102])
    ]
    case, layout, query = passes[0].case, passes[0].layout(), passes[0].query().clone()
    keys, values = case.key_cache.clone(), case.value_cache.clone()
    if not is_chain:
        layout.paths = layout.path_slots

    def attend() -> torch.Tensor:
        return launch_tree_attention(query, keys, values, layout, case.scaling)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for ragged in passes[::-1]:
        now = ragged.layout()
        for tensor, new in ((layout.starts, now.starts), (layout.depths, now.depths), (query, ragged.query())):
            tensor.copy_(new)
        if not is_chain:
            layout.paths.copy_(now.path_slots)
        keys.copy_(ragged.case.key_cache)
        values.copy_(ragged.case.value_cache)
        graph.replay()
        for row, nodes in ragged.rows():
            assert torch.equal(out[:, nodes], ragged.alone(row).run_kernel())


@NEEDS_TRITON
@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("most_nodes", [5, 100], ids=["several launches", "one launch"])
@pytest.mark.parametrize(("is_chain", "dtype"), [(False, DTYPES[0]), (True, DTYPES[1])], ids=str)
def test_the_result_of_a_uniform_pass_may_be_some_nodes_of_a_longer_one(
    monkeypatch: pytest.MonkeyPatch, is_chain: bool, dtype: torch.dtype, most_nodes: int
) -> None:
    monkeypatch.setattr(tree_attention_file, "MAX_NODES", most_nodes)
    parents = [[-1, *range(6)], [-1, *range(6)] if is_chain else [-1, 0, 0, 1, 1, 2, 3]]
    case = make_case(parents, [28, 3], SMALL_HEADS["grouped"], dtype=dtype, is_chain=is_chain, device=DEVICE)
    arguments = case.query, case.key_cache, case.value_cache, case.layout, case.scaling
    for attend in (launch_tree_attention, tree_attention):
        whole = case.query.new_full((2, 12, 3, 8), POISON)
        attend(*arguments, out=whole[:, 3:10])
        assert torch.equal(whole[:, 3:10], attend(*arguments))
        whole[:, 3:10] = POISON
        assert (whole == POISON).all()
