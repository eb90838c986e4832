"""Answer made-up prompts, so CUDA graphs of every size are there, and their times known, when requests come."""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from selfspec.cache.kv import KVCache
from selfspec.config import SamplingParams
from selfspec.loop.costs import Costs, Key, Kind
from selfspec.loop.group import Group
from selfspec.loop.kept_costs import save_costs
from selfspec.loop.planner import Evidence, Plan, Planner, Shape
from selfspec.loop.scheduler import Scheduler
from selfspec.loop.sequence import Request
from selfspec.loop.sequence import Sequence as Row
from selfspec.loop.survival import Record
from selfspec.model.shapes import ROW_BUCKETS
from selfspec.model.target import Target

logger = logging.getLogger(__name__)

# A graph is captured when its shape comes for the second time. Then as many steps are timed.
NUM_SET_UP, NUM_TIMED = 2, 4
# The most tokens that a made-up text takes.
MAX_TOKENS = 512


def warm_up(target: Target, cache: KVCache, groups: Iterable[Group], *, max_batch: int, prefill_tokens: int) -> None:
    """Decode random prompts of every size, alone and beside batches of every size, with each group's drafter.

    It uses a scheduler of its own on the engine's cache, because graphs hold the cache's addresses. Nobody listens, nothing
    is published, and nothing is learnt of drafts. The planners are told what passes and drafts cost.
    """
    scheduler = Scheduler(target, cache, max_batch=max_batch, prefill_tokens=prefill_tokens)
    is_shared, cache.use_sharing = cache.use_sharing, False
    try:
        for group in groups:
            costs, calibrator = group.planner.costs, Calibrator()
            # Costs that were kept from an earlier start need not be measured again.
            num_timed = 0 if costs.most_rows >= max_batch else NUM_TIMED
            own = scheduler.add_group(group.drafter, calibrator)
            _Rehearsal(scheduler, own, calibrator, num_timed).run(max_batch, prefill_tokens)
            if num_timed and group.planner.is_active:
                calibrator.tell(costs)
                save_costs(costs, target, group.drafter)
            group.drafter.forget()
    finally:
        scheduler.close()
        cache.use_sharing = is_shared


