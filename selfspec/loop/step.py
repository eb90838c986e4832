"""One step for a group of rows: draft a candidate tree -> verify -> accept -> compact; and the prefill before the first.

Verify, accept and compact are one function of tensors, whether a CUDA graph runs it or not (`selfspec.model.passes`).

Invariant: the host reads a step's outcome once, in `Batch.commit`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

import torch

from selfspec.cache.blocks import CacheFull
from selfspec.cache.kv import KVCache, Places
from selfspec.loop.accept import Acceptance, accept, accept_all_nodes
from selfspec.loop.batch import Batch, report_of
from selfspec.loop.drafter import Drafter, Outcome, Proposal
from selfspec.loop.planner import Ask, Planner
from selfspec.loop.sampling import Laws
from selfspec.loop.sequence import Emission, Sequence
from selfspec.model.passes import Function
from selfspec.model.target import Verification
from selfspec.tree import CandidateTree, chain


class Stage(Enum):
    """Who does a part of a step: the drafter or the target."""

    DRAFT = "draft"
    TARGET = "target"


class StageError(Exception):
    """A stage failed with `error`."""

    def __init__(self, stage: Stage, error: Exception) -> None:
        super().__init__(f"{stage.value}: {error}")
        self.stage = stage
        self.error = error


@contextmanager
def blamed(stage: Stage) -> Iterator[None]:
    """Turn an error inside the block into this stage's `StageError`."""
    try:
        yield
    except Exception as error:
        raise StageError(stage, error) from error


@dataclass(frozen=True, eq=False)
class Group:
    """The sequences that one drafter serves, which share a verify pass. `name` is the drafter's name in this scheduler."""

    name: str
    drafter: Drafter
    planner: Planner
    batch: Batch


@dataclass(frozen=True)
class StepSeconds:
    """Where one step's time went, in seconds of wall clock on the host.

    Attributes:
        draft: the proposal.
        verify: the target's pass, acceptance and compaction. On a GPU this is only their launch.
        commit: reading the outcome, which waits for the device, and passing it on.
    """

    draft: float
    verify: float
    commit: float


@dataclass(frozen=True)
class Step:
    """One pass of the loop: what was proposed, what was kept, and what each sequence emitted.

    Attributes:
        name, drafter: who drafted the tree.
        sequences: the step's B rows, in the order of the tensors' first dimension.
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


def take_step(group: Group, *, is_typical: bool = True) -> Step:
    """Propose, verify, accept, compact and commit for every row of a group.

    Args:
        is_typical: false where the step's time says nothing about the next one, because the device is still busy with
            prompts.

    Raises:
        StageError: a stage failed.
    """
    batch, drafter, planner = group.batch, group.drafter, group.planner
    passes, sequences = batch.target.passes, list(batch.sequences)
    num_set_up = passes.num_set_up
    clock = [time.perf_counter()]
    with blamed(Stage.DRAFT):
        ask, proposal = _propose(group)
    clock.append(time.perf_counter())
    with blamed(Stage.TARGET):
        acceptance, report, verification = _verify(group, proposal)
        clock.append(time.perf_counter())
        emissions, num_accepted, facts = batch.commit(acceptance, verification.logits, report)
    with blamed(Stage.DRAFT):
        num_new = [number + 1 for number in num_accepted]
        drafter.commit(batch, proposal, Outcome(acceptance, verification.features, num_new))
    clock.append(time.perf_counter())
    seconds = StepSeconds(*(end - start for start, end in pairwise(clock)))
    if planner.is_active:
        # These numbers decide the next step's size, and processes that share a model must agree on that size.
        is_typical = is_typical and passes.num_set_up == num_set_up
        agreed = batch.target.agreed([is_typical, proposal.is_typical, seconds.draft, seconds.verify + seconds.commit])
        draft = agreed[2] if agreed[0] and agreed[1] else None
        planner.observe(ask, proposal.tree, facts, num_accepted, draft, agreed[3] if agreed[0] else None)
    finished = [sequence for sequence in sequences if sequence.finish_reason is not None]
    return Step(group.name, drafter, sequences, proposal.tree, acceptance, emissions, finished, seconds)


def _propose(group: Group) -> tuple[Ask, Proposal]:
    """The drafter's proposal, cut to what fits; only the roots where the cache has no room for more."""
    batch, drafter, planner = group.batch, group.drafter, group.planner
    deepest = max(sequence.max_depth for sequence in batch.sequences)
    ask = planner.ask(min(drafter.num_draft_tokens, deepest), len(batch), is_costly=drafter.is_costly)
    try:
        proposal = drafter.propose(batch, ask.depth)
        for b in proposal.paused:
            batch.sequences[b].num_paused_passes += 1
        tree = _fit(proposal.tree, ask, group)
        batch.cache.reserve(batch.rows, batch.target.passes.num_slots(tree.num_nodes))
    except CacheFull:
        return ask, Proposal(chain(batch.roots))
    return ask, replace(proposal, tree=tree)


def _fit(tree: CandidateTree, ask: Ask, group: Group) -> CandidateTree:
    """Cut a tree to the nodes that can be emitted, that pay, and that leave a row's bits unchanged."""
    batch, passes = group.batch, group.batch.target.passes
    if min(sequence.max_depth for sequence in batch.sequences) < tree.max_depth:
        tree = tree.limit_depth(batch.max_depths)
    tree = group.planner.prune(tree, ask, free_nodes=passes.free_nodes)
    has_order = tree.is_deterministic and (tree.is_chain or tree.scores is not None)
    return tree.prune(passes.most_nodes(len(batch))) if has_order else tree


