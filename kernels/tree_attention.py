# mypy: allow-untyped-defs
"""Attention of a candidate tree over the paged KV cache.

    out[i] = softmax_p(cap(scaling * q_i . k_ip)) @ v_ip,    p = 0 ... position(i),    cap(x) = softcap * tanh(x / softcap)

where k_ip is the key at *position* p of node i's own text: a prefix key below T, and from there on the key of i's ancestor
at depth p - T. A tree needs no mask but the causal one; siblings differ in where their keys lie (`TreeLayout.path_slots`).

**The same bits, drafted or not.** A node's result depends on its query and on its keys by position. It does not depend on N,
on the batch, on the other nodes, or on which of its keys are committed yet. Verification therefore gives, bit for bit, what
decoding one token at a time gives. Three rules make it so:

* Positions are cut into splits of `SPLIT`, always at the same places, and splits into tiles of BLOCK_N. A key has the same
  lane of the same tile whether it lies in the prefix or in a scratch slot. Each split is reduced alone, tile by tile, and
  the splits that a node sees are added up one by one, starting from the first.
* All sums over keys are the matrix instruction's, the sum of the probabilities too (it is their product with ones). The
  instruction's sums do not depend on the tile's number of rows, nor on which of the card's instructions runs; the rest is
  elementwise or a maximum. So a tile may have any number of rows.
* An invisible key adds exact zeros, so a tile of such keys may be computed or skipped. Sizes that vary from pass to pass do
  not specialise the code.

**Ragged passes.** Rows may have different numbers of nodes, or none (`TreeLayout.starts`). A tile has query rows of one row
of the batch only, and a program finds its row on the device. Each row therefore gets the bits that it gets alone.

**Two ways to the same bits.** Few nodes: programs of two kinds take one split each, and a second kernel adds the splits up.
In the splits that lie in the prefix all nodes share their keys, and a program takes BLOCK_M rows, which are a key-value
group's query heads for several nodes. In the splits from T on, every node has its own program, which gathers the node's own
path. (The nodes of a chain share all keys and need only the causal mask.) A long chain, such as a prompt's chunk: one
program walks through all splits of its rows and adds them up itself, so no partial result goes through memory.

On CPU, every row of the batch is one fused `scaled_dot_product_attention` over its own keys. Nothing is padded to the
longest row, no key-value head is repeated (a group's query heads are stacked along the node axis), and nothing is copied
where the row's blocks are consecutive. The fused form has no soft-capping or sinks; `tree_attention_reference` computes
those.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from selfspec.kernels.jit import is_compiled_for, shared_memory, triton
from selfspec.kernels.reference import path_attention_reference, tree_attention_reference
from selfspec.kernels.tree_attention_kernels import chain_kernel, combine_kernel, split_kernel
from selfspec.kernels.tree_layout import TreeLayout

# Keys in a split. Neither this nor the tile of a decoding pass may depend on the pass's sizes, because bits would differ.
SPLIT = 128


class Tile(NamedTuple):
    """The query rows and keys that a program takes at once, and how it is compiled."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# One node has few query rows for a key-value head. The lowest tile that the instruction allows leaves room for programs.
TILE = Tile(16, 64, 2, 2)
# No matrix instruction takes float32 in full precision, so it is summed in registers, by this tile alone.
FLOAT32_TILE = Tile(16, 32, 8, 2)
# For chains of at least MIN_CHAIN_NODES nodes: where they make few programs, where they make MANY_PROGRAMS, and for heads of
# more than 128 dimensions.
CHAIN_TILE, HIGH_CHAIN_TILE = Tile(64, TILE.keys, 4, 3), Tile(128, TILE.keys, 8, 3)
LARGE_CHAIN_TILE = Tile(64, TILE.keys, 8, 1)
MIN_CHAIN_NODES, MANY_PROGRAMS = 128, 128
# The sum of probabilities is their product with a matrix of ones, as narrow as the instruction allows.
NUM_ONES = 16
# The splits that the second kernel loads at once, and how often ahead.
BLOCK_P, NUM_COMBINE_STAGES = 4, 4
# Nodes in one launch, which bounds the partial results.
MAX_NODES = 256


def tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layout: TreeLayout,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [B, N, H, Dv] of a pass's nodes; see `tree_attention_reference`.

    In the ragged form (`TreeLayout.starts`) B is 1 and N is F. Every row gets the bits that it gets alone.

    Args:
        query: [B, H, N, D].
        key_cache, value_cache: one layer's pool, [num_slots, G, D] and [num_slots, G, Dv].
        sinks: [H] or None.
        out: the result's place, [B, N, H, Dv]: a contiguous tensor, or some of its nodes.
    """
    if out is None:
        B, H, N, _ = query.shape
        out = query.new_empty(B, N, H, value_cache.shape[2])
    options = scaling, sliding_window, softcap, sinks
    if is_compiled_for(query):
        launch_tree_attention(query, key_cache, value_cache, layout, *options, out)
    elif layout.starts is None:
        out.copy_(_attend_uniformly(query, key_cache, value_cache, layout, *options))
    else:
        for nodes, row in layout.rows:
            out[:, nodes] = _attend_uniformly(query[:, :, nodes], key_cache, value_cache, row, *options)
    return out


def _attend_uniformly(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layout: TreeLayout,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`tree_attention` of the uniform form in torch; shapes as there."""
    if layout.ancestor_mask is None:
        assert layout.paths is not None and sliding_window is None and softcap is None and sinks is None
        lengths, depths = layout.lengths, layout.depths[:, -query.shape[2] :]
        tables = layout.block_tables
        return path_attention_reference(
            query, key_cache, value_cache, tables, lengths, depths, layout.paths, layout.block_size, scaling
        )
    if softcap is None and sinks is None and layout.row_slots is not None:
        return _attend_row_by_row(query, key_cache, value_cache, layout, scaling, sliding_window)
    return tree_attention_reference(
        query,
        key_cache,
        value_cache,
        layout.block_tables,
        layout.lengths,
        layout.depths,
        layout.ancestor_mask,
        layout.block_size,
        scaling,
        sliding_window,
        softcap,
        sinks,
    )


