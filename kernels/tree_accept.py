"""The greedy walk through a candidate tree, without a host round trip: one gather and compare per depth.

Node 0 is the root. A child of node n is a node i with `parents[i] == n`; the walk goes on while some child's token is the
target's chosen token at n. Padding (token -1, parent -1) has no parent on the walk, so it is never reached.
"""

from __future__ import annotations

import torch


def tree_accept(
    tokens: torch.Tensor, parents: torch.Tensor, chosen: torch.Tensor, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted path and its length; arguments and results as in `tree_accept_reference`, shapes fixed by `max_depth`."""
    B, _ = tokens.shape
    node = tokens.new_zeros(B)
    is_alive = torch.ones(B, dtype=torch.bool, device=tokens.device)
    path = [node]
    for _ in range(max_depth):
        want = chosen.gather(1, node[:, None])
        is_child = (parents == node[:, None]) & (tokens == want) & (tokens >= 0)
        is_alive = is_alive & is_child.any(1)
        # int64 argmax returns the first of equal maxima, so of two equal siblings the earlier one is taken.
        node = torch.where(is_alive, is_child.to(torch.int64).argmax(1), node)
        path.append(torch.where(is_alive, node, -1))
    stacked = torch.stack(path, dim=1)  # [B, D + 1]
    return stacked, (stacked >= 0).sum(1) - 1
