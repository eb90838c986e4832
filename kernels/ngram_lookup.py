# mypy: allow-untyped-defs
"""Prompt lookup: the continuation of each text's longest earlier match of its ending, without a host round trip.

A place j before the text's last token matches with length m if the m tokens that end at j are the text's last m. The
longest match counts, and the latest of equally long ones. A match's key is its length in the upper 32 bits and its place in
the lower ones, so that the greatest key is the best match.

The places of a text are shared out among at most `MAX_PARTS` programs. Their time follows the text's own length, whatever
the width of the history. Each writes its greatest key to [B, P] int64. Then one program per text takes the greatest.
"""

from __future__ import annotations

import torch

from selfspec.kernels.jit import is_compiled_for, jit, tl, triton
from selfspec.kernels.reference import ngram_lookup_reference

# Places that a program compares at a time, and most programs of one text.
BLOCK_T, MAX_PARTS = 512, 64


@jit()
def _match_kernel(history_ptr, rows_ptr, num_tokens_ptr, keys_ptr, stride_s, MAX_MATCH: tl.constexpr, BLOCK_T: tl.constexpr):
    """The greatest key among a program's places of one text; 0 where nothing matches."""
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_tokens = tl.load(num_tokens_ptr + b).to(tl.int32)
    row = b if rows_ptr is None else tl.load(rows_ptr + b)
    history_ptr += row * stride_s
    best = tl.zeros((BLOCK_T,), tl.int64)
    for start in range(part * BLOCK_T, num_tokens - 1, tl.num_programs(1) * BLOCK_T):
        offs_t = start + tl.arange(0, BLOCK_T)
        is_equal = offs_t < num_tokens - 1
        length = tl.zeros((BLOCK_T,), tl.int64)
        for back in tl.static_range(MAX_MATCH):
            # A place that has `back` tokens before it is earlier than the last token, which then has as many.
            mask = (offs_t < num_tokens - 1) & (offs_t >= back)
            last = tl.load(history_ptr + num_tokens - 1 - back, mask=num_tokens > back, other=-1)
            is_equal &= mask & (tl.load(history_ptr + offs_t - back, mask=mask, other=-1) == last)
            length += is_equal.to(tl.int64)
        best = tl.maximum(best, tl.where(length > 0, (length << 32) + offs_t, 0))
    tl.store(keys_ptr + b * tl.num_programs(1) + part, tl.max(best, 0))


@jit(do_not_specialize=("num_parts", "K"))
def _continue_kernel(
    history_ptr,
    rows_ptr,
    num_tokens_ptr,
    keys_ptr,
    drafts_ptr,
    matched_ptr,
    stride_s,
    num_parts,
    K,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The tokens after the best match."""
    b = tl.program_id(0).to(tl.int64)
    num_tokens = tl.load(num_tokens_ptr + b)
    row = b if rows_ptr is None else tl.load(rows_ptr + b)
    offs_p = tl.arange(0, BLOCK_P)
    key = tl.max(tl.load(keys_ptr + b * num_parts + offs_p, mask=offs_p < num_parts, other=0), 0)
    first = (key & 0xFFFFFFFF) + 1
    offs_k = tl.arange(0, BLOCK_K)
    # Where nothing matches, there may be no tokens either.
    wanted = first + offs_k % tl.maximum(num_tokens - first, 1)
    is_drafted = offs_k < tl.where(key > 0, K, 0)
    drafts = tl.load(history_ptr + row * stride_s + wanted, mask=is_drafted, other=-1)
    tl.store(drafts_ptr + b * K + offs_k, drafts, mask=offs_k < K)
    tl.store(matched_ptr + b, key >> 32)


def ngram_lookup(
    history: torch.Tensor, rows: torch.Tensor | None, num_tokens: torch.Tensor, num_draft_tokens: int, max_match: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft tokens [B, K] and the match's length [B], both int64; see `ngram_lookup_reference`.

    Args:
        history: [S, C] int64.
        rows: [B] int64, each text's row of the history; None for all rows in their order.
        num_tokens: [B] int64.
    """
    search = launch_ngram_lookup if is_compiled_for(history) else ngram_lookup_reference
    return search(history, rows, num_tokens, num_draft_tokens, max_match)


def launch_ngram_lookup(
    history: torch.Tensor, rows: torch.Tensor | None, num_tokens: torch.Tensor, num_draft_tokens: int, max_match: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ngram_lookup` by the kernels; shapes as there."""
    B, K = len(num_tokens), num_draft_tokens
    assert history.stride(1) == 1 and B == len(history if rows is None else rows), (history.shape, num_tokens.shape)
    num_parts = min(triton.cdiv(history.shape[1], BLOCK_T), MAX_PARTS)
    keys = history.new_empty(B, num_parts)
    drafts = history.new_empty(B, K)
    matched = history.new_empty(B)
    text = (history, rows, num_tokens)
    _match_kernel[(B, num_parts)](*text, keys, history.stride(0), MAX_MATCH=max_match, BLOCK_T=BLOCK_T, num_warps=4)
    _continue_kernel[(B,)](
        *text,
        keys,
        drafts,
        matched,
        history.stride(0),
        num_parts,
        K,
        BLOCK_P=triton.next_power_of_2(num_parts),
        BLOCK_K=triton.next_power_of_2(K),
        num_warps=1,
    )
    return drafts, matched
