"""What the decode loop asks of a drafter: a candidate tree a step, from whatever state it keeps for itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Sequence_
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from selfspec.loop.planner import Planner
from selfspec.tree import CandidateTree, chain

if TYPE_CHECKING:
    from selfspec.loop.accept import Acceptance
    from selfspec.loop.sequence import Batch, Sequence
    from selfspec.model.target import Target, Verification


class Drafter(ABC):
    """Proposes trees and follows what became of them.

    Attributes:
        name: as written on the command line.
        num_draft_tokens: how deep it drafts when nothing limits it.
        num_nodes: most nodes of its trees, root included; 0 where they are chains.
        features: hidden states of the target that it wants of every committed token (see `selfspec.model.target`).
        verifies_itself: its `verify` is its own.
        was_behind: its last proposal also entered what steps without drafts had left, so that its cost is no other's.
        is_costly: drafting takes a noticeable part of a target pass, so the planner decides before it, not only after.
    """

    name: str = ""
    num_draft_tokens: int = 0
    num_nodes: int = 0
    features: Sequence_[int] = ()
    is_costly: bool = False
    verifies_itself: bool = False
    was_behind: bool = False

    @cached_property
    def planner(self) -> Planner:
        """What was measured of this drafter; kept across calls, so that a second prompt starts where the first ended."""
        return Planner()

    def admit(  # noqa: B027  (a drafter without state has nothing to do here, nor below)
        self, sequence: Sequence, features: Mapping[int, torch.Tensor]
    ) -> None:
        """A prompt was prefilled; `features` are those of all its tokens but the last, each [1, T, E]."""

    @abstractmethod
    def propose(self, batch: Batch, num_draft_tokens: int) -> CandidateTree:
        """A tree for every row, at most `num_draft_tokens` deep (0: the roots alone)."""

    def verify(self, target: Target, batch: Batch, tree: CandidateTree) -> Verification:
        """The target's pass over the tree; a drafter that ran a part of it already goes on from there."""
        return target.verify(tree, batch.rows, batch.cache, features=self.features)

    def commit(  # noqa: B027
        self, batch: Batch, tree: CandidateTree, acceptance: Acceptance, features: Mapping[int, torch.Tensor]
    ) -> None:
        """The step's outcome: `features` are those along the accepted path, each [B, K + 1, E], garbage past its end.

        A drafter that keeps some of them for longer than the step makes a copy.
        """

    def retire(self, sequence: Sequence) -> None:  # noqa: B027
        """A sequence ended or was cancelled: drop its state. Called once for every admitted sequence."""


class NoDrafter(Drafter):
    """Autoregressive decoding: the tree is its root."""

    name = "none"

    def propose(self, batch: Batch, num_draft_tokens: int) -> CandidateTree:
        return chain(batch.roots)
