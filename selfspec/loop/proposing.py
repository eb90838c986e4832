"""How much a step drafts, and the drafter's proposal, cut to what fits.

Invariant: a row's tokens do not depend on what is cut. Where the cache is short of room, only roots are left.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from selfspec.cache.blocks import CacheFull
from selfspec.loop.drafter import Proposal
from selfspec.loop.group import ROOTS, Flight, Group
from selfspec.loop.planner import Plan
from selfspec.tree import CandidateTree, chain, spread


def propose(group: Group, flight: Flight) -> None:
    """Plan, have the drafter propose, cut the proposal to what fits, and reserve room; only roots where there is none."""
    batch, drafter, sequences = group.batch, group.drafter, flight.sequences
    cache, passes = batch.cache, batch.target.passes
    rows = [sequence.row for sequence in sequences]
    plan = flight.plan = _plan(group, flight)
    ahead = group.num_ahead
    everyone = batch.part(sequences)
    flight.proposal = Proposal(chain(everyone.roots)) if not group.can_fly else ROOTS
    if plan.shape is None:
        return cache.reserve(rows, ahead + 1)
    drafting = [sequence for sequence, is_drafting in zip(sequences, plan.is_drafting, strict=True) if is_drafting]
    try:
        if drafter.is_resident:
            cache.reserve(rows, ahead + max(drafter.num_scratch(plan.shape.depth), 1))
        proposal = drafter.propose(everyone.part(drafting), plan.shape.depth)
        for b in proposal.paused:
            drafting[b].num_paused_passes += 1
        if len(drafting) < len(sequences):
            drafting_rows = torch.tensor([b for b, is_drafting in enumerate(plan.is_drafting) if is_drafting])
            # Without waiting for the step in flight.
            index = drafting_rows.to(batch.device, non_blocking=True)
            proposal = replace(
                proposal,
                tree=spread(proposal.tree, everyone.roots, index),
                state=_spread_state(proposal.state, len(sequences), index),
            )
        tree = _fit(proposal.tree, group, flight)
        most = drafter.most_nodes if is_ranked(group, tree) else 1
        cache.reserve(rows, ahead + passes.num_flat_slots(tree, len(rows), most))
        flight.proposal = replace(proposal, tree=tree)
    except CacheFull:
        cache.reserve(rows, ahead + 1)
        # What the step costs is no draft's cost.
        flight.plan = replace(plan, shape=None, num_nodes=len(rows), is_drafting=(False,) * len(rows))


def _spread_state(state: torch.Tensor | None, num_rows: int, index: torch.Tensor) -> torch.Tensor | None:
    """A proposal's state [A, ...] of the A rows `index` as one of all rows, zeros for the others."""
    return None if state is None else state.new_zeros(num_rows, *state.shape[1:]).index_copy_(0, index, state)


def most_mixed_nodes(group: Group) -> int:
    """The most nodes that a group's rows may have beside prompts."""
    return group.batch.target.passes.flat_sizes(len(group.batch), group.drafter.most_nodes, num_prompt_tokens=1)[-1]


def _plan(group: Group, flight: Flight) -> Plan:
    batch, drafter, sequences = group.batch, group.drafter, flight.sequences
    passes, num_rows = batch.target.passes, len(sequences)
    num_prompt_tokens = sum(len(chunk.tokens) for chunk in flight.chunks)
    limit = drafter.num_draft_tokens
    if not group.can_fly:
        # Where steps are launched ahead, a draft past a text's end costs less than a pass of another shape.
        limit = min(limit, max(sequence.max_depth for sequence in sequences))
    sizes = passes.flat_sizes(num_rows, drafter.most_nodes, num_prompt_tokens=num_prompt_tokens)
    plan = group.planner.plan(
        [sequence.record for sequence in sequences],
        # Without the roots of rows that fill up the batch.
        sizes=[size - sizes[0] + num_rows for size in sizes],
        shapes=drafter.shapes(num_rows),
        limit=limit,
        is_costly=drafter.is_costly,
        num_prompt_tokens=num_prompt_tokens,
        mean_length=sum(sequence.num_tokens for sequence in sequences) / num_rows,
    )
    # What others keep of a row is on the host, and lags behind if the row leaves a draft out.
    return plan if drafter.is_resident or plan.shape is None else replace(plan, is_drafting=(True,) * num_rows)


def _fit(tree: CandidateTree, group: Group, flight: Flight) -> CandidateTree:
    """Cut a tree to the nodes that can be emitted, and that leave a row's bits unchanged."""
    batch, num_rows = group.batch, len(flight.sequences)
    if not group.can_fly and min(sequence.max_depth for sequence in batch.sequences) < tree.max_depth:
        tree = tree.limit_depth(batch.max_depths)
    if not tree.is_deterministic or not (tree.is_chain or tree.scores is not None):
        return tree
    most = batch.target.passes.most_nodes(num_rows)
    if group.planner.is_active and not is_ranked(group, tree):
        # Every row has as many.
        assert flight.plan is not None
        most = min(most, max(flight.plan.num_nodes // num_rows, 1))
    return tree.prune(most)


def is_ranked(group: Group, tree: CandidateTree) -> bool:
    """Whether the pass takes the likeliest nodes of all rows, whichever rows they belong to."""
    return group.planner.is_active and tree.scores is not None and not group.batch.is_walked(tree) and tree.origins is None
