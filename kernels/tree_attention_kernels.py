# mypy: allow-untyped-defs
"""The kernels of tree attention. `selfspec.kernels.tree_attention` says what they compute, and when which of them runs.

The nodes of all rows of the batch are numbered one after the other, and a launch takes `num_nodes` of these from
`first_node` on. Row b has nodes `starts[b]` to `starts[b + 1] - 1`. Without `starts`, the launch takes all nodes, and each
row has equally many. A program finds its row by itself, because the host does not know where rows end.
"""

from __future__ import annotations

from selfspec.kernels.jit import jit, tl

# Sizes that vary from pass to pass. Specialising on a size of 1 or a multiple of 16 would compile other code for it.
_VARYING = (
    "is_chain",
    "num_rows",
    "first_node",
    "num_nodes",
    "num_tiles",
    "depth_gap",
    "out_gap",
    "stride_tables_b",
    "num_splits",
    "path_length",
)
_UNALIGNED = ("starts_ptr", "depths_ptr")


@jit()
def _find_node(node, starts_ptr, num_rows, num_nodes):
    """The row of the batch that has node `node`; `num_rows` if none has it."""
    if starts_ptr is None:
        return node // (num_nodes // num_rows)
    else:
        b = num_rows * 0
        for first in range(0, num_rows, 64):
            offs_b = first + tl.arange(0, 64)
            ends = tl.load(starts_ptr + 1 + offs_b, mask=offs_b < num_rows, other=node + 1)
            b += tl.sum((ends <= node).to(tl.int32), 0)
        return b


