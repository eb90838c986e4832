# mypy: allow-untyped-defs
"""The greedy walk through a candidate tree, without a host round trip.

Node 0 is the root. A child of node n is a node i with `parents[i] == n`. The walk goes on while a child's token is the
target's chosen token at n, and takes the earlier of two such siblings. Padding (token -1, parent -1) has no parent on the
walk, so the walk never reaches it.

The kernel has one program per row of the batch, which keeps the whole tree in registers. One gather finds every node that
the target chose at its parent. A step of the walk is one minimum over a node's children.
"""

from __future__ import annotations

import torch

from selfspec.kernels.jit import is_compiled_for, jit, tl, triton


@jit(do_not_specialize=("N", "max_depth"))
def _tree_accept_kernel(
    tokens_ptr, parents_ptr, chosen_ptr, path_ptr, num_accepted_ptr, N, max_depth, BLOCK_NODES: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_NODES)
    mask_n = offs_n < N
    tokens = tl.load(tokens_ptr + b * N + offs_n, mask=mask_n, other=-1)
    parents = tl.load(parents_ptr + b * N + offs_n, mask=mask_n, other=-1)
    has_parent = (parents >= 0) & (tokens >= 0)
    is_chosen = has_parent & (tokens == tl.load(chosen_ptr + b * N + parents, mask=has_parent, other=-1))

    path_ptr += b * (max_depth + 1)
    node = 0
    num_accepted = 0
    tl.store(path_ptr, node)
    for depth in range(1, max_depth + 1):
        child = tl.min(tl.where(is_chosen & (parents == node), offs_n, BLOCK_NODES), 0)
        # After the walk's end the node is -1, and no chosen node has that parent.
        node = tl.where(child < BLOCK_NODES, child, -1)
        num_accepted += (node >= 0).to(tl.int32)
        tl.store(path_ptr + depth, node)
    tl.store(num_accepted_ptr + b, num_accepted)


def tree_accept(
    tokens: torch.Tensor, parents: torch.Tensor, chosen: torch.Tensor, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted path [B, K + 1] and its number of draft tokens [B], both int64; see `tree_accept_reference`.

    Args:
        tokens, parents, chosen: [B, N] int64.
        max_depth: K, which fixes the result's shape.
    """
    walk = launch_tree_accept if is_compiled_for(tokens) else _walk_by_depth
    return walk(tokens, parents, chosen, max_depth)


def launch_tree_accept(
    tokens: torch.Tensor, parents: torch.Tensor, chosen: torch.Tensor, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`tree_accept` by the kernel; shapes as there."""
    B, N = tokens.shape
    path = tokens.new_empty(B, max_depth + 1)
    num_accepted = tokens.new_empty(B)
    _tree_accept_kernel[(B,)](
        tokens.contiguous(),
        parents.contiguous(),
        chosen.contiguous(),
        path,
        num_accepted,
        N,
        max_depth,
        BLOCK_NODES=triton.next_power_of_2(N),
        num_warps=1,
    )
    return path, num_accepted


def _walk_by_depth(
    tokens: torch.Tensor, parents: torch.Tensor, chosen: torch.Tensor, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`tree_accept` in torch: all rows together, one gather and one comparison per depth."""
    B, _ = tokens.shape
    node = tokens.new_zeros(B)
    is_alive = torch.ones(B, dtype=torch.bool, device=tokens.device)
    path = [node]
    for _ in range(max_depth):
        want = chosen.gather(1, node[:, None])
        is_child = (parents == node[:, None]) & (tokens == want) & (tokens >= 0)
        is_alive = is_alive & is_child.any(1)
        # int64 argmax returns the first of equal maxima, so the earlier of two equal siblings is taken.
        node = torch.where(is_alive, is_child.to(torch.int64).argmax(1), node)
        path.append(torch.where(is_alive, node, -1))
    stacked = torch.stack(path, dim=1)  # [B, K + 1]
    return stacked, (stacked >= 0).sum(1) - 1
