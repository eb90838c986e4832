"""The main loop: draft a candidate tree, verify it in one target pass, accept, compact, commit, until all is answered.

Autoregressive decoding is this loop with a tree of one node, a draft model's chain is it with a path, and a batch is it with
more rows. Sequences join when a place is free and leave when they end; the others do not notice.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Sequence_
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F

from selfspec.cache.kv import CacheFull, KVCache, Places
from selfspec.loop.accept import Acceptance, accept, accept_all_nodes
from selfspec.loop.drafter import Drafter, NoDrafter
from selfspec.loop.planner import Planner
from selfspec.loop.sampling import Laws
from selfspec.loop.sequence import Batch, Emission, Request, Sequence, report_of
from selfspec.model.graphs import NODE_BUCKETS, bucket
from selfspec.model.target import GraphShape, Target
from selfspec.tree import CandidateTree, chain


@dataclass(frozen=True)
class StepSeconds:
    """Where one step's time went, in seconds of wall clock on the host."""

    draft: float
    verify: float
    accept: float


@dataclass(frozen=True)
class Step:
    """One pass of the loop: what was proposed, what was kept, and what each sequence emitted.

    Attributes:
        drafter: whose tree it is.
        sequences: the rows of the step, in the order of the tensors' first dimension.
        emissions: per row, the tokens that were appended and how many of them were drafted.
        finished: those of `sequences` that ended with this step.
    """

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


def decode(
    target: Target,
    requests: Iterable[Request],
    *,
    drafter: Drafter | None = None,
    max_batch: int = 1,
    planner: Planner | None = None,
    cache: KVCache | None = None,
) -> Iterator[Step]:
    """Answer `requests`, at most `max_batch` at a time, and yield every step taken.

    Closing the generator early frees what it holds. `requests` may be a generator: it is asked for the next one only when a
    place is free.

    Raises:
        FloatingPointError: the target's logits held a NaN or an infinity where a token was to be chosen.
        MemoryError: a prompt does not fit the cache.
    """
    with nullcontext(cache) if cache is not None else target.borrowed_cache() as pool:
        scheduler = Scheduler(target, pool, max_batch=max_batch)
        group = scheduler.add_group(drafter or NoDrafter(), planner)
        waiting = iter(requests)
        try:
            # A context manager around the yields would leave inference mode on in the caller: each round enters it.
            while True:
                with torch.inference_mode():
                    while len(scheduler) < max_batch and (request := next(waiting, None)) is not None:
                        scheduler.submit(request, group)
                    if not len(scheduler):
                        return
                    steps = scheduler.round()
                for step in steps:
                    for sequence in step.finished:
                        if sequence.error is not None:
                            raise sequence.error
                    yield step
        finally:
            scheduler.close()


@dataclass(frozen=True, eq=False)
class Group:
    """The sequences that one drafter serves; they share its proposals and a verify pass."""

    drafter: Drafter
    planner: Planner
    batch: Batch


@dataclass(frozen=True)
class _Prefill:
    """A prompt on its way into the cache, with the features of what is there, part by part."""

    sequence: Sequence
    parts: list[Mapping[int, torch.Tensor]]