class Calibrator(Planner):
    """Asks for one kind of step after the other, whatever it brings, and notes what they cost.

    Attributes:
        shape, size: indices of what is asked for; no draft where `shape` is None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shape: int | None = None
        self.size = 0
        self._times: dict[tuple[Kind, Key], list[float]] = defaultdict(list)

    def plan(
        self,
        rows: Sequence[Record],
        *,
        sizes: Sequence[int],
        shapes: Sequence[Shape],
        num_prompt_tokens: int = 0,
        mean_length: float = 0.0,
        **others: Any,
    ) -> Plan:
        B = len(rows)
        shape = shapes[self.shape] if self.shape is not None else None
        depth = max((each.depth for each in shapes), default=0)
        return Plan(
            shape,
            sizes[min(self.size, len(sizes) - 1) if shape is not None else 0],
            (shape is not None,) * B,
            False,
            (1.0,) * (depth + 1),
            (1.0,) * B,
            tuple(sizes),
            num_prompt_tokens,
            mean_length,
        )

    def observe(
        self,
        plan: Plan,
        rows: Sequence[Record],
        evidence: Evidence,
        draft_seconds: float | None = None,
        pass_seconds: float | None = None,
    ) -> None:
        if pass_seconds is None or draft_seconds is None:
            return
        num_nodes = plan.num_nodes + plan.num_prompt_tokens
        self._times["pass", (num_nodes, len(rows), round(plan.mean_length))].append(pass_seconds)
        if plan.shape is not None:
            self._times["draft", (len(rows), plan.shape.depth, plan.shape.width)].append(draft_seconds)

    def tell(self, costs: Costs) -> None:
        """Note every median, of steps of about one length."""
        merged: dict[tuple[Kind, Key], list[float]] = defaultdict(list)
        for (kind, (first, second, third)), times in self._times.items():
            merged[kind, (first, second, third // MAX_TOKENS * MAX_TOKENS if kind == "pass" else third)] += times
        for (kind, key), times in merged.items():
            costs.note(kind, key, median(times))


class _Rehearsal:
    """Made-up work for one group."""

    def __init__(self, scheduler: Scheduler, group: Group, calibrator: Calibrator, num_timed: int) -> None:
        self._draw = random.Random(0)
        self._scheduler = scheduler
        self._group = group
        self._calibrator = calibrator
        self._num_rounds = NUM_SET_UP + num_timed
        target = scheduler.target
        self._passes = target.passes
        self._vocab_size = target.vocab_size
        self._room = min(scheduler.cache.max_tokens or target.context_length, target.context_length)

    def run(self, max_batch: int, prefill_tokens: int) -> None:
        for size in self._passes.prompt_sizes(0, self._room - 16):
            self._enter(size, NUM_SET_UP)
        for num_rows in ROW_BUCKETS:
            if num_rows <= max_batch:
                self._decode(num_rows)
                self._decode_beside_prompts(num_rows if num_rows < max_batch else num_rows - 1, prefill_tokens)

    def _decode(self, num_rows: int) -> None:
        """Take steps of every kind with `num_rows` rows."""
        calibrator = self._calibrator
        for shape, size in self._options(num_rows):
            if len(self._group.batch) < num_rows:
                self._fill(num_rows)
            calibrator.shape, calibrator.size = shape, size
            for _ in range(self._num_rounds):
                self._scheduler.round()
        self._clear()

    def _options(self, num_rows: int) -> list[tuple[int | None, int]]:
        """No draft; every size with the deepest shape; every other shape."""
        drafter = self._group.drafter
        num_shapes = len(drafter.shapes(num_rows))
        sizes = self._passes.flat_sizes(num_rows, drafter.most_nodes)
        if not num_shapes:
            return [(None, 0)]
        deepest = num_shapes - 1
        shapes = range(deepest) if drafter.is_costly else ()
        return [(None, 0), *((deepest, size) for size in range(1, len(sizes))), *((shape, 1) for shape in shapes)]

    def _decode_beside_prompts(self, num_rows: int, prefill_tokens: int) -> None:
        """Enter prompts of every size beside `num_rows` rows, which draft or do not."""
        calibrator, drafter = self._calibrator, self._group.drafter
        if not num_rows:
            return
        sizes = self._passes.flat_sizes(num_rows, drafter.most_nodes, num_prompt_tokens=1)
        for number, num_nodes in enumerate(sizes):
            calibrator.shape, calibrator.size = (len(drafter.shapes(num_rows)) - 1 if number else None), number
            most = min(self._passes.prompt_room(sizes[-1], prefill_tokens, prefill_tokens), self._room - 32 * num_rows)
            for size in self._passes.prompt_sizes(num_nodes, most + sizes[-1] - num_nodes):
                if len(self._group.batch) < num_rows:
                    self._fill(num_rows)
                self._enter(min(size, most), NUM_SET_UP + 1)
        self._clear()

    def _fill(self, num_rows: int) -> None:
        """Have `num_rows` rows decode, with as long an answer as there is room for."""
        self._clear()
        for _ in range(num_rows):
            self._submit(1, max(min(self._room // num_rows - 64, MAX_TOKENS), 1))
        while self._scheduler.waiting or len(self._group.batch) < num_rows:
            if not len(self._scheduler):
                return
            self._scheduler.round()

    def _enter(self, num_tokens: int, times: int) -> None:
        """Enter a prompt so many times, one after the other."""
        for _ in range(times):
            late = self._submit(num_tokens, 1)
            while late.finish_reason is None:
                self._scheduler.round()

    def _submit(self, num_tokens: int, max_new_tokens: int) -> Row:
        ids = [self._draw.randrange(self._vocab_size) for _ in range(num_tokens + 1)]
        sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        return self._scheduler.submit(Request(ids, sampling), self._group)

    def _clear(self) -> None:
        for sequence in self._scheduler.sequences_of(self._group):
            self._scheduler.cancel(sequence)
        # Reads the step that is in flight.
        self._scheduler.round()
