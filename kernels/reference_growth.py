"""The specification of the kernels that grow and prune trees, as in reference.py.

Scores are log-probabilities of paths, so they never rise along a path. Logits, log-probabilities and scores that are NaN or
below `LEAST` count as `LEAST`.
"""

from __future__ import annotations

import torch

# Its sum with any usual logit is finite in float32.
LEAST = -3.0e38


def likeliest_reference(logits: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row's likeliest tokens, descending, and their log-probabilities.

    Of equal logits any may come first here; in the kernel it is the first.

    Args:
        logits: [..., V].
        num_tokens: k, at most V.

    Returns:
        [..., k] int64 and [..., k] float32.
    """
    logits = logits.float().nan_to_num(nan=LEAST, posinf=torch.inf, neginf=LEAST).clamp_(min=LEAST)
    best = logits.log_softmax(-1).topk(num_tokens, dim=-1)
    return best.indices, torch.where(best.values > LEAST, best.values, LEAST)


def grow_layer_reference(
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
    """Give every node of the beam its k likeliest children; the best of all these children are the next beam.

    Logits and scores that are NaN or below `LEAST` count as `LEAST`. Of equal numbers any may come first here; in the
    kernel it is the first.

    Args:
        logits: [B, W, V].
        beam, beam_scores: [B, W] int64 and float32: each node's number in the tree and its path's log-probability.
        num_children: k, at most V.
        width: the next beam has W' = min(width, W * k) nodes.
        first_node, depth: the first child's number in the tree, and the children's depth.
        token_ids: [V] int64, the target's id for each draft id; None where they are the same.

    Returns:
        The fields of `tree_growth.Layer`: [3, B, W * k], [B, W * k], [3, B, W'] and [B, W'].
    """
    tokens, log_probs = likeliest_reference(logits, num_children)
    tokens = (tokens if token_ids is None else token_ids[tokens]).flatten(1)  # [B, W * k]
    scores = (beam_scores[:, :, None] + log_probs).flatten(1)
    scores = torch.where(scores > LEAST, scores, LEAST)
    parents = beam.repeat_interleave(num_children, dim=1)
    chosen = scores.topk(min(width, tokens.shape[1]), dim=1)
    parent_places = chosen.indices // num_children
    next_beam = torch.stack([first_node + chosen.indices, tokens.gather(1, chosen.indices), parent_places])
    return torch.stack([tokens, parents, torch.full_like(tokens, depth)]), scores, next_beam, chosen.values


def product_tree_reference(
    roots: torch.Tensor, tokens: torch.Tensor, log_probs: torch.Tensor, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best nodes of the tree in which every node of depth d has the same k children, of the same log-probabilities.

    Nodes are listed by depth, those of one depth by their parents' scores, and siblings as they are given. Of equal scores
    the one that is listed first is the better.

    Args:
        roots: [B] int64.
        tokens, log_probs: [B, K, k] int64 and float32, the children of the nodes of depth 0 … K - 1. Each node's
            log-probabilities descend.
        num_nodes: most nodes, root included.

    Returns:
        Tokens, parents, depths [B, N] int64 and scores [B, N] float32; N is less than `num_nodes` where the whole tree is.
    """
    B, K, k = tokens.shape
    layers = [torch.stack([roots, torch.full_like(roots, -1), torch.zeros_like(roots)])[:, :, None]]  # [3, B, 1]
    scores = [log_probs.new_zeros(B, 1)]
    # The best nodes of the newest depth: their numbers in the tree and their scores.
    beam, beam_scores, first = torch.zeros_like(roots)[:, None], scores[0], 1
    for d in range(K):
        paths = (beam_scores[:, :, None] + log_probs[:, d, None]).flatten(1)
        paths = torch.where(paths > LEAST, paths, LEAST)
        parents = beam.repeat_interleave(k, dim=1)
        children = tokens[:, d].repeat(1, beam.shape[1])
        layers.append(torch.stack([children, parents, torch.full_like(parents, d + 1)]))
        scores.append(paths)
        beam_scores, order = paths.sort(dim=1, descending=True, stable=True)
        beam, beam_scores = first + order[:, :num_nodes], beam_scores[:, :num_nodes]
        first += paths.shape[1]
    names, parents, depths = torch.cat(layers, dim=2)
    return prune_tree_reference(names, parents, depths, torch.cat(scores, dim=1), min(num_nodes, first))[:4]


def prune_tree_reference(
    tokens: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, scores: torch.Tensor, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best nodes of every tree, in their order. Of equal scores the first is the better.

    Args:
        tokens, parents, depths: [B, M] int64. Padding (token -1) is worse than any other node.
        scores: [B, M] float32.
        num_nodes: N, at most M.

    Returns:
        The kept nodes' tokens, parents (as places among the kept nodes), depths and scores, and their places before, [B, N]
        each.
    """
    ranked = torch.where(tokens >= 0, scores, -torch.inf)
    kept = ranked.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes].sort(dim=1).values
    places = torch.arange(num_nodes, device=kept.device).expand_as(kept)
    new_index = torch.full_like(tokens, -1).scatter_(1, kept, places)
    kept_parents = parents.gather(1, kept)
    kept_parents = torch.where(kept_parents >= 0, new_index.gather(1, kept_parents.clamp(min=0)), -1)
    return tokens.gather(1, kept), kept_parents, depths.gather(1, kept), scores.gather(1, kept), kept
