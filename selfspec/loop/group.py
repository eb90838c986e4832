"""What a step belongs to and leaves: the group of sequences that one drafter serves, its steps in flight, their outcomes."""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from typing import Any

import torch

from selfspec.loop.accept import Acceptance
from selfspec.loop.batch import Batch
from selfspec.loop.drafter import Drafter, Proposal
from selfspec.loop.planner import Plan, Planner
from selfspec.loop.prompts import Chunk
from selfspec.loop.run_pass import Outcomes
from selfspec.loop.sampling import Sampler
from selfspec.loop.sequence import Emission, Sequence
from selfspec.tree import CandidateTree, chain

# A proposal of roots alone, which a pass finds on the device.
ROOTS = Proposal(chain(torch.zeros(0, dtype=torch.int64)))


@dataclass(eq=False)
class Group:
    """The sequences that one drafter serves, which share a pass. `name` is the drafter's name in this scheduler.

    Attributes:
        flights: the steps that were launched and not read yet, oldest first.
    """

    name: str
    drafter: Drafter
    planner: Planner
    batch: Batch
    flights: list[Flight] = field(default_factory=list)

    @property
    def can_fly(self) -> bool:
        """Whether a step may be launched before the last one is read: nothing that it needs is on the host alone."""
        return self.drafter.is_resident and self.batch.is_pathless and self.batch.target.passes.is_captured

    @property
    def num_ahead(self) -> int:
        """By how many tokens a row's length on the device may be ahead of the host's."""
        return sum(flight.num_tokens for flight in self.flights)


@dataclass(frozen=True)
class StepSeconds:
    """Where one step's time went, in seconds: of the device where it can tell, of the host otherwise.

    Attributes:
        draft: the proposal.
        verify: the target's pass, acceptance and compaction.
        commit: reading the outcome and passing it on, on the host.
    """

    draft: float
    verify: float
    commit: float


@dataclass(frozen=True)
class Step:
    """One pass of the loop: what was proposed, what was kept, and what each sequence emitted.

    Attributes:
        name, drafter: who drafted the trees.
        sequences: the step's B rows, in the order of the tensors' first dimension.
        tree: what was verified.
        emissions: per row, the tokens that were appended and how many of them were drafted.
        finished: the sequences that ended in this step.
    """

    name: str
    drafter: Drafter
    sequences: list[Sequence]
    tree: CandidateTree
    acceptance: Acceptance
    emissions: list[Emission]
    finished: list[Sequence]
    seconds: StepSeconds

    @property
    def emitted(self) -> list[list[int]]:
        """Per row, the tokens that were appended."""
        return [emission.tokens for emission in self.emissions]


@dataclass(eq=False)
class Flight:
    """A step that was launched and not read yet.

    Attributes:
        sequences: the rows; `left` are those that ended or left while the step was in flight.
        report: the outcome's report on the host, when the clock says so.
    """

    sequences: list[Sequence]
    chunks: Sequence_[Chunk]
    clock: Clock
    left: set[Sequence] = field(default_factory=set)
    plan: Plan | None = None
    proposal: Proposal | None = None
    outcomes: Outcomes | None = None
    report: torch.Tensor | None = None
    sampler: Sampler | None = None
    log_probs: tuple[torch.Tensor, ...] | None = None
    is_typical: bool = True

    @property
    def num_tokens(self) -> int:
        """A bound on the tokens that a row gets; 0 for prompts alone."""
        return self.proposal.tree.max_depth + 1 if self.proposal is not None else 0


class Clock:
    """Times of a step's marks, taken by the device where it has a clock."""

    def __init__(self, device: torch.device) -> None:
        self._is_device = device.type == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if self._is_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def wait(self) -> None:
        """Wait for the last mark."""
        if self._is_device:
            self._marks[-1].synchronize()

    def seconds(self, number: int) -> float:
        """From mark `number` to the next."""
        first, second = self._marks[number : number + 2]
        return first.elapsed_time(second) / 1000 if self._is_device else second - first
