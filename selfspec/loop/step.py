"""One step: draft candidate trees -> verify, accept, compact -> read the outcome; and chunks of prompts in the same pass.

`launch` enqueues a step's device work and returns a `Flight`; `land` reads its outcome. On a GPU the next step is launched
before the last one is read, because lengths, roots and texts are on the device (`selfspec.cache.rows`). Verify, accept and
compact are one function of tensors, whether a CUDA graph runs it or not (`selfspec.model.passes`).

Invariant: the host reads a step's outcome once, in `land`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequence_
from dataclasses import replace

import torch

from selfspec.loop.batch import commit_row, open_slot, without_choice
from selfspec.loop.drafter import Outcome
from selfspec.loop.group import ROOTS, Clock, Flight, Group, Step, StepSeconds
from selfspec.loop.planner import Evidence
from selfspec.loop.prompts import Chunk
from selfspec.loop.proposing import is_ranked, propose
from selfspec.loop.report import Report
from selfspec.loop.run_pass import Pass, log_probs, run_pass
from selfspec.loop.sequence import Emission, Sequence
from selfspec.loop.stages import Stage, blamed


def launch(group: Group, chunks: Sequence_[Chunk] = ()) -> bool:
    """Enqueue a step for every row of a group that can go on, with chunks of prompts in the same pass.

    Returns:
        Whether there was anything to do.

    Raises:
        StageError: a stage failed.
    """
    batch, passes = group.batch, group.batch.target.passes
    sequences = _going_on(group)
    if not sequences and not chunks:
        return False
    num_set_up = passes.num_set_up
    batch.begin_step()
    flight = Flight(sequences, chunks, Clock(batch.device))
    if sequences:
        with blamed(Stage.DRAFT):
            propose(group, flight)
    flight.clock.mark()
    with blamed(Stage.TARGET):
        _enter(group, flight)
    flight.clock.mark()
    flight.is_typical = passes.num_set_up == num_set_up and (flight.proposal is None or flight.proposal.is_typical)
    group.flights.append(flight)
    return True


def land(group: Group) -> Step | None:
    """Read the outcome of a group's oldest step, and tell its sequences; None if none of them are left.

    Raises:
        StageError: a stage failed.
    """
    flight = group.flights.pop(0)
    batch, drafter, planner = group.batch, group.drafter, group.planner
    with blamed(Stage.TARGET):
        flight.clock.wait()
        began = time.perf_counter()
        for chunk in flight.chunks:
            if chunk.is_last:
                chunk.prefill.finish()
        if not flight.sequences:
            return None
        assert flight.outcomes is not None and flight.report is not None
        tree, acceptance = flight.outcomes.tree, flight.outcomes.acceptance
        assert tree is not None and acceptance is not None
        reports, curve = _read(flight, acceptance.tokens.shape[1])
        # Without those that ended or left while the step was in flight.
        here = [b for b, sequence in enumerate(flight.sequences) if sequence not in flight.left]
        emissions = [_commit_row(group, flight, b, reports[b]) for b in here]
    sequences = [flight.sequences[b] for b in here]
    with blamed(Stage.DRAFT):
        if not drafter.is_resident and here:
            num_new = [each.num_accepted + 1 for each in reports]
            assert flight.proposal is not None
            outcome = Outcome(acceptance, flight.outcomes.features or {}, num_new)
            # Without those whose prompts were in the same pass.
            drafter.commit(batch.part(flight.sequences), replace(flight.proposal, tree=tree), outcome)
    seconds = StepSeconds(flight.clock.seconds(0), flight.clock.seconds(2), time.perf_counter() - began)
    if planner.is_active:
        _learn(group, flight, reports, curve)
    if not here:
        return None
    if len(here) < len(flight.sequences):
        # Without waiting for the next step, which is in flight.
        index = torch.tensor(here, dtype=torch.int64).to(batch.device, non_blocking=True)
        tree, acceptance = tree.of_rows(index), acceptance.of_rows(index)
    finished = [sequence for sequence in sequences if sequence.finish_reason is not None]
    return Step(group.name, drafter, sequences, tree, acceptance, emissions, finished, seconds)


def _read(flight: Flight, num_tokens: int) -> tuple[list[Report], list[list[float]] | None]:
    """The rows' reports, and the gain curve where there is one."""
    assert flight.report is not None and flight.outcomes is not None and flight.outcomes.report is not None
    B, width = flight.outcomes.report.shape
    numbers = flight.report.tolist()
    reports = [Report.parse(numbers[b * width : (b + 1) * width], num_tokens) for b in range(B)]
    if flight.outcomes.curve is None:
        return reports, None
    K, size = flight.outcomes.curve.shape
    rest = numbers[B * width :]
    return reports, [rest[d * size : (d + 1) * size] for d in range(K)]


def _going_on(group: Group) -> list[Sequence]:
    """The rows that take another step: not those that end with the steps in flight, whatever they accept."""
    flying = [set(map(id, flight.sequences)) for flight in group.flights]
    return [s for s in group.batch.sequences if s.max_depth >= sum(id(s) in members for members in flying)]


