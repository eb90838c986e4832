"""Prompt lookup: draft the tokens that followed the last occurrence of the text's present ending.

The idea is from https://github.com/apoorvumang/prompt-lookup-decoding. It needs no model and no training, and pays where the
output repeats the prompt or itself: summaries, edits, code, extraction. The longer the matched ending, the likelier its
continuation is accepted, so the drafter counts acceptances by match length and depth, and scores its drafts by these counts.

Invariant: a draft is a chain and depends only on its row's tokens; the counts change only the scores.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from selfspec.cache.kv import KVCache, Places
from selfspec.cache.rows import ROOT
from selfspec.drafters.growth import as_tensors, from_tensors
from selfspec.kernels.ngram_lookup import ngram_lookup
from selfspec.loop.drafter import DefaultShape, Drafter, DraftShape, Observed, Proposal
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
    is_resident = True
    default_shape = DefaultShape(cpu=DraftShape(15), gpu=DraftShape(15))

    def __init__(self, num_draft_tokens: int | None = None, *, max_match: int = 8, min_match: int = 1) -> None:
        if num_draft_tokens is None:
            num_draft_tokens = self.default_shape.cpu.num_draft_tokens
        if num_draft_tokens < 1:
            raise ValueError(f"ngram:{num_draft_tokens} is not allowed: draft at least one token")
        self.num_draft_tokens = num_draft_tokens
        self.max_match = max_match
        self.min_match = min_match
        # Trials and hits by match length (row 0 is unused) and depth.
        self._counts = torch.zeros(2, max_match + 1, num_draft_tokens)
        self.forget()

    def forget(self) -> None:
        super().forget()
        # The prior trusts longer matches more. In place, because CUDA graphs hold the address.
        prior = 1 - 0.6 / torch.arange(self.max_match + 1).clamp(min=1)
        self._counts[0] = 4.0
        self._counts[1] = 4.0 * prior.to(self._counts.device)[:, None]

    def attach(self, cache: KVCache) -> None:
        self._counts = self._counts.to(cache.device)

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        """A chain per row; the proposal's state is the length of each row's match [B]."""
        cache, K = batch.cache, num_draft_tokens
        if K == 0:
            return Proposal(chain(batch.roots))

        def draft(slots: torch.Tensor, places: Places) -> tuple[torch.Tensor, ...]:
            state = cache.state
            drafts, matched = ngram_lookup(state.history, slots, places.lengths + 1, K, self.max_match)
            drafts = torch.where((matched >= self.min_match)[:, None], drafts, -1)
            trials, hits = self._counts
            scores = (hits / trials)[matched, :K].log().cumsum(1)
            return *as_tensors(chain(state.integers[slots, ROOT], drafts, scores)), matched

        key = ("ngram", self.graph_key, K)
        *tensors, matched = batch.target.passes.draft(key, draft, batch.rows, cache)
        tree = replace(from_tensors(tensors, depth=K), is_chain=True)
        if not batch.target.passes.is_captured:
            # Cut to the longest draft. Not where steps are launched ahead, because asking for it would wait for the device.
            tree = tree.prune(int(tree.is_real.sum(1).max()))
        return Proposal(tree, state=matched)

    def observe(self, cache: KVCache, observed: Observed) -> None:
        """Count, for every depth that was reached, whether its draft was accepted."""
        tree, acceptance, matched = observed.tree, observed.acceptance, observed.state
        if tree is not None and acceptance is not None and matched is not None:
            # A tree may have been padded beyond the longest draft.
            count(self._counts, matched, tree.tokens[:, : self.num_draft_tokens + 1], acceptance.num_accepted)


def count(counts: torch.Tensor, matched: torch.Tensor, tokens: torch.Tensor, num_accepted: torch.Tensor) -> None:
    """Count, for every depth that was reached, whether its draft was accepted. Old counts fade, because texts change.

    A function of tensors that changes `counts` in place, so that a graph can run it.

    Args:
        counts: [2, M + 1, K] trials and hits by match length and depth, float32.
        matched: [B] int64, the length of each row's match.
        tokens: [B, 1 + K'] int64, each row's root and draft tokens, K' at most K.
        num_accepted: [B] int64.
    """
    K = tokens.shape[1] - 1
    depths = torch.arange(K, device=tokens.device)
    is_reached = (tokens[:, 1:] >= 0) & (depths <= num_accepted[:, None])
    is_hit = is_reached & (depths < num_accepted[:, None])
    counts[:, :, :K].index_add_(1, matched, torch.stack([is_reached, is_hit]).to(counts.dtype))
    counts.mul_((MEMORY / counts[0]).clamp(max=1.0))