def launch_tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layout: TreeLayout,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`tree_attention` by the kernels; shapes as there.

    The grid follows from shapes and from bounds that the host knows; the device is not asked.
    """
    B, H, N, D = query.shape
    G, Dv = key_cache.shape[1], value_cache.shape[2]
    R, num_rows = H // G, len(layout.lengths)
    assert key_cache.is_contiguous() and value_cache.is_contiguous() and layout.block_tables.stride(1) == 1
    out = query.new_empty(B, N, H, Dv) if out is None else out
    assert out.shape == (B, N, H, Dv) and out[0].is_contiguous() and out.stride(0) % (H * Dv) == 0
    query = query.transpose(1, 2).contiguous()  # [B, N, H, D]
    depths = layout.depths[:, layout.depths.shape[1] - N :]
    assert depths.stride(1) == 1
    # Node i of row b has its depth at i + b * depth_gap, and its result at i + b * out_gap, if i goes on from row to row.
    depth_gap, out_gap = (0, 0) if B == 1 else (depths.stride(0) - N, out.stride(0) // (H * Dv) - N)
    starts, most_nodes = (None, N) if layout.starts is None else (layout.starts, layout.node_bound)
    block_d, block_dv = max(16, triton.next_power_of_2(D)), max(16, triton.next_power_of_2(Dv))
    log2_e = math.log2(math.e)
    score_scale, cap = (scaling * log2_e, 0.0) if softcap is None else (scaling / softcap, softcap * log2_e)
    shape = {"H": H, "G": G, "D": D, "DV": Dv, "PAGE": layout.block_size, "WINDOW": sliding_window}
    shape |= {"HAS_CAP": softcap is not None, "SPLIT": SPLIT, "NUM_ONES": NUM_ONES, "BLOCK_D": block_d, "BLOCK_DV": block_dv}
    if layout.is_chain and most_nodes >= MIN_CHAIN_NODES and query.dtype != torch.float32:
        tile = _chain_tile(query, B * N * R, G, block_d, block_dv)
        chain_kernel[(_num_tiles(starts, num_rows, B * N, R, tile.rows) * G,)](
            query,
            key_cache,
            value_cache,
            layout.block_tables,
            layout.lengths,
            starts,
            depths,
            sinks,
            out,
            score_scale,
            cap,
            num_rows,
            B * N,
            depth_gap,
            out_gap,
            layout.block_tables.stride(0),
            **shape,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            NUM_STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
        return out
    # A chain's keys lie in the block table's order, so no path is read.
    path_slots = layout.lengths[:, None] if layout.is_chain else layout.path_slots
    K = layout.depth_bound
    num_splits = (layout.length_bound + K) // SPLIT + 1
    if sliding_window is not None:
        num_splits = min(num_splits, _num_touched(sliding_window + K))
    num_open_splits = 0 if layout.is_chain else min(num_splits, _num_touched(K + 1))
    tile = FLOAT32_TILE if query.dtype == torch.float32 else TILE
    if starts is None and B * N > MAX_NODES:
        # Only a launch of all nodes finds rows without.
        starts = torch.arange(0, B * N + 1, N, device=query.device)
    for first_node in range(0, B * N, MAX_NODES):
        num_nodes = min(MAX_NODES, B * N - first_node)
        acc = torch.empty(num_splits, num_nodes, H, Dv, dtype=torch.float32, device=query.device)
        row_max, row_sum = torch.empty(2, num_splits, num_nodes, H, dtype=torch.float32, device=query.device)
        num_tiles = _num_tiles(starts, num_rows, num_nodes, R, tile.rows)
        num_own = num_open_splits * num_nodes * triton.cdiv(R, tile.rows)
        split_kernel[((num_splits * num_tiles + num_own) * G,)](
            query,
            key_cache,
            value_cache,
            layout.block_tables,
            layout.lengths,
            starts,
            depths,
            path_slots,
            acc,
            row_max,
            row_sum,
            score_scale,
            cap,
            int(layout.is_chain),
            num_rows,
            first_node,
            num_nodes,
            num_tiles,
            depth_gap,
            layout.block_tables.stride(0),
            num_splits,
            path_slots.shape[-1],
            **shape,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        combine_kernel[(num_nodes * H,)](
            acc,
            row_max,
            row_sum,
            layout.lengths,
            starts,
            depths,
            sinks,
            out,
            num_rows,
            first_node,
            num_nodes,
            depth_gap,
            out_gap,
            H=H,
            DV=Dv,
            WINDOW=sliding_window,
            SPLIT=SPLIT,
            BLOCK_P=BLOCK_P,
            NUM_STAGES=NUM_COMBINE_STAGES,
            BLOCK_DV=block_dv,
            num_warps=1,
        )
    return out


def _chain_tile(query: torch.Tensor, num_rows: int, num_heads: int, block_d: int, block_dv: int) -> Tile:
    """The tile for `num_rows` query rows of each of `num_heads` heads, with the stages that fit into shared memory."""
    tile = CHAIN_TILE
    if max(block_d, block_dv) > 128:
        tile = LARGE_CHAIN_TILE
    elif num_heads * triton.cdiv(num_rows, HIGH_CHAIN_TILE.rows) >= MANY_PROGRAMS:
        tile = HIGH_CHAIN_TILE
    free = shared_memory(query.device) - tile.rows * block_d * query.element_size()
    num_stages = free // (SPLIT * (block_d + block_dv) * query.element_size())
    return tile._replace(num_stages=max(1, min(tile.num_stages, num_stages)))


def _num_tiles(starts: torch.Tensor | None, num_rows: int, num_nodes: int, num_heads: int, height: int) -> int:
    """The tiles of `height` query rows, `num_heads` for each node, as the kernels number them; some may be left out."""
    if starts is None:
        return num_rows * triton.cdiv(num_nodes // num_rows * num_heads, height)
    return num_nodes * num_heads // height + num_rows


def _num_touched(num_positions: int) -> int:
    """The most splits that `num_positions` consecutive positions can touch."""
    return (num_positions + SPLIT - 2) // SPLIT + 1


def _attend_row_by_row(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layout: TreeLayout,
    scaling: float,
    sliding_window: int | None,
) -> torch.Tensor:
    B, H, N, D = query.shape
    G, Dv = key_cache.shape[1], value_cache.shape[2]
    out = query.new_empty(B, N, H, Dv)
    assert layout.row_slots is not None
    for b, slots in enumerate(layout.row_slots):
        keys = key_cache[slots].transpose(0, 1)[None]  # [1, G, S, D]
        values = value_cache[slots].transpose(0, 1)[None]
        grouped = query[b].reshape(1, G, (H // G) * N, D)
        bias = layout.bias(b, sliding_window, H // G, query.dtype)
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scaling)
        out[b] = attended.view(H, N, Dv).transpose(0, 1)
    return out
