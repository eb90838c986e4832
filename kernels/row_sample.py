# mypy: allow-untyped-defs
"""The token at every node, greedy or drawn under temperature, top-k, top-p and min-p: no sorting, no noise in memory.

A drawn token is `argmax(logit / temperature + gumbel)` over the tokens that the filters keep. The noise is a function of
key, position and token, as in `selfspec.kernels.noise`. Each filter keeps the tokens from some logit upwards. If the winner
among all tokens is kept, it is the drawn token. If not, no token with its logit or less is kept, and the next candidate is
the winner among the tokens above it. With a share f of the probability kept, this takes 1 + ln(1 / f) winners on average.

The number and the mass of the tokens with greater logits say whether a token is kept. Only top-p after top-k needs more: the
mass of the k greatest, whose least logit is bracketed by bisection until either end decides.

Rows are cut into chunks of `BLOCK_V` for the first winner and its rank. Then one program per row decides and, where it must,
goes on alone. Sums are float32 in an order that depends on V alone, so a row gets the same token in any tree and batch.
"""

from __future__ import annotations

import torch

from selfspec.kernels.jit import is_compiled_for, jit, tl, triton
from selfspec.kernels.reference import row_sample_reference

BLOCK_V = 2048
# Logits that a row's program reads at a time when it goes on alone.
BLOCK_ROW = 8192
# The low bits of a float32 that are zero in every number of a type.
SPARE_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
# The batch's sizes are not compiled in, nor is the alignment of the chunks' results, which follows from the sizes.
UNSPECIALIZED = ("N", "num_chunks", "max_ptr", "score_ptr", "index_ptr", "count_ptr", "mass_ptr")


