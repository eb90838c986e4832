"""Formulas for the cost and gain of speculation and for the size of a KV cache. Nothing is loaded or measured here.

`selfspec plan` and the page's Plan tab use them before a model is loaded; `selfspec bench` compares them with what it
measured. The planner does not: it decides during decoding, from measurements. Rates are shares from 0 to 1, costs are
relative to one plain pass of the target, times are in seconds, sizes in bytes, bandwidths and peaks per second.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

# The deepest drafts that predictions cover, unless the drafter itself has a limit.
MAX_PLANNED_DEPTH = 16


@dataclass(frozen=True)
class TreeGain:
    """A candidate tree's size (root included), its depth, and the expected number of tokens that a pass over it emits."""

    num_nodes: int
    depth: int
    expected_tokens: float


def expected_tokens(acceptance_rate: float, num_draft_tokens: int) -> float:
    """Tokens per pass, bonus token included, for a chain in which every draft is accepted with the same chance:

        (1 - rate^(K + 1)) / (1 - rate), and K + 1 if the rate is 1

    (equation 1 of https://arxiv.org/abs/2211.17192, which writes alpha for the rate and gamma for K).

    Raises:
        ValueError: the rate is not between 0 and 1, or the number is negative.
    """
    _check_rate(acceptance_rate)
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens={num_draft_tokens} is not allowed: use 0 or more")
    # The sum instead of its closed form, because that is inexact close to rate 1.
    return math.fsum(acceptance_rate**depth for depth in range(num_draft_tokens + 1))


def expected_tokens_by_depth(acceptance_rates: Sequence[float]) -> float:
    """Tokens per pass from measured rates: entry d is the share of passes in which the draft of depth d + 1 was accepted.

    The rates by position in heads' cards and `/metrics` are such rates: a draft counts only if all before it were accepted.
    """
    for rate in acceptance_rates:
        _check_rate(rate)
    return 1 + math.fsum(acceptance_rates)


def best_trees(rank_rates: Sequence[float], *, max_depth: int, max_nodes: int) -> list[TreeGain]:
    """The tree that is expected to emit most, for every size from the root alone up to `max_nodes`.

    A node's chance is the product of the rates on its path, and a tree's expected tokens are the sum of its nodes' chances.
    So the best tree of a size has the likeliest nodes (https://arxiv.org/abs/2401.10774, section 2.3.3), a chain if there is
    only one rate.

    Args:
        rank_rates: how often the target's token is the drafter's first choice, its second, and so on, given that all
            drafts before it were accepted; the same at every depth.

    Raises:
        ValueError: there are no rates, a rate is not between 0 and 1, or they add up to more than 1.
    """
    for rate in rank_rates:
        _check_rate(rate)
    if not rank_rates or math.fsum(rank_rates) > 1 + 1e-9:
        raise ValueError(f"rates by rank {list(rank_rates)} are not allowed: give at least one, and no more than 1 in sum")
    rates = sorted(rank_rates, reverse=True)
    trees = [TreeGain(1, 0, 1.0)]
    # For every node that may be added next: its negative chance, depth, rank, and its parent's chance.
    frontier = [(-rates[0], 1, 0, 1.0)] if max_depth > 0 else []
    while frontier and len(trees) < max_nodes:
        negative, depth, rank, parent = heapq.heappop(frontier)
        last = trees[-1]
        trees.append(TreeGain(last.num_nodes + 1, max(last.depth, depth), last.expected_tokens - negative))
        if depth < max_depth:
            heapq.heappush(frontier, (negative * rates[0], depth + 1, 0, -negative))
        if rank + 1 < len(rates):
            heapq.heappush(frontier, (-parent * rates[rank + 1], depth, rank + 1, parent))
    return trees


def acceptance_rate_of(acceptance_length: float, num_draft_tokens: int) -> float:
    """The rate at which a chain of `num_draft_tokens` emits `acceptance_length` tokens per pass; inverts `expected_tokens`.

    Raises:
        ValueError: no rate gives that length.
    """
    if not 1 <= acceptance_length <= num_draft_tokens + 1:
        raise ValueError(
            f"acceptance_length={acceptance_length} is not allowed: {num_draft_tokens} draft tokens and the bonus token "
            f"give 1 to {num_draft_tokens + 1}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_tokens(middle, num_draft_tokens) < acceptance_length:
            low = middle
        else:
            high = middle
    return high


def speedup(tokens_per_pass: float, draft_cost: float, verify_cost: float = 1.0) -> float:
    """How many times as fast as plain decoding: tokens per pass over the cost of drafting and verifying,

        E / (draft_cost + verify_cost)

    This is theorem 3.8 of https://arxiv.org/abs/2211.17192, in which drafting costs gamma times c and verifying costs one
    plain pass. Here verifying may cost more: its cost grows with the tree once computing takes longer than reading weights.

    Args:
        draft_cost: cost of all drafting in a step, relative to a plain pass of the target.
        verify_cost: cost of the pass over the tree, relative to a plain pass of the target.
    """
    if draft_cost < 0 or verify_cost <= 0:
        raise ValueError(
            f"draft_cost={draft_cost}, verify_cost={verify_cost} is not allowed: use 0 or more, and more than 0 to verify"
        )
    return tokens_per_pass / (draft_cost + verify_cost)


def kv_bytes(bytes_per_token: int, *, num_rows: int, num_tokens: int, block_size: int = 16) -> int:
    """Bytes that `num_rows` sequences of `num_tokens` hold in a paged cache; each holds whole blocks.

    Args:
        bytes_per_token: layers × kv heads × (key dim + value dim) × bytes of a value (`KVShape.bytes_per_token`).
    """
    return num_rows * -(-num_tokens // block_size) * block_size * bytes_per_token


def distinct_experts(num_experts: int, num_experts_per_token: int, num_tokens: int) -> float:
    """How many of a layer's experts `num_tokens` tokens are expected to use, if each token chooses at random.

    n (1 - (1 - k / n)^T). A pass reads the weights of these experts, so a wider tree reads more of a mixture of experts.
    """
    return num_experts * (1 - (1 - num_experts_per_token / num_experts) ** num_tokens)


def pass_seconds(num_bytes: float, num_flops: float, *, bandwidth: float, peak: float) -> float:
    """The least time of a pass: of reading or computing, the longer (roofline, https://doi.org/10.1145/1498765.1498785)."""
    return max(num_bytes / bandwidth, num_flops / peak)


def _check_rate(rate: float) -> None:
    if not 0 <= rate <= 1:
        raise ValueError(f"acceptance rate {rate} is not allowed: use 0 to 1")
