# mypy: allow-untyped-defs
"""Where the keys of every node's path lie: `TreeLayout.paths` from a tree's parents, in one launch.

A program takes BLOCK_F nodes. From each it climbs to the root and writes the slot of every node it meets, at that node's
depth. All nodes of a program climb at once: at depth d stand those that are at least that deep.
"""

from __future__ import annotations

import torch

from selfspec.kernels.jit import is_compiled_for, jit, tl, triton
from selfspec.kernels.reference import tree_paths_reference

# Nodes of a program, one for each thread of a warp.
BLOCK_F = 32


@jit(do_not_specialize=("F", "N", "max_depth", "stride_tables_b"))
def _tree_paths_kernel(
    parents_ptr,
    depths_ptr,
    lengths_ptr,
    block_tables_ptr,
    nodes_ptr,
    paths_ptr,
    F,
    N,
    max_depth,
    stride_tables_b,
    PAGE: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    offs_f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_f = offs_f < F
    if nodes_ptr is None:
        node = offs_f.to(tl.int64)
    else:
        node = tl.load(nodes_ptr + offs_f, mask=mask_f, other=0)
    b = node // N
    depth = tl.load(depths_ptr + node, mask=mask_f, other=0)
    T = tl.load(lengths_ptr + b, mask=mask_f, other=0)
    for step in range(0, max_depth + 1):
        d = max_depth - step
        is_on_path = mask_f & (d <= depth)
        index = T + node % N
        page = tl.load(block_tables_ptr + b * stride_tables_b + index // PAGE, mask=is_on_path, other=0)
        slot = tl.where(is_on_path, page * PAGE + index % PAGE, 0)
        tl.store(paths_ptr + offs_f.to(tl.int64) * (max_depth + 1) + d, slot, mask=mask_f)
        # The root is met last, and its parent is not looked at.
        node = tl.where(is_on_path, b * N + tl.load(parents_ptr + node, mask=is_on_path, other=0), node)


def tree_paths(
    parents: torch.Tensor,
    depths: torch.Tensor,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    max_depth: int,
    nodes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Slots [F, K + 1] of every node's path, int64; see `tree_paths_reference`.

    Args:
        parents, depths: [B, N].
        lengths, block_tables: [B] and [B, P].
        max_depth: K, at least every node's depth.
        nodes: [F], the nodes that are asked for, numbered through all rows; None asks for all, and F is B * N.
    """
    find = launch_tree_paths if is_compiled_for(parents) else tree_paths_reference
    return find(parents, depths, lengths, block_tables, block_size, max_depth, nodes)


def launch_tree_paths(
    parents: torch.Tensor,
    depths: torch.Tensor,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    max_depth: int,
    nodes: torch.Tensor | None = None,
) -> torch.Tensor:
    """`tree_paths` by the kernel; shapes as there."""
    assert block_tables.stride(1) == 1
    num_nodes = parents.numel() if nodes is None else len(nodes)
    paths = parents.new_empty(num_nodes, max_depth + 1)
    _tree_paths_kernel[(triton.cdiv(num_nodes, BLOCK_F),)](
        parents.contiguous(),
        depths.contiguous(),
        lengths,
        block_tables,
        None if nodes is None else nodes.contiguous(),
        paths,
        num_nodes,
        parents.shape[1],
        max_depth,
        block_tables.stride(0),
        PAGE=block_size,
        BLOCK_F=BLOCK_F,
        num_warps=1,
    )
    return paths
