"""The main loop: prompt -> prefill -> draft a candidate tree -> verify -> accept -> compact -> text, until all is answered.

Autoregressive decoding is this loop with a tree of one node, a draft model's chain is this loop with a path, and a batch is
this loop with more rows. `selfspec.loop.scheduler` says who takes part in a round, `selfspec.loop.step` what one step does.

Invariant: sequences join when a place is free and leave when they end, and the others' tokens do not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import torch

from selfspec.cache.kv import KVCache
from selfspec.loop.drafter import Drafter, NoDrafter
from selfspec.loop.group import Step
from selfspec.loop.planner import Planner
from selfspec.loop.scheduler import Scheduler
from selfspec.loop.sequence import Request, check_request
from selfspec.model.target import Target


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

    Closing the generator early frees what it holds. `requests` may be a generator, which is asked for a request only when a
    place is free. Threads that share a target take turns, a round at a time.

    Raises:
        ValueError: a request can never be served, because its prompt does not fit the cache for instance.
        FloatingPointError: the target's logits held a NaN or an infinity where a token had to be chosen.
    """
    with nullcontext(cache) if cache is not None else target.borrowed_cache() as pool:
        scheduler = Scheduler(target, pool, max_batch=max_batch)
        group = scheduler.add_group(drafter or NoDrafter(), planner)
        waiting = iter(requests)
        try:
            while True:
                while len(scheduler) < max_batch and (request := next(waiting, None)) is not None:
                    check_request(target, request, cache_tokens=pool.max_tokens)
                    scheduler.submit(request, group)
                if not len(scheduler):
                    return
                # Not around the caller's code, which would then run in inference mode and hold the target's lock.
                with target.lock, torch.inference_mode():
                    steps = scheduler.round()
                for step in steps:
                    for sequence in step.finished:
                        if sequence.error is not None:
                            raise sequence.error
                    yield step
        finally:
            with target.lock:
                scheduler.close()