def _enter(group: Group, flight: Flight) -> None:
    """Enqueue the target's pass, and note what the host knows of its outcome already."""
    cache, proposal, chunks = group.batch.cache, flight.proposal, flight.chunks
    texts = [*flight.sequences, *(chunk.sequence for chunk in chunks)]
    cache.make_room(0, max(sequence.num_tokens for sequence in texts) + group.num_ahead)
    for chunk in chunks:
        if chunk.is_last:
            open_slot(chunk.sequence, cache)
    if proposal is not None and proposal.verify is not None and chunks:
        # Such a drafter's trees go through a part of the target only.
        _run(group, replace(flight, sequences=[], proposal=None))
        _run(group, replace(flight, chunks=()), into=flight)
    else:
        _run(group, flight, into=flight)


def _run(group: Group, flight: Flight, *, into: Flight | None = None) -> None:
    """Run one pass over a flight's rows and chunks, and keep `into` what comes of the rows."""
    batch, drafter = group.batch, group.drafter
    proposal = flight.proposal or ROOTS
    plan = flight.plan if flight.sequences and is_ranked(group, proposal.tree) else None
    taken = Pass(
        flight.sequences,
        proposal,
        [chunk for chunk in flight.chunks if chunk.tokens],
        is_greedy=batch.is_greedy,
        is_known=not group.flights,
        num_nodes=None if plan is None else plan.num_nodes,
        plan=plan,
        sampler=batch.sampler if flight.sequences and batch.is_walked(proposal.tree) else None,
    )
    outcomes = run_pass(batch.target, batch.cache, drafter, taken, flight.clock.mark if into is not None else None)
    first = 0
    for chunk in flight.chunks:
        end = first + len(chunk.tokens)
        # Copies, because the next pass may overwrite what this one gave.
        chunk.prefill.note(chunk, {name: each[None, first:end].clone() for name, each in outcomes.chunk_features.items()})
        first = end
    if into is not None and flight.sequences:
        into.outcomes, into.sampler = outcomes, taken.sampler
        assert outcomes.report is not None
        parts = [outcomes.report.flatten(), *([] if outcomes.curve is None else [outcomes.curve.flatten()])]
        into.report = to_host(torch.cat(parts))
        found = log_probs(flight.sequences, outcomes)
        into.log_probs = None if found is None else tuple(map(to_host, found))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, which is there when the device comes to it."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def admit(group: Group, chunk: Chunk) -> None:
    """Let a sequence whose prompt is complete take part in the next step.

    Raises:
        StageError: the drafter failed.
    """
    sequence, drafter = chunk.sequence, group.drafter
    if not drafter.is_resident:
        with blamed(Stage.DRAFT):
            try:
                drafter.admit(sequence, chunk.prefill.features)
            except Exception:
                drafter.retire(sequence)
                raise
    temperature = sequence.sampling.temperature
    # Greedy texts, and sampled ones in classes of about one temperature, share what is expected of a new one.
    sequence.record = group.planner.row(round(4 * temperature))
    group.batch.add(sequence)


def _commit_row(group: Group, flight: Flight, b: int, report: Report) -> Emission:
    sequence = flight.sequences[b]
    problem = None
    if not report.is_valid:
        # Where no choice depends on a path, nothing but the logits can leave no token.
        outcomes, logits = flight.outcomes, None
        if flight.sampler is not None and outcomes is not None:
            assert outcomes.logits is not None and outcomes.along is not None
            logits = outcomes.logits[outcomes.along[b, : report.num_accepted + 1]]
        problem = without_choice(sequence, logits)
    emission = commit_row(sequence, group.batch.cache, report, problem)
    if flight.log_probs is not None and sequence.sampling.logprobs:
        chosen, ids, scores = (each[b, : len(emission.tokens)].tolist() for each in flight.log_probs)
        sequence.logprobs += chosen
        if count := sequence.request.num_top_logprobs:
            pairs = [list(zip(*row, strict=True))[:count] for row in zip(ids, scores, strict=True)]
            sequence.top_logprobs += pairs
    return emission


def _learn(group: Group, flight: Flight, reports: list[Report], curve: list[list[float]] | None) -> None:
    """Tell the planner what a step cost and brought."""
    plan, clock = flight.plan, flight.clock
    assert plan is not None and flight.proposal is not None
    # These numbers decide the next step's size, and processes that share a model must agree on that size.
    is_typical, draft, verify = group.batch.target.agreed([flight.is_typical, clock.seconds(0), clock.seconds(2)])
    depths = [min(report.num_drafted, flight.proposal.tree.max_depth) for report in reports]
    evidence = Evidence(
        [depth if is_drafting else 0 for depth, is_drafting in zip(depths, plan.is_drafting, strict=True)],
        [report.num_accepted for report in reports],
        None if curve is None else [report.facts for report in reports],
        curve,
    )
    group.planner.observe(
        plan,
        [sequence.record for sequence in flight.sequences],
        evidence,
        draft if is_typical else None,
        verify if is_typical else None,
    )
