"""How a pass of prefill, draft or verify runs: as it is, or padded to one of a few shapes and replayed as a CUDA graph.

A pass is one function of tensors: where rows lie in a cache, a tree, and whatever else it needs. The function does not know
how it runs, and only this file decides whether a graph runs it. With a graph, the batch is filled up to a bucket of rows and
nodes.

Invariant: results do not depend on how a pass runs, because added rows repeat the last row and padding nodes can never be
accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence

import torch

from selfspec.cache.blocks import CacheRow
from selfspec.cache.kv import KVCache, Places
from selfspec.cache.rows import LENGTH
from selfspec.model.graphs import Graphs
from selfspec.model.shapes import (
    CHUNK_BUCKETS,
    CHUNK_ROW_BUCKETS,
    DEPTH_BUCKETS,
    FLAT_BUCKETS,
    FULL_ROWS,
    NODE_BUCKETS,
    ROW_BUCKETS,
    FlatShape,
    GraphShape,
    bucket,
    column_bucket,
    fill_rows,
)
from selfspec.tree import CandidateTree

# (where rows lie, the tree, ...) -> tensors whose first dimension counts rows.
Function = Callable[..., tuple[torch.Tensor, ...]]

# Without graphs a pass may have any number of nodes, of which so many are considered.
MAX_SIZES = 15
# Prompt tokens in a pass. On a CPU a pass gains nothing from more.
CHUNK_SIZE, CPU_CHUNK_SIZE = 2048, 512
# The most nodes of all trees in a pass on a GPU.
MAX_ROWS = 512


class Passes:
    """Runs the passes of one target and of the drafters that serve it.

    Args:
        graphs: the captured passes; None where every pass is launched kernel by kernel.
        max_rows: the most nodes of all trees in one pass.
        chunk_size: the most prompt tokens in one pass.
    """

    def __init__(
        self,
        graphs: Graphs | None = None,
        *,
        device: torch.device | str = "cpu",
        max_rows: int = sys.maxsize,
        chunk_size: int = CPU_CHUNK_SIZE,
    ) -> None:
        self.graphs = graphs
        self.device = device
        self.max_rows = max_rows
        self.chunk_size = chunk_size

    @classmethod
    def on(cls, device: torch.device) -> Passes:
        """The passes for a device: on a GPU, captured and limited to `MAX_ROWS`."""
        if device.type != "cuda":
            return cls(device=device)
        return cls(Graphs(device), device=device, max_rows=MAX_ROWS, chunk_size=CHUNK_SIZE)

    @property
    def is_captured(self) -> bool:
        """Whether there are CUDA graphs. They hold addresses, so a cache should not move."""
        return self.graphs is not None

    @property
    def num_set_up(self) -> int:
        """Counts compilations and captures; a step in which it rises is not typical."""
        return 0 if self.graphs is None else self.graphs.num_set_up

    def most_nodes(self, num_rows: int) -> int:
        """The largest tree for each of `num_rows` rows that fits into one pass, 1 at least."""
        padded = None if self.graphs is None else bucket(num_rows, ROW_BUCKETS)
        if padded is None:
            return max(self.max_rows // num_rows, 1)
        # The nodes of a graph are filled up too.
        return max(size for size in NODE_BUCKETS if size == 1 or size * padded <= self.max_rows)

    def prompt_sizes(self, num_nodes: int, most: int) -> list[int]:
        """The numbers of prompt tokens, ascending and at most `most`, that fill a pass up beside `num_nodes` other nodes."""
        return [size - num_nodes for size in CHUNK_BUCKETS if num_nodes < size <= num_nodes + most]

    def prompt_room(self, num_nodes: int, most: int, num_waiting: int) -> int:
        """How many prompt tokens to enter beside `num_nodes` other nodes: at most `most`, and so many that tiles are full.

        Args:
            num_waiting: prompt tokens that wait.
        """
        if self.graphs is None:
            return most
        room = (num_nodes + min(most, num_waiting)) // FULL_ROWS * FULL_ROWS - num_nodes
        return room if room > 0 else most

    def num_flat_slots(self, tree: CandidateTree, num_rows: int, most_nodes: int) -> int:
        """How many scratch slots per row a flat pass writes: those of the largest tree, which all are padded to.

        Args:
            most_nodes: of the largest tree.
        """
        if self.graphs is None or tree.num_nodes == 1:
            return tree.num_nodes
        size = max(tree.num_nodes, min(most_nodes, self.most_nodes(num_rows)))
        return bucket(size, NODE_BUCKETS) or tree.num_nodes

    def flat_sizes(self, num_rows: int, most_nodes: int, *, num_prompt_tokens: int = 0) -> list[int]:
        """The numbers of nodes, ascending, that a pass may have for `num_rows` rows with trees of at most `most_nodes`.

        The first has only roots. With graphs they are few, and fewer beside prompts; the roots of rows that fill up a batch
        count, too.
        """
        if self.graphs is None:
            spare = min(num_rows * most_nodes, self.max_rows) - num_rows
            return sorted({num_rows + round(spare * i / MAX_SIZES) for i in range(MAX_SIZES + 1)})
        padded = bucket(num_rows, ROW_BUCKETS)
        if padded is None:
            return [num_rows]
        most = min(padded * most_nodes, self.max_rows)
        if num_prompt_tokens:
            return [padded, *([2 * padded] if 2 * padded <= most else [])]
        return [padded, *(size for size in FLAT_BUCKETS if padded < size <= most)]

    def shape_of(self, tree: CandidateTree, num_rows: int, *, has_exact_nodes: bool = False) -> GraphShape | None:
        """The shape that a pass over `tree` is padded to; None without graphs or for too large a batch or tree.

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

    def flat_shape(
        self,
        tree: CandidateTree | None,
        rows: Sequence[CacheRow],
        num_nodes: int | None,
        most: tuple[int, int],
        chunk_rows: Sequence[CacheRow],
        num_tokens: int,
    ) -> FlatShape | None:
        """The shape of a pass; None without graphs or for too large a pass.

        Args:
            tree: [B, N]; None for only roots.
            num_nodes: of these rows' trees that the pass computes; None for all nodes.
            most: nodes and depth of the largest tree, which all are padded to.
            num_tokens: of all chunks together.
        """
        if self.graphs is None:
            return None
        shape = GraphShape(0, 0, 0, is_chain=True)
        num_columns = num_chunks = num_chunk_columns = 0
        if rows:
            num_rows = bucket(len(rows), ROW_BUCKETS)
            if num_rows is None:
                return None
            shape = GraphShape(num_rows, 1, 0, is_chain=True)
            if tree is not None:
                size = self.num_flat_slots(tree, len(rows), most[0])
                depth = bucket(max(tree.max_depth, most[1]), DEPTH_BUCKETS)
                if size not in NODE_BUCKETS or depth is None:
                    return None
                shape = GraphShape(num_rows, size, min(depth, size - 1), tree.is_chain)
            num_columns = column_bucket(max(len(row.blocks) for row in rows))
        whole = shape.num_rows * shape.num_nodes
        if num_nodes is not None:
            # The roots of rows that fill up the batch are nodes, too.
            num_nodes += shape.num_rows - len(rows)
            num_nodes = num_nodes if num_nodes < whole else None
        if chunk_rows:
            # One more, which takes the tokens that fill up the others.
            others = whole if num_nodes is None else num_nodes
            chunks, total = bucket(len(chunk_rows) + 1, CHUNK_ROW_BUCKETS), bucket(others + num_tokens, CHUNK_BUCKETS)
            if chunks is None or total is None:
                return None
            num_chunks, num_tokens = chunks, total - others
            num_chunk_columns = column_bucket(max(len(row.blocks) for row in chunk_rows))
        return FlatShape(
            shape.num_rows,
            shape.num_nodes,
            num_nodes,
            shape.max_depth,
            num_columns,
            num_chunks,
            num_tokens,
            num_chunk_columns,
        )

    def replay(
        self,
        key: Hashable | None,
        function: Callable[..., tuple[torch.Tensor, ...]],
        given: Sequence[torch.Tensor],
        *,
        num_kept: int | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run `function(*given)`, by a graph if there is a key; see `Graphs`."""
        if self.graphs is None or key is None:
            return function(*(each.to(self.device, non_blocking=True) for each in given))
        return self.graphs(key, function, given, num_kept=num_kept)

    def draft(
        self,
        key: Hashable,
        function: Callable[[torch.Tensor, Places], tuple[torch.Tensor, ...]],
        rows: Sequence[CacheRow],
        cache: KVCache,
    ) -> tuple[torch.Tensor, ...]:
        """Run `function(slots, places)` for rows that decode and have their room: a resident drafter's pass.

        Returns:
            The function's results [B, ...], valid until another graph runs.
        """
        B = len(rows)
        num_rows = None if self.graphs is None else bucket(B, ROW_BUCKETS)
        num_columns = max(len(row.blocks) for row in rows)
        known = rows if num_rows is None else None

        def body(numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
            slots = numbers[:, 0].contiguous()
            lengths = cache.state.integers[slots, LENGTH]
            return function(slots, Places(lengths, numbers[:, 1:], known))

        if num_rows is None:
            return self.replay(None, body, [cache.pack_slots(rows, B, num_columns)])
        numbers = cache.pack_slots(rows, num_rows, column_bucket(num_columns))
        return tuple(each[:B] for each in self.replay((key, cache.serial), body, [numbers], num_kept=0))

    def chunk_shape(self, num_tokens: int, row: CacheRow, cache: KVCache) -> GraphShape | None:
        """The shape of a pass over a prompt's chunk; None without graphs, or where the row has no room for padding."""
        size = None if self.graphs is None else bucket(num_tokens, CHUNK_BUCKETS)
        return None if size is None or not cache.can_reserve([row], size) else GraphShape(1, size, size - 1, is_chain=True)

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
        """Run `function(places, tree, *extra, *along)`, the pass over one tree per row.

        Args:
            key: everything that the function depends on besides its arguments, the shape and the cache.
            function: only device work. In a graph its tree has only tokens, parents and depths, and `places` has no rows.
            rows: B cache rows; the pass reserves the room it needs.
            shape: what the pass is padded to; None runs it as it is.
            extra: tensors [B, ...]; small ones may be on the host.
            along: tensors [B, N, ...]; small ones may be on the host.
            num_kept: the first `num_kept` results are copies for the caller, all by default. The others are valid only until
                another graph runs.

        Returns:
            The function's results [B, ...], with padding nodes where a shape was given.
        """
        if shape is None or self.graphs is None:
            places = cache.place(rows, tree.num_nodes)
            return function(places, tree, *(each.to(cache.device, non_blocking=True) for each in (*extra, *along)))

        def body(places: Places, nodes: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # Contiguous, because kernels read each of them row by row.
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
        """Run `function(places, *given)` with room for `num_slots` slots per row. Arguments and results are as in `run`.

        Args:
            given: tensors [B, ...]; those with a dimension of nodes are padded to the shape already.
        """
        if shape is None or self.graphs is None:
            places = cache.place(rows, num_slots)
            return function(places, *(each.to(cache.device, non_blocking=True) for each in given))
        B = len(rows)
        filled = [*rows, *[rows[-1]] * (shape.num_rows - B)]
        # Reserve first, because the cache may move to other addresses.
        cache.reserve(rows, num_slots)
        numbers = cache.pack(filled, column_bucket(max(len(row.blocks) for row in rows)))

        def body(numbers: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return function(Places.unpack(numbers), *given)

        inputs = (numbers, *(fill_rows(each, shape.num_rows) for each in given))
        results = self.graphs((key, shape, cache.serial, num_slots), body, inputs, num_kept=num_kept)
        return tuple(each[:B] for each in results)
