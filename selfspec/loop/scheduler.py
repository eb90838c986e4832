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
from typing import TYPE_CHECKING

from selfspec.loop.batch import Batch
from selfspec.loop.planner import Planner
from selfspec.loop.sequence import Request, Sequence, open_sequence
from selfspec.loop.step import Group, Prefill, StageError, Step, take_step

if TYPE_CHECKING:
    from selfspec.cache.kv import KVCache
    from selfspec.loop.drafter import Drafter
    from selfspec.model.target import Target

logger = logging.getLogger(__name__)

# After this many rounds in a row that entered prompts, one enters none, because only such a round shows what a step costs.
MAX_MIXED_ROUNDS = 8


class Scheduler:
    """All sequences of one cache: waiting, in prefill, or decoding. A round takes each of them a step further.

    Args:
        max_batch: the most sequences with a place in the cache.
        prefill_tokens: the most prompt tokens that a round enters while others decode, rounded up to a
            multiple of `Passes.prompt_step`, because a long prompt must not hold everyone up; None for no limit.
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
        self._prefill: Prefill | None = None
        # True from a preemption until a sequence ends: one more sequence would only be preempted again.
        self._is_crowded = False
        # Rounds in a row that entered prompts, the present one included.
        self._num_mixed = 0

    def __len__(self) -> int:
        return len(self._homes)

    @property
    def num_running(self) -> int:
        return len(self._homes) - len(self.waiting)

    def add_group(self, drafter: Drafter, planner: Planner | None = None, *, name: str | None = None) -> Group:
        group = Group(name or drafter.name, drafter, planner or drafter.planner, Batch(self.target, self.cache))
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
        """Enter this round's share of prompts, then take one step for every group."""
        steps = []
        self._enter_prompts()
        for group in list(self._groups):
            if not self._has_room(group):
                continue
            try:
                step = take_step(group, is_typical=not self._num_mixed)
            except StageError as failure:
                self._on_error(failure, list(group.batch.sequences))
            else:
                steps.append(step)
                for sequence in step.finished:
                    self.cancel(sequence)
        return steps

    def _enter_prompts(self) -> None:
        """Enter prompts in order, up to this round's budget."""
        is_decoding = any(group.batch.sequences for group in self._groups)
        if self._num_mixed >= MAX_MIXED_ROUNDS and is_decoding:
            self._num_mixed = 0
            return
        budget, is_mixed = self.prefill_tokens, False
        if not is_decoding:
            # Nobody waits for a step, so the pass may be as large as passes get.
            budget = max(budget, self.target.passes.chunk_size)
        step = self.target.passes.prompt_step(budget)
        while budget > 0 and (prefill := self._prefill or self._admit()) is not None:
            is_mixed = True
            try:
                prefill.begin()
                size = min(prefill.num_left, -(-budget // step) * step)
                budget -= size
                if prefill.enter(size):
                    self._prefill = None
            except StageError as failure:
                self._on_error(failure, [prefill.sequence])
        self._num_mixed = self._num_mixed + 1 if is_mixed else 0

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
        prefix, names = sequence.prefix_ids, group.drafter.features
        # One spare block for each running sequence's next tokens.
        needs = (sequence.row, prefix, names, sequence.num_tokens, num_running)
        if num_running and not self.cache.can_adopt(*needs):
            self._trim()
            if not self.cache.can_adopt(*needs):
                return None
        self._prefill = Prefill(group, self.waiting.popleft())
        return self._prefill

    def _running(self) -> list[Sequence]:
        return [sequence for sequence in self._homes if sequence.row.blocks]

    def _trim(self) -> None:
        """Take back the scratch blocks that rows keep from larger trees."""
        for group in self._groups:
            for row in group.batch.rows:
                self.cache.trim(row)

    def _has_room(self, group: Group) -> bool:
        """Make room for every row's root, and preempt the youngest sequences where it is short; false if no row is left."""
        batch = group.batch
        if len(batch) and not self.cache.can_reserve(batch.rows, 1):
            self._trim()
        while len(batch) and not self.cache.can_reserve(batch.rows, 1):
            youngest = self._running()[-1]
            self.move(youngest, self._homes[youngest])
            self.num_preemptions += 1
            self._is_crowded = True
        return len(batch) > 0

    def _vacate(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue, the prefill or its batch, and publish its blocks for texts that begin alike."""
        group = self._homes[sequence]
        try:
            if sequence in group.batch.sequences:
                group.batch.remove(sequence)
                if sequence.error is None:
                    prefix = sequence.prefix_ids
                    # Tokens accepted after the end are not part of the text.
                    self.cache.rewind(sequence.row, len(prefix))
                    self.cache.publish(sequence.row, prefix)
                _retire(group.drafter, sequence)
            elif self._prefill is not None and self._prefill.sequence is sequence:
                self._prefill = None
            else:
                self.waiting.remove(sequence)
        finally:
            self.cache.release(sequence.row)


def _retire(drafter: Drafter, sequence: Sequence) -> None:
    """Have a drafter drop a sequence's state. If it cannot, the sequence leaves all the same."""
    try:
        drafter.retire(sequence)
    except Exception:
        logger.exception("drafter %s failed to drop the state of a sequence that ended", drafter.name)


def _raise(failure: StageError, sequences: list[Sequence]) -> None:
    raise failure.error
