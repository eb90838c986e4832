"""Prompt lookup: draft the tokens that followed the last occurrence of the text's present ending.

The idea is https://github.com/apoorvumang/prompt-lookup-decoding's.

No model and no training; it pays where the output repeats the prompt or itself: summaries, edits, code, extraction. The
longer the matched ending, the likelier its continuation holds, so the drafter counts, per match length and depth, how often
it did, and scores its drafts with that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from selfspec.loop.drafter import Drafter
from selfspec.tree import CandidateTree, chain

if TYPE_CHECKING:
    from selfspec.loop.accept import Acceptance
    from selfspec.loop.sequence import Batch

# How many trials of one kind the acceptance counts remember.
MEMORY = 64.0


class NgramDrafter(Drafter):
    """Drafts a chain from the row's own tokens.

    Args:
        num_draft_tokens: longest draft, K.
        max_match: longest ending that is told apart; longer matches count as this long.
        min_match: shortest ending worth a draft.
    """

    name = "ngram"

    def __init__(self, num_draft_tokens: int = 15, *, max_match: int = 8, min_match: int = 1) -> None:
        if num_draft_tokens < 1:
            raise ValueError(f"ngram:{num_draft_tokens} is not allowed: draft at least one token")
        self.num_draft_tokens = num_draft_tokens
        self.max_match = max_match
        self.min_match = min_match
        # Trials and hits by match length (row 0 is unused) and depth, from a prior that trusts longer matches more.
        prior = 1 - 0.6 / torch.arange(max_match + 1).clamp(min=1)
        trials = torch.full((max_match + 1, num_draft_tokens), 4.0)
        self._counts = torch.stack([trials, trials * prior[:, None]])
        self._matched: torch.Tensor | None = None

    def propose(self, batch: Batch, num_draft_tokens: int) -> CandidateTree:
        K = num_draft_tokens
        if K == 0:
            self._matched = None
            return chain(batch.roots)
        drafts, matched = lookup(batch.history, batch.num_tokens, K, self.max_match)
        drafts = torch.where((matched >= self.min_match)[:, None], drafts, -1)
        self._matched = matched
        self._counts = self._counts.to(drafts.device)
        trials, hits = self._counts
        scores = (hits / trials)[matched, :K].log().cumsum(1)
        tree = chain(batch.roots, drafts, scores)
        if drafts.device.type == "cpu":
            # Nothing is verified for a row without a match; elsewhere shapes stay fixed.
            tree = tree.prune(1 + int((drafts >= 0).sum(1).max()))
        return tree

    def commit(
        self, batch: Batch, tree: CandidateTree, acceptance: Acceptance, features: Mapping[int, torch.Tensor]
    ) -> None:
        """Count, for every depth that was reached, whether its draft held. Old counts fade: texts change."""
        if self._matched is None or tree.max_depth == 0:
            return
        K = tree.max_depth
        depths = torch.arange(K, device=tree.tokens.device)
        is_reached = (tree.tokens[:, 1:] >= 0) & (depths <= acceptance.num_accepted[:, None])
        is_hit = is_reached & (depths < acceptance.num_accepted[:, None])
        events = torch.stack([is_reached, is_hit]).to(self._counts.dtype)  # [2, B, K]
        self._counts[:, :, :K].index_add_(1, self._matched, events)
        self._counts *= (MEMORY / self._counts[0]).clamp(max=1.0)


def lookup(
    history: torch.Tensor, num_tokens: torch.Tensor, num_draft_tokens: int, max_match: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The continuation of the longest earlier match of each row's ending, the most recent one among equals.

    Args:
        history: [B, C] int64.
        num_tokens: [B].

    Returns:
        Draft tokens [B, K], -1 throughout where nothing matches, and the length of the match [B], 0 for none. A
        continuation that reaches the row's end starts over behind the match, which is right where the text repeats.
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
