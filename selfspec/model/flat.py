"""The nodes of one target pass as a single list: trees of different sizes, then chunks of prompts.

Linear layers see [1, F + P] nodes and no padding between rows. Attention runs in two parts, because the nodes of a tree see
their own paths and the tokens of a chunk, a chain, share all keys.

Invariant: node j of a row is stored at storage index `length + j`, and a node's bits do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from selfspec.cache.blocks import CacheRow
from selfspec.cache.kv import KVCache, Places
from selfspec.kernels.jit import is_compiled_for
from selfspec.kernels.tree_layout import TreeLayout
from selfspec.kernels.tree_paths import tree_paths
from selfspec.tree import CandidateTree


@dataclass(frozen=True)
class Packing:
    """Which nodes of trees [B, N] a pass computes.

    Attributes:
        nodes: [F] int64, ascending indices into the B * N nodes. Each row's are its first ones.
        starts: [B + 1] int64, where each row's begin.
    """

    nodes: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def whole(cls, tree: CandidateTree) -> Packing:
        """All nodes of every tree."""
        B, N = tree.tokens.shape
        device = tree.tokens.device
        return cls(torch.arange(B * N, device=device), torch.arange(0, B * N + 1, N, device=device))


def pack(tree: CandidateTree, kept: torch.Tensor, counts: torch.Tensor) -> tuple[CandidateTree, Packing]:
    """The trees of the kept nodes, which become each row's first nodes in their order.

    Args:
        kept: [F] ascending indices into the B * N nodes: every root, and no node without its parent.
        counts: [B] how many of them each row has.
    """
    B, N = tree.tokens.shape
    device = tree.tokens.device
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    rows = kept // N
    places = rows * N + torch.arange(len(kept), device=device) - starts[rows]

    def moved(values: torch.Tensor, filler: float) -> torch.Tensor:
        flat = values.new_full((B * N,), filler)
        return flat.index_copy_(0, places, values.flatten()[kept]).view(B, N)

    # Where each node goes within its row; a kept node's parent is kept.
    moves = torch.zeros(B * N, dtype=torch.int64, device=device).index_copy_(0, kept, places - rows * N).view(B, N)
    parents = torch.where(tree.parents >= 0, moves.gather(1, tree.parents.clamp(min=0)), -1)
    smaller = replace(
        tree,
        tokens=moved(tree.tokens, -1),
        parents=moved(parents, -1),
        depths=moved(tree.depths, 0),
        scores=None if tree.scores is None else moved(tree.scores, 0.0),
    )
    return smaller, Packing(places, starts)


@dataclass(frozen=True)
class Chunks:
    """Prompt tokens of a pass: C chains, P tokens in all.

    Attributes:
        tokens: [P]; next_ids: [P], the token after each.
        lengths: [C], the rows' prefixes before the pass.
        starts: [C + 1]
        block_tables: [C, M].
        slots: [C], the slot of a row whose prompt ends here; the null slot for the others.
        rows, host_starts: the same on the host; None in a CUDA graph.
    """

    tokens: torch.Tensor
    next_ids: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor
    rows: Sequence[CacheRow] | None = None
    host_starts: list[int] | None = None

    @classmethod
    def unpack(cls, numbers: torch.Tensor, tokens: torch.Tensor) -> Chunks:
        """From numbers [C, 3 + M], which are length, number of tokens, slot and blocks of each row, and tokens [2, P]."""
        counts = numbers[:, 1]
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return cls(tokens[0], tokens[1], numbers[:, 0].contiguous(), starts, numbers[:, 3:], numbers[:, 2])


@dataclass(frozen=True)
class FlatNodes:
    """What a pass over F tree nodes and P prompt tokens reads and writes.

    Attributes:
        num_nodes: F.
        tokens, positions, slots: [F + P] each; `slots` is where keys and values go.
        trees, chunks: the layouts of the two parts; None where a part is empty.
    """

    num_nodes: int
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    trees: TreeLayout | None
    chunks: TreeLayout | None


def lay_out(
    cache: KVCache,
    places: Places | None,
    tree: CandidateTree | None,
    packing: Packing | None,
    chunks: Chunks | None,
) -> FlatNodes:
    """Lay out one pass. Device work only, unless the rows are known to the host."""
    parts = []
    trees = chains = None
    num_nodes = 0
    if tree is not None:
        assert places is not None and packing is not None
        trees, part = _lay_out_trees(cache, places, tree, packing)
        num_nodes = len(part[0])
        parts.append(part)
    if chunks is not None:
        chains, part = _lay_out_chunks(cache, chunks)
        parts.append(part)
    tokens, positions, slots = (torch.cat(each) if len(parts) > 1 else each[0] for each in zip(*parts, strict=True))
    return FlatNodes(num_nodes, tokens, positions, slots, trees, chains)


Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _lay_out_trees(cache: KVCache, places: Places, tree: CandidateTree, packing: Packing) -> tuple[TreeLayout, Part]:
    N = tree.num_nodes
    rows, local = packing.nodes // N, packing.nodes % N
    depths = tree.depths.flatten()[packing.nodes]
    lengths = places.lengths[rows]
    slots = _slots(cache, places.block_tables, rows, lengths + local)
    is_compiled, paths, mask = is_compiled_for(cache.keys), None, None
    if is_compiled and not tree.is_chain:
        paths = tree_paths(
            tree.parents,
            tree.depths,
            places.lengths,
            places.block_tables,
            block_size=cache.block_size,
            max_depth=tree.max_depth,
            nodes=packing.nodes,
        )[None]
    elif not is_compiled:
        mask = tree.ancestor_mask()[rows, local][:, local] & (rows[:, None] == rows)
    host_starts = None if places.rows is None else packing.starts.tolist() if not is_compiled else None
    layout = TreeLayout(
        block_tables=places.block_tables,
        lengths=places.lengths,
        host_lengths=None if places.rows is None else [row.length for row in places.rows],
        depths=depths[None],
        ancestor_mask=mask,
        block_size=cache.block_size,
        row_slots=_row_slots(cache, places.rows, host_starts),
        max_depth=tree.max_depth,
        is_chain=tree.is_chain,
        paths=paths,
        starts=packing.starts,
        host_starts=host_starts,
        max_nodes=N,
    )
    return layout, (tree.tokens.flatten()[packing.nodes].clamp(min=0), lengths + depths, slots)


def _lay_out_chunks(cache: KVCache, chunks: Chunks) -> tuple[TreeLayout, Part]:
    P = len(chunks.tokens)
    nodes = torch.arange(P, device=chunks.tokens.device)
    rows = torch.searchsorted(chunks.starts[1:], nodes, right=True).clamp(max=len(chunks.lengths) - 1)
    depths = nodes - chunks.starts[rows]
    positions = chunks.lengths[rows] + depths
    slots = _slots(cache, chunks.block_tables, rows, positions)
    is_compiled = is_compiled_for(cache.keys)
    layout = TreeLayout(
        block_tables=chunks.block_tables,
        lengths=chunks.lengths,
        host_lengths=None if chunks.rows is None else [row.length for row in chunks.rows],
        depths=depths[None],
        ancestor_mask=None if is_compiled else (rows[:, None] == rows) & (depths[:, None] >= depths),
        block_size=cache.block_size,
        row_slots=None if is_compiled else _row_slots(cache, chunks.rows, chunks.host_starts),
        max_depth=P - 1,
        is_chain=True,
        starts=chunks.starts,
        host_starts=chunks.host_starts,
        max_nodes=P,
    )
    return layout, (chunks.tokens, positions, slots)


def _slots(cache: KVCache, tables: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The slots [F] of storage indices [F] in rows [F]."""
    size = cache.block_size
    return tables[rows, index // size] * size + index % size


def _row_slots(
    cache: KVCache, rows: Sequence[CacheRow] | None, host_starts: list[int] | None
) -> list[slice | torch.Tensor] | None:
    if rows is None or host_starts is None:
        return None
    counts = [end - first for first, end in pairwise(host_starts)]
    return [cache.row_slots(row, row.length + count) for row, count in zip(rows, counts, strict=True)]
