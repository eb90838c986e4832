"""Prompt lookup: draft the tokens that followed the last occurrence of the text's present ending.

The idea is from https://github.com/apoorvumang/prompt-lookup-decoding. It needs no model and no training, and pays where the
output repeats the prompt or itself: summaries, edits, code, extraction. The longer the matched ending, the likelier its
continuation is accepted, so the drafter counts acceptances by match length and depth, and scores its drafts by these counts.

Invariant: a draft is a chain and depends only on its row's tokens; the counts change only the scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from selfspec.kernels.jit import is_compiled_for
from selfspec.loop.drafter import DefaultShape, Drafter, DraftShape, Outcome, Proposal
from selfspec.tree import chain

if TYPE_CHECKING:
    from selfspec.loop.batch import Batch

# How many trials of one match length and depth the counts remember.
MEMORY = 64.0


class NgramDrafter(Drafter):
    """Drafts a chain from the row's own tokens.

    Args:
        num_draft_tokens: longest draft, K.
        max_match: longest ending that is compared; longer matches count as this long.
        min_match: shortest ending worth a draft.
    """

    name = "ngram"
    default_shape = DefaultShape(cpu=DraftShape(15), gpu=DraftShape(15))

    def __init__(self, num_draft_tokens: int | None = None, *, max_match: int = 8, min_match: int = 1) -> None:
        if num_draft_tokens is None:
            num_draft_tokens = self.default_shape.cpu.num_draft_tokens
        if num_draft_tokens < 1:
            raise ValueError(f"ngram:{num_draft_tokens} is not allowed: draft at least one token")
        self.num_draft_tokens = num_draft_tokens
        self.max_match = max_match
        self.min_match = min_match
        self._counts: torch.Tensor
        self.forget()

    def forget(self) -> None:
        super().forget()
        # Trials and hits by match length (row 0 is unused) and depth. The prior trusts longer matches more.
        prior = 1 - 0.6 / torch.arange(self.max_match + 1).clamp(min=1)
        trials = torch.full((self.max_match + 1, self.num_draft_tokens), 4.0)
        self._counts = torch.stack([trials, trials * prior[:, None]])

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        """A chain per row; the proposal's state is the length of each row's match [B]."""
        K = num_draft_tokens
        if K == 0:
            return Proposal(chain(batch.roots))
        drafts, matched = lookup(batch.history, batch.num_tokens, K, self.max_match)
        drafts = torch.where((matched >= self.min_match)[:, None], drafts, -1)
        self._counts = self._counts.to(drafts.device)
        trials, hits = self._counts
        scores = (hits / trials)[matched, :K].log().cumsum(1)
        tree = chain(batch.roots, drafts, scores)
        if not is_compiled_for(drafts):
            # Cut to the longest draft. Not where kernels run, because asking for it would wait for the device.
            tree = tree.prune(1 + int((drafts >= 0).sum(1).max()))
        return Proposal(tree, state=matched)

    def commit(self, batch: Batch, proposal: Proposal, outcome: Outcome) -> None:
        """Count, for every depth that was reached, whether its draft was accepted. Old counts fade, because texts change."""
        tree, matched = proposal.tree, proposal.state
        K = tree.max_depth
        if matched is None or K == 0:
            return
        depths = torch.arange(K, device=tree.tokens.device)
        is_reached = (tree.tokens[:, 1:] >= 0) & (depths <= outcome.acceptance.num_accepted[:, None])
        is_hit = is_reached & (depths < outcome.acceptance.num_accepted[:, None])
        events = torch.stack([is_reached, is_hit]).to(self._counts.dtype)  # [2, B, K]
        self._counts[:, :, :K].index_add_(1, matched, events)
        self._counts *= (MEMORY / self._counts[0]).clamp(max=1.0)


def lookup(
    history: torch.Tensor, num_tokens: torch.Tensor, num_draft_tokens: int, max_match: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The continuation of each row's longest earlier match of its ending; among equally long ones, of the latest.

    Args:
        history: [B, C] int64.
        num_tokens: [B].

    Returns:
        Draft tokens [B, K], -1 throughout where nothing matches, and the match's length [B], 0 for none. A continuation
        that reaches the row's end starts over after the match, which is right where the text repeats.
    """
    B, C = history.shape
    index = torch.arange(C, device=history.device)
    # run[b, j]: how many tokens ending at j equal the row's ending.
    run = torch.zeros(B, C, dtype=torch.int64, device=history.device)
    is_equal = (index < num_tokens[:, None] - 1).clone()
    for back in range(min(max_match, C)):
        last = history.gather(1, (num_tokens - 1 - back).clamp(min=0)[:, None])
        is_equal[:, back:] &= history[:, : C - back] == last
        is_equal[:, :back] = False
        is_equal &= (back < num_tokens)[:, None]
        run += is_equal
    # Longest first, then latest.
    best = (run * C + index).argmax(1)
    matched = run.gather(1, best[:, None])[:, 0]
    period = (num_tokens - 1 - best).clamp(min=1)[:, None]
    wanted = best[:, None] + 1 + torch.arange(num_draft_tokens, device=history.device) % period
    drafts = history.gather(1, wanted.clamp(max=C - 1))
    return torch.where((matched > 0)[:, None], drafts, -1), matched
