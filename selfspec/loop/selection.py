"""Which drafted nodes of a whole batch are verified: those that are likeliest to survive, whichever rows they belong to.

Everything here runs on the device, has fixed shapes and never waits, so it can be a part of a CUDA graph. A node's chance is
what its score promises, times the correction of its depth, times the factor of its row.

Invariant: a node is never kept without its ancestors. Scores and corrections never rise along a path, the sum of their
logarithms therefore neither, and a tie goes to the lower index, which is the ancestor's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ranking:
    """All nodes of a batch of trees, likeliest first; the roots come before all others, padding after them.

    Attributes:
        order: [B * N] int64 flat indices `row * N + node`.
        depths: [B * N] int64, in that order.
        chances: [B * N] float32, in that order; 0 for roots and padding.
        num_rows: B.
    """

    order: torch.Tensor
    depths: torch.Tensor
    chances: torch.Tensor
    num_rows: int

    def select(self, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep every root and the likeliest other nodes, `num_nodes` in all.

        Returns:
            The kept nodes' flat indices [num_nodes], ascending, so by row and then by node; each row's number of them [B].
        """
        B, (total,) = self.num_rows, self.order.shape
        assert B <= num_nodes <= total, f"{num_nodes} nodes of {B} rows with {total} in all"
        kept = self.order[:num_nodes].sort().values
        counts = torch.zeros(B, dtype=torch.int64, device=kept.device)
        return kept, counts.scatter_add_(0, kept // (total // B), torch.ones_like(kept))

    def curve(self, num_nodes: torch.Tensor, max_depth: int) -> torch.Tensor:
        """How many drafted tokens the likeliest nodes promise together, for trees cut at each depth.

        Args:
            num_nodes: [S] int64 sizes of passes, roots included.

        Returns:
            [K, S] float64; entry [d, s] counts the best `num_nodes[s] - B` nodes no deeper than d + 1.
        """
        limits = torch.arange(1, max_depth + 1, device=self.depths.device)[:, None]
        is_counted = (self.depths <= limits) & (self.depths > 0)  # [K, B * N]
        ranks = is_counted.cumsum(1)
        # Summed in integers, because then every process gets the same sums.
        sums = (is_counted * (self.chances * UNIT).long()).cumsum(1)
        wanted = (num_nodes - self.num_rows).expand(max_depth, -1).contiguous()
        place = torch.searchsorted(ranks, wanted).clamp(max=ranks.shape[1] - 1)
        return torch.where(wanted > 0, sums.gather(1, place).double() / UNIT, 0.0)


# One certain token in the integers that chances are summed in.
UNIT = 1 << 24


def rank(
    scores: torch.Tensor,
    is_real: torch.Tensor,
    depths: torch.Tensor,
    corrections: torch.Tensor,
    row_factors: torch.Tensor | None = None,
) -> Ranking:
    """Order the nodes of trees by their chances.

    Args:
        scores: [B, N] log-probability of the path down to the node; never rises along a path.
        is_real, depths: [B, N]; node 0 is the root.
        corrections: [K + 1] float32 factor by depth, never rising.
        row_factors: [B] float32.
    """
    # In logarithms, because rounded sums keep the order of their terms and rounded exponentials may not. The same holds for
    # the running minimum after a rounded logarithm.
    terms = corrections.log().cummin(0).values[depths] + scores.nan_to_num(nan=-torch.inf)
    if row_factors is not None:
        terms = terms + row_factors.log()[:, None]
    is_draft = is_real & (depths > 0)
    chances = torch.where(is_draft, terms.exp().clamp(max=1.0), 0.0)
    # A real node without any chance still stands before padding.
    terms = torch.where(is_draft, terms.clamp(min=LEAST), -torch.inf)
    terms[:, 0] = torch.inf
    order = terms.flatten().sort(descending=True, stable=True).indices
    return Ranking(order, depths.flatten()[order], chances.flatten()[order], scores.shape[0])


# Logarithm of the least chance that is told from none.
LEAST = -1e30


def promised(
    scores: torch.Tensor, is_real: torch.Tensor, depths: torch.Tensor, kept: torch.Tensor, max_depth: int
) -> torch.Tensor:
    """What the scores alone promised for the nodes [F] kept by `select`: [B, K] float32 sums of chances by row and depth."""
    is_kept = torch.zeros_like(is_real).flatten().scatter(0, kept, True).view_as(is_real)
    chances = torch.where(is_kept & is_real, scores.exp(), 0.0)
    at_depth = depths[:, :, None] == torch.arange(1, max_depth + 1, device=depths.device)  # [B, N, K]
    return (at_depth * chances[:, :, None]).sum(1)
