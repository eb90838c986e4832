"""Verify, accept, compact and the drafter's own bookkeeping, with chunks of prompts: one function of tensors for one pass.

`StepFunction` is that function; `selfspec.loop.run_pass` gathers its arguments from the host's side and runs it, by a CUDA
graph where it can. The function reads lengths and roots from the cache's state and leaves there what the pass makes of them.

Invariant: a row's outcome depends on its own text alone, not on the other rows, the chunks, or how the pass runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from selfspec.cache.blocks import CacheRow
from selfspec.cache.kv import KVCache, Places
from selfspec.cache.rows import LENGTH, ROOT
from selfspec.kernels.slots import slots_of
from selfspec.loop.accept import Acceptance, accept, accept_flat
from selfspec.loop.batch import laws_of
from selfspec.loop.drafter import Drafter, Entries, Observed
from selfspec.loop.report import report_of
from selfspec.loop.sampling import Sampler
from selfspec.loop.selection import promised, rank
from selfspec.loop.stages import Stage, blamed
from selfspec.model.flat import Chunks, FlatNodes, Packing, lay_out, pack
from selfspec.model.target import Target, Verification
from selfspec.tree import CandidateTree, chain


@dataclass(frozen=True)
class HostSide:
    """What a pass takes from the host where no graph runs it.

    Attributes:
        rows, chunk_rows: the cache rows of the trees and of the chunks; `rows` is None where the host's lengths lag behind.
        tree: the proposal; None for only roots.
        chunk_starts: where each chunk begins among the P tokens, and P.
        sampler: chooses along paths; None where every node's token can be chosen at once.
        verify: of a drafter that has run a part of the target's pass already.
    """

    rows: list[CacheRow] | None
    tree: CandidateTree | None
    chunk_rows: list[CacheRow]
    chunk_starts: list[int]
    sampler: Sampler | None = None
    verify: Callable[[CandidateTree, Places], Verification] | None = None


@dataclass(frozen=True)
class StepKind:
    """Everything that a pass depends on besides its arguments and their shapes; a part of its graph's key.

    Attributes:
        max_depth, is_chain: of the trees.
        num_nodes: F, how many nodes of all trees the pass computes; None for all.
        has_rows, has_nodes, has_scores, has_state, has_chunks: which arguments are given. The nodes are those of trees of
            more than a root.
        is_greedy: every row takes the likeliest token.
        is_ranked: the planner ranks the nodes by their scores.
    """

    max_depth: int
    is_chain: bool
    num_nodes: int | None
    has_rows: bool
    has_nodes: bool
    has_scores: bool
    has_state: bool
    has_chunks: bool
    is_greedy: bool
    is_ranked: bool


@dataclass(frozen=True)
class StepFunction:
    """One pass from its arguments to its outcome. Where `host` is None it does only device work."""

    kind: StepKind
    target: Target
    cache: KVCache
    drafter: Drafter
    host: HostSide | None = None

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the pass.

        Args:
            given: in this order and as far as they are given: slots and block tables [B, 1 + M]; the trees' nodes [B, 3, N];
                scores [B, N]; corrections [K + 1], row factors [B] and sizes [S]; the proposal's state; the chunks' numbers
                [C, 3 + M'] and tokens [2, P].

        Returns:
            With rows: the report; the outcome (`split_outcome`); the verified nodes [B, 3, N]; their scores [B, N] if given;
            the gain curve [K, S] if nodes are ranked. For a drafter that is not resident: its features along the accepted
            paths, [B, K + 1, E] each, and of the chunks, [P, E] each. With rows, last: the logits [F, V].
        """
        taken = iter(given)
        rows = tree = packing = state = drafted = None
        if self.kind.has_rows:
            rows, tree, packing, drafted, state = self._trees(taken)
        chunks = self._chunks(taken) if self.kind.has_chunks else None
        cache, names = self.cache, self.drafter.features
        nodes = None
        if self.host is not None and self.host.verify is not None:
            assert tree is not None and rows is not None
            verification = self.host.verify(tree, rows.places)
            logits = verification.logits.flatten(0, 1)
            features = {name: each.flatten(0, 1) for name, each in verification.features.items()}
            num_nodes = len(logits)
        else:
            nodes = lay_out(cache, None if rows is None else rows.places, tree, packing, chunks)
            output = self.target.run_flat(nodes, cache, features=names)
            logits, features, num_nodes = output.logits, output.features, nodes.num_nodes
        results: list[torch.Tensor] = []
        acceptance = along = None
        if rows is not None:
            assert tree is not None and packing is not None
            acceptance = self._accept(tree, packing, rows, logits)
            along = packing.starts[:-1, None] + acceptance.path.clamp(min=0)
            results += self._outcome(tree, acceptance, along, drafted)
            cache.compact(rows.places, tree, acceptance.path, acceptance.num_accepted)
        if self.drafter.is_resident:
            entries = None
            if names:
                assert nodes is not None
                entries = entries_of(cache, rows, acceptance, along, chunks, nodes)
            with blamed(Stage.DRAFT):
                self.drafter.observe(cache, Observed(entries, features, tree, acceptance, state))
        elif names:
            if along is not None:
                results += [features[name][along] for name in names]
            if chunks is not None:
                results += [features[name][num_nodes:] for name in names]
        if rows is not None:
            assert acceptance is not None
            cache.state.advance(rows.slots, acceptance.tokens, acceptance.num_accepted + 1)
            results.append(logits)
        return tuple(results)

    def _trees(
        self, taken: Iterator[torch.Tensor]
    ) -> tuple[Rows, CandidateTree, Packing, Drafted | None, torch.Tensor | None]:
        numbers = next(taken)
        slots = numbers[:, 0].contiguous()
        integers = self.cache.state.integers[slots]
        known = None if self.host is None else self.host.rows
        rows = Rows(slots, Places(integers[:, LENGTH].contiguous(), numbers[:, 1:], known))
        tree = chain(integers[:, ROOT])
        if self.host is not None:
            tree = self.host.tree or tree
        elif self.kind.has_nodes:
            # Contiguous, because kernels read each of them row by row.
            tokens, parents, depths = next(taken).transpose(0, 1).contiguous()
            tree = CandidateTree(tokens, parents, depths, max_depth=self.kind.max_depth, is_chain=self.kind.is_chain)
            if self.kind.has_scores:
                tree = replace(tree, scores=next(taken))
        packing, drafted = Packing.whole(tree), None
        scores = tree.scores
        if scores is not None and self.kind.is_ranked:
            ranking = rank(scores, tree.is_real, tree.depths, next(taken), next(taken))
            kept = packing.nodes
            curve = ranking.curve(next(taken), tree.max_depth)
            before = tree
            if self.kind.num_nodes is not None:
                kept, counts = ranking.select(self.kind.num_nodes)
                tree, packing = pack(tree, kept, counts)
            chances = promised(scores, before.is_real, before.depths, kept, before.max_depth)
            drafted = Drafted(chances.double(), curve)
        return rows, tree, packing, drafted, next(taken) if self.kind.has_state else None

    def _chunks(self, taken: Iterator[torch.Tensor]) -> Chunks:
        chunks = Chunks.unpack(next(taken), next(taken))
        if self.host is None:
            return chunks
        return replace(chunks, rows=self.host.chunk_rows, host_starts=self.host.chunk_starts)

    def _accept(self, tree: CandidateTree, packing: Packing, rows: Rows, logits: torch.Tensor) -> Acceptance:
        if self.host is not None and self.host.sampler is not None:
            return accept(tree, logits.view(*tree.tokens.shape, -1), self.host.sampler)
        laws = None if self.kind.is_greedy else laws_of(self.cache, rows.slots)
        return accept_flat(tree, packing.nodes, logits, laws)

    def _outcome(
        self, tree: CandidateTree, acceptance: Acceptance, along: torch.Tensor, drafted: Drafted | None
    ) -> list[torch.Tensor]:
        report = report_of(tree, acceptance, None if drafted is None else drafted.promised)
        columns = [acceptance.num_accepted[:, None], acceptance.is_valid[:, None], acceptance.path, acceptance.tokens, along]
        nodes = torch.stack([tree.tokens, tree.parents, tree.depths], dim=1)
        results = [report, torch.cat(columns, dim=1), nodes]
        if tree.scores is not None:
            results.append(tree.scores)
        if drafted is not None:
            results.append(drafted.curve)
        return results


