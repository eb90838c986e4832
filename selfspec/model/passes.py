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
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from selfspec.cache.blocks import CacheRow
from selfspec.cache.kv import KVCache, Places
from selfspec.model.graphs import Graphs
from selfspec.tree import CandidateTree

# (where rows lie, the tree, ...) -> tensors whose first dimension counts rows.
Function = Callable[..., tuple[torch.Tensor, ...]]

# Numbers of rows, nodes and depths are rounded up to these sizes, because few graphs should serve all.
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NODE_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
DEPTH_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 127)
# Few sizes for a prompt's chunks, because their shapes seldom return. Larger chunks keep the device busy for longer than
# their launch takes, so no graph runs them.
CHUNK_BUCKETS = (32, 64, 128, 192, 256, 384, 512, 768, 1024)
# Prompt tokens in a pass. On a CPU a pass gains nothing from more.
CHUNK_SIZE, CPU_CHUNK_SIZE = 2048, 512
# The most nodes of all trees in a pass on a GPU, because more cost more than they bring.
MAX_ROWS = 256
# The fewest columns of a block table in a graph.
MIN_COLUMNS = 64
# A captured pass over this many nodes costs hardly more than over one, and less than reading their scores back.
FREE_NODES = 64


@dataclass(frozen=True)
class GraphShape:
    """What a batch of trees is padded to, because one CUDA graph should serve many batches."""

    num_rows: int
    num_nodes: int
    max_depth: int
    is_chain: bool

    def pad(self, tree: CandidateTree) -> torch.Tensor:
        """The tree's tokens, parents and depths as [B, 3, N'], padding nodes included."""
        N = tree.num_nodes
        nodes = torch.stack([tree.tokens, tree.parents, tree.depths], dim=1)
        if N < self.num_nodes:
            nodes = F.pad(nodes, (0, self.num_nodes - N), value=-1)
            nodes[:, 2, N:] = 0
        return nodes

    def pad_along(self, values: torch.Tensor) -> torch.Tensor:
        """From values of nodes [B, N, ...] to [B, N', ...], with zeros for padding nodes."""
        missing = self.num_nodes - values.shape[1]
        return F.pad(values, (0, 0) * (values.ndim - 2) + (0, missing)) if missing else values


class Passes:
    """Runs the passes of one target and of the drafters that serve it.

    Args:
        graphs: the captured passes; None where every pass is launched kernel by kernel.
        max_rows: the most nodes of all trees in one pass.
        chunk_size: the most prompt tokens in one pass.

    Attributes:
        free_nodes: see `FREE_NODES`; 1 where nothing is captured.
    """

    def __init__(
        self, graphs: Graphs | None = None, *, max_rows: int = sys.maxsize, chunk_size: int = CPU_CHUNK_SIZE
    ) -> None:
        self.graphs = graphs
        self.max_rows = max_rows
        self.chunk_size = chunk_size

    @classmethod
    def on(cls, device: torch.device) -> Passes:
        """The passes for a device: on a GPU, captured and limited to `MAX_ROWS`."""
        return cls(Graphs(device), max_rows=MAX_ROWS, chunk_size=CHUNK_SIZE) if device.type == "cuda" else cls()

    @property
    def is_captured(self) -> bool:
        """Whether there are CUDA graphs. They hold addresses, so a cache should not move."""
        return self.graphs is not None

    @property
    def free_nodes(self) -> int:
        return FREE_NODES if self.is_captured else 1

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

    def prompt_step(self, budget: int) -> int:
        """A prompt is cut into multiples of this, of which about `budget` may be entered at a time.

        It is 1 on a CPU. On a GPU each part costs a pass that reads all weights, so a prompt is cut into few.
        """
        return min(self.chunk_size, budget) if self.is_captured else 1

    def num_slots(self, num_nodes: int) -> int:
        """How many scratch slots a pass over `num_nodes` nodes writes, padding nodes included."""
        return num_nodes if self.graphs is None else bucket(num_nodes, NODE_BUCKETS) or num_nodes

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

    def chunk_shape(self, num_tokens: int, row: CacheRow, cache: KVCache) -> GraphShape | None:
        """The shape of a pass over a prompt's chunk; None without graphs, or where the row has no room for padding."""
        size = None if self.graphs is None else bucket(num_tokens, CHUNK_BUCKETS)
        return None if size is None or not cache.can_reserve([row], size) else GraphShape(1, size, size - 1, is_chain=True)

    def entries_shape(self, num_rows: int, most: int) -> GraphShape | None:
        """The shape of a pass over up to `most` new entries per row, whatever their number; None without graphs."""
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

    def run_rows(self, key: Hashable, function: Function, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run `function(*inputs)`, which touches no cache, from tensors [B, ...] to tensors [B, ...]."""
        B = len(inputs[0])
        num_rows = bucket(B, ROW_BUCKETS)
        if self.graphs is None or num_rows is None:
            return function(*inputs)
        results = self.graphs((key, num_rows), function, [fill_rows(each, num_rows) for each in inputs])
        return tuple(each[:B] for each in results)


def bucket(size: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket of at least `size`; None where all are smaller."""
    return next((each for each in buckets if each >= size), None)


def column_bucket(num_columns: int) -> int:
    """The number of columns of a block table in a graph, a power of two."""
    return max(MIN_COLUMNS, 1 << (num_columns - 1).bit_length())


def fill_rows(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """From at most `num_rows` rows [B, ...] to [num_rows, ...], by repeating the last one."""
    return torch.cat([rows, rows[-1:].expand(num_rows - len(rows), *rows.shape[1:])]) if num_rows > len(rows) else rows
