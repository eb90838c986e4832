"""Who decodes: the queue, admission, prefill and preemption. Host only; `selfspec.loop.step` handles the tensors.

In prompt -> prefill -> draft a candidate tree -> verify -> accept -> compact -> text, this file decides which sequences are
prefilled and which take the next step. First come, first served. When the cache is full, drafts are left out first. Then the
youngest sequence gives up its blocks and waits; it returns as a prompt that ends with the tokens it has emitted.

Invariant: none of this changes an output, because a token depends only on the tokens before it, the request's key and its
position.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

from selfspec.loop.batch import Batch
from selfspec.loop.group import Group, Step
from selfspec.loop.kept_costs import load_costs
from selfspec.loop.planner import Planner
from selfspec.loop.prompts import Chunk, Prefill, publish, reusable
from selfspec.loop.proposing import most_mixed_nodes
from selfspec.loop.sequence import Request, Sequence, open_sequence
from selfspec.loop.stages import Stage, StageError
from selfspec.loop.step import admit, land, launch

if TYPE_CHECKING:
    from selfspec.cache.kv import KVCache
    from selfspec.loop.drafter import Drafter
    from selfspec.model.target import Target

logger = logging.getLogger(__name__)

# The most prompts in one pass.
MAX_CHUNKS = 31
# Steps of a group that may be launched before the oldest is read.
MAX_FLIGHTS = 1


class Scheduler:
    """All sequences of one cache: waiting, in prefill, or decoding. A round takes each of them a step further.

    Args:
        max_batch: the most sequences with a place in the cache.
        prefill_tokens: the most prompt tokens that a round enters while others decode, because a long prompt must not hold
            everyone up; None for no limit.
        on_error: called with the failure and the sequences that it stopped, which it must `cancel` or `move`. By default
            the error is raised.
    """

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        *,
        max_batch: int,
        prefill_tokens: int | None = None,
        on_error: Callable[[StageError, list[Sequence]], None] | None = None,
    ) -> None:
        self.target = target
        self.cache = cache
        self.max_batch = max_batch
        self.prefill_tokens = prefill_tokens or sys.maxsize
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self._on_error = on_error or _raise
        self._groups: list[Group] = []
        # Every sequence, in the order of arrival.
        self._homes: dict[Sequence, Group] = {}
        # The prompts that are being entered, the oldest first; only the last has tokens that no chunk has yet.
        self._prefills: dict[Sequence, Prefill] = {}
        # True from a preemption until a sequence ends: one more sequence would only be preempted again.
        self._is_crowded = False
        # Beside another scheduler's rows, as those of an engine that is warmed up while it serves.
        cache.make_room(cache.state.num_open + max_batch)

    def __len__(self) -> int:
        return len(self._homes)

    @property
    def num_running(self) -> int:
        return len(self._homes) - len(self.waiting)

    def add_group(self, drafter: Drafter, planner: Planner | None = None, *, name: str | None = None) -> Group:
        drafter.attach(self.cache)
        planner = planner or drafter.planner
        if planner.is_active and not planner.costs.is_calibrated and (costs := load_costs(self.target, drafter)):
            planner.use(costs)
        group = Group(name or drafter.name, drafter, planner, Batch(self.target, self.cache))
        self._groups.append(group)
        return group

    def remove_group(self, group: Group) -> None:
        assert group not in self._homes.values()
        self._groups.remove(group)

    def group_of(self, sequence: Sequence) -> Group:
        return self._homes[sequence]

    def sequences_of(self, group: Group) -> list[Sequence]:
        """The group's sequences, waiting or running, in the order of arrival."""
        return [sequence for sequence, home in self._homes.items() if home is group]

    def submit(self, request: Request, group: Group) -> Sequence:
        """Put a request that passed `check_request` at the end of the queue."""
        sequence = open_sequence(self.target, request, self.cache.open_row(), cache_tokens=self.cache.max_tokens)
        self._homes[sequence] = group
        self.waiting.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence wherever it is, and free what it holds. Does nothing if it has ended already."""
        if sequence in self._homes:
            try:
                self._vacate(sequence)
            finally:
                del self._homes[sequence]
                self._is_crowded = False

    def move(self, sequence: Sequence, group: Group) -> None:
        """Hand a sequence over to another group: it goes to the head of the queue and keeps what it has emitted."""
        self._vacate(sequence)
        self._homes[sequence] = group
        self.waiting.appendleft(sequence)

    def close(self) -> None:
        for sequence in list(self._homes):
            self.cancel(sequence)

    def round(self) -> list[Step]:
        """Launch a step for every group, with this round's share of prompts, and read the steps that are due.

        A group whose steps depend on nothing but the device has one step in flight from round to round.
        """
        steps: list[Step] = []
        chunks = self._take_chunks()
        for group in list(self._groups):
            if group.flights and not (group.can_fly and self._has_room(group, group.num_ahead)):
                self._land(group, steps)
            if not group.flights:
                self._make_room(group, chunks, steps)
            own = chunks.get(group, [])
            try:
                is_launched = launch(group, own)
            except StageError as failure:
                self._land(group, steps)
                self._fail(failure, [*group.batch.sequences, *(chunk.sequence for chunk in own)])
                continue
            for chunk in own:
                # Unless it has left because another one's failed.
                if chunk.is_last and self._prefills.get(chunk.sequence) is chunk.prefill:
                    self._join(group, chunk)
            self._land(group, steps, MAX_FLIGHTS if is_launched and group.can_fly else 0)
        return steps

    def _fail(self, failure: StageError, sequences: list[Sequence]) -> None:
        """Tell of a failure, unless all that it stopped have ended with the steps in flight."""
        if sequences:
            self._on_error(failure, sequences)

    def _join(self, group: Group, chunk: Chunk) -> None:
        """Let a sequence whose prompt is complete take part in the next step."""
        try:
            admit(group, chunk)
            del self._prefills[chunk.sequence]
        except StageError as failure:
            self._on_error(failure, [chunk.sequence])

    def _land(self, group: Group, steps: list[Step], num_left: int = 0) -> None:
        """Read a group's steps until `num_left` are in flight."""
        while len(group.flights) > num_left:
            flight = group.flights[0]
            try:
                step = land(group)
            except StageError as failure:
                self._fail(failure, [s for s in flight.sequences if s not in flight.left])
                continue
            if step is not None:
                steps.append(step)
                for sequence in step.finished:
                    self.cancel(sequence)

    def _take_chunks(self) -> dict[Group, list[Chunk]]:
        """The chunks of this round, in the order of arrival, by group."""
        passes = self.target.passes
        # Where nobody waits for a step, the pass may be as large as passes get.
        budget = passes.chunk_size
        if decoding := [group for group in self._groups if len(group.batch)]:
            most = min(self.prefill_tokens, budget)
            budget = passes.prompt_room(max(map(most_mixed_nodes, decoding)), most, self._num_waiting_tokens(most))
        taken: dict[Group, list[Chunk]] = {}
        while budget > 0 and len(self._prefills) < MAX_CHUNKS and (prefill := self._next_prefill()) is not None:
            sequence = prefill.sequence
            try:
                prefill.begin()
            except Exception as error:
                self._on_error(StageError(Stage.TARGET, error), [sequence])
                continue
            chunk = prefill.take(budget)
            budget -= max(len(chunk.tokens), 1)
            taken.setdefault(self._homes[sequence], []).append(chunk)
        return taken

    def _num_waiting_tokens(self, enough: int) -> int:
        """Prompt tokens that wait and may have a place, counted up to `enough`."""
        count = sum(prefill.num_left for prefill in self._prefills.values())
        for sequence in islice(self.waiting, max(self.max_batch - self.num_running, 0)):
            if count >= enough:
                break
            count += sequence.num_tokens - 1
        return count

    def _next_prefill(self) -> Prefill | None:
        """The prompt that is being entered, or the next that may be."""
        for prefill in reversed(self._prefills.values()):
            if not prefill.is_taken:
                return prefill
        return self._admit()

    def _admit(self) -> Prefill | None:
        """Give the head of the queue a place, if one is free and its prompt fits in with the running sequences."""
        num_running = self.num_running
        if not self.waiting or num_running >= self.max_batch or (num_running and self._is_crowded):
            return None
        sequence = self.waiting[0]
        if num_running and (sequence.is_suspect or any(other.is_suspect for other in self._running())):
            # A suspect decodes alone: if its step fails, it is the one to blame.
            return None
        group = self._homes[sequence]
        drafter = group.drafter
        # One spare block for each running sequence's next tokens.
        needs = (sequence.row, reusable(sequence, drafter), drafter.block_names, sequence.num_tokens, num_running)
        if num_running and not self.cache.can_adopt(*needs):
            self._trim()
            if not self.cache.can_adopt(*needs):
                return None
        self.waiting.popleft()
        prefill = self._prefills[sequence] = Prefill(sequence, drafter, self.cache)
        return prefill

    def _running(self) -> list[Sequence]:
        return [sequence for sequence in self._homes if sequence.row.blocks]

    def _trim(self) -> None:
        """Take back the scratch blocks that rows keep from larger trees."""
        for group in self._groups:
            for row in group.batch.rows:
                self.cache.trim(row, group.num_ahead)

    def _has_room(self, group: Group, num_ahead: int = 0) -> bool:
        """Whether every row has room for its root."""
        rows = group.batch.rows
        if self.cache.can_reserve(rows, num_ahead + 1):
            return True
        self._trim()
        return self.cache.can_reserve(rows, num_ahead + 1)

    def _make_room(self, group: Group, chunks: dict[Group, list[Chunk]], steps: list[Step]) -> None:
        """Make room for every row's root, and preempt the youngest sequences where it is short."""
        while len(group.batch) and not self._has_room(group):
            youngest = self._running()[-1]
            home = self._homes[youngest]
            if home.flights:
                # They may end a sequence, or make it longer.
                self._land(home, steps)
                continue
            self.move(youngest, home)
            chunks[home] = [chunk for chunk in chunks.get(home, []) if chunk.sequence is not youngest]
            self.num_preemptions += 1
            self._is_crowded = True

    def _vacate(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue, the prefill or its batch, and publish its blocks for texts that begin alike."""
        group = self._homes[sequence]
        for flight in group.flights:
            flight.left.add(sequence)
        try:
            if sequence in group.batch.sequences:
                group.batch.remove(sequence)
                if sequence.error is None:
                    # Tokens accepted after the end are not part of the text.
                    self.cache.rewind(sequence.row, sequence.num_tokens - 1)
                    publish(sequence, group.drafter, self.cache)
                _retire(group.drafter, sequence)
            elif self._prefills.pop(sequence, None) is None:
                self.waiting.remove(sequence)
        finally:
            if sequence.row.slot is not None:
                self.cache.close_slot(sequence.row)
            self.cache.release(sequence.row)


def _retire(drafter: Drafter, sequence: Sequence) -> None:
    """Have a drafter drop a sequence's state. If it cannot, the sequence leaves all the same."""
    try:
        drafter.retire(sequence)
    except Exception:
        logger.exception("drafter %s failed to drop the state of a sequence that ended", drafter.name)


def _raise(failure: StageError, sequences: list[Sequence]) -> None:
    raise failure.error