@jit()
def _find_tile(tile, starts_ptr, num_rows, first_node, num_nodes, R: tl.constexpr, BLOCK_M: tl.constexpr):
    """The row b of the batch that has tile `tile`, and the tile's first query row and b's last, counted from `first_node`.

    A tile has up to BLOCK_M query rows, R for each node, and all are b's. Tile `starts[b] * R // BLOCK_M + b` is b's first:
    numbers that need no sum over rows, and leave out at most one tile for each row. The first query row of a tile that is
    left out is not before the last one.
    """
    if starts_ptr is None:
        rows_each = num_nodes // num_rows * R
        tiles_each = tl.cdiv(rows_each, BLOCK_M)
        b = tile // tiles_each
        return b, b * rows_each + tile % tiles_each * BLOCK_M, (b + 1) * rows_each
    else:
        b = num_rows * 0
        for first in range(0, num_rows, 64):
            offs_b = first + tl.arange(0, 64)
            ends = tl.load(starts_ptr + 1 + offs_b, mask=offs_b < num_rows, other=0).to(tl.int32) - first_node
            ends = tl.minimum(tl.maximum(ends, 0), num_nodes)
            b += tl.sum(((offs_b < num_rows) & (ends * R // BLOCK_M + offs_b + 1 <= tile)).to(tl.int32), 0)
        start = tl.load(starts_ptr + b).to(tl.int32) - first_node
        start = tl.minimum(tl.maximum(start, 0), num_nodes)
        end = tl.load(starts_ptr + b + 1, mask=b < num_rows, other=0).to(tl.int32) - first_node
        end = tl.minimum(end, num_nodes)
        return b, start * R + (tile - start * R // BLOCK_M - b) * BLOCK_M, end * R


@jit()
def _first_split(T, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """The first split that a node at position T sees. At the root's T it is the first that any node sees."""
    if WINDOW is None:
        return T * 0
    else:
        return tl.maximum(T - WINDOW + 1, 0) // SPLIT


@jit()
def _add_tile(
    row_max,
    row_sum,
    acc,
    query,
    position,
    key_ptr,
    value_ptr,
    slot,
    offs_key,
    mask_key,
    g,
    score_scale,
    cap,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    NUM_ONES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Add a tile's keys to a split's maximum [BLOCK_M], sum [BLOCK_M, NUM_ONES] and weighted values [BLOCK_M, BLOCK_DV]."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    pool_row = slot * G + g
    key = tl.load(key_ptr + pool_row[:, None] * D + offs_d, mask=mask_key[:, None] & (offs_d < D), other=0.0)
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
    rescale = tl.exp2(row_max - base)[:, None]
    value = tl.load(value_ptr + pool_row[:, None] * DV + offs_dv, mask=mask_key[:, None] & (offs_dv < DV), other=0.0)
    probs = tl.exp2(scores - base[:, None]).to(value.dtype)
    ones = tl.full([BLOCK_N, NUM_ONES], 1.0, value.dtype)
    row_sum = tl.dot(probs, ones, row_sum * rescale, input_precision="ieee")
    acc = tl.dot(probs, value, acc * rescale, input_precision="ieee")
    return new_max, row_sum, acc


@jit()
def _add_split(row_max, row_sum, acc, split_max, split_sum, split_acc):
    """Add a split's maximum, sum and weighted values to those of the splits before it, all of one shape or broadcast.

    The additions are written as `fma`, because the compiler could otherwise choose another of two ways in each kernel.
    """
    new_max = tl.maximum(row_max, split_max)
    # No row has seen a key where the window begins later.
    base = tl.where(new_max == -float("inf"), 0.0, new_max)
    old_weight, weight = tl.exp2(row_max - base), tl.exp2(split_max - base)
    row_sum = tl.fma(row_sum, old_weight, split_sum * weight)
    return new_max, row_sum, tl.fma(acc, old_weight, split_acc * weight)


@jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def split_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    lengths_ptr,
    starts_ptr,
    depths_ptr,
    path_slots_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    score_scale,
    cap,
    is_chain,
    num_rows,
    first_node,
    num_nodes,
    num_tiles,
    depth_gap,
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
    NUM_ONES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One split's softmax, in base 2 and not normalised, for up to BLOCK_M rows of one key-value head.

    Row r is head `r % (H // G)` of the group for node `r // (H // G)`. The kernel writes the rows' maximum and sum
    [P, N, H] and their weighted values [P, N, H, DV] for the launch's N nodes, all float32. It writes nothing where no row
    sees a key of the split.
    """
    R: tl.constexpr = H // G
    TILES_PER_NODE: tl.constexpr = (R + BLOCK_M - 1) // BLOCK_M
    # Heads are neighbours in launch order as in memory.
    program = tl.program_id(0) // G
    g = tl.program_id(0) % G
    num_shared = num_splits * num_tiles
    is_shared = program < num_shared
    if is_shared:
        # Tiles of one split are neighbours in launch order, so they find its keys in L2.
        step = program // num_tiles
        b, first_row, end_row = _find_tile(program % num_tiles, starts_ptr, num_rows, first_node, num_nodes, R, BLOCK_M)
    else:
        own = program - num_shared
        node = own // TILES_PER_NODE % num_nodes
        step = own // (num_nodes * TILES_PER_NODE)
        b = _find_node(first_node + node, starts_ptr, num_rows, num_nodes)
        first_row = node * R + own % TILES_PER_NODE * BLOCK_M
        end_row = tl.where(b < num_rows, (node + 1) * R, 0)
    if first_row >= end_row:
        return
    T = tl.load(lengths_ptr + b).to(tl.int32)
    first_split = _first_split(T, WINDOW, SPLIT)
    split = step + tl.where(is_shared, first_split, T // SPLIT)

    offs_row = first_row + tl.arange(0, BLOCK_M)
    mask_row = offs_row < end_row
    offs_node = offs_row // R
    offs_head = g * R + offs_row % R
    depth = tl.load(depths_ptr + b * depth_gap + first_node + offs_node, mask=mask_row, other=0).to(tl.int32)
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
    query_row = (first_node.to(tl.int64) + offs_node) * H + offs_head
    query = tl.load(query_ptr + query_row[:, None] * D + offs_d, mask=mask_row[:, None] & (offs_d < D), other=0.0)
    table_ptr = block_tables_ptr + b.to(tl.int64) * stride_tables_b
    path_ptr = path_slots_ptr + (first_node.to(tl.int64) + first_row // R) * path_length

    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M, NUM_ONES], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for first_key in range(start, end, BLOCK_N):
        offs_key = first_key + tl.arange(0, BLOCK_N)
        mask_key = offs_key < end
        in_table = offs_key < table_end
        page = tl.load(table_ptr + offs_key // PAGE, mask=mask_key & in_table, other=0)
        path_slot = tl.load(path_ptr + offs_key - T, mask=mask_key & ~in_table, other=0)
        slot = tl.where(in_table, page * PAGE + offs_key % PAGE, path_slot)
        row_max, row_sum, acc = _add_tile(
            row_max,
            row_sum,
            acc,
            query,
            position,
            key_ptr,
            value_ptr,
            slot,
            offs_key,
            mask_key,
            g,
            score_scale,
            cap,
            G,
            D,
            DV,
            WINDOW,
            HAS_CAP,
            NUM_ONES,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            BLOCK_DV,
        )

    part = ((split - first_split).to(tl.int64) * num_nodes + offs_node) * H + offs_head
    offs_dv = tl.arange(0, BLOCK_DV)
    tl.store(max_ptr + part, row_max, mask=mask_row)
    tl.store(sum_ptr + part, tl.max(row_sum, 1), mask=mask_row)
    tl.store(acc_ptr + part[:, None] * DV + offs_dv, acc, mask=mask_row[:, None] & (offs_dv < DV))


@jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def combine_kernel(
    acc_ptr,
    max_ptr,
    sum_ptr,
    lengths_ptr,
    starts_ptr,
    depths_ptr,
    sinks_ptr,
    out_ptr,
    num_rows,
    first_node,
    num_nodes,
    depth_gap,
    out_gap,
    H: tl.constexpr,
    DV: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Add up the splits that one head of one node sees, one by one from the first, and normalise."""
    node = tl.program_id(0) // H
    head = tl.program_id(0) % H
    b = _find_node(first_node + node, starts_ptr, num_rows, num_nodes)
    if b >= num_rows:
        return
    T = tl.load(lengths_ptr + b).to(tl.int32)
    position = T + tl.load(depths_ptr + b * depth_gap + first_node + node).to(tl.int32)
    first = _first_split(position, WINDOW, SPLIT)
    last = position // SPLIT
    base = node.to(tl.int64) - _first_split(T, WINDOW, SPLIT) * num_nodes

    offs_dv = tl.arange(0, BLOCK_DV)
    mask_dv = offs_dv < DV
    acc = tl.zeros([BLOCK_DV], tl.float32)
    if sinks_ptr is None:
        row_max = -float("inf")
        row_sum = 0.0
    else:
        row_max = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        row_sum = 1.0
    for first_of_block in tl.range(first, last + 1, BLOCK_P, num_stages=NUM_STAGES):
        for i in tl.static_range(BLOCK_P):
            # The last one again where the block goes on after it, with a weight of zero.
            split = tl.minimum(first_of_block + i, last)
            part = (base + split * num_nodes) * H + head
            split_max = tl.where(first_of_block + i <= last, tl.load(max_ptr + part), -float("inf"))
            split_acc = tl.load(acc_ptr + part * DV + offs_dv, mask=mask_dv, other=0.0)
            row_max, row_sum, acc = _add_split(row_max, row_sum, acc, split_max, tl.load(sum_ptr + part), split_acc)
    out_row = (b.to(tl.int64) * out_gap + first_node + node) * H + head
    tl.store(out_ptr + out_row * DV + offs_dv, (acc / row_sum).to(out_ptr.dtype.element_ty), mask=mask_dv)


@jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def chain_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    lengths_ptr,
    starts_ptr,
    depths_ptr,
    sinks_ptr,
    out_ptr,
    score_scale,
    cap,
    num_rows,
    num_nodes,
    depth_gap,
    out_gap,
    stride_tables_b,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_ONES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """All splits of BLOCK_M rows of one key-value head (rows as in `split_kernel`), for all nodes of chains."""
    R: tl.constexpr = H // G
    g = tl.program_id(0) % G
    # A chain's last rows see the most keys, so their programs start first.
    tile = tl.num_programs(0) // G - 1 - tl.program_id(0) // G
    b, first_row, end_row = _find_tile(tile, starts_ptr, num_rows, 0, num_nodes, R, BLOCK_M)
    if first_row >= end_row:
        return
    b = b.to(tl.int64)
    T = tl.load(lengths_ptr + b).to(tl.int32)
    offs_row = first_row + tl.arange(0, BLOCK_M)
    mask_row = offs_row < end_row
    offs_node = offs_row // R
    offs_head = g * R + offs_row % R
    position = T + tl.load(depths_ptr + b * depth_gap + offs_node, mask=mask_row, other=0).to(tl.int32)
    end = tl.max(position) + 1
    # Rows past the last one see what the last one sees.
    position = tl.where(mask_row, position, end - 1)

    offs_d = tl.arange(0, BLOCK_D)
    query_row = offs_node.to(tl.int64) * H + offs_head
    query = tl.load(query_ptr + query_row[:, None] * D + offs_d, mask=mask_row[:, None] & (offs_d < D), other=0.0)
    table_ptr = block_tables_ptr + b * stride_tables_b
    if sinks_ptr is None:
        row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M, NUM_ONES], tl.float32)
    else:
        row_max = tl.load(sinks_ptr + offs_head, mask=mask_row, other=0.0).to(tl.float32) * 1.4426950408889634
        row_sum = tl.full([BLOCK_M, NUM_ONES], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    start = _first_split(tl.min(position), WINDOW, SPLIT) * SPLIT
    for first_of_split in tl.range(start, end, SPLIT, num_stages=NUM_STAGES):
        split_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        split_sum = tl.zeros([BLOCK_M, NUM_ONES], tl.float32)
        split_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        for i in tl.static_range(SPLIT // BLOCK_N):
            offs_key = first_of_split + i * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_key = offs_key < end
            page = tl.load(table_ptr + offs_key // PAGE, mask=mask_key, other=0)
            split_max, split_sum, split_acc = _add_tile(
                split_max,
                split_sum,
                split_acc,
                query,
                position,
                key_ptr,
                value_ptr,
                page * PAGE + offs_key % PAGE,
                offs_key,
                mask_key,
                g,
                score_scale,
                cap,
                G,
                D,
                DV,
                WINDOW,
                HAS_CAP,
                NUM_ONES,
                BLOCK_M,
                BLOCK_N,
                BLOCK_D,
                BLOCK_DV,
            )
        new_max, row_sum, acc = _add_split(row_max[:, None], row_sum, acc, split_max[:, None], split_sum, split_acc)
        row_max = tl.reshape(new_max, (BLOCK_M,))

    offs_dv = tl.arange(0, BLOCK_DV)
    out = (acc / tl.max(row_sum, 1)[:, None]).to(out_ptr.dtype.element_ty)
    out_row = query_row + b * out_gap * H
    tl.store(out_ptr + out_row[:, None] * DV + offs_dv, out, mask=mask_row[:, None] & (offs_dv < DV))
