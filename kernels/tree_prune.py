# mypy: allow-untyped-defs
"""The best nodes of a tree whose scores never rise along a path, in their order; a node's parent is always among them.

A node is kept if fewer than N others are better, which means that their scores are greater, or equal while they stand before
it. The kernel has one program per tree, which holds all nodes in registers and compares them with `BLOCK_OTHERS` at a time.
"""

from __future__ import annotations

import torch

from selfspec.kernels.jit import is_compiled_for, jit, tl, triton
from selfspec.kernels.reference_growth import prune_tree_reference

# Every node is compared with every other.
MAX_NODES = 1024
BLOCK_OTHERS = 32


@jit()
def _load_ranked(tokens_ptr, scores_ptr, offs, M):
    """Scores that order the nodes; padding and what is no node have the least."""
    token = tl.load(tokens_ptr + offs, mask=offs < M, other=-1)
    score = tl.load(scores_ptr + offs, mask=offs < M, other=-float("inf")).to(tl.float32)
    return tl.where(token >= 0, score, -float("inf"))


@jit(do_not_specialize=("M", "N"))
def _prune_tree_kernel(
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    scores_ptr,
    out_tokens_ptr,
    out_parents_ptr,
    out_depths_ptr,
    out_scores_ptr,
    kept_ptr,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    nodes = b * M + offs_m
    mask_m = offs_m < M
    ranked = _load_ranked(tokens_ptr + b * M, scores_ptr + b * M, offs_m, M)
    num_better = tl.zeros((BLOCK_M,), tl.int32)
    for start in range(0, M, BLOCK_OTHERS):
        offs_o = start + tl.arange(0, BLOCK_OTHERS)
        others = _load_ranked(tokens_ptr + b * M, scores_ptr + b * M, offs_o, M)
        is_first = offs_o[None, :] < offs_m[:, None]
        is_better = (others[None, :] > ranked[:, None]) | ((others[None, :] == ranked[:, None]) & is_first)
        num_better += tl.sum(is_better.to(tl.int32), 1)
    # Places past the end are worse than all nodes, because they come last.
    is_kept = num_better < N
    index = tl.cumsum(is_kept.to(tl.int32), 0) - 1
    # A score that is no number is better and worse than none, so that there may be too many.
    is_kept &= index < N
    parents = tl.load(parents_ptr + nodes, mask=mask_m, other=-1)
    new_parents = tl.gather(tl.where(is_kept, index, -1), tl.maximum(parents, 0).to(tl.int32), 0)
    out = b * N + index
    tl.store(out_tokens_ptr + out, tl.load(tokens_ptr + nodes, mask=mask_m, other=-1), mask=is_kept)
    tl.store(out_parents_ptr + out, tl.where(parents >= 0, new_parents, -1).to(tl.int64), mask=is_kept)
    tl.store(out_depths_ptr + out, tl.load(depths_ptr + nodes, mask=mask_m, other=0), mask=is_kept)
    tl.store(out_scores_ptr + out, tl.load(scores_ptr + nodes, mask=mask_m, other=0.0), mask=is_kept)
    tl.store(kept_ptr + out, offs_m.to(tl.int64), mask=is_kept)


def prune_tree(
    tokens: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, scores: torch.Tensor, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kept nodes' tokens, parents, depths, scores and places before, [B, N] each; see `prune_tree_reference`.

    Args:
        tokens, parents, depths: [B, M] int64.
        scores: [B, M] float32.
        num_nodes: N, at most M.
    """
    prune = launch_prune_tree if is_compiled_for(tokens) and tokens.shape[1] <= MAX_NODES else prune_tree_reference
    return prune(tokens, parents, depths, scores, num_nodes)


def launch_prune_tree(
    tokens: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, scores: torch.Tensor, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`prune_tree` by the kernel; shapes as there."""
    B, M = tokens.shape
    assert tokens.shape == parents.shape == depths.shape == scores.shape and 0 < num_nodes <= M, (tokens.shape, num_nodes)
    kept_tokens, kept_parents, kept_depths, kept = tokens.new_empty(4, B, num_nodes)
    kept_scores = scores.new_empty(B, num_nodes)
    block_m = triton.next_power_of_2(M)
    _prune_tree_kernel[(B,)](
        tokens.contiguous(),
        parents.contiguous(),
        depths.contiguous(),
        scores.contiguous(),
        kept_tokens,
        kept_parents,
        kept_depths,
        kept_scores,
        kept,
        M,
        num_nodes,
        BLOCK_M=block_m,
        BLOCK_OTHERS=BLOCK_OTHERS,
        num_warps=8 if block_m > 128 else 4,
    )
    return kept_tokens, kept_parents, kept_depths, kept_scores, kept
