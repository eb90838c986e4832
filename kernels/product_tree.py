# mypy: allow-untyped-defs
"""The best-first tree of heads that draft without seeing the path (https://arxiv.org/abs/2401.10774): all its nodes at once.

    score(path) = log-probability of head 1's token + … + log-probability of head d's token

Every node of one depth has the same children, so a node's best child is followed by its second best. The kernel has one
program per text, which holds the whole tree in registers. It adds one node at a time: the best among each node's best child
that is not in the tree yet. Of equal scores the least deep is taken first, and then the child of the parent that was found
first. In the end it lists the nodes by depth, by the order in which their parents were found, and by their rank among the
head's tokens.
"""

from __future__ import annotations

import torch

from selfspec.kernels.jit import is_compiled_for, jit, tl, triton
from selfspec.kernels.reference_growth import LEAST, product_tree_reference

# Every node is compared with every other in the end.
MAX_NODES = 128


@jit(do_not_specialize=("N", "K", "W"))
def _product_tree_kernel(
    roots_ptr,
    candidates_ptr,
    log_probs_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    scores_ptr,
    N,
    K,
    W,
    LEAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    candidates_ptr += b * K * W
    log_probs_ptr += b * K * W
    offs_n = tl.arange(0, BLOCK_N)
    # Of the nodes in the order in which they are found: `found_parents` and the nodes' ranks among their head's tokens.
    scores = tl.zeros((BLOCK_N,), tl.float32)
    depths = tl.zeros((BLOCK_N,), tl.int32)
    found_parents = tl.full((BLOCK_N,), -1, tl.int32)
    ranks = tl.zeros((BLOCK_N,), tl.int32)
    # How many children of each node are in the tree.
    num_children = tl.zeros((BLOCK_N,), tl.int32)
    for n in range(1, N):
        can_grow = (offs_n < n) & (depths < K) & (num_children < W)
        child = scores + tl.load(log_probs_ptr + depths * W + num_children, mask=can_grow, other=0.0)
        child = tl.where(can_grow, tl.where(child > LEAST, child, LEAST), -float("inf"))
        best = tl.max(child, 0)
        # One number that orders equals, and from which the child can be read.
        order = (depths * BLOCK_N + offs_n) * BLOCK_W + num_children
        first = tl.min(tl.where(child == best, order, 0x7FFFFFFF), 0)
        parent = first // BLOCK_W % BLOCK_N
        is_new = offs_n == n
        scores = tl.where(is_new, best, scores)
        depths = tl.where(is_new, first // (BLOCK_W * BLOCK_N) + 1, depths)
        found_parents = tl.where(is_new, parent, found_parents)
        ranks = tl.where(is_new, first % BLOCK_W, ranks)
        num_children += (offs_n == parent).to(tl.int32)

    mask_n = offs_n < N
    order = tl.where(mask_n, (depths * BLOCK_N + found_parents) * BLOCK_W + ranks, 0x7FFFFFFF)
    index = tl.sum((order[None, :] < order[:, None]).to(tl.int32), 1)
    is_parent = offs_n[None, :] == found_parents[:, None]
    parents = tl.sum(tl.where(is_parent, index[None, :], 0), 1)
    is_child = mask_n & (offs_n > 0)
    tokens = tl.load(candidates_ptr + (depths - 1) * W + ranks, mask=is_child, other=0)
    out = b * N + index
    tl.store(tokens_ptr + out, tl.where(is_child, tokens, tl.load(roots_ptr + b)), mask=mask_n)
    tl.store(parents_ptr + out, tl.where(is_child, parents, -1).to(tl.int64), mask=mask_n)
    tl.store(depths_ptr + out, depths.to(tl.int64), mask=mask_n)
    tl.store(scores_ptr + out, scores, mask=mask_n)


def product_tree(
    roots: torch.Tensor, tokens: torch.Tensor, log_probs: torch.Tensor, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, parents, depths [B, N] int64 and scores [B, N] float32; see `product_tree_reference`.

    Args:
        roots: [B] int64.
        tokens, log_probs: [B, K, k] int64 and float32.
    """
    grow = launch_product_tree if is_compiled_for(tokens) and num_nodes <= MAX_NODES else product_tree_reference
    return grow(roots, tokens, log_probs, num_nodes)


def launch_product_tree(
    roots: torch.Tensor, tokens: torch.Tensor, log_probs: torch.Tensor, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`product_tree` by the kernel; shapes as there."""
    B, K, W = tokens.shape
    N = min(num_nodes, _size_of_whole_tree(K, W, num_nodes))
    block_n, block_w = triton.next_power_of_2(N), triton.next_power_of_2(W)
    assert log_probs.dtype == torch.float32 and (K + 1) * block_n * block_w < 1 << 31, tokens.shape
    outputs = torch.empty(3, B, N, dtype=torch.int64, device=tokens.device)
    scores = torch.empty(B, N, device=tokens.device)
    _product_tree_kernel[(B,)](
        roots.contiguous(),
        tokens.contiguous(),
        log_probs.contiguous(),
        *outputs,
        scores,
        N,
        K,
        W,
        LEAST=LEAST,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        # A reduction within one warp needs no shared memory.
        num_warps=1 if block_n <= 64 else 4,
    )
    return *outputs, scores


def _size_of_whole_tree(depth: int, width: int, most: int) -> int:
    """Nodes of the tree of that depth in which every node has `width` children, counted up to `most` or a little more."""
    size = layer = 1
    for _ in range(depth):
        layer = min(layer * width, most)
        size += layer
    return size
