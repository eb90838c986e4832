"""The main loop: draft a candidate tree, verify it in one target pass, accept, compact, commit, until all is answered.

Autoregressive decoding is this loop with a tree of one node, a draft model's chain is it with a path, and a batch is it with
more rows. Sequences join when a place is free and leave when they end; the others do not notice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from selfspec.accept import Acceptance, accept
from selfspec.cache import KVCache
from selfspec.drafters.base import Drafter, NoDrafter
from selfspec.planner import Planner
from selfspec.sequence import Batch, Request, Sequence
from selfspec.target import Target
from selfspec.tree import CandidateTree


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
        sequences: the rows of the step, in the order of the tensors' first dimension.
        emitted: per row, the tokens that were appended (cut where the sequence ended).
        finished: those of `sequences` that ended with this step.
    """

    sequences: list[Sequence]
    tree: CandidateTree
    acceptance: Acceptance
    emitted: list[list[int]]
    finished: list[Sequence]
    seconds: StepSeconds


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
    """
    drafter = drafter or NoDrafter()
    planner = planner or drafter.planner
    cache = cache or target.new_cache()
    batch = Batch(target, cache)
    waiting = iter(requests)
    try:
        # A context manager around the yields would leave inference mode on in the caller; each stage enters it by itself.
        while True:
            with torch.inference_mode():
                while len(batch) < max_batch and (request := next(waiting, None)) is not None:
                    _prefill(target, batch, drafter, request)
                if not len(batch):
                    return
                batch.refresh()
                step = _step(target, batch, drafter, planner)
            yield step
    finally:
        for sequence in batch.sequences:
            drafter.retire(sequence)
            cache.release(sequence.row)


def _prefill(target: Target, batch: Batch, drafter: Drafter, request: Request) -> None:
    """Commit all of a prompt but its last token, which is the first tree's root."""
    sequence = batch.open(request)
    started = time.perf_counter()
    prefix = torch.tensor(request.prompt_ids[:-1], dtype=torch.int64).to(target.device)
    try:
        features = target.prefill(prefix, sequence.row, batch.cache, features=drafter.features)
        drafter.admit(sequence, features)
    except BaseException:
        # Not part of the batch yet, so nobody else would free it.
        batch.cache.release(sequence.row)
        raise
    sequence.prefill_seconds = time.perf_counter() - started
    batch.add(sequence)


def _step(target: Target, batch: Batch, drafter: Drafter, planner: Planner) -> Step:
    sequences = list(batch.sequences)
    times = [time.perf_counter()]
    tree = drafter.propose(batch, planner.num_draft_tokens(drafter, batch))
    tree = planner.prune(tree.limit_depth(batch.max_depths))
    times.append(time.perf_counter())
    verification = drafter.verify(target, batch, tree)
    times.append(time.perf_counter())
    acceptance = accept(tree, verification.logits, batch.sampler)
    batch.cache.compact(batch.rows, tree, acceptance)
    emitted = batch.commit(tree, acceptance, verification.logits)
    drafter.commit(batch, tree, acceptance, verification.features)
    times.append(time.perf_counter())
    seconds = StepSeconds(*(end - start for start, end in pairwise(times)))
    planner.observe(tree, acceptance, seconds.draft, seconds.verify + seconds.accept)
    finished = batch.remove_finished()
    for sequence in finished:
        drafter.retire(sequence)
    return Step(sequences, tree, acceptance, emitted, finished, seconds)