def _verify(group: Group, proposal: Proposal) -> tuple[Acceptance, torch.Tensor, Verification]:
    """Run the target over the tree, accept a path and compact the cache to it.

    Returns:
        The acceptance; the report for `Batch.commit` (see `report_of`); the logits [B, N, V] and the features along the
        accepted path, each [B, K + 1, E].
    """
    batch, tree, planner = group.batch, proposal.tree, group.planner
    target, cache, names = batch.target, batch.cache, tuple(group.drafter.features)
    # No graph takes a step in which a choice depends on a path, or whose drafting ran a part of the target's pass already.
    is_open = batch.is_pathless and tree.is_deterministic and proposal.verify is None and target.passes.is_captured
    is_scored = planner.is_active and tree.scores is not None
    laws = batch.laws if is_open and not batch.is_greedy else None
    function = _one_pass(
        cache,
        proposal.verify or (lambda tree, places: target.verify_at(tree, places, cache, features=names)),
        accept_all_nodes if is_open else (lambda tree, logits, _: accept(tree, logits, batch.sampler)),
        planner.measure if planner.is_active else None,
        is_scored=is_scored,
    )
    outcome, report, logits, *taken = target.passes.run(
        ("step", names, is_scored, planner.is_active),
        function,
        tree,
        batch.rows,
        cache,
        shape=target.passes.shape_of(tree, len(batch)) if is_open else None,
        extra=() if laws is None else (laws.integers, laws.fractions),
        along=(tree.scores,) if is_scored and tree.scores is not None else (),
        num_kept=1,
    )
    K = (outcome.shape[1] - 2) // 2
    num_accepted, is_valid, path, tokens = outcome.split([1, 1, K, K], dim=1)
    acceptance = Acceptance(path, num_accepted[:, 0], tokens, is_valid[:, 0].bool())
    return acceptance, report, Verification(logits[:, : tree.num_nodes], dict(zip(names, taken, strict=True)))


def _one_pass(
    cache: KVCache,
    verify: Callable[[CandidateTree, Places], Verification],
    choose: Callable[[CandidateTree, torch.Tensor, Laws | None], Acceptance],
    measure: Callable[[CandidateTree], torch.Tensor] | None,
    *,
    is_scored: bool,
) -> Function:
    """Verification, acceptance and compaction as one function (places, tree, laws' tensors, scores) of tensors."""

    def run(places: Places, tree: CandidateTree, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if is_scored:
            tree, given = replace(tree, scores=given[-1]), given[:-1]
        verification = verify(tree, places)
        acceptance = choose(tree, verification.logits, Laws(*given) if given else None)
        report = report_of(tree, acceptance, measure(tree) if measure is not None else None)
        cache.compact(places, tree, acceptance.path, acceptance.num_accepted)
        columns = (acceptance.num_accepted[:, None], acceptance.is_valid[:, None], acceptance.path, acceptance.tokens)
        features = along_path(acceptance, verification.features)
        return torch.cat(columns, dim=1), report, verification.logits, *features.values()

    return run


def along_path(acceptance: Acceptance, features: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """From features [B, N, E] of all nodes to those along the accepted path [B, K + 1, E], with garbage after its end."""
    nodes = acceptance.path.clamp(min=0)[:, :, None]
    return {name: each.gather(1, nodes.expand(-1, -1, each.shape[-1])) for name, each in features.items()}


class Prefill:
    """One prompt's way into the cache, chunk by chunk, and the features of the tokens that are there already."""

    def __init__(self, group: Group, sequence: Sequence) -> None:
        self.group = group
        self.sequence = sequence
        self._prefix = sequence.prefix_ids
        self._parts: list[Mapping[int, torch.Tensor]] = []

    @property
    def num_left(self) -> int:
        return len(self._prefix) - self.sequence.row.length

    def begin(self) -> None:
        """Adopt the beginning of the prompt that the cache holds, and reserve room for the rest. A second call does nothing.

        Raises:
            StageError: there is no room.
        """
        cache, sequence, row = self.group.batch.cache, self.sequence, self.sequence.row
        if row.blocks:
            return
        with blamed(Stage.TARGET):
            if adopted := cache.adopt(row, self._prefix, self.group.drafter.features):
                self._parts.append(adopted)
            cache.reserve([row], sequence.num_tokens - row.length)
        if not sequence.started:
            sequence.started = time.perf_counter()
            sequence.num_reused_tokens = row.length

    def enter(self, num_tokens: int) -> bool:
        """Commit the prompt's next `num_tokens`. Its last token is left out, because it is the first tree's root.

        Returns:
            Whether all of the prompt is entered; the sequence then takes part in the next step.

        Raises:
            StageError: a stage failed.
        """
        started = time.perf_counter()
        batch, drafter, sequence = self.group.batch, self.group.drafter, self.sequence
        row = sequence.row
        with blamed(Stage.TARGET):
            chunk = self._prefix[row.length : row.length + num_tokens]
            tokens = torch.tensor(chunk, dtype=torch.int64).to(batch.device, non_blocking=True)
            self._parts.append(batch.target.prefill(tokens, row, batch.cache, features=drafter.features))
            if self.num_left:
                sequence.prefill_seconds += time.perf_counter() - started
                return False
            features = {name: torch.cat([part[name] for part in self._parts], dim=1) for name in drafter.features}
            batch.cache.publish(row, self._prefix, features)
        with blamed(Stage.DRAFT):
            try:
                drafter.admit(sequence, features)
            except Exception:
                drafter.retire(sequence)
                raise
        batch.add(sequence)
        sequence.prefill_seconds += time.perf_counter() - started
        return True
