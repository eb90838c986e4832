"""Accept, the stage after verify: which path of the tree is kept, and the bonus token after it.

Invariant: both rules are exact.

* `accept_deterministic`: the target chooses its own token at every node it visits (argmax, or a draw with noise keyed by
  the request's seed and the absolute position). The walk goes on while one of the node's children is that token. The
  emitted tokens are exactly those of plain decoding with the same seed, whatever was drafted.
* `accept_sampled`: speculative sampling of a drawn chain (https://arxiv.org/abs/2211.17192, algorithm 1). Draft token x
  is kept with probability min(1, target_probs[x] / draft_probs[x]); otherwise it is replaced by a draw from the normalised
  residual max(0, target_probs - draft_probs). The emitted tokens have the target's law.

Both walk depth by depth and process only the rows of logits they visit, because penalties and grammars must see each node's
own path. Where no choice depends on a path, `accept_all_nodes` gives the first rule's result without a loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from selfspec.kernels.jit import is_compiled_for
from selfspec.kernels.row_argmax import row_argmax
from selfspec.kernels.tree_accept import tree_accept
from selfspec.loop.sampling import Stream

if TYPE_CHECKING:
    from selfspec.loop.sampling import Laws, Sampler
    from selfspec.tree import CandidateTree


@dataclass(frozen=True)
class Acceptance:
    """What one verify pass emits for each row.

    Attributes:
        path: [B, K + 1] accepted nodes, the root first, -1 after the end.
        num_accepted: [B] accepted draft tokens; the bonus token is not counted.
        tokens: [B, K + 1] emitted tokens: the accepted drafts, then the bonus token, -1 after it.
        is_valid: [B] false where there was no token to choose, because a visited row of logits held a NaN or +inf, or -inf
            throughout, be it by the row's settings.
    """

    path: torch.Tensor
    num_accepted: torch.Tensor
    tokens: torch.Tensor
    is_valid: torch.Tensor

    def of_rows(self, index: torch.Tensor) -> Acceptance:
        """The acceptance of the rows `index` alone."""
        return Acceptance(self.path[index], self.num_accepted[index], self.tokens[index], self.is_valid[index])


def accept(tree: CandidateTree, logits: torch.Tensor, sampler: Sampler) -> Acceptance:
    """Accept by the rule for the tree's kind of draft.

    Args:
        logits: [B, N, V] the target's logits at every node.
    """
    if not tree.is_deterministic:
        return accept_sampled(tree, logits, sampler)
    # Without a kernel, filters cost less along a walk than at every node.
    if sampler.is_plain or (sampler.is_pathless and is_compiled_for(logits)):
        return accept_all_nodes(tree, logits, None if sampler.is_greedy else sampler.laws)
    return accept_deterministic(tree, logits, sampler)


def accept_all_nodes(tree: CandidateTree, logits: torch.Tensor, laws: Laws | None) -> Acceptance:
    """`accept_deterministic` where no choice depends on a path: choose at every node, then walk.

    Args:
        logits: [B, N, V] the target's logits at every node.
        laws: the B rows' laws; None where every row is greedy.
    """
    nodes = torch.arange(tree.tokens.numel(), device=tree.tokens.device)
    return accept_flat(tree, nodes, logits.flatten(0, 1), laws)


def accept_flat(tree: CandidateTree, nodes: torch.Tensor, logits: torch.Tensor, laws: Laws | None) -> Acceptance:
    """`accept_all_nodes` where only some nodes have logits.

    Args:
        nodes: [F] indices into the B * N nodes; every node that is not padding is among them.
        logits: [F, V], theirs.
    """
    B, N = tree.tokens.shape
    if laws is None:
        chosen, is_valid = row_argmax(logits)
    else:
        rows, depths = nodes // N, tree.depths.flatten()[nodes]
        own = replace(laws, integers=laws.integers[rows], fractions=laws.fractions[rows])
        chosen, is_valid = (each[:, 0] for each in own.choose(logits[:, None], depths[:, None]))
    # A node without logits is nobody's child, and no walk comes to it.
    chosen = chosen.new_full((B * N,), -1).index_copy_(0, nodes, chosen).view(B, N)
    is_valid = is_valid.new_zeros(B * N).index_copy_(0, nodes, is_valid).view(B, N)
    path, num_accepted = tree_accept(tree.tokens, tree.parents, chosen, tree.max_depth)
    tokens = torch.where(path >= 0, chosen.gather(1, path.clamp(min=0)), -1)
    return Acceptance(path, num_accepted, tokens, is_valid.gather(1, path.clamp(min=0)).all(1))


def accept_deterministic(tree: CandidateTree, logits: torch.Tensor, sampler: Sampler) -> Acceptance:
    """Walk while the target's own choice is among the children, by logits [B, N, V]; see the module's docstring."""
    walk = _Walk(tree, logits)
    for depth in range(tree.max_depth + 1):
        token = sampler.choose_among(walk.scores_here(sampler, depth), depth)
        is_child = (tree.parents == walk.node[:, None]) & (tree.tokens == token[:, None]) & (token >= 0)[:, None]
        walk.emit(token, is_child, sampler)
        if walk.is_over():
            break
    return walk.acceptance()


def accept_sampled(tree: CandidateTree, logits: torch.Tensor, sampler: Sampler) -> Acceptance:
    """Speculative sampling along a drawn chain, by logits [B, N, V]; a row whose chain has ended draws from the target."""
    assert tree.is_chain and tree.draft_probs is not None
    B, N, _ = logits.shape
    walk = _Walk(tree, logits)
    for depth in range(N):
        target_probs = sampler.warp(walk.scores_here(sampler, depth)).softmax(-1)  # [B, V]
        if depth + 1 < N:
            draft_probs = tree.draft_probs[:, depth + 1]
            draft = tree.tokens[:, depth + 1]
        else:
            draft_probs, draft = torch.zeros_like(target_probs), torch.full_like(walk.node, -1)
        has_draft = draft >= 0
        at = draft.clamp(min=0)[:, None]
        threshold = sampler.uniform(depth, Stream.ACCEPT)
        ratio_passes = threshold * draft_probs.gather(1, at)[:, 0] < target_probs.gather(1, at)[:, 0]
        is_kept = has_draft & ratio_passes
        residual = (target_probs - draft_probs).clamp(min=0)
        # A zero residual means target and draft agree everywhere, where a rejection has probability zero.
        use_residual = has_draft & (residual.sum(-1) > 0)
        redrawn = sampler.draw(residual.log(), depth, Stream.RESIDUAL)
        drawn = sampler.draw(target_probs.log(), depth, Stream.TARGET)
        token = torch.where(is_kept, draft, torch.where(use_residual, redrawn, drawn))
        is_child = torch.zeros_like(tree.tokens, dtype=torch.bool)
        if depth + 1 < N:
            is_child[:, depth + 1] = is_kept
        walk.emit(token, is_child, sampler)
        if walk.is_over():
            break
    return walk.acceptance()


class _Walk:
    """The state of a walk from the root, all rows together; a finished row emits nothing more."""

    def __init__(self, tree: CandidateTree, logits: torch.Tensor) -> None:
        B = logits.shape[0]
        device = logits.device
        self.logits = logits
        self.num_steps = tree.max_depth + 1
        self.node = torch.zeros(B, dtype=torch.int64, device=device)
        self.is_alive = torch.ones(B, dtype=torch.bool, device=device)
        self.is_valid = torch.ones(B, dtype=torch.bool, device=device)
        self.path = [self.node]
        self.tokens: list[torch.Tensor] = []

    def scores_here(self, sampler: Sampler, depth: int) -> torch.Tensor:
        """The logits [B, V] after each row's node, as the row's path leaves them."""
        B, _, V = self.logits.shape
        rows = self.logits.gather(1, self.node[:, None, None].expand(B, 1, V))[:, 0].float()
        scores = sampler.follow_paths(rows, depth)
        # A row that is over chooses nothing more.
        self.is_valid = self.is_valid & ((_is_valid(rows) & _is_valid(scores)) | ~self.is_alive)
        return scores

    def emit(self, token: torch.Tensor, is_child: torch.Tensor, sampler: Sampler) -> None:
        self.tokens.append(torch.where(self.is_alive, token, -1))
        sampler.record(token, depth=len(self.tokens) - 1)
        self.is_alive = self.is_alive & is_child.any(1)
        self.node = torch.where(self.is_alive, is_child.to(torch.int64).argmax(1), self.node)
        self.path.append(torch.where(self.is_alive, self.node, -1))

    def is_over(self) -> bool:
        """True when no row can go on. Always false where kernels run, because the answer would wait for the device."""
        return not is_compiled_for(self.is_alive) and not bool(self.is_alive.any())

    def acceptance(self) -> Acceptance:
        filler = torch.full_like(self.node, -1)
        path = torch.stack((self.path + [filler] * self.num_steps)[: self.num_steps], dim=1)
        tokens = torch.stack((self.tokens + [filler] * self.num_steps)[: self.num_steps], dim=1)
        return Acceptance(path, (path >= 0).sum(1) - 1, tokens, self.is_valid)


def _is_valid(logits: torch.Tensor) -> torch.Tensor:
    """[...] bool from logits [..., V]: true where the maximum is finite (no NaN, no +inf, not -inf throughout)."""
    return logits.amax(-1).isfinite()