class Scheduler:
    """All sequences of one cache, from waiting over prefill to decoding; a round takes each of them a step further.

    First come, first served. Where the cache runs out, drafts are left out first. Then the youngest sequence gives its
    blocks up and waits; it comes back as a prompt with what it has emitted behind it. A token depends on those before it,
    on the request's key and on its position alone, so that none of this changes an output.

    Args:
        max_batch: the most sequences with a place in the cache.
        prefill_tokens: the most prompt tokens that a round enters, lest a long prompt hold everyone up, in whole passes of
            `Target.max_rows`; None for no limit.
        on_error: is told an error and whose sequences it stopped, and has to `cancel` or `move` them; raises it by default.
    """

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        *,
        max_batch: int,
        prefill_tokens: int | None = None,
        on_error: Callable[[Exception, list[Sequence]], None] | None = None,
    ) -> None:
        self.target = target
        self.cache = cache
        self.max_batch = max_batch
        self.prefill_tokens = prefill_tokens or sys.maxsize
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self._on_error = on_error or _raise
        self._groups: list[Group] = []
        # Every sequence there is, in the order of arrival.
        self._homes: dict[Sequence, Group] = {}
        self._prefill: _Prefill | None = None
        # A sequence had to give way, and none has ended since: one more would only have to give way again.
        self._is_crowded = False
        # The round entered prompts, too, on which its steps may wait.
        self._is_mixed = False

    def __len__(self) -> int:
        return len(self._homes)

    @property
    def num_running(self) -> int:
        return len(self._homes) - len(self.waiting)

    def add_group(self, drafter: Drafter, planner: Planner | None = None) -> Group:
        group = Group(drafter, planner or drafter.planner, Batch(self.target, self.cache))
        self._groups.append(group)
        return group

    def remove_group(self, group: Group) -> None:
        assert group not in self._homes.values()
        self._groups.remove(group)

    def group_of(self, sequence: Sequence) -> Group:
        return self._homes[sequence]

    def sequences_of(self, group: Group) -> list[Sequence]:
        """Waiting or running, in the order of arrival."""
        return [sequence for sequence, home in self._homes.items() if home is group]

    def submit(self, request: Request, group: Group) -> Sequence:
        """Put a request at the end of the queue.

        Raises:
            MemoryError: it does not fit the cache, were it alone there.
        """
        sequence = group.batch.open(request)
        self._homes[sequence] = group
        self.waiting.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence wherever it is, and free what it holds."""
        self._vacate(sequence)
        del self._homes[sequence]
        self._is_crowded = False

    def move(self, sequence: Sequence, group: Group) -> None:
        """Have another drafter serve a sequence: it goes back to the head of the queue, with what it has emitted."""
        self._vacate(sequence)
        self._homes[sequence] = group
        self.waiting.appendleft(sequence)

    def close(self) -> None:
        for sequence in list(self._homes):
            self.cancel(sequence)

    def round(self) -> list[Step]:
        """Enter this round's share of prompts, then take a step of every group."""
        steps = []
        try:
            self._enter_prompts()
        except Exception as error:
            assert self._prefill is not None
            self._on_error(error, [self._prefill.sequence])
        for group in list(self._groups):
            try:
                if self._has_room(group):
                    steps.append(self._step(group))
            except Exception as error:
                self._on_error(error, list(group.batch.sequences))
        return steps

    def _enter_prompts(self) -> None:
        """Commit all of a prompt but its last token, which is the first tree's root; one prompt after the other."""
        budget = self.prefill_tokens
        # A prompt that is cut within a pass costs one more.
        pass_size = self.target.max_rows if self.target.max_rows <= budget else 1
        self._is_mixed = False
        while budget > 0 and (prefill := self._prefill or self._admit()) is not None:
            self._is_mixed = True
            started = time.perf_counter()
            sequence, group = prefill.sequence, self._homes[prefill.sequence]
            drafter, prefix = group.drafter, sequence.prefix_ids
            chunk = prefix[sequence.row.length :][: -(-budget // pass_size) * pass_size]
            budget -= len(chunk)
            tokens = torch.tensor(chunk, dtype=torch.int64).to(self.target.device, non_blocking=True)
            prefill.parts.append(self.target.prefill(tokens, sequence.row, self.cache, features=drafter.features))
            if sequence.row.length == len(prefix):
                features = {name: torch.cat([part[name] for part in prefill.parts], dim=1) for name in drafter.features}
                self.cache.publish(sequence.row, prefix, features)
                try:
                    drafter.admit(sequence, features)
                except Exception:
                    drafter.retire(sequence)
                    raise
                self._prefill = None
                group.batch.add(sequence)
            sequence.prefill_seconds += time.perf_counter() - started

    def _admit(self) -> _Prefill | None:
        """Give the head of the queue a place, if there is one and its prompt fits beside those that are running."""
        num_running = self.num_running
        if not self.waiting or num_running >= self.max_batch or (num_running and self._is_crowded):
            return None
        sequence = self.waiting[0]
        drafter = self._homes[sequence].drafter
        features = self.cache.adopt(sequence.row, sequence.prefix_ids, drafter.features)
        num_new = sequence.num_tokens - sequence.row.length
        # A block to spare for everyone's next tokens.
        if num_running and not self.cache.can_reserve([sequence.row], num_new, num_spare=num_running):
            self.cache.release(sequence.row)
            return None
        self.waiting.popleft()
        self._prefill = _Prefill(sequence, [features] if features else [])
        self.cache.reserve([sequence.row], num_new)
        if not sequence.started:
            sequence.started = time.perf_counter()
            sequence.num_reused_tokens = sequence.row.length
        return self._prefill

    def _has_room(self, group: Group) -> bool:
        """Make room for the root of every row, at the cost of the youngest sequences; false where no row is left."""
        batch = group.batch
        while len(batch) and not self.cache.can_reserve(batch.rows, 1):
            youngest = next(sequence for sequence in reversed(self._homes) if sequence.row.blocks)
            self.move(youngest, self._homes[youngest])
            self.num_preemptions += 1
            self._is_crowded = True
        return len(batch) > 0

    def _step(self, group: Group) -> Step:
        batch, drafter, planner = group.batch, group.drafter, group.planner
        batch.refresh()
        sequences = list(batch.sequences)
        num_captured = self._num_captured
        times = [time.perf_counter()]
        tree = self._propose(group)
        times.append(time.perf_counter())
        shape = self._graph_shape(group, tree)
        if shape is None:
            verification = drafter.verify(self.target, batch, tree)
            times.append(time.perf_counter())
            acceptance = accept(tree, verification.logits, batch.sampler)
            self.cache.compact(self.cache.locate(batch.rows), tree, acceptance.path, acceptance.num_accepted)
            logits, features = verification.logits, _along(acceptance, verification.features)
            report = report_of(tree, acceptance, planner.measure(tree) if planner.is_active else None)
        else:
            acceptance, report, logits, features = self._verify_and_accept(group, tree, shape)
            times.append(time.perf_counter())
        emissions, num_accepted, facts = batch.commit(acceptance, logits, report)
        drafter.commit(batch, tree, acceptance, features)
        times.append(time.perf_counter())
        seconds = StepSeconds(*(end - start for start, end in pairwise(times)))
        if planner.is_active:
            # All that decides on the next step's size comes from here.
            is_typical = self._num_captured == num_captured and not self._is_mixed
            costs = self.target.agreed([is_typical, seconds.draft, seconds.verify + seconds.accept])
            draft, verify = costs[1:] if costs[0] else (None, None)
            planner.observe(tree, facts, num_accepted, None if drafter.was_behind else draft, verify)
        finished = [sequence for sequence in sequences if sequence.finish_reason is not None]
        for sequence in finished:
            self.cancel(sequence)
        return Step(drafter, sequences, tree, acceptance, emissions, finished, seconds)

    @property
    def _num_captured(self) -> int:
        """Changes in a step that no other will be like: one that set a CUDA graph up."""
        return 0 if self.target.graphs is None else self.target.graphs.num_set_up

    def _graph_shape(self, group: Group, tree: CandidateTree) -> GraphShape | None:
        """The shape of the graph that can take the step from verification to the compacted cache, if there is one."""
        batch, drafter = group.batch, group.drafter
        if self.target.graphs is None or drafter.verifies_itself or not batch.is_pathless:
            return None
        return GraphShape.of(tree, batch.rows) if tree.is_deterministic else None

    def _verify_and_accept(
        self, group: Group, tree: CandidateTree, shape: GraphShape
    ) -> tuple[Acceptance, torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]:
        """Verify, accept and compact as one CUDA graph: acceptance, report, logits, and the features along the path."""
        batch, names, cache, planner = group.batch, group.drafter.features, self.cache, group.planner
        laws = None if batch.is_greedy else batch.sampler.laws
        extra = [] if laws is None else [laws.integers, laws.fractions]
        if is_scored := planner.is_active and tree.scores is not None:
            assert tree.scores is not None
            num_padding = shape.num_nodes - tree.num_nodes
            extra.append(F.pad(tree.scores, (0, num_padding)) if num_padding else tree.scores)

        def run(places: Places, padded: CandidateTree, *extra: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if is_scored:
                padded, extra = replace(padded, scores=extra[-1]), extra[:-1]
            verification = self.target.verify_at(padded, places, cache, features=names)
            acceptance = accept_all_nodes(padded, verification.logits, Laws(*extra) if extra else None)
            report = report_of(padded, acceptance, planner.measure(padded) if planner.is_active else None)
            cache.compact(places, padded, acceptance.path, acceptance.num_accepted)
            outcome = torch.cat(
                [acceptance.num_accepted[:, None], acceptance.is_valid[:, None], acceptance.path, acceptance.tokens], dim=1
            )
            return outcome, report, verification.logits, *_along(acceptance, verification.features).values()

        B, N = tree.tokens.shape
        key = ("step", tuple(names), is_scored, planner.is_active)
        results = self.target.replay(key, run, tree, batch.rows, cache, shape, extra=extra, num_kept=1)
        outcome, report, logits, *taken = results
        num_accepted, is_valid, path, tokens = outcome[:B].split([1, 1, shape.max_depth + 1, shape.max_depth + 1], dim=1)
        acceptance = Acceptance(path, num_accepted[:, 0], tokens, is_valid[:, 0].bool())
        return acceptance, report[:B], logits[:B, :N], {name: each[:B] for name, each in zip(names, taken, strict=True)}

    def _propose(self, group: Group) -> CandidateTree:
        """What the drafter proposes and the planner keeps; the roots alone where the cache has no room for more."""
        batch, drafter, planner = group.batch, group.drafter, group.planner
        try:
            tree = drafter.propose(batch, planner.num_draft_tokens(drafter, batch))
            if min(sequence.max_depth for sequence in batch.sequences) < tree.max_depth:
                tree = tree.limit_depth(batch.max_depths)
            tree = self._within_rows(planner.prune(tree))
            # A graph's trees are filled up with empty nodes, which need their slots, too.
            num_padded = None if self.target.graphs is None else bucket(tree.num_nodes, NODE_BUCKETS)
            self.cache.reserve(batch.rows, num_padded or tree.num_nodes)
        except CacheFull:
            tree = chain(batch.roots)
        return tree

    def _within_rows(self, tree: CandidateTree) -> CandidateTree:
        """No more nodes than a pass of the same bits takes; see `Target.max_rows`."""
        has_order = tree.is_deterministic and (tree.is_chain or tree.scores is not None)
        return tree.prune(self.target.most_nodes(len(tree.tokens))) if has_order else tree

    def _vacate(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue, the prefill or its batch; its blocks may serve others that begin alike."""
        group = self._homes[sequence]
        if sequence in group.batch.sequences:
            group.batch.remove(sequence)
            group.drafter.retire(sequence)
            if sequence.error is None:
                prefix = sequence.prefix_ids
                # What was accepted behind an end is no part of the text.
                self.cache.rewind(sequence.row, len(prefix))
                self.cache.publish(sequence.row, prefix)
        elif self._prefill is not None and self._prefill.sequence is sequence:
            self._prefill = None
        else:
            self.waiting.remove(sequence)
        self.cache.release(sequence.row)


def _along(acceptance: Acceptance, features: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The nodes' features, each [B, N, E], along the accepted path: [B, K + 1, E], past its end garbage."""
    nodes = acceptance.path.clamp(min=0)[:, :, None]
    return {name: each.gather(1, nodes.expand(-1, -1, each.shape[-1])) for name, each in features.items()}


def _raise(error: Exception, sequences: Sequence_[Sequence]) -> None:
    raise error
