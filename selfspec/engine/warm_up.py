"""Answer made-up prompts, so the CUDA graphs of every size are there when requests come."""

from __future__ import annotations

import random
from collections.abc import Iterable

from selfspec.cache.kv import KVCache
from selfspec.config import SamplingParams
from selfspec.loop.scheduler import Scheduler
from selfspec.loop.sequence import Request
from selfspec.loop.step import Group
from selfspec.model.passes import CHUNK_BUCKETS, ROW_BUCKETS
from selfspec.model.target import Target


def warm_up(target: Target, cache: KVCache, groups: Iterable[Group], *, max_batch: int, prefill_tokens: int) -> None:
    """Decode random prompts of every size, and batches of every size, with each group's drafter.

    It uses a scheduler of its own on the engine's cache, because graphs hold the cache's addresses. Nobody listens and
    nothing is published. The planners keep what passes cost; what was counted or learnt of drafts is forgotten.
    """
    draw = random.Random(0)
    sampling = SamplingParams(max_new_tokens=16, ignore_eos=True)
    room = min(cache.max_tokens or target.context_length, target.context_length) - sampling.max_new_tokens
    # One prompt of every size, and batches of every size of short ones.
    batches = [[size] for size in CHUNK_BUCKETS if size < room]
    batches += [[1] * rows for rows in ROW_BUCKETS if rows <= max_batch]
    scheduler = Scheduler(target, cache, max_batch=max_batch, prefill_tokens=prefill_tokens)
    is_shared, cache.use_sharing = cache.use_sharing, False
    try:
        for group in groups:
            own = scheduler.add_group(group.drafter, group.planner)
            # A graph is captured when its shape comes for the second time.
            for sizes in batches * 2:
                for size in sizes:
                    ids = [draw.randrange(target.config.vocab_size) for _ in range(size + 1)]
                    scheduler.submit(Request(ids, sampling), own)
                while len(scheduler):
                    scheduler.round()
            group.planner.forget()
            group.drafter.forget()
    finally:
        scheduler.close()
        cache.use_sharing = is_shared