@jit()
def _splitmix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit()
def _noise_state(key, position):
    """The uint64 at which the noise of a position begins, for `Stream.TARGET` of four streams."""
    mixed = _splitmix64(key.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    return _splitmix64(mixed ^ _splitmix64((position * 4 + 1).to(tl.uint64, bitcast=True)))


@jit()
def _gumbel(state, offs_v):
    bits = _splitmix64(state + (offs_v + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 11
    # Times 2**-53, and at most 1 - 2**-24.
    uniform = (bits.to(tl.int64, bitcast=True).to(tl.float32) + 0.5) * 1.1102230246251565e-16
    uniform = tl.minimum(uniform, 0.999999940395355224609375)
    # -log1p(-u): the quotient corrects the rounding of 1 - u.
    rest = 1.0 - uniform
    is_tiny = rest == 1.0
    exponential = -tl.log(rest) * (uniform / tl.where(is_tiny, 1.0, 1.0 - rest))
    return -tl.log(tl.where(is_tiny, uniform, exponential))


@jit()
def _load_logits(logits_ptr, offs_v, V):
    logits = tl.load(logits_ptr + offs_v, mask=offs_v < V, other=-float("inf")).to(tl.float32)
    return tl.where(logits == logits, logits, float("inf"))


@jit()
def _ordered(x, SPARE: tl.constexpr):
    """Integers in the same order as the float32 numbers x, whose last `SPARE` bits are zero."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SPARE


@jit()
def _load_chunks(max_ptr, score_ptr, index_ptr, num_chunks, V, BLOCK_C: tl.constexpr):
    """A row's greatest logit, and its chunks' best scores [BLOCK_C] with their indices [BLOCK_C]."""
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < num_chunks
    greatest = tl.max(tl.load(max_ptr + offs_c, mask=mask_c, other=-float("inf")), 0)
    scores = tl.load(score_ptr + offs_c, mask=mask_c, other=-float("inf"))
    return greatest, scores, tl.load(index_ptr + offs_c, mask=mask_c, other=V)


@jit()
def _first_best(scores, indices, V):
    """The least index that has the greatest score."""
    return tl.min(tl.where(scores == tl.max(scores, 0), indices, V), 0)


@jit(do_not_specialize=("N", "max_ptr", "score_ptr", "index_ptr"))
def _chunk_winner_kernel(
    logits_ptr,
    depths_ptr,
    integers_ptr,
    fractions_ptr,
    max_ptr,
    score_ptr,
    index_ptr,
    N,
    V,
    stride_r,
    BLOCK_V: tl.constexpr,
):
    """For each chunk: the greatest logit, the best score and its first index."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    b = row // N
    offs_v = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    logits = _load_logits(logits_ptr + row * stride_r, offs_v, V)
    temperature = tl.load(fractions_ptr + b * 3)
    scores = logits
    if temperature > 0:
        position = tl.load(integers_ptr + b * 3 + 1) + tl.load(depths_ptr + row)
        state = _noise_state(tl.load(integers_ptr + b * 3), position)
        scores = tl.div_rn(logits, temperature) + _gumbel(state, offs_v)
    part = row * tl.num_programs(1) + chunk
    tl.store(max_ptr + part, tl.max(logits, 0))
    tl.store(score_ptr + part, tl.max(scores, 0))
    tl.store(index_ptr + part, _first_best(scores, offs_v, V))


@jit(do_not_specialize=UNSPECIALIZED)
def _chunk_rank_kernel(
    logits_ptr,
    integers_ptr,
    fractions_ptr,
    max_ptr,
    score_ptr,
    index_ptr,
    count_ptr,
    mass_ptr,
    N,
    V,
    stride_r,
    num_chunks,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """For each chunk: number and mass of the tokens above the first winner, mass from the winner upwards, and all mass."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    b = row // N
    temperature = tl.load(fractions_ptr + b * 3)
    is_ranked = (tl.load(integers_ptr + b * 3 + 2) > 0) | (tl.load(fractions_ptr + b * 3 + 1) < 1)
    if (temperature > 0) & is_ranked:
        first = row * num_chunks
        greatest, scores, indices = _load_chunks(
            max_ptr + first, score_ptr + first, index_ptr + first, num_chunks, V, BLOCK_C
        )
        logit = _load_logits(logits_ptr + row * stride_r, _first_best(scores, indices, V), V)
        if (logit < greatest) & (greatest < float("inf")):
            offs_v = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
            logits = _load_logits(logits_ptr + row * stride_r, offs_v, V)
            sharpness = 1.0 / temperature
            weights = tl.exp((logits - greatest) * sharpness)
            is_above = logits > logit
            part = first + chunk
            num_parts = tl.num_programs(0).to(tl.int64) * num_chunks
            tl.store(count_ptr + part, tl.sum(is_above.to(tl.int32), 0))
            tl.store(mass_ptr + part, tl.sum(tl.where(is_above, weights, 0.0), 0))
            tl.store(mass_ptr + num_parts + part, tl.sum(tl.where(logits >= logit, weights, 0.0), 0))
            tl.store(mass_ptr + 2 * num_parts + part, tl.sum(weights, 0))


@jit()
def _rank(logits_ptr, logit, greatest, sharpness, V, BLOCK_V: tl.constexpr):
    """The number and the mass of a row's tokens above `logit`, and the mass from it upwards."""
    count = tl.zeros((BLOCK_V,), tl.int32)
    above = tl.zeros((BLOCK_V,), tl.float32)
    upwards = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, V, BLOCK_V):
        logits = _load_logits(logits_ptr, start + tl.arange(0, BLOCK_V), V)
        weights = tl.exp((logits - greatest) * sharpness)
        count += (logits > logit).to(tl.int32)
        above += tl.where(logits > logit, weights, 0.0)
        upwards += tl.where(logits >= logit, weights, 0.0)
    return tl.sum(count, 0), tl.sum(above, 0), tl.sum(upwards, 0)


@jit()
def _rank_of_key(logits_ptr, key, greatest, sharpness, V, BLOCK_V: tl.constexpr, SPARE: tl.constexpr):
    """The number and the mass of a row's tokens whose ordered integer is `key` or more."""
    count = tl.zeros((BLOCK_V,), tl.int32)
    mass = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, V, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        logits = _load_logits(logits_ptr, offs_v, V)
        is_in = (_ordered(logits, SPARE) >= key) & (offs_v < V)
        count += is_in.to(tl.int32)
        mass += tl.where(is_in, tl.exp((logits - greatest) * sharpness), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@jit(do_not_specialize=UNSPECIALIZED)
def _row_sample_kernel(
    logits_ptr,
    depths_ptr,
    integers_ptr,
    fractions_ptr,
    max_ptr,
    score_ptr,
    index_ptr,
    count_ptr,
    mass_ptr,
    token_ptr,
    is_valid_ptr,
    N,
    V,
    stride_r,
    num_chunks,
    SPARE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b = row // N
    logits_ptr += row * stride_r
    first = row * num_chunks
    greatest, scores, indices = _load_chunks(max_ptr + first, score_ptr + first, index_ptr + first, num_chunks, V, BLOCK_C)
    index = _first_best(scores, indices, V)
    logit = _load_logits(logits_ptr, index, V)
    is_valid = tl.abs(greatest) < float("inf")
    temperature = tl.load(fractions_ptr + b * 3)
    is_open = is_valid & (temperature > 0) & (logit < greatest)
    if is_open:
        top_p = tl.load(fractions_ptr + b * 3 + 1)
        min_p = tl.load(fractions_ptr + b * 3 + 2)
        top_k = tl.load(integers_ptr + b * 3 + 2)
        sharpness = 1.0 / temperature
        is_ranked = (top_k > 0) | (top_p < 1)
        has_top_k = (top_k > 0) & (top_k < V)
        position = tl.load(integers_ptr + b * 3 + 1) + tl.load(depths_ptr + row)
        state = _noise_state(tl.load(integers_ptr + b * 3), position)

        offs_c = tl.arange(0, BLOCK_C)
        mask_c = offs_c < tl.where(is_ranked, num_chunks, 0)
        num_parts = tl.num_programs(0).to(tl.int64) * num_chunks
        parts_ptr = mass_ptr + first + offs_c
        count = tl.sum(tl.load(count_ptr + first + offs_c, mask=mask_c, other=0), 0)
        above = tl.sum(tl.load(parts_ptr, mask=mask_c, other=0.0), 0)
        upwards = tl.sum(tl.load(parts_ptr + num_parts, mask=mask_c, other=0.0), 0)
        # The k-th greatest logit lies within low … high - 1, and the mass that top-k keeps within least … most.
        most = tl.sum(tl.load(parts_ptr + 2 * num_parts, mask=mask_c, other=0.0), 0)
        least = tl.zeros_like(most)
        low = tl.zeros_like(state).to(tl.int64) - 2147483648
        high = tl.where(has_top_k, low + 4294967296, low + 1)
        step = 2 * temperature

        while is_open:
            is_in_top_k = (has_top_k == 0) | (count < top_k)
            key = _ordered(logit, SPARE).to(tl.int64)
            if is_in_top_k:
                high = tl.minimum(high, key + 1)
                least = tl.maximum(least, upwards)
            else:
                low = key + 1
                most = above
            is_kept = is_in_top_k & (tl.exp((logit - greatest) * sharpness) >= min_p)
            if is_kept & (top_p < 1):
                while (high - low > 1) & (above >= top_p * least) & (above < top_p * most):
                    middle = low + (high - low) // 2
                    if low == -2147483648:
                        # The logits that matter are near, so gallop: halving would first go through all exponents.
                        middle = _ordered(logit - step, SPARE).to(tl.int64)
                        middle = tl.maximum(tl.minimum(middle, high - 1), low + 1)
                        step *= 4
                    num, mass = _rank_of_key(logits_ptr, middle.to(tl.int32), greatest, sharpness, V, BLOCK_V, SPARE)
                    if num < top_k:
                        high = middle
                        least = tl.maximum(least, mass)
                    else:
                        low = middle
                        most = mass
                is_kept = above < top_p * most
            is_open = is_kept == 0
            if is_open:
                # If a chunk's winner is above `bound`, it is also the best of the chunk's tokens above it. If it is not,
                # these have no better score than the winner, and matter only once that score is the best.
                bound = logit
                is_stale = is_open
                while is_stale:
                    index = _first_best(scores, indices, V)
                    logit = _load_logits(logits_ptr, index, V)
                    is_unlikely = (tl.exp((logit - greatest) * sharpness) < min_p) & (logit < greatest)
                    is_stale = (logit <= bound) | is_unlikely
                    if is_stale:
                        chunk = index // CHUNK
                        offs_v = chunk * CHUNK + tl.arange(0, CHUNK)
                        logits = _load_logits(logits_ptr, offs_v, V)
                        is_likely = (tl.exp((logits - greatest) * sharpness) >= min_p) | (logits == greatest)
                        is_in = (logits > bound) & is_likely
                        drawn = tl.div_rn(logits, temperature) + _gumbel(state, offs_v)
                        drawn = tl.where(is_in, drawn, -float("inf"))
                        chunk_index = _first_best(drawn, tl.where(is_in, offs_v, V), V)
                        scores = tl.where(offs_c == chunk, tl.max(drawn, 0), scores)
                        indices = tl.where(offs_c == chunk, chunk_index, indices)
                is_open = logit < greatest
                if is_open & is_ranked:
                    count, above, upwards = _rank(logits_ptr, logit, greatest, sharpness, V, BLOCK_V)
    tl.store(token_ptr + row, index.to(tl.int64))
    tl.store(is_valid_ptr + row, is_valid)


def row_sample(
    logits: torch.Tensor, depths: torch.Tensor, integers: torch.Tensor, fractions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every node's token and whether its greatest logit is finite; see `row_sample_reference`.

    Args:
        logits, depths: [B, N, V] and [B, N].
        integers, fractions: [B, 3] each.

    Returns:
        [B, N] int64 and [B, N] bool.
    """
    sample = launch_row_sample if is_compiled_for(logits) else row_sample_reference
    return sample(logits, depths, integers, fractions)


def launch_row_sample(
    logits: torch.Tensor, depths: torch.Tensor, integers: torch.Tensor, fractions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`row_sample` by the kernels; shapes as there."""
    B, N, V = logits.shape
    rows = logits.reshape(-1, V)
    assert rows.stride(1) == 1 and integers.shape == fractions.shape == (B, 3)
    depths, integers, fractions = depths.contiguous(), integers.contiguous(), fractions.contiguous()
    R, C = B * N, triton.cdiv(V, BLOCK_V)
    # For each chunk: greatest logit, best score, and the masses above the winner, from it upwards, and of all tokens.
    numbers = torch.empty(5, R, C, dtype=torch.float32, device=logits.device)
    index, count = torch.empty(2, R, C, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(B, N, dtype=torch.int64, device=logits.device)
    is_valid = torch.empty(B, N, dtype=torch.bool, device=logits.device)
    winners = (numbers[0], numbers[1], index)
    laws = (integers, fractions)
    block_c = triton.next_power_of_2(C)
    _chunk_winner_kernel[(R, C)](rows, depths, *laws, *winners, N, V, rows.stride(0), BLOCK_V=BLOCK_V, num_warps=8)
    _chunk_rank_kernel[(R, C)](
        rows, *laws, *winners, count, numbers[2:], N, V, rows.stride(0), C, BLOCK_V=BLOCK_V, BLOCK_C=block_c, num_warps=8
    )
    _row_sample_kernel[(R,)](
        rows,
        depths,
        *laws,
        *winners,
        count,
        numbers[2:],
        tokens,
        is_valid,
        N,
        V,
        rows.stride(0),
        C,
        SPARE=SPARE_BITS[logits.dtype],
        CHUNK=BLOCK_V,
        BLOCK_V=BLOCK_ROW,
        BLOCK_C=block_c,
        num_warps=16,
    )
    return tokens, is_valid
