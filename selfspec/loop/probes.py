"""Steps that are taken for what they teach, and how they are paid for (see `Planner`).

Invariant: probes take at most a fixed share of all time, counted in seconds by the costs, from the first step on. What a
probe costs is saved up before, or earned back before the next one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from selfspec.loop.costs import Costs
from selfspec.loop.survival import Record, Survival


@dataclass(frozen=True)
class Shape:
    """Trees that a drafter can grow.

    Attributes:
        depth: how deep.
        width: how many nodes are expanded at each depth.
        num_drafts: most drafted nodes of one row; 0 for one at each depth.
    """

    depth: int
    width: int = 1
    num_drafts: int = 0

    @property
    def most_drafts(self) -> int:
        return self.num_drafts or self.depth

    def most_nodes(self, num_rows: int) -> int:
        """Nodes of so many rows' trees, roots and padding included."""
        return num_rows * (1 + self.most_drafts)


class Option(NamedTuple):
    """One way to take a step: who drafts, what it verifies (an index of the sizes), and what that brings and costs."""

    shape: Shape | None
    drafting: Sequence[int]
    size: int = 0
    gain: float = 0.0
    draft_seconds: float = 0.0


@dataclass(frozen=True)
class Prices:
    """What a step's options cost.

    Attributes:
        sizes: numbers of nodes, the first of roots alone.
        alone: seconds of a pass of each size.
        owed: the same with the step's prompts in the pass.
        token: seconds that one more token is worth.
    """

    sizes: Sequence[int]
    alone: Sequence[float]
    owed: Sequence[float]
    token: float

    def loss(self, option: Option) -> float:
        """Seconds by which an option is worse than a step without drafts; negative where it is better."""
        return self.owed[option.size] - self.owed[0] + option.draft_seconds - option.gain * self.token


class Draft(NamedTuple):
    """Trees of a shape for some rows, with what they gain at each size."""

    shape: Shape
    drafting: Sequence[int]
    gains: Sequence[float]
    seconds: float

    def token(self, alone: Sequence[float], num_rows: int) -> float:
        """The fewest seconds for a token, where each of so many rows gets one without a draft."""
        passes = zip(alone, self.gains, strict=False)
        return min((seconds + self.seconds) / (num_rows + gain) for seconds, gain in passes)

    def best(self, prices: Prices) -> Option:
        """At the size that loses least; with no node verified, nothing would be gained."""
        losses = [owed - gain * prices.token for owed, gain in zip(prices.owed, self.gains, strict=False)]
        size = min(range(1, len(losses)), key=losses.__getitem__)
        return Option(self.shape, self.drafting, size, self.gains[size], self.seconds)


class Probes:
    """Decides when to probe, and what.

    Where nothing seems to pay, a probe is the cheapest draft for a few rows. Where drafts pay, it is the best draft of
    another width, or a deeper one; and where costs are learnt from the steps, a plain step or the next larger size.
    """

    # The share of all time that may go to probes; how many plain passes' worth of it is there at the start; and for how many
    # it is saved up at most, because text that has just ceased to be drafted well would be probed at every step.
    SHARE = 0.01
    FIRST_PASSES = 12
    MOST_PASSES = 60
    # A probe is not believed to cost more than so many passes, because one slow first timing must not rule it out for good.
    # Nor is it believed to cost less than so many, and than so many where drafts pay, because it may be worse than it seems.
    DEAREST = 4.0
    LEAST = 0.05
    CHEAPEST = 0.25
    # How much dearer a probe may be for more rows.
    DEARER = 1.5
    # Where nothing was calibrated: plain steps of a load before any draft is, because drafts are compared with them.
    PLAIN_TIMINGS = 2

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._savings: float | None = None
        self._turn = 0

    def next(
        self,
        best: Option,
        plain: Option,
        options: Sequence[Option],
        rows: Sequence[Record],
        load: Survival,
        cheapest: Shape,
        prices: Prices,
    ) -> Option | None:
        """The probe to take in place of the best option, if there are savings for it, or the load is worth a credit."""
        one_pass = prices.alone[0]
        if self._savings is None:
            self._savings = self.SHARE * self.FIRST_PASSES * one_pass
        else:
            self._savings += self.SHARE * (prices.owed[best.size] + best.draft_seconds)
        if not self._costs.is_calibrated and self._costs.num_timings(prices.sizes[0], len(rows)) < self.PLAIN_TIMINGS:
            return plain
        if best.size == 0:
            probe = self._draft(plain, rows, cheapest, prices)
            if probe is plain:
                return None
            price = prices.loss(probe)
        else:
            candidates = list(self._alternatives(best, plain, options, prices))
            if not candidates:
                return None
            probe = candidates[self._turn % len(candidates)]
            price = max(prices.loss(probe) - prices.loss(best), self.CHEAPEST * one_pass)
        price = min(max(price, self.LEAST * one_pass), self.DEAREST * one_pass)
        self._savings = min(self._savings, max(self.SHARE * self.MOST_PASSES * one_pass, price))
        is_credited = best.size == 0 and load.curiosity > 0
        load.curiosity = max(load.curiosity - 1, 0)
        if self._savings < price and not is_credited:
            return None
        self._savings -= price
        self._turn += 1
        return probe

    def _draft(self, plain: Option, rows: Sequence[Record], shape: Shape, prices: Prices) -> Option:
        """A node for each of the rows that may be good ones for all that is known; more rows where they hardly cost more."""
        B, probe, least = len(rows), plain, 0.0
        hopeful = sorted(range(B), key=lambda i: -rows[i].acceptance.value(1.0, 1.0))
        for size in range(1, bisect_right(prices.sizes, shape.most_nodes(B))):
            count = min(prices.sizes[size] - prices.sizes[0], B)
            if plain.shape is not None:
                larger = plain._replace(size=size)
            else:
                seconds = self._costs.draft_seconds(count, shape.depth, shape.width)
                larger = Option(shape, hopeful[:count], size, draft_seconds=seconds)
            is_known = self._costs.is_calibrated or self._costs.num_timings(prices.sizes[size], B) > 0
            if size > 1 and not (is_known and prices.loss(larger) <= self.DEARER * least):
                break
            probe, least = larger, least or prices.loss(larger)
            if count == B:
                break
        return probe

    def _alternatives(self, best: Option, plain: Option, options: Sequence[Option], prices: Prices) -> Iterator[Option]:
        """What may turn out to be better than the best option, of which this and that is only guessed."""
        if best.shape is None:
            return
        if not self._costs.is_calibrated:
            yield plain
            if best.size + 1 < bisect_right(prices.sizes, best.shape.most_nodes(prices.sizes[0])):
                yield best._replace(size=best.size + 1)
        depth, width = best.shape.depth, best.shape.width
        drafts = [(each, each.shape) for each in options if each.shape is not None]
        others = [each for each, shape in drafts if shape.width != width]
        deeper = [each for each, shape in drafts if shape.width == width and shape.depth > depth]
        for alternatives in filter(None, (others, deeper)):
            yield min(alternatives, key=prices.loss)
