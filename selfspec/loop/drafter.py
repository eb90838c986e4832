"""The `Drafter` protocol: the stage "draft a candidate tree", from whatever state a drafter keeps for itself.

Invariant: a drafter changes how fast tokens come, never their distribution.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from selfspec.loop.planner import Planner, Shape
from selfspec.tree import CandidateTree, chain

if TYPE_CHECKING:
    from selfspec.cache.kv import KVCache, Places
    from selfspec.loop.accept import Acceptance
    from selfspec.loop.batch import Batch
    from selfspec.loop.sequence import Sequence
    from selfspec.model.target import Verification


_SERIALS = itertools.count()


@dataclass(frozen=True)
class Proposal:
    """What a drafter proposes in one step.

    Attributes:
        tree: one tree per row.
        is_typical: false where the proposal first processed a backlog or set something up, because its time then says
            nothing about the next one.
        verify: for a drafter that has run a part of the target's pass already: from (tree, places) to the target's logits
            and features. None for a whole pass.
        paused: rows without drafts, because their texts have outgrown the drafter's context.
        state: anything that `commit` needs to know about the proposal; for a resident drafter a tensor [B, ...], which
            `observe` gets.
    """

    tree: CandidateTree
    is_typical: bool = True
    verify: Callable[[CandidateTree, Places], Verification] | None = None
    paused: tuple[int, ...] = ()
    state: Any = None


@dataclass(frozen=True)
class Outcome:
    """What became of a proposal.

    Attributes:
        acceptance: the accepted path of each row.
        features: hidden states along the accepted path, each [B, K + 1, E], with garbage after its end. A drafter copies
            what it keeps beyond the step, because the next pass may overwrite them.
        num_new: by how many tokens each row's prefix grew: the root and the accepted drafts.
    """

    acceptance: Acceptance
    features: Mapping[int, torch.Tensor]
    num_new: list[int]


@dataclass(frozen=True)
class Entries:
    """The tokens that a pass committed, X in all, and garbage in between whose slots nobody reads.

    Attributes:
        nodes: [X] each token's index among the pass's nodes.
        next_ids: [X] the token after it.
        positions: [X] its position in its row's text.
        slots: [X] where its keys and values lie in the target's cache.
        last: [R] indices into the X tokens: the last one of each row that decodes after the pass.
        owners: [R] these rows' slots in the cache's `state`.
    """

    nodes: torch.Tensor
    next_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor
    owners: torch.Tensor


@dataclass(frozen=True)
class Observed:
    """What a pass of the target committed, for a resident drafter. Only tensors, because a CUDA graph may run it.

    Attributes:
        entries: None where the drafter reads no features.
        features: hidden states of the pass's nodes, each [F + P, E].
        tree, acceptance: of the rows that decode; None in a pass of prompts alone.
        state: of the proposal.
    """

    entries: Entries | None
    features: Mapping[int, torch.Tensor]
    tree: CandidateTree | None = None
    acceptance: Acceptance | None = None
    state: torch.Tensor | None = None


@dataclass(frozen=True)
class DraftShape:
    """How large a drafter's trees are when nothing limits them.

    Attributes:
        num_draft_tokens: depth; 0 for as deep as the head goes.
        num_nodes: most nodes, root included; 0 where trees are chains.
        width: nodes expanded at each depth.
    """

    num_draft_tokens: int
    num_nodes: int = 0
    width: int = 1


@dataclass(frozen=True)
class DefaultShape:
    """The default `DraftShape` of a kind of drafter.

    Trees are smaller on a CPU, because there a pass over more than six nodes costs noticeably more than one over one node.
    """

    cpu: DraftShape
    gpu: DraftShape

    def on(self, device: torch.device | str) -> DraftShape:
        return self.cpu if torch.device(device).type == "cpu" else self.gpu


class Drafter(ABC):
    """Proposes trees, and is told what was accepted of them.

    For each sequence the loop calls `admit` once, then `propose` and `commit` once a step, and `retire` once. All calls of
    one drafter come from one thread at a time.

    A *resident* drafter keeps everything that it knows of a row on the device, in the target's cache: a layer in the cache's
    slots (`KVCache.side`), and a vector for each row that decodes (`RowState.owned`). Its `observe` keeps them up to date as
    a part of the target's pass, so the next step can be launched before this one's tokens are read. The loop calls neither
    `admit` nor `commit` for it.

    Attributes:
        name: as written on the command line.
        num_draft_tokens: how deep it drafts when nothing limits it.
        num_nodes: most nodes of its trees, root included; 0 where they are chains.
        features: names of the target's hidden states that it needs for every committed token (see
            `selfspec.model.target`).
        is_costly: drafting takes a noticeable part of a target pass, so the planner decides before drafting, not only after.
    """

    name: str = ""
    num_draft_tokens: int = 0
    num_nodes: int = 0
    features: tuple[int, ...] = ()
    is_costly: bool = False
    is_resident: bool = False
    # What a published block must keep for a row of this drafter to adopt it: features by name, or its own entries.
    block_names: tuple[Hashable, ...] = ()

    @cached_property
    def graph_key(self) -> Hashable:
        """Identifies the drafter in the keys of CUDA graphs. Not `id()`, which Python reuses."""
        return next(_SERIALS)

    @cached_property
    def planner(self) -> Planner:
        """This drafter's measurements, kept across calls: a second prompt starts with what the first one learnt."""
        return Planner()

    def shapes(self, num_rows: int) -> list[Shape]:
        """The trees that it can grow for `num_rows` rows, the cheapest first."""
        return [Shape(depth) for depth in range(1, self.num_draft_tokens + 1)]

    @property
    def most_nodes(self) -> int:
        """The most nodes of one of its trees, root included."""
        return self.num_nodes or self.num_draft_tokens + 1

    def attach(self, cache: KVCache) -> None:  # noqa: B027  (a drafter without state has nothing to do here, nor below)
        """Make what a resident drafter keeps in a cache, before a CUDA graph can ask for it."""

    def num_scratch(self, num_draft_tokens: int) -> int:
        """How many slots after a row's prefix a resident drafter writes while it drafts."""
        return 0

    def observe(self, cache: KVCache, observed: Observed) -> None:  # noqa: B027
        """For a resident drafter: take note of what a pass committed. Device work only."""

    def admit(  # noqa: B027
        self, sequence: Sequence, features: Mapping[int, torch.Tensor]
    ) -> None:
        """A prompt was prefilled; `features`, each [1, T, E], are those of its T tokens before the root."""

    @abstractmethod
    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        """A tree for every row, at most `num_draft_tokens` deep; at 0, only the roots."""

    def commit(self, batch: Batch, proposal: Proposal, outcome: Outcome) -> None:  # noqa: B027
        """Take note of a step's outcome. The rows' prefixes in the target's cache have grown already.

        Args:
            proposal: with the tree that was verified, which may be smaller than the one proposed.
        """

    def forget(self) -> None:
        """Unlearn what was accepted so far."""
        self.planner.forget()

    def retire(self, sequence: Sequence) -> None:  # noqa: B027
        """A sequence ended, was moved or was cancelled: drop its state. Called once for every admitted sequence."""


class NoDrafter(Drafter):
    """Autoregressive decoding: every tree is only its root."""

    name = "none"
    is_resident = True
    graph_key = "none"

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        return Proposal(chain(batch.roots))
