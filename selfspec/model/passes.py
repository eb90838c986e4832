"""How a pass runs: as it is, or padded to one of a few shapes and replayed as a CUDA graph.

A pass is one function of tensors: where rows lie in a cache, a tree, and whatever else it needs. It does not know how it
runs, and nobody but this file asks whether there are graphs. Without them the function is called with the batch as it is.
With them the batch is filled up to a bucket of rows and nodes: rows that repeat the last one do what it does, and padding
nodes can never be accepted, so results do not change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from selfspec.cache.blocks import CacheRow
from selfspec.cache.kv import KVCache, Places
from selfspec.kernels.linear import MAX_ROWS
from selfspec.model.graphs import Graphs
from selfspec.tree import CandidateTree

# (where rows lie, the tree, ...) -> tensors whose first dimension counts rows.
Function = Callable[..., tuple[torch.Tensor, ...]]

# Sizes that a number of rows or nodes is rounded up to, so that few graphs serve all.
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
NODE_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
DEPTH_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 127)
# Of a prompt's chunks, whose shapes seldom return: few sizes.
CHUNK_BUCKETS = (32, 64, 128, 192, 256)
# The fewest columns of a block table in a graph.
MIN_COLUMNS = 64
# So many nodes of a batch cost a captured pass hardly more than one, and less than reading their scores back.
FREE_NODES = 64


@dataclass(frozen=True)
class GraphShape:
    """What a batch of trees is padded to, so that one CUDA graph serves many of them."""

    num_rows: int
    num_nodes: int
    max_depth: int
    is_chain: bool

    def pad(self, tree: CandidateTree) -> torch.Tensor:
        """The tree's tokens, parents and depths [B, 3, N'], with padding nodes."""
        N = tree.num_nodes
        nodes = torch.stack([tree.tokens, tree.parents, tree.depths], dim=1)
        if N < self.num_nodes:
            nodes = F.pad(nodes, (0, self.num_nodes - N), value=-1)
            nodes[:, 2, N:] = 0
        return nodes

    def pad_along(self, values: torch.Tensor) -> torch.Tensor:
        """Values of nodes [B, N, ...] as [B, N', ...]: zeros for padding nodes."""
        missing = self.num_nodes - values.shape[1]
        return F.pad(values, (0, 0) * (values.ndim - 2) + (0, missing)) if missing else values


class Passes:
    """Runs the passes of one target and of the drafters that serve it.

    Args:
        graphs: where captured passes are kept; None where every pass is launched kernel by kernel.
        max_rows: nodes of all rows in one pass, up to which a row's bits do not depend on their number.

    Attributes:
        free_nodes: see `FREE_NODES`; 1 where nothing is captured.
    """

    def __init__(self, graphs: Graphs | None = None, *, max_rows: int = sys.maxsize) -> None:
        self.graphs = graphs
        self.max_rows = max_rows

    @classmethod
    def on(cls, device: torch.device) -> Passes:
        """Captured on a GPU, and within the rows whose bits do not depend on their number."""
        return cls(Graphs(device), max_rows=MAX_ROWS) if device.type == "cuda" else cls()

    @property
    def is_captured(self) -> bool:
        """Whether CUDA graphs hold addresses, so that a cache had better not move."""
        return self.graphs is not None

    @property
    def free_nodes(self) -> int:
        return FREE_NODES if self.is_captured else 1

    @property
    def num_set_up(self) -> int:
        """Counts compilations and captures; a step in which it rises is not typical."""
        return 0 if self.graphs is None else self.graphs.num_set_up

    def most_nodes(self, num_rows: int) -> int:
        """Largest tree per row for which a pass of `num_rows` rows keeps a row's bits. At least 1."""
        padded = None if self.graphs is None else bucket(num_rows, ROW_BUCKETS)
        if padded is None:
            return max(self.max_rows // num_rows, 1)
        # A graph's rows and nodes are filled up.
        return max(size for size in NODE_BUCKETS if size == 1 or size * padded <= self.max_rows)

    def num_slots(self, num_nodes: int) -> int:
        """How many scratch slots a pass over `num_nodes` nodes writes: padding nodes are written, too."""
        return num_nodes if self.graphs is None else bucket(num_nodes, NODE_BUCKETS) or num_nodes

    def shape_of(self, tree: CandidateTree, num_rows: int, *, has_exact_nodes: bool = False) -> GraphShape | None:
        """The shape that a pass over `tree` is padded to; None where the batch or the tree is too large, or no graph is.

        Args:
            has_exact_nodes: no node may be added.
        """
        rows, nodes = bucket(num_rows, ROW_BUCKETS), bucket(tree.num_nodes, NODE_BUCKETS)
        if self.graphs is None or rows is None or nodes is None:
            return None
        nodes = tree.num_nodes if has_exact_nodes else nodes
        depth = bucket(tree.max_depth, DEPTH_BUCKETS)
        assert depth is not None
        return GraphShape(rows, nodes, min(depth, nodes - 1), tree.is_chain)

    def chunk_shape(self, num_tokens: int, row: CacheRow, cache: KVCache) -> GraphShape | None:
        """The shape of a pass over a prompt's chunk; None where no graph is, or the row has no room for padding."""
        size = None if self.graphs is None else bucket(num_tokens, CHUNK_BUCKETS)
        return None if size is None or not cache.can_reserve([row], size) else GraphShape(1, size, size - 1, is_chain=True)

    def entries_shape(self, num_rows: int, most: int) -> GraphShape | None:
        """The shape of a pass over up to `most` new entries a row, whatever their number; None where no graph is."""
        rows, entries = bucket(num_rows, ROW_BUCKETS), bucket(most, NODE_BUCKETS)
        if self.graphs is None or rows is None or entries is None:
            return None
        return GraphShape(rows, entries, entries - 1, is_chain=True)

    def run(
        self,
        key: Hashable,
        function: Function,
        tree: CandidateTree,
        rows: Sequence[CacheRow],
        cache: KVCache,
        *,
        shape: GraphShape | None,
        extra: Sequence[torch.Tensor] = (),
        along: Sequence[torch.Tensor] = (),
        num_kept: int | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """`function(places, tree, *extra, *along)`: the pass over one tree a row.

        Args:
            key: with the shapes and the cache, everything that the function depends on besides its arguments.
            function: device work alone. In a graph its tree has tokens, parents and depths, and `places` has no host rows.
            rows: B cache rows; they get the room that the pass needs.
            shape: what the pass is padded to; None runs it as it is.
            extra, along: tensors [B, ...] and [B, N, ...], small ones on the host where that is easier.
            num_kept: so many results, the first ones, are the caller's; the others stay until another graph runs. All by
                default.

        Returns:
            The function's results, each cut to B rows; padding nodes are still there.
        """
        if shape is None or self.graphs is None:
            places = cache.place(rows, tree.num_nodes)
            return function(places, tree, *(each.to(cache.device, non_blocking=True) for each in (*extra, *along)))

        def body(places: Places, nodes: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # Kernels read each of them row by row.
            tokens, parents, depths = nodes.transpose(0, 1).contiguous()
            padded = CandidateTree(tokens, parents, depths, max_depth=shape.max_depth, is_chain=shape.is_chain)
            return function(places, padded, *given)

        given = (shape.pad(tree), *extra, *(shape.pad_along(each) for each in along))
        return self.enter(key, body, rows, cache, shape=shape, given=given, num_slots=shape.num_nodes, num_kept=num_kept)

    def enter(
        self,
        key: Hashable,
        function: Function,
        rows: Sequence[CacheRow],
        cache: KVCache,
        *,
        shape: GraphShape | None,
        given: Sequence[torch.Tensor],
        num_slots: int,
        num_kept: int | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """`function(places, *given)`, with `num_slots` slots a row to fill; arguments and results as in `run`.

        Args:
            given: tensors [B, ...]; what counts nodes among them has the shape's number already.
        """
        if shape is None or self.graphs is None:
            places = cache.place(rows, num_slots)
            return function(places, *(each.to(cache.device, non_blocking=True) for each in given))
        B = len(rows)
        filled = [*rows, *[rows[-1]] * (shape.num_rows - B)]
        # Reserving comes first: it may move the cache to other addresses.
        cache.reserve(rows, num_slots)
        numbers = cache.pack(filled, column_bucket(max(len(row.blocks) for row in rows)))

        def body(numbers: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return function(Places.unpack(numbers), *given)

        inputs = (numbers, *(fill_rows(each, shape.num_rows) for each in given))
        results = self.graphs((key, shape, cache.serial, num_slots), body, inputs, num_kept=num_kept)
        return tuple(each[:B] for each in results)

    def run_rows(self, key: Hashable, function: Function, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """`function(*inputs)` of tensors [B, ...] that touches no cache; results are cut to B rows."""
        B = len(inputs[0])
        num_rows = bucket(B, ROW_BUCKETS)
        if self.graphs is None or num_rows is None:
            return function(*inputs)
        results = self.graphs((key, num_rows), function, [fill_rows(each, num_rows) for each in inputs])
        return tuple(each[:B] for each in results)


def bucket(size: int, buckets: Sequence[int]) -> int | None:
    """The least bucket that holds `size`, None where none does."""
    return next((each for each in buckets if each >= size), None)


def column_bucket(num_columns: int) -> int:
    """The columns of a block table in a graph: a power of two."""
    return max(MIN_COLUMNS, 1 << (num_columns - 1).bit_length())


def fill_rows(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows, ...] from fewer rows: the last one is repeated."""
    return torch.cat([rows, rows[-1:].expand(num_rows - len(rows), *rows.shape[1:])]) if num_rows > len(rows) else rows
