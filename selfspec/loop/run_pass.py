"""Run one pass for a group: gather what it takes from the host's side, and sort what it gives.

Invariant: nothing here waits for the device. Where lengths are known to the device alone, nothing reads the host's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, replace
from typing import Any

import torch

from selfspec.cache.kv import KVCache
from selfspec.loop.accept import Acceptance
from selfspec.loop.drafter import Drafter, Proposal
from selfspec.loop.flat_step import HostSide, StepFunction, StepKind, split_outcome
from selfspec.loop.planner import Plan
from selfspec.loop.prompts import Chunk
from selfspec.loop.sampling import Sampler
from selfspec.loop.sequence import Sequence
from selfspec.model.shapes import FlatShape, fill_rows
from selfspec.model.target import Target
from selfspec.tree import CandidateTree


@dataclass(frozen=True)
class Outcomes:
    """What a pass gave, for the host and for a drafter that is not resident.

    Attributes:
        report: [B, …], see `report_of`.
        tree, acceptance: of the B rows.
        along: [B, K + 1], each accepted node's index among the F nodes of `logits`.
        features: along the accepted paths, each [B, K + 1, E].
        chunk_features: of the chunks' P tokens, each [P, E].
        logits: [F, V], valid until the next pass.
        curve: [K, S] float64, the gain curve of ranked nodes.
    """

    chunk_features: dict[int, torch.Tensor]
    report: torch.Tensor | None = None
    tree: CandidateTree | None = None
    acceptance: Acceptance | None = None
    along: torch.Tensor | None = None
    features: dict[int, torch.Tensor] | None = None
    logits: torch.Tensor | None = None
    curve: torch.Tensor | None = None


@dataclass(frozen=True)
class Pass:
    """What one pass takes, on the host.

    Attributes:
        sequences: of the rows that decode.
        chunks: their slots are open where a prompt is complete with them.
        is_known: the host's lengths are those on the device.
        num_nodes: of all trees that the pass computes; None for all nodes of every tree.
        plan: the planner's, which says how nodes with scores are ranked; None where no planner is active.
        sampler: for rows whose choices depend on a path.
    """

    sequences: list[Sequence]
    proposal: Proposal
    chunks: Sequence_[Chunk]
    is_greedy: bool
    is_known: bool
    num_nodes: int | None = None
    plan: Plan | None = None
    sampler: Sampler | None = None


def run_pass(
    target: Target, cache: KVCache, drafter: Drafter, taken: Pass, on_start: Callable[[], None] | None = None
) -> Outcomes:
    """Enqueue one pass. The rows and the prompts must have their room.

    Args:
        on_start: called when all arguments are there.
    """
    passes, proposal = target.passes, taken.proposal
    rows = [sequence.row for sequence in taken.sequences]
    if not rows and not taken.chunks:
        return Outcomes(_no_features(target, drafter))
    # A drafter that verifies its own trees has computed a part of the roots' pass, too.
    has_tree = bool(rows) and (proposal.tree.num_nodes > 1 or proposal.verify is not None)
    tree = proposal.tree if has_tree else None
    num_tokens = sum(len(chunk.tokens) for chunk in taken.chunks)
    is_ranked = taken.plan is not None and tree is not None and tree.scores is not None and tree.is_deterministic
    shape = None
    if taken.sampler is None and proposal.verify is None:
        chunk_rows = [chunk.sequence.row for chunk in taken.chunks]
        # Trees of one size need one graph for each number of nodes.
        most = (drafter.most_nodes, drafter.num_draft_tokens) if is_ranked else (1, 0)
        shape = passes.flat_shape(tree, rows, taken.num_nodes, most, chunk_rows, num_tokens)
    num_nodes = taken.num_nodes
    if shape is not None:
        num_nodes = shape.num_nodes
    elif num_nodes is not None and (tree is None or num_nodes >= tree.tokens.numel()):
        num_nodes = None
    given: list[torch.Tensor] = []
    if rows:
        num_columns = max(len(row.blocks) for row in rows) if shape is None else shape.num_columns
        given.append(cache.pack_slots(rows, len(rows) if shape is None else shape.num_rows, num_columns))
        if shape is not None and tree is not None:
            given += shape.pad_tree(tree)
        if is_ranked:
            assert taken.plan is not None and tree is not None
            depth = tree.max_depth if shape is None else shape.max_depth
            given += _ranking_of(taken.plan, depth, len(rows) if shape is None else shape.num_rows)
        if drafter.is_resident and proposal.state is not None:
            given.append(proposal.state if shape is None else fill_rows(proposal.state, shape.num_rows))
    if taken.chunks:
        given += _pack_chunks(cache, taken.chunks, shape)
    kind = StepKind(
        max_depth=0 if tree is None else shape.max_depth if shape is not None else tree.max_depth,
        is_chain=tree is None or tree.is_chain,
        num_nodes=num_nodes,
        has_rows=bool(rows),
        has_nodes=tree is not None,
        has_scores=tree is not None and tree.scores is not None,
        has_state=bool(rows) and drafter.is_resident and proposal.state is not None,
        has_chunks=bool(taken.chunks),
        is_greedy=taken.is_greedy,
        is_ranked=is_ranked,
    )
    function = StepFunction(kind, target, cache, drafter, None if shape is not None else _host_side(taken, tree))
    if on_start is not None:
        on_start()
    key = None if shape is None else ("step", drafter.graph_key, kind, shape, cache.serial)
    results = passes.replay(key, function, given, num_kept=3 + kind.has_scores + is_ranked if rows else 0)
    return _outcomes(function, results, len(rows))


def _ranking_of(plan: Plan, depth: int, num_rows: int) -> list[torch.Tensor]:
    """Corrections [K + 1], factors [B] and sizes [S] on the host, for trees of depth K and `num_rows` rows."""
    corrections = [*plan.corrections, *[plan.corrections[-1]] * depth][: depth + 1]
    factors = [*plan.factors, *[1.0] * (num_rows - len(plan.factors))]
    # The roots of rows that fill up a batch are nodes of the pass, too.
    sizes = [size + num_rows - len(plan.factors) for size in plan.sizes]
    return [torch.tensor(corrections), torch.tensor(factors), torch.tensor(sizes)]


def _host_side(taken: Pass, tree: CandidateTree | None) -> HostSide:
    rows = [sequence.row for sequence in taken.sequences] if taken.is_known else None
    starts = [0, *itertools.accumulate(len(chunk.tokens) for chunk in taken.chunks)]
    chunk_rows = [chunk.sequence.row for chunk in taken.chunks]
    return HostSide(rows, tree, chunk_rows, starts, taken.sampler, taken.proposal.verify)


def _pack_chunks(cache: KVCache, chunks: Sequence_[Chunk], shape: FlatShape | None) -> list[torch.Tensor]:
    """The chunks' numbers [C, 3 + M] and tokens [2, P] on the host; a row of nobody's takes what fills them up."""
    null, num_blocks = cache.state.null, cache.num_blocks
    num_columns = max(len(chunk.sequence.row.blocks) for chunk in chunks)
    num_tokens = num_padding = sum(len(chunk.tokens) for chunk in chunks)
    num_chunks = len(chunks)
    if shape is not None:
        num_columns, num_chunks = shape.num_chunk_columns, shape.num_chunks
        num_padding = shape.num_tokens
    num_padding -= num_tokens
    numbers = torch.full((num_chunks, 3 + num_columns), num_blocks)
    numbers[:, :3] = torch.tensor([0, 0, null])
    for place, chunk in enumerate(chunks):
        row = chunk.sequence.row
        slot = row.slot if chunk.is_last and row.slot is not None else null
        numbers[place, : 3 + len(row.blocks)] = torch.tensor([row.length, len(chunk.tokens), slot, *row.blocks])
    if num_chunks > len(chunks):
        numbers[len(chunks), 1] = num_padding
    tokens = [token for chunk in chunks for token in chunk.tokens] + [0] * num_padding
    next_ids = [token for chunk in chunks for token in chunk.next_ids] + [0] * num_padding
    return [numbers, torch.tensor([tokens, next_ids])]


def _outcomes(function: StepFunction, results: tuple[torch.Tensor, ...], num_rows: int) -> Outcomes:
    taken = iter(results)
    names = () if function.drafter.is_resident else function.drafter.features
    outcome: dict[str, Any] = {}
    if function.kind.has_rows:
        outcome["report"] = next(taken)[:num_rows]
        acceptance, along = split_outcome(next(taken)[:num_rows])
        tokens, parents, depths = next(taken)[:num_rows].unbind(1)
        known = None if function.host is None else function.host.tree
        tree = CandidateTree(tokens, parents, depths, max_depth=function.kind.max_depth, is_chain=function.kind.is_chain)
        if function.kind.has_scores:
            tree = replace(tree, scores=next(taken)[:num_rows])
        if function.kind.is_ranked:
            outcome["curve"] = next(taken)
        if known is not None and function.kind.num_nodes is None:
            tree = known
        outcome |= {"acceptance": acceptance, "along": along, "tree": tree}
        outcome["features"] = {name: next(taken)[:num_rows] for name in names}
    chunk_features = _no_features(function.target, function.drafter)
    if function.kind.has_chunks:
        chunk_features = {name: next(taken) for name in names}
    if function.kind.has_rows:
        outcome["logits"] = next(taken)
    return Outcomes(chunk_features, **outcome)


def _no_features(target: Target, drafter: Drafter) -> dict[int, torch.Tensor]:
    """The features [0, E] of no tokens, which a prompt has that is one token long or all in the cache."""
    nothing = torch.zeros(0, target.config.hidden_size, dtype=target.dtype, device=target.device)
    return {} if drafter.is_resident else dict.fromkeys(drafter.features, nothing)


def log_probs(sequences: list[Sequence], outcomes: Outcomes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Log-probabilities under the target alone (no temperature, filter or penalty), along each row's path.

    Returns:
        Each emitted token's log-probability [B, K + 1], and the likeliest tokens with theirs, [B, K + 1, M] each, M as many
        as any row asks for. None where no row asks.
    """
    if not any(sequence.sampling.logprobs for sequence in sequences):
        return None
    assert outcomes.logits is not None and outcomes.along is not None and outcomes.acceptance is not None
    scores = outcomes.logits[outcomes.along].float().log_softmax(-1)  # [B, K + 1, V]
    best = scores.topk(max(sequence.request.num_top_logprobs for sequence in sequences), dim=-1)
    tokens = outcomes.acceptance.tokens.clamp(min=0)
    return scores.gather(2, tokens[:, :, None])[:, :, 0], best.indices, best.values
