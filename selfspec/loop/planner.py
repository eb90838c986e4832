"""How much to draft in the next step, zero included. It stands before the stage "draft a candidate tree".

Invariant: speculation does not cost more than it brings. The planner measures what a step costs at each size and how often
drafts of each depth are accepted, and picks the size with the most expected tokens a second:

    rate(N) = (B + sum over rows of the best N - 1 nodes' acceptance probabilities) / (draft seconds + verify seconds(N))

(the expected acceptance length of https://arxiv.org/abs/2211.17192, with a probability for every node in place of one
constant rate). A drafter's own probabilities may be wrong: the planner compares what they promised at each depth with
what was accepted, and corrects them by the ratio. It guesses that untried sizes are cheap, because they are then tried and
measured. Only deterministic drafts are pruned by their scores; a sampled draft's size is fixed before anything is drawn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from selfspec.tree import CandidateTree


@dataclass(frozen=True)
class Ask:
    """What the planner asks of one step.

    Attributes:
        depth: how deep to draft; 0 for only the roots.
        is_probe: the step measures a size larger than the one that seems to pay.
    """

    depth: int
    is_probe: bool = False


class Planner:
    """Chooses draft sizes from measurements.

    Args:
        is_active: False always drafts as much as the drafter can.
    """

    # How many timings of one size are remembered. Their median is its cost.
    MEMORY = 15
    # Guess for what an untried node adds to a pass, relative to a pass over one node.
    NODE_COST = 0.01
    # One step in so many has no drafts, because the cost of plain decoding must stay known. Another drafts two tokens more
    # than seems to pay, because one slow pass or another text must not rule a size out for good.
    PROBE_EVERY = 48
    # Where nothing pays, a probe is a short draft in each of so many steps, because the first may cost more than the others.
    # After each probe the pause before the next doubles, up to MAX_PAUSE steps, and half of what was counted is forgotten.
    PROBE_STEPS = 2
    MAX_PAUSE = 384
    # The share of a count that is left a step later, and how many trials the first guess is worth.
    FADE = 0.98
    PRIOR = 4.0

    def __init__(self, *, is_active: bool = True) -> None:
        self.is_active = is_active
        # By number of rows and nodes: the last timings of a pass, and their median.
        self._verify: dict[tuple[int, int], deque[float]] = {}
        self._seconds: dict[tuple[int, int], float] = {}
        # Timings of drafts, by number of rows (rounded up to a power of two) and by depth.
        self._draft: dict[int, dict[int, deque[float]]] = {}
        self._trials: list[float] = []
        self._hits: list[float] = []
        # By depth: how many accepted tokens the scores promised, and how many were accepted.
        self._promised: list[float] = []
        self._kept: list[float] = []
        # By depth: how many nodes were verified when it was drafted.
        self._sizes: dict[int, deque[int]] = {}
        self._steps = 0
        # Steps since drafting last paid, and how many pass before a probe.
        self._num_idle = 0
        self._pause = self.PROBE_EVERY

    def forget(self) -> None:
        """Forget what was accepted, but keep what passes cost."""
        for counts in (self._trials, self._hits, self._promised, self._kept):
            counts.clear()
        self._num_idle, self._pause = 0, self.PROBE_EVERY

    def ask(self, limit: int, num_rows: int, *, is_costly: bool) -> Ask:
        """How deep the drafter should go in this step.

        Args:
            limit: the deepest draft that is of any use.
            num_rows: rows of the batch.
            is_costly: drafting takes a noticeable part of a pass, so a draft that does not pay is not begun.
        """
        if not self.is_active or limit <= 0:
            return Ask(max(limit, 0))
        self._steps += 1
        is_probe = self._steps % self.PROBE_EVERY == self.PROBE_EVERY // 2
        if self._steps % self.PROBE_EVERY == 2:
            return Ask(0)
        return self._best(limit, num_rows, is_probe=is_probe) if is_costly else Ask(limit, is_probe)

    def _best(self, limit: int, num_rows: int, *, is_probe: bool) -> Ask:
        """The depth with the best rate, or a probe's depth."""
        verify, draft = self._verify_seconds(num_rows), self._draft_seconds(num_rows)
        rates = [self._rate_of_chain(depth, verify, draft) for depth in range(limit + 1)]
        best = max(range(limit + 1), key=rates.__getitem__)
        if best > 0:
            self._num_idle, self._pause = 0, self.PROBE_EVERY
            return Ask(min(best + 2, limit), is_probe=True) if is_probe else Ask(best)
        self._num_idle += 1
        if self._num_idle <= self._pause:
            return Ask(0)
        if self._num_idle == self._pause + 1:
            self._trials, self._hits = ([count / 2 for count in counts] for counts in (self._trials, self._hits))
        if self._num_idle == self._pause + self.PROBE_STEPS:
            self._num_idle, self._pause = 0, min(2 * self._pause, self.MAX_PAUSE)
        return Ask(min(2, limit), is_probe=True)

    def prune(self, tree: CandidateTree, ask: Ask, *, free_nodes: int = 1) -> CandidateTree:
        """Drop the nodes that cost more than they promise.

        Args:
            free_nodes: a batch with no more nodes than this is not pruned, because a pass over them costs hardly more.
        """
        B, N = tree.tokens.shape
        if not self.is_active or tree.scores is None or not tree.is_deterministic or N == 1 or B * N <= free_nodes:
            return tree
        corrections = torch.tensor([1.0, *(self._correction(depth) for depth in range(tree.max_depth))])
        chances = (tree.scores.exp() * corrections.to(tree.scores.device)[tree.depths]).clamp(max=1.0)
        # The order in which `CandidateTree.prune` keeps nodes.
        order = torch.where(tree.is_real, tree.scores, -torch.inf).sort(dim=1, descending=True, stable=True).indices
        gains = torch.where(tree.is_real, chances, 0.0).gather(1, order)[:, 1:].sum(0).cumsum(0).tolist()
        seconds = self._verify_seconds(B)
        rates = [(B + gain) / seconds(size) for size, gain in enumerate([0.0, *gains], start=1)]
        best = max(range(N), key=rates.__getitem__)
        return tree.prune(1 + (best + 2 if ask.is_probe else best))

    @staticmethod
    def measure(tree: CandidateTree) -> torch.Tensor:
        """What `observe` must know about a tree: [B, 1 + K + 1] float64 on the device.

        The columns are each row's depth, then for each depth the sum of its nodes' chances, 0 where there are no scores.
        Float64, because the host reads it in one tensor with the step's tokens.
        """
        at_depth = tree.depths[:, :, None] == torch.arange(tree.max_depth + 1, device=tree.tokens.device)  # [B, N, K + 1]
        chances = 0.0 if tree.scores is None else torch.where(tree.is_real, tree.scores.exp(), 0.0).double()[:, :, None]
        return torch.cat([tree.depths.amax(1, keepdim=True).double(), (at_depth * chances).sum(1)], dim=1)

    def observe(
        self,
        ask: Ask,
        tree: CandidateTree,
        facts: list[list[float]],
        num_accepted: list[int],
        draft_seconds: float | None,
        verify_seconds: float | None,
    ) -> None:
        """Learn from a step's cost and outcome.

        Args:
            ask: what was asked of the step.
            facts: what `measure` gave, row by row.
            num_accepted: each row's accepted draft tokens.
            draft_seconds, verify_seconds: None for a step that is not typical (a capture, or prompts in the same round).
        """
        if not self.is_active:
            return
        B, N = tree.tokens.shape
        if verify_seconds is not None:
            timings = self._verify.setdefault((B, N), deque(maxlen=self.MEMORY))
            timings.append(verify_seconds)
            self._seconds[B, N] = median(timings)
        # A pruned tree may be lower than what was drafted.
        depth = max(ask.depth, tree.max_depth)
        if draft_seconds is not None and tree.max_depth > 0:
            by_depth = self._draft.setdefault(_power_of_two(B), {})
            by_depth.setdefault(depth, deque(maxlen=self.MEMORY)).append(draft_seconds)
        depths = [int(row[0]) for row in facts]
        for num_drafted, accepted in zip(depths, num_accepted, strict=True):
            self._count(num_drafted, accepted)
        self._sizes.setdefault(max(depths), deque(maxlen=self.MEMORY)).append(N)
        if tree.scores is not None:
            for depth in range(tree.max_depth):
                self._compare(
                    depth, sum(row[depth + 2] for row in facts), sum(accepted > depth for accepted in num_accepted)
                )

    def _compare(self, depth: int, promised: float, kept: int) -> None:
        """Count what a step's scores promised at a depth and what was accepted there; old steps fade."""
        if depth == len(self._promised):
            self._promised.append(0.0)
            self._kept.append(0.0)
        self._promised[depth] = self._promised[depth] * self.FADE + promised
        self._kept[depth] = self._kept[depth] * self.FADE + kept

    def _correction(self, depth: int) -> float:
        """The factor that corrects a score's chance; near 1 while little is known."""
        if depth >= len(self._promised):
            return 1.0
        return (self._kept[depth] + self.PRIOR) / (self._promised[depth] + self.PRIOR)

    def _count(self, num_drafted: int, num_accepted: int) -> None:
        while len(self._trials) < num_drafted:
            # A prior in favour of drafting, worth a few trials.
            self._trials.append(self.PRIOR)
            self._hits.append(0.75 * self.PRIOR)
        for depth in range(min(num_drafted, num_accepted + 1)):
            self._trials[depth] = self._trials[depth] * self.FADE + 1
            self._hits[depth] = self._hits[depth] * self.FADE + (depth < num_accepted)

    def _rate_of_chain(
        self, depth: int, verify_seconds: Callable[[int], float], draft_seconds: Callable[[int], float]
    ) -> float:
        expected, chance = 1.0, 1.0
        for d in range(depth):
            chance *= self._hits[d] / self._trials[d] if d < len(self._trials) else 0.75
            expected += chance
        num_nodes = round(median(self._sizes[depth])) if depth in self._sizes else depth + 1
        return expected / (verify_seconds(num_nodes) + draft_seconds(depth))

    def _draft_seconds(self, num_rows: int) -> Callable[[int], float]:
        """Seconds of a draft by its depth: measured, interpolated, or guessed as one pass per depth and one before them."""
        if not self._draft:
            return lambda depth: 0.0
        wanted = _power_of_two(num_rows)
        by_depth = self._draft[min(self._draft, key=lambda rows: abs(rows - wanted))]
        known = {depth: median(timings) for depth, timings in sorted(by_depth.items())}
        depths = list(known)

        def seconds(depth: int) -> float:
            if depth == 0:
                return 0.0
            place = bisect_right(depths, depth)
            if 0 < place < len(depths):
                low, high = depths[place - 1], depths[place]
                return known[low] + (known[high] - known[low]) * (depth - low) / (high - low)
            nearest = depths[max(place - 1, 0)]
            return known[nearest] * (depth + 1) / (nearest + 1)

        return seconds

    def _verify_seconds(self, num_rows: int) -> Callable[[int], float]:
        """Seconds of a pass by nodes per row: measured, interpolated, or guessed from the nearest size below.

        Where this number of rows was not measured, a pass with as many nodes in all is taken instead.
        """
        # The nearest number of rows comes last, so it overwrites the others.
        measured = sorted(self._seconds.items(), key=lambda item: -abs(item[0][0] - num_rows))
        by_total = {rows * nodes: seconds for (rows, nodes), seconds in measured}
        totals = sorted(by_total)

        def seconds(num_nodes: int) -> float:
            if (num_rows, num_nodes) in self._seconds:
                return self._seconds[num_rows, num_nodes]
            if not totals:
                return 1 + self.NODE_COST * (num_nodes - 1)
            total = num_rows * num_nodes
            place = bisect_right(totals, total)
            if place == 0:
                return by_total[totals[0]] / (1 + self.NODE_COST * (totals[0] - total) / num_rows)
            low = by_total[totals[place - 1]]
            if place == len(totals):
                return low * (1 + self.NODE_COST * (total - totals[-1]) / num_rows)
            share = (total - totals[place - 1]) / (totals[place] - totals[place - 1])
            return low + (by_total[totals[place]] - low) * share

        return seconds


def _power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
