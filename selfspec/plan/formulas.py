"""What speculation and a KV cache cost and bring, by formulas alone: nothing is loaded, measured or drafted here.

`selfspec plan` and the page's Plan tab ask these before a model is loaded, `selfspec bench` compares them with what it has
measured; the planner decides during decoding, from measurements. Rates are shares from 0 to 1, costs are relative to one
plain pass of the target, times are seconds, sizes are bytes, and bandwidths and peaks are those per second.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_PLANNED_DEPTH = 16


@dataclass(frozen=True)
class TreeGain:
    """A candidate tree's size (root included), its depth, and the tokens that a pass over it is expected to emit."""

    num_nodes: int
    depth: int
    expected_tokens: float


def expected_tokens(acceptance_rate: float, num_draft_tokens: int) -> float:
    """Tokens a pass emits, bonus token included, for a chain each of whose drafts holds with the same chance:

        (1 - rate^(K + 1)) / (1 - rate), and K + 1 where the rate is 1

    (equation 1 of https://arxiv.org/abs/2211.17192, which writes alpha for the rate and gamma for K).

    Raises:
        ValueError: the rate is no share, or the number is negative.
    """
    _check_rate(acceptance_rate)
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens={num_draft_tokens} is not allowed: use 0 or more")
    # The sum, not its closed form: exact at rate 1, and close to it.
    return math.fsum(acceptance_rate**depth for depth in range(num_draft_tokens + 1))


def expected_tokens_by_depth(acceptance_rates: Sequence[float]) -> float:
    """The same from measured rates: entry d is the share of passes in which the draft of depth d + 1 was accepted.

    Those are the rates by position of heads' cards and of `/metrics`: a draft counts only where all before it held.
    """
    for rate in acceptance_rates:
        _check_rate(rate)
    return 1 + math.fsum(acceptance_rates)


def best_trees(rank_rates: Sequence[float], *, max_depth: int, max_nodes: int) -> list[TreeGain]:
    """For every size from the root alone up, the tree that is expected to emit most.

    A node's chance is the product of the rates on its path, and a tree's tokens the sum of its nodes' chances, so that the
    best tree of a size has the likeliest nodes (https://arxiv.org/abs/2401.10774, section 2.3.3). One rate gives chains.

    Args:
        rank_rates: how often the target's token is the drafter's first choice, its second, and so on, where all before
            held; the same at every depth.

    Raises:
        ValueError: no rates, one that is no share, or more than one in sum.
    """
    for rate in rank_rates:
        _check_rate(rate)
    if not rank_rates or math.fsum(rank_rates) > 1 + 1e-9:
        raise ValueError(f"rates by rank {list(rank_rates)} are not allowed: give at least one, and no more than 1 in sum")
    rates = sorted(rank_rates, reverse=True)
    trees = [TreeGain(1, 0, 1.0)]
    # The negative chance, the depth, the rank, and the parent's chance of every node that may come next.
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
    """The rate at which a chain of `num_draft_tokens` emits `acceptance_length` tokens a pass: `expected_tokens` inverted.

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

    Theorem 3.8 of https://arxiv.org/abs/2211.17192, where drafting costs gamma times c and verification as much as a plain
    pass. Here a verification may cost more: it grows with the tree's nodes once these compute longer than weights are read.

    Args:
        draft_cost: of all drafting of a step, relative to a plain pass of the target.
        verify_cost: of the pass over the tree, likewise.
    """
    if draft_cost < 0 or verify_cost <= 0:
        raise ValueError(f"draft_cost={draft_cost}, verify_cost={verify_cost}: costs are not negative, passes not free")
    return tokens_per_pass / (draft_cost + verify_cost)


def best_num_draft_tokens(
    acceptance_rate: float,
    draft_cost: float,
    verify_cost: Callable[[int], float] = lambda num_nodes: 1.0,
    *,
    limit: int = MAX_PLANNED_DEPTH,
) -> int:
    """How long a chain decodes fastest, 0 where drafting does not pay (section 3.3 of https://arxiv.org/abs/2211.17192).

    Args:
        draft_cost: of one draft token, relative to a plain pass of the target.
        verify_cost: of a pass over that many nodes, likewise.
        limit: the longest chain looked at.
    """
    return max(
        range(limit + 1),
        key=lambda K: speedup(expected_tokens(acceptance_rate, K), K * draft_cost, verify_cost(K + 1)),
    )


def kv_bytes(bytes_per_token: int, *, num_rows: int, num_tokens: int, block_size: int = 16) -> int:
    """What `num_rows` sequences of `num_tokens` hold in a paged cache: whole blocks each.

    Args:
        bytes_per_token: layers × kv heads × (key dim + value dim) × bytes of a value (`KVShape.bytes_per_token`).
    """
    return num_rows * -(-num_tokens // block_size) * block_size * bytes_per_token


def distinct_experts(num_experts: int, num_experts_per_token: int, num_tokens: int) -> float:
    """How many of a layer's experts `num_tokens` tokens are expected to meet, each choosing as if by lot.

    n (1 - (1 - k / n)^T): a pass reads these experts' weights, so that on a mixture a wider tree reads more.
    """
    return num_experts * (1 - (1 - num_experts_per_token / num_experts) ** num_tokens)


def pass_seconds(num_bytes: float, num_flops: float, *, bandwidth: float, peak: float) -> float:
    """The least a pass can take: reading or computing, whichever is longer (roofline, https://doi.org/10.1145/1498765.1498785)."""
    return max(num_bytes / bandwidth, num_flops / peak)


def _check_rate(rate: float) -> None:
    if not 0 <= rate <= 1:
        raise ValueError(f"acceptance rate {rate} is not allowed: use 0 to 1")
