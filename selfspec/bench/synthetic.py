"""A drafter with a set acceptance length, to measure how fast the runtime is with a head of that quality.

It knows the answers. It drafts the next right tokens, as many as the set length needs, and fills the tree with wrong ones.
So every pass emits exactly that many tokens and verifies a tree of exactly the set size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from selfspec.loop.drafter import Drafter, Proposal
from selfspec.tree import CandidateTree, chain, from_parents

if TYPE_CHECKING:
    from selfspec.loop.batch import Batch


class SyntheticDrafter(Drafter):
    """Trees with a known number of right tokens.

    Args:
        answers: prompt -> the tokens that plain decoding emits after it.
        acceptance_length: tokens emitted per pass, the bonus token included.
        num_nodes: size of every tree, root included.
    """

    def __init__(self, answers: Mapping[tuple[int, ...], list[int]], *, acceptance_length: int, num_nodes: int) -> None:
        if not 1 <= acceptance_length <= num_nodes:
            raise ValueError(f"acceptance_length={acceptance_length} is not allowed: use 1 to num_nodes={num_nodes}")
        self.name = f"synthetic:{acceptance_length}"
        self.acceptance_length = acceptance_length
        self.num_nodes = num_nodes
        self.num_draft_tokens = acceptance_length
        self._answers = answers
        # The right tokens form a chain. The wrong ones are children of its nodes, each node in turn.
        A = acceptance_length
        self._parents = [-1, *range(A - 1), *((i % A) for i in range(num_nodes - A))]
        self._shapes: dict[int, CandidateTree] = {}

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        if num_draft_tokens == 0:
            return Proposal(chain(batch.roots))
        A, V = self.acceptance_length, batch.target.vocab_size
        drafts = []
        for sequence in batch.sequences:
            num_emitted = len(sequence.token_ids)
            answer = self._answers[tuple(sequence.request.prompt_ids)][num_emitted : num_emitted + A]
            right = answer + [0] * (A - len(answer))
            # A wrong token differs from its siblings and from the right token.
            wrong = [(right[parent] + 1 + i // A) % V for i, parent in enumerate(self._parents[A:])]
            drafts.append(right[: A - 1] + wrong)
        shape = self._shape(len(batch), batch.device)
        tokens = torch.cat([batch.roots[:, None], torch.tensor(drafts, dtype=torch.int64).to(batch.device)], dim=1)
        tree = replace(shape, tokens=tokens)
        if num_draft_tokens < tree.max_depth:
            tree = tree.limit_depth(torch.full((len(batch),), num_draft_tokens, device=batch.device))
        return Proposal(tree)

    def _shape(self, num_rows: int, device: torch.device) -> CandidateTree:
        """A tree [num_rows, num_nodes] with the parents and depths of every step; its tokens are zeros."""
        if num_rows not in self._shapes:
            parents = torch.tensor([self._parents], device=device).repeat(num_rows, 1)
            self._shapes[num_rows] = from_parents(torch.zeros_like(parents), parents)
        return self._shapes[num_rows]
