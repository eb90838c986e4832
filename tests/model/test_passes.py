"""Passes run as they are or as graphs, and nobody can tell which."""

from __future__ import annotations

import pytest
import torch
from support import tiny_target

from selfspec.cache.blocks import CacheRow
from selfspec.model.graphs import MAX_KEYS, Graphs
from selfspec.model.passes import Passes
from selfspec.model.shapes import NODE_BUCKETS, fill_rows
from selfspec.tree import chain, from_parents

CPU = torch.device("cpu")


def rehearsed() -> Passes:
    return Passes(Graphs(CPU, is_rehearsal=True))


def test_a_value_that_a_graph_freezes_is_frozen_in_a_rehearsal() -> None:
    """Once as it is, then captured: from there on the captured function runs, whatever is handed in."""
    graphs = Graphs(CPU, is_rehearsal=True)
    results = []
    for factor in (2, 3, 4, 5):
        (result,) = graphs("times", lambda x, factor=factor: (x * factor,), [torch.ones(1)])
        results.append(float(result))
    assert results == [2, 3, 3, 3]


def test_a_pass_gets_the_batch_as_it_is_or_filled_up() -> None:
    target = tiny_target("llama", num_hidden_layers=1)
    tree = from_parents(torch.tensor([[5, 6, 7], [5, 6, 7], [8, 9, 9]]), torch.tensor([[-1, 0, 0]] * 3))
    values, weights = torch.arange(9.0).view(3, 3), torch.tensor([[1.0], [2.0], [3.0]])
    seen: list[tuple[int, ...]] = []

    def work(places, tree, weights, values):  # type: ignore[no-untyped-def]
        seen.append((*tree.tokens.shape, len(weights)))
        return tree.tokens * 1.0, (values * weights).sum(1), places.lengths

    for passes in (Passes(), rehearsed()):
        cache = target.new_cache(block_size=4)
        rows = [cache.open_row() for _ in range(3)]
        for _ in range(3):
            shape = passes.shape_of(tree, 3)
            tokens, sums, lengths = passes.run(
                "work", work, tree, rows, cache, shape=shape, extra=(weights,), along=(values,)
            )
            assert tokens[:, :3].tolist() == tree.tokens.tolist()
            assert sums.tolist() == (values * weights).sum(1).tolist() and lengths.tolist() == [0, 0, 0]
    assert set(seen) == {(3, 3, 3), (4, 4, 4)}


def test_room_is_made_before_anything_is_located() -> None:
    """Reserving may move the cache: what a pass reads and what names its graph is of the place that it has then."""
    target = tiny_target("llama", num_hidden_layers=1)
    for passes in (Passes(), rehearsed()):
        cache, serials = target.new_cache(block_size=4), []
        row = cache.open_row()
        tree = chain(torch.tensor([3]), torch.arange(3, 13)[None])

        def work(places, tree):  # type: ignore[no-untyped-def]
            serials.append(cache.serial)  # noqa: B023
            layout, slots = cache.layout(places, tree)  # noqa: B023
            return (slots.view(len(tree.tokens), -1),)

        before = cache.serial
        for _ in range(2):
            passes.run("slots", work, tree, [row], cache, shape=passes.shape_of(tree, 1))
        assert before not in serials and len(row.blocks) * 4 >= tree.num_nodes


def test_the_largest_tree_keeps_a_rows_bits_with_its_padding() -> None:
    passes = Passes(Graphs(CPU, is_rehearsal=True), max_rows=24)
    assert [passes.most_nodes(rows) for rows in (1, 2, 3, 5)] == [24, 12, 4, 2]
    assert Passes(max_rows=24).most_nodes(5) == 4
    for rows in range(1, 9):
        size = passes.most_nodes(rows)
        assert size in NODE_BUCKETS


def test_rows_are_filled_up_with_the_last_one() -> None:
    assert fill_rows(torch.tensor([[1], [2]]), 4).tolist() == [[1], [2], [2], [2]]
    assert fill_rows(torch.tensor([[1], [2]]), 2).tolist() == [[1], [2]]


def test_what_graphs_remember_of_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.model.graphs.MAX_KEYS", 16)
    assert MAX_KEYS > 16
    graphs = Graphs(CPU, is_rehearsal=True)
    for key in range(100):
        graphs(key, lambda x: (x,), [torch.zeros(1)])
    assert len(graphs._seen) == 16


def test_a_small_tree_in_a_large_shape_costs_no_more_nodes_than_it_has() -> None:
    """Trees of every size share a shape, and a pass computes only the nodes that were planned."""
    passes = Passes(Graphs(torch.device("cpu"), is_rehearsal=True), max_rows=64)
    rows = [CacheRow(blocks=[0], length=3), CacheRow(blocks=[1], length=4), CacheRow(blocks=[2], length=5)]
    tree = chain(torch.tensor([1, 2, 3]), torch.tensor([[4, 5]] * 3), torch.zeros(3, 2))
    shape = passes.flat_shape(tree, rows, 7, (16, 6), [], 0)
    assert shape is not None and (shape.num_rows, shape.num_tree_nodes, shape.max_depth) == (4, 16, 8)
    assert shape.num_nodes == 7 + 1, "and the root of the row that fills up the batch"
    whole = passes.flat_shape(tree, rows, None, (1, 0), [], 0)
    assert whole is not None and (whole.num_tree_nodes, whole.num_nodes) == (4, None)
