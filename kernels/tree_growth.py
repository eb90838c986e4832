# mypy: allow-untyped-defs
"""One layer of a growing tree: the likeliest children of every node of the beam, and the best of these as the next beam.

    score(child) = score(parent) + log softmax(logits of the parent)[child]

There are two launches. First, a program finds the greatest logits of one chunk of a node's vocabulary, and the chunk's share
of the softmax. Then one program per text merges the chunks and grows the layer. The first of equal numbers counts as the
greatest. Logits and scores that are NaN or -inf count as `LEAST`, which is about the least finite number.

`likeliest` begins in the same way, and then merges each node's chunks, where no tree grows with the distributions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from selfspec.kernels.jit import is_compiled_for, jit, tl, triton
from selfspec.kernels.reference_growth import LEAST, grow_layer_reference, likeliest_reference

# Logits of a chunk.
BLOCK_V = 2048
# The second kernel has room for this many candidates and, because its choices are unrolled, children.
MAX_CANDIDATES, MAX_CHILDREN = 1 << 15, 16


class Layer(NamedTuple):
    """The layer that grows from a beam of W nodes with k children each.

    Attributes:
        nodes: [3, B, W * k] int64: tokens, parents and depths of all children, those of one parent side by side.
        scores: [B, W * k] float32, log-probabilities of the children's paths.
        beam: [3, B, W'] int64: the next beam's nodes, their tokens, and their parents' places in the beam before.
        beam_scores: [B, W'] float32, descending.
    """

    nodes: torch.Tensor
    scores: torch.Tensor
    beam: torch.Tensor
    beam_scores: torch.Tensor


@jit()
def _top_of_chunk_kernel(
    logits_ptr,
    values_ptr,
    indices_ptr,
    max_ptr,
    sum_ptr,
    V,
    LEAST: tl.constexpr,
    K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A chunk's K greatest logits, descending, their vocabulary indices, and the chunk's maximum and sum of exponentials."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_v = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    x = tl.load(logits_ptr + row * V + offs_v, mask=offs_v < V, other=-float("inf")).to(tl.float32)
    # Lanes past the end stay at -inf, which is less than any logit.
    x = tl.where(offs_v < V, tl.where(x > LEAST, x, LEAST), -float("inf"))
    part = row * tl.num_programs(1) + chunk
    greatest = tl.max(x, 0)
    tl.store(max_ptr + part, greatest)
    tl.store(sum_ptr + part, tl.sum(tl.exp(x - greatest), 0))
    for i in tl.static_range(K):
        best = tl.max(x, 0)
        at = tl.argmax(x, 0, tie_break_left=True)
        tl.store(values_ptr + part * K + i, best)
        tl.store(indices_ptr + part * K + i, chunk * BLOCK_V + at)
        x = tl.where(offs_v == chunk * BLOCK_V + at, -float("inf"), x)


@jit()
def _merge_chunks(
    values_ptr,
    max_ptr,
    sum_ptr,
    row,
    mask_w,
    num_chunks,
    LEAST: tl.constexpr,
    K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_CK: tl.constexpr,
):
    """The candidates [BLOCK_W, BLOCK_CK] of the rows `row`, their greatest logits, and the log of their softmax's sums."""
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = mask_w[:, None] & (offs_c < num_chunks)
    part_max = tl.load(max_ptr + row[:, None] * num_chunks + offs_c, mask=mask_c, other=LEAST)
    part_sum = tl.load(sum_ptr + row[:, None] * num_chunks + offs_c, mask=mask_c, other=0.0)
    row_max = tl.max(part_max, 1)
    total = tl.sum(part_sum * tl.exp(part_max - row_max[:, None]), 1)
    offs_ck = tl.arange(0, BLOCK_CK)
    mask_ck = mask_w[:, None] & (offs_ck < num_chunks * K)
    x = tl.load(values_ptr + row[:, None] * num_chunks * K + offs_ck, mask=mask_ck, other=-float("inf"))
    return x, row_max, tl.log(tl.where(mask_w, total, 1.0))


@jit(do_not_specialize=("num_chunks",))
def _likeliest_kernel(
    values_ptr,
    indices_ptr,
    max_ptr,
    sum_ptr,
    tokens_ptr,
    log_probs_ptr,
    num_chunks,
    LEAST: tl.constexpr,
    K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_CK: tl.constexpr,
):
    # A beam of one node.
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    x, row_max, log_total = _merge_chunks(
        values_ptr, max_ptr, sum_ptr, row, row >= 0, num_chunks, LEAST, K, BLOCK_C, BLOCK_CK
    )
    offs_ck = tl.arange(0, BLOCK_CK)
    for i in tl.static_range(K):
        at = tl.argmax(x, 1, tie_break_left=True)
        log_prob = (tl.max(x, 1) - row_max) - log_total
        tl.store(tokens_ptr + row * K + i, tl.load(indices_ptr + row * num_chunks * K + at).to(tl.int64))
        tl.store(log_probs_ptr + row * K + i, tl.where(log_prob > LEAST, log_prob, LEAST))
        x = tl.where(offs_ck == at[:, None], -float("inf"), x)


@jit(do_not_specialize=("num_rows", "first_node", "depth", "num_chunks"))
def _grow_layer_kernel(
    values_ptr,
    indices_ptr,
    max_ptr,
    sum_ptr,
    token_ids_ptr,
    beam_ptr,
    beam_scores_ptr,
    nodes_ptr,
    scores_ptr,
    next_beam_ptr,
    next_scores_ptr,
    num_rows,
    first_node,
    depth,
    num_chunks,
    LEAST: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    NEXT_W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_CK: tl.constexpr,
):
    b = tl.program_id(0)
    offs_w = tl.arange(0, BLOCK_W)
    mask_w = offs_w < W
    row = b * W + offs_w
    beam = tl.load(beam_ptr + row, mask=mask_w, other=0)
    before = tl.load(beam_scores_ptr + row, mask=mask_w, other=0.0)
    x, row_max, log_total = _merge_chunks(values_ptr, max_ptr, sum_ptr, row, mask_w, num_chunks, LEAST, K, BLOCK_C, BLOCK_CK)
    offs_ck = tl.arange(0, BLOCK_CK)
    offs_k = tl.arange(0, BLOCK_K)
    scores = tl.full([BLOCK_W, BLOCK_K], -float("inf"), tl.float32)
    tokens = tl.zeros([BLOCK_W, BLOCK_K], tl.int64)
    for i in tl.static_range(K):
        best = tl.max(x, 1)
        at = tl.argmax(x, 1, tie_break_left=True)
        token = tl.load(indices_ptr + row * num_chunks * K + at, mask=mask_w, other=0).to(tl.int64)
        if token_ids_ptr is not None:
            token = tl.load(token_ids_ptr + token, mask=mask_w, other=0)
        # The added term is never positive, not even by rounding.
        score = before + ((best - row_max) - log_total)
        # Greater than -inf, the padding with which a child competes below.
        score = tl.where(score > LEAST, score, LEAST)
        child = row * K + i
        tl.store(nodes_ptr + child, token, mask=mask_w)
        tl.store(nodes_ptr + num_rows * W * K + child, beam, mask=mask_w)
        tl.store(nodes_ptr + 2 * num_rows * W * K + child, beam * 0 + depth, mask=mask_w)
        tl.store(scores_ptr + child, score, mask=mask_w)
        is_here = mask_w[:, None] & (offs_k == i)
        scores = tl.where(is_here, score[:, None], scores)
        tokens = tl.where(is_here, token[:, None], tokens)
        x = tl.where(offs_ck == at[:, None], -float("inf"), x)

    # In the order of the children's numbers, with gaps where BLOCK_K > K.
    flat_scores = tl.reshape(scores, (BLOCK_W * BLOCK_K,))
    flat_tokens = tl.reshape(tokens, (BLOCK_W * BLOCK_K,))
    offs = tl.arange(0, BLOCK_W * BLOCK_K)
    for i in tl.static_range(NEXT_W):
        at = tl.argmax(flat_scores, 0, tie_break_left=True)
        parent = at // BLOCK_K
        out = b * NEXT_W + i
        tl.store(next_scores_ptr + out, tl.max(flat_scores, 0))
        tl.store(next_beam_ptr + out, first_node + (parent * K + at % BLOCK_K).to(tl.int64))
        tl.store(next_beam_ptr + num_rows * NEXT_W + out, tl.sum(tl.where(offs == at, flat_tokens, 0), 0))
        tl.store(next_beam_ptr + 2 * num_rows * NEXT_W + out, parent.to(tl.int64))
        flat_scores = tl.where(offs == at, -float("inf"), flat_scores)


def likeliest(logits: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row's likeliest tokens and their log-probabilities, [..., k] each, from logits [..., V].

    See `likeliest_reference`.
    """
    find = launch_likeliest if _has_kernel(logits, num_tokens, 1) else likeliest_reference
    return find(logits, num_tokens)


def launch_likeliest(logits: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`likeliest` by the kernels; shapes as there."""
    *shape, V = logits.shape
    K = num_tokens
    assert 0 < K <= V, logits.shape
    values, indices, part_max, part_sum = _top_of_chunks(logits.reshape(-1, V), K)
    R, C, _ = values.shape
    tokens = torch.empty(*shape, K, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(*shape, K, device=logits.device)
    _likeliest_kernel[(R,)](
        values,
        indices,
        part_max,
        part_sum,
        tokens,
        log_probs,
        C,
        LEAST=LEAST,
        K=K,
        BLOCK_C=triton.next_power_of_2(C),
        BLOCK_CK=triton.next_power_of_2(C * K),
        num_warps=4,
    )
    return tokens, log_probs


def _has_kernel(logits: torch.Tensor, num_children: int, beam_width: int) -> bool:
    num_candidates = -(-logits.shape[-1] // BLOCK_V) * num_children * beam_width
    is_small = max(num_children, beam_width) <= MAX_CHILDREN and num_candidates <= MAX_CANDIDATES
    return is_small and is_compiled_for(logits)


def _top_of_chunks(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    """Values and indices [R, C, k], maxima and sums of exponentials [R, C] of the C chunks of logits [R, V]."""
    R, V = logits.shape
    C = triton.cdiv(V, BLOCK_V)
    values = torch.empty(R, C, k, device=logits.device)
    indices = torch.empty(R, C, k, dtype=torch.int32, device=logits.device)
    part_max, part_sum = torch.empty(2, R, C, device=logits.device)
    parts = (values, indices, part_max, part_sum)
    _top_of_chunk_kernel[(R, C)](logits.contiguous(), *parts, V, LEAST=LEAST, K=k, BLOCK_V=BLOCK_V, num_warps=4)
    return parts


def grow_layer(
    logits: torch.Tensor, beam: torch.Tensor, beam_scores: torch.Tensor, *, num_children: int, **others: Any
) -> Layer:
    """The next layer of every text's tree, from logits [B, W, V] and the beam and its scores, [B, W] each.

    `others` are the other arguments of `grow_layer_reference`.
    """
    run: Callable[..., tuple[torch.Tensor, ...]] = grow_layer_reference
    if _has_kernel(logits, num_children, logits.shape[1]):
        run = launch_grow_layer
    return Layer(*run(logits, beam, beam_scores, num_children=num_children, **others))


def launch_grow_layer(
    logits: torch.Tensor,
    beam: torch.Tensor,
    beam_scores: torch.Tensor,
    *,
    num_children: int,
    width: int,
    first_node: int,
    depth: int,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`grow_layer` by the kernels; shapes as in `grow_layer_reference`."""
    B, W, V = logits.shape
    K, NEXT_W = num_children, min(width, W * num_children)
    assert beam.shape == beam_scores.shape == (B, W) and 0 < K <= V, (logits.shape, beam.shape)
    device = logits.device
    values, indices, part_max, part_sum = _top_of_chunks(logits.reshape(B * W, V), K)
    C = values.shape[1]
    nodes = torch.empty(3, B, W * K, dtype=torch.int64, device=device)
    scores = torch.empty(B, W * K, device=device)
    next_beam = torch.empty(3, B, NEXT_W, dtype=torch.int64, device=device)
    next_scores = torch.empty(B, NEXT_W, device=device)
    block_w, block_k = triton.next_power_of_2(W), triton.next_power_of_2(K)
    _grow_layer_kernel[(B,)](
        values,
        indices,
        part_max,
        part_sum,
        token_ids,
        beam.contiguous(),
        beam_scores.contiguous(),
        nodes,
        scores,
        next_beam,
        next_scores,
        B,
        first_node,
        depth,
        C,
        LEAST=LEAST,
        W=W,
        K=K,
        NEXT_W=NEXT_W,
        BLOCK_W=block_w,
        BLOCK_K=block_k,
        BLOCK_C=triton.next_power_of_2(C),
        BLOCK_CK=triton.next_power_of_2(C * K),
        num_warps=4 if block_w * C * K <= 4096 else 16,
    )
    return nodes, scores, next_beam, next_scores
