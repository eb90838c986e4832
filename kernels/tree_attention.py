# mypy: allow-untyped-defs
"""Attention of a candidate tree over the paged KV cache.

    out[i] = softmax_p(cap(scaling * q_i . k_ip)) @ v_ip,    p = 0 ... position(i),    cap(x) = softcap * tanh(x / softcap)

where k_ip is the key at *position* p of node i's own text: a prefix key below T, and from there on the key of i's ancestor
at depth p - T. A tree needs no mask but the causal one; siblings differ in where their keys lie (`TreeLayout.path_slots`).

**The same bits, drafted or not.** A node's result depends on its query and on its keys by position. It does not depend on N,
on the batch, on the other nodes, or on which of its keys are committed yet. Verification therefore gives, bit for bit, what
decoding one token at a time gives. Three rules make it so:

* Positions are cut into splits of `SPLIT`, always at the same places, and splits into tiles of BLOCK_N. A key has the same
  lane of the same tile whether it lies in the prefix or in a scratch slot. Each split is reduced alone, tile by tile. A
  second kernel adds up the splits that a node sees, starting from the first.
* Programs of two kinds run the same instructions. In the splits that lie in the prefix all nodes share their keys, and a
  program takes BLOCK_M rows, which are a key-value group's query heads for several nodes. In the splits from T on, every
  node has its own program, which gathers the node's own path. (The nodes of a chain share all keys and need only the causal
  mask.)
* An invisible key adds exact zeros, so a tile of such keys may be computed or skipped. Sizes that vary from pass to pass do
  not specialise the code.

Rows of a matrix instruction do not influence each other, but another tile shape is another instruction. So there is one tile
for all passes of up to MAX_ROWS nodes; other layers keep a row's bits no further either.

On CPU, every row of the batch is one fused `scaled_dot_product_attention` over its own keys. Nothing is padded to the
longest row, no key-value head is repeated (a group's query heads are stacked along the node axis), and nothing is copied
where the row's blocks are consecutive. The fused form has no soft-capping or sinks; `tree_attention_reference` computes
those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F

from selfspec.kernels.jit import is_compiled_for, jit, tl, triton
from selfspec.kernels.linear import MAX_ROWS
from selfspec.kernels.reference import path_attention_reference, tree_attention_reference
from selfspec.kernels.slots import slots_of

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
# For more nodes than MAX_ROWS, whose bits other layers do not keep anyway: heads of up to 128 dimensions, and larger ones.
BATCH_TILE, LARGE_BATCH_TILE = Tile(64, 64, 4, 3), Tile(64, 64, 8, 2)
# No matrix instruction takes float32 in full precision, so it is summed in registers.
FLOAT32_TILE = Tile(16, 32, 8, 2)
# The splits that the second kernel adds up at once.
BLOCK_P = 32
# Nodes in one launch, which bounds the partial results of a long prefill.
MAX_NODES = 128


@dataclass
class TreeLayout:
    """Which keys the nodes of one pass see, and where they lie.

    Attributes:
        block_tables: [B, P] int64.
        lengths: [B] int64, T of each row; `host_lengths` is the same on the host, or None if the host does not know it.
        depths: [B, M] int64, of the tree's stored nodes. A pass queries the last N of these.
        ancestor_mask: [B, N, M] bool; None where `paths` says the same.
        row_slots: for each row, the slots of its T + M keys in storage order, as a slice where they are consecutive. Only
            the CPU needs them.
        max_depth: K, a bound on the nodes' depths; None if M - 1 is the best bound known.
        paths: [B, N, K + 1 or more] int64, the `path_slots` where they are known already.
        is_chain: every row is one path in storage order, with padding only after it. The result at a padding node may then
            differ from the formula; nobody reads it.
    """

    block_tables: torch.Tensor
    lengths: torch.Tensor
    host_lengths: list[int] | None
    depths: torch.Tensor
    ancestor_mask: torch.Tensor | None
    block_size: int
    row_slots: list[slice | torch.Tensor] | None = None
    max_depth: int | None = None
    is_chain: bool = False
    paths: torch.Tensor | None = None
    _biases: dict[tuple[int, int | None, int, torch.dtype], torch.Tensor | None] = field(default_factory=dict)

    @property
    def depth_bound(self) -> int:
        """K: no node is deeper."""
        return self.depths.shape[1] - 1 if self.max_depth is None else self.max_depth

    @property
    def length_bound(self) -> int:
        """A bound on the rows' prefix lengths, found without asking the device."""
        return self.block_tables.shape[1] * self.block_size if self.host_lengths is None else max(self.host_lengths)

    @cached_property
    def path_slots(self) -> torch.Tensor:
        """[B, N, K + 1] int64: the slot of each queried node's ancestor at each depth, and its own at its own depth.

        Entries past a node's own depth mean nothing.
        """
        if self.paths is not None:
            return self.paths
        assert self.ancestor_mask is not None
        B, N, M = self.ancestor_mask.shape
        K = self.depth_bound
        nodes = torch.arange(M, device=self.depths.device).expand(B, M)
        slots = slots_of(self.block_tables, self.lengths[:, None] + nodes, self.block_size)
        # Nodes that are no ancestors go to one more column, which is cut off.
        column = torch.where(self.ancestor_mask, self.depths[:, None], K + 1)
        path = slots.new_zeros(B, N, K + 2).scatter_(2, column, slots[:, None].expand(B, N, M))
        return path[:, :, : K + 1].contiguous()

    def bias(self, row: int, sliding_window: int | None, num_groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """One row's additive mask [num_groups * N, T + M], cached for the pass; None where every key is visible."""
        key = (row, sliding_window, num_groups, dtype)
        if key not in self._biases:
            self._biases[key] = self._make_bias(*key)
        return self._biases[key]

    def _make_bias(self, row: int, sliding_window: int | None, num_groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        assert self.host_lengths is not None and self.ancestor_mask is not None
        _, N, M = self.ancestor_mask.shape
        T = self.host_lengths[row]
        if N == M == 1 and (sliding_window is None or T < sliding_window):
            return None
        device = self.depths.device
        visible = torch.cat([torch.ones(N, T, dtype=torch.bool, device=device), self.ancestor_mask[row]], dim=1)
        if sliding_window is not None:
            depths = self.depths[row]
            positions = torch.cat([torch.arange(T, device=device), T + depths])
            visible &= (T + depths[M - N :])[:, None] - positions < sliding_window
        bias = torch.zeros(N, T + M, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
        return bias.repeat(num_groups, 1)


# Sizes that vary from pass to pass. Specialising on a size of 1 or a multiple of 16 would compile other code for it.
_VARYING = ("is_chain", "num_nodes", "stride_nodes_b", "stride_depths_b", "stride_tables_b", "num_splits", "path_length")


@jit()
def _first_split(T, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """The first split that a node at position T sees. At the root's T it is the first that any node sees."""
    if WINDOW is None:
        return T * 0
    else:
        return tl.maximum(T - WINDOW + 1, 0) // SPLIT


@jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=("depths_ptr",))
def _tree_attention_split_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    lengths_ptr,
    depths_ptr,
    path_slots_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    score_scale,
    cap,
    is_chain,
    num_nodes,
    stride_nodes_b,
    stride_depths_b,
    stride_tables_b,
    num_splits,
    path_length,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One split's softmax, in base 2 and not normalised, for up to BLOCK_M rows of one key-value head.

    Row r is head `r % (H // G)` of the group for node `r // (H // G)`. The kernel writes the rows' maximum and sum
    [B, P, N, H] and their weighted values [B, P, N, H, DV], all float32. It writes nothing where no row sees a key of the
    split.
    """
    R: tl.constexpr = H // G
    TILES_PER_NODE: tl.constexpr = (R + BLOCK_M - 1) // BLOCK_M
    # Heads are neighbours in launch order as in memory.
    program = tl.program_id(0) // G
    g = tl.program_id(0) % G
    b = tl.program_id(1)
    T = tl.load(lengths_ptr + b).to(tl.int32)
    first_split = _first_split(T, WINDOW, SPLIT)

    num_row_tiles = tl.cdiv(num_nodes * R, BLOCK_M)
    num_shared = num_splits * num_row_tiles
    is_shared = program < num_shared
    if is_shared:
        # Tiles of one split are neighbours in launch order, so they find its keys in L2.
        split = first_split + program // num_row_tiles
        first_row = program % num_row_tiles * BLOCK_M
        end_row = num_nodes * R
    else:
        own = program - num_shared
        split = T // SPLIT + own // (num_nodes * TILES_PER_NODE)
        node = own // TILES_PER_NODE % num_nodes
        first_row = node * R + own % TILES_PER_NODE * BLOCK_M
        end_row = (node + 1) * R

    offs_row = first_row + tl.arange(0, BLOCK_M)
    mask_row = offs_row < end_row
    offs_node = offs_row // R
    offs_head = g * R + offs_row % R
    depth = tl.load(depths_ptr + b * stride_depths_b + offs_node, mask=mask_row, other=0).to(tl.int32)
    position = T + depth
    start = split * SPLIT
    end = tl.minimum(start + SPLIT, tl.max(position) + 1)
    # Keys at positions below this are found through the block table, the others on the node's path.
    table_end = T
    if is_chain:
        table_end = end
    elif is_shared:
        end = tl.minimum(end, T // SPLIT * SPLIT)
    if WINDOW is not None:
        start = tl.maximum(start, tl.maximum(tl.min(position) - WINDOW + 1, 0) // BLOCK_N * BLOCK_N)
    if start >= end:
        return

    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_d = offs_d < D
    mask_dv = offs_dv < DV
    query_row = (b.to(tl.int64) * stride_nodes_b + offs_node) * H + offs_head
    query = tl.load(query_ptr + query_row[:, None] * D + offs_d, mask=mask_row[:, None] & mask_d, other=0.0)
    table_ptr = block_tables_ptr + b.to(tl.int64) * stride_tables_b
    path_ptr = path_slots_ptr + (b.to(tl.int64) * stride_nodes_b + first_row // R) * path_length

    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for first_key in range(start, end, BLOCK_N):
        offs_key = first_key + tl.arange(0, BLOCK_N)
        mask_key = offs_key < end
        in_table = offs_key < table_end
        page = tl.load(table_ptr + offs_key // PAGE, mask=mask_key & in_table, other=0)
        path_slot = tl.load(path_ptr + offs_key - T, mask=mask_key & ~in_table, other=0)
        slot = tl.where(in_table, page * PAGE + offs_key % PAGE, path_slot)
        pool_row = slot * G + g
        key = tl.load(key_ptr + pool_row[:, None] * D + offs_d, mask=mask_key[:, None] & mask_d, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * score_scale
        if HAS_CAP:
            # tanh; `score_scale` contains the division by the cap, and `cap` the factor for base 2.
            scores = cap - 2 * cap / (1 + tl.exp(2 * scores))
        visible = mask_key[None, :] & (offs_key[None, :] <= position[:, None])
        if WINDOW is not None:
            visible = visible & (position[:, None] - offs_key[None, :] < WINDOW)
        scores = tl.where(visible, scores, -float("inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row may have seen no key yet, and -inf - -inf must not arise.
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - base)
        probs = tl.exp2(scores - base[:, None])
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        row_max = new_max
        value = tl.load(value_ptr + pool_row[:, None] * DV + offs_dv, mask=mask_key[:, None] & mask_dv, other=0.0)
        acc = tl.dot(probs.to(value.dtype), value, acc * rescale[:, None], input_precision="ieee")

    part = (b.to(tl.int64) * num_splits + split - first_split) * num_nodes + offs_node
    part = part * H + offs_head
    tl.store(max_ptr + part, row_max, mask=mask_row)
    tl.store(sum_ptr + part, row_sum, mask=mask_row)
    tl.store(acc_ptr + part[:, None] * DV + offs_dv, acc, mask=mask_row[:, None] & mask_dv)


@jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=("depths_ptr",))
def _tree_attention_combine_kernel(
    acc_ptr,
    max_ptr,
    sum_ptr,
    lengths_ptr,
    depths_ptr,
    sinks_ptr,
    out_ptr,
    num_nodes,
    stride_nodes_b,
    stride_depths_b,
    num_splits,
    H: tl.constexpr,
    DV: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Add up the splits that one head of one node sees, BLOCK_P at a time, and normalise."""
    node = tl.program_id(0) // H
    head = tl.program_id(0) % H
    b = tl.program_id(1).to(tl.int64)
    T = tl.load(lengths_ptr + b).to(tl.int32)
    position = T + tl.load(depths_ptr + b * stride_depths_b + node).to(tl.int32)
    first = _first_split(position, WINDOW, SPLIT)
    last = position // SPLIT
    base = (b * num_splits - _first_split(T, WINDOW, SPLIT)) * num_nodes + node

    offs_dv = tl.arange(0, BLOCK_DV)
    mask_dv = offs_dv < DV
    acc = tl.zeros([BLOCK_DV], tl.float32)
    if sinks_ptr is None:
        row_max = -float("inf")
        row_sum = 0.0
    else:
        row_max = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        row_sum = 1.0
    for first_of_block in range(first, last + 1, BLOCK_P):
        offs_split = first_of_block + tl.arange(0, BLOCK_P)
        mask_split = offs_split <= last
        part = (base + offs_split.to(tl.int64) * num_nodes) * H + head
        split_max = tl.load(max_ptr + part, mask=mask_split, other=-float("inf"))
        split_sum = tl.load(sum_ptr + part, mask=mask_split, other=0.0)
        split_acc = tl.load(acc_ptr + part[:, None] * DV + offs_dv, mask=mask_split[:, None] & mask_dv, other=0.0)
        new_max = tl.maximum(row_max, tl.max(split_max, 0))
        rescale = tl.exp2(row_max - new_max)
        weight = tl.exp2(split_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weight * split_sum, 0)
        acc = acc * rescale + tl.sum(weight[:, None] * split_acc, 0)
        row_max = new_max
    out_row = (b * stride_nodes_b + node) * H + head
    tl.store(out_ptr + out_row * DV + offs_dv, (acc / row_sum).to(out_ptr.dtype.element_ty), mask=mask_dv)


def tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layout: TreeLayout,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [B, N, H, Dv] of a pass's nodes; see `tree_attention_reference`.

    Args:
        query: [B, H, N, D].
        key_cache, value_cache: one layer's pool, [num_slots, G, D] and [num_slots, G, Dv].
        sinks: [H] or None.
    """
    if is_compiled_for(query):
        return launch_tree_attention(query, key_cache, value_cache, layout, scaling, sliding_window, softcap, sinks)
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
) -> torch.Tensor:
    """`tree_attention` by the kernels; shapes as there.

    The grid follows from shapes and from bounds that the host knows; the device is not asked.
    """
    B, H, N, D = query.shape
    G, M, Dv = key_cache.shape[1], layout.depths.shape[1], value_cache.shape[2]
    assert key_cache.is_contiguous() and value_cache.is_contiguous() and layout.block_tables.stride(1) == 1
    query = query.transpose(1, 2).contiguous()  # [B, N, H, D]
    depths = layout.depths[:, M - N :]
    assert depths.stride(1) == 1
    # A chain's keys lie in the block table's order, so no path is read.
    path_slots = layout.lengths[:, None, None].expand(B, N, 1) if layout.is_chain else layout.path_slots
    K = layout.depth_bound
    num_splits = (layout.length_bound + K) // SPLIT + 1
    if sliding_window is not None:
        num_splits = min(num_splits, _num_touched(sliding_window + K))
    num_open_splits = 0 if layout.is_chain else min(num_splits, _num_touched(K + 1))

    block_d, block_dv = max(16, triton.next_power_of_2(D)), max(16, triton.next_power_of_2(Dv))
    tile = TILE
    if query.dtype == torch.float32:
        tile = FLOAT32_TILE
    elif B * N > MAX_ROWS:
        tile = BATCH_TILE if max(block_d, block_dv) <= 128 else LARGE_BATCH_TILE
    log2_e = math.log2(math.e)
    score_scale, cap = (scaling * log2_e, 0.0) if softcap is None else (scaling / softcap, softcap * log2_e)
    out = query.new_empty(B, N, H, Dv)
    for first in range(0, N, MAX_NODES):
        nodes = slice(first, min(N, first + MAX_NODES))
        num_nodes = nodes.stop - first
        acc = torch.empty(B, num_splits, num_nodes, H, Dv, dtype=torch.float32, device=query.device)
        row_max, row_sum = torch.empty(2, B, num_splits, num_nodes, H, dtype=torch.float32, device=query.device)
        num_shared = num_splits * triton.cdiv(num_nodes * (H // G), tile.rows)
        num_own = num_open_splits * num_nodes * triton.cdiv(H // G, tile.rows)
        _tree_attention_split_kernel[((num_shared + num_own) * G, B)](
            query[:, nodes],
            key_cache,
            value_cache,
            layout.block_tables,
            layout.lengths,
            depths[:, nodes],
            path_slots[:, nodes],
            acc,
            row_max,
            row_sum,
            score_scale,
            cap,
            int(layout.is_chain),
            num_nodes,
            N,
            depths.stride(0),
            layout.block_tables.stride(0),
            num_splits,
            path_slots.shape[2],
            H=H,
            G=G,
            D=D,
            DV=Dv,
            PAGE=layout.block_size,
            WINDOW=sliding_window,
            HAS_CAP=softcap is not None,
            SPLIT=SPLIT,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        _tree_attention_combine_kernel[(num_nodes * H, B)](
            acc,
            row_max,
            row_sum,
            layout.lengths,
            depths[:, nodes],
            sinks,
            out[:, nodes],
            num_nodes,
            N,
            depths.stride(0),
            num_splits,
            H=H,
            DV=Dv,
            WINDOW=sliding_window,
            SPLIT=SPLIT,
            BLOCK_P=BLOCK_P,
            BLOCK_DV=block_dv,
        )
    return out


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