@dataclass(frozen=True)
class Drafted:
    """What trees promised: the verified nodes by row and depth [B, K], and the gain curve [K, S], both float64."""

    promised: torch.Tensor
    curve: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """The slots [B] of the rows that decode, and where they lie."""

    slots: torch.Tensor
    places: Places


def split_outcome(outcome: torch.Tensor) -> tuple[Acceptance, torch.Tensor]:
    """The acceptance, and each accepted node's index [B, K + 1] among the pass's nodes."""
    size = (outcome.shape[1] - 2) // 3
    num_accepted, is_valid, path, tokens, along = outcome.split([1, 1, size, size, size], dim=1)
    return Acceptance(path, num_accepted[:, 0], tokens, is_valid[:, 0].bool()), along


def entries_of(
    cache: KVCache,
    rows: Rows | None,
    acceptance: Acceptance | None,
    along: torch.Tensor | None,
    chunks: Chunks | None,
    nodes: FlatNodes,
) -> Entries:
    """The tokens that a pass commits: the accepted paths' and the chunks'.

    After a path's end come garbage entries. Their slots are scratch.
    """
    parts: list[tuple[torch.Tensor, ...]] = []
    offset = 0
    if rows is not None:
        assert acceptance is not None and along is not None
        places, path = rows.places, acceptance.path
        B, size = path.shape
        offset = B * size
        positions = places.lengths[:, None] + torch.arange(size, device=path.device)
        slots = slots_of(places.block_tables, positions, cache.block_size)
        last = torch.arange(B, device=path.device) * size + acceptance.num_accepted
        each = (along, acceptance.tokens.clamp(min=0), positions, slots)
        parts.append((*(values.flatten() for values in each), last, rows.slots))
    if chunks is not None:
        own = torch.arange(nodes.num_nodes, len(nodes.tokens), device=chunks.tokens.device)
        last = offset + (chunks.starts[1:] - 1).clamp(min=0)
        parts.append((own, chunks.next_ids, nodes.positions[own], nodes.slots[own], last, chunks.slots))
    return Entries(*(torch.cat(each) if len(parts) > 1 else each[0] for each in zip(*parts, strict=True)))
