"""How many drafted tokens survive: learnt from every step, quickly, for each row and for each load (see `Planner`).

Three things are learnt of one load, which is a power of two of rows. How often drafts are accepted, row by row; a row of
which little is known is taken for the load's average row. What the scores promise at each depth, compared with what came.
And the *gain curves*: how many accepted tokens the likeliest n nodes of all rows bring in trees of each depth
(`selfspec.loop.gains`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import log2
from operator import mul

from selfspec.loop.gains import Curve, Growth, Ratio, mass_of


@dataclass(eq=False, slots=True)
class Record:
    """What is known of one sequence's drafts.

    Attributes:
        bucket: sequences of one bucket (greedy, or sampled at about one temperature) share a prior.
        acceptance: accepted over tried drafts, where the first rejected draft of a step is its last try.
        promise: accepted drafts over those that the corrected scores promised.
        num_steps: steps so far.
    """

    bucket: int = 0
    num_steps: int = 0
    acceptance: Ratio = field(default_factory=lambda: Ratio(20))
    promise: Ratio = field(default_factory=lambda: Ratio(8, spread=1.0))


class Survival:
    """What is known of the drafts of one load.

    Attributes:
        curiosity: how many probes may be taken on credit.
    """

    # The first guess of the acceptance rate, and its weight in drafts. Where costs are known it is so low that text must
    # show first that drafts hold. Where they are not, drafts come first, because they show what they cost, too.
    FIRST_RATE, FIRST_RATE_UNCALIBRATED = 0.05, 0.7
    FIRST_WEIGHT = 2.0
    # In how many drafts a row is worth as much as its load.
    ROW_WEIGHT = 1.0
    # How many steps a load remembers, and the share of another load's counts that a new load starts with.
    MEMORY = 50.0
    INHERITED = 0.2
    # What is left each step of the counts of a row whose drafts were not tried, and when the load is surprised: the row may
    # have come to other text.
    UNTRIED = 0.99
    SURPRISED = 0.05
    # How many probes may be taken on credit after drafts did surprisingly well.
    CURIOSITY = 4
    # As how many rejected drafts it counts that none of a row's drafts was among the likeliest.
    PASSED_OVER = 0.5
    # A sequence is new for so many steps. Sequences differ, so what a new one is expected to do is only what others did when
    # they were new, and no surprise changes that.
    BEGINNING = 8
    VARIETY = 100.0
    # What twice the width is guessed to add to a gain that was not measured at that width.
    WIDTH_GAIN = 0.1

    def __init__(self, parent: Survival | None = None, *, first_rate: float = FIRST_RATE) -> None:
        self.curiosity = 0
        self._first_rate = first_rate
        # By bucket: of all rows, and of rows that had only begun.
        self._acceptance: dict[int, Ratio] = {}
        self._beginnings: dict[int, Ratio] = {}
        # By width.
        self._growths: dict[int, Growth] = {}
        if parent is not None:
            self._acceptance = {bucket: ratio.copy(self.INHERITED) for bucket, ratio in parent._acceptance.items()}
            self._beginnings = {bucket: ratio.copy(self.INHERITED) for bucket, ratio in parent._beginnings.items()}
            self._growths = {width: Growth(growth, self.INHERITED) for width, growth in parent._growths.items()}

    def rate(self, record: Record) -> float:
        """The chance that a row's next draft is accepted."""
        others = (self._beginnings if record.num_steps < self.BEGINNING else self._acceptance).get(record.bucket)
        prior = self._first_rate if others is None else others.value(self._first_rate, self.FIRST_WEIGHT)
        return min(record.acceptance.value(prior, self.ROW_WEIGHT), 0.98)

    def factor(self, record: Record) -> float:
        """By how much a row's scores promise too much, compared with the other rows' scores."""
        return min(record.promise.value(1.0, Growth.WEIGHT), 1.0)

    def corrections(self, width: int, depth: int) -> list[float]:
        """The factors from a score's chance to the observed one, for depths 0 to `depth`."""
        known = self._nearest(width)
        return Growth().corrections(depth) if known is None else self._growths[known].corrections(depth)

    def gains(
        self,
        rates: Sequence[float],
        masses: Sequence[float],
        width: int,
        nodes: Sequence[float],
        depths: Sequence[int],
        deepest: int,
    ) -> list[list[float]]:
        """Expected accepted drafts for each depth of trees and for each number of nodes.

        Args:
            rates, masses: of the rows that draft; the masses are those of chains of `deepest` drafts.
        """
        mass = sum(masses)
        rate = sum(map(mul, masses, rates)) / mass
        curves = {other: growth.curve for other, growth in self._growths.items() if growth.curve is not None}
        if not curves:
            return Curve.of_chains(len(rates), rate, deepest, mass).gains(mass, nodes, depths, rate)
        known = min(curves, key=lambda other: (abs(log2(other / width)), other))
        gains = curves[known].gains(mass, nodes, depths, rate)
        factor = 1 + self.WIDTH_GAIN * log2(width / known)
        return [[gain * factor for gain in row] for row in gains] if known != width else gains

    def learn(
        self,
        records: Sequence[Record],
        is_drafting: Sequence[bool],
        depths: Sequence[int],
        num_accepted: Sequence[int],
    ) -> None:
        """Count a step's acceptances.

        Args:
            depths: how deep each row's drafts were verified.
        """
        counts: dict[int, list[float]] = {}
        for record, has_drafted, depth, accepted in zip(records, is_drafting, depths, num_accepted, strict=True):
            record.num_steps += 1
            if depth > 0:
                count = (min(accepted, depth), min(accepted + 1, depth))
                record.acceptance.add(*count)
                if record.num_steps <= self.BEGINNING:
                    self._beginnings.setdefault(record.bucket, Ratio(self.MEMORY, self.VARIETY)).add(*count)
                sums = counts.setdefault(record.bucket, [0.0, 0.0])
                sums[:] = sums[0] + count[0], sums[1] + count[1]
            elif has_drafted:
                record.acceptance.add(0.0, self.PASSED_OVER)
            else:
                record.acceptance.fade(self.UNTRIED)
                record.promise.fade(self.UNTRIED)
        for bucket, (came, tried) in counts.items():
            if surprise := self._acceptance.setdefault(bucket, Ratio(self.MEMORY)).add(came, tried):
                self.curiosity = self.CURIOSITY if surprise > 0 else 0
                self._doubt(record for record in records if record.bucket == bucket)

    def _doubt(self, records: Iterable[Record]) -> None:
        """The text has changed: what is known of each row and of its trees counts little from now on."""
        for record in records:
            record.acceptance.fade(self.SURPRISED)
        for growth in self._growths.values():
            growth.curve = None

    def compare(
        self,
        records: Sequence[Record],
        width: int,
        depths: Sequence[int],
        num_accepted: Sequence[int],
        promised: Sequence[Sequence[float]],
        factors: Sequence[float],
    ) -> None:
        """Compare what the scores promised with what was accepted.

        Args:
            promised: [B][K] sums of the scores' chances by row and depth.
            factors: what `factor` gave when the nodes were chosen.
        """
        deepest = max(depths)
        corrections = self.corrections(width, deepest)[1:]
        for record, depth, accepted, chances in zip(records, depths, num_accepted, promised, strict=True):
            if depth:
                record.promise.add(min(accepted, depth), sum(map(mul, chances, corrections)))
        sums = [sum(map(mul, (chances[d] for chances in promised), factors)) for d in range(deepest)]
        came = [sum(min(pair) > d for pair in zip(num_accepted, depths, strict=True)) for d in range(deepest)]
        self._growth(width).compare(sums, came)

    def measure(
        self,
        drafted: Sequence[Record],
        width: int,
        nodes: Sequence[float],
        curve: Sequence[Sequence[float]],
        corrections: Sequence[float],
    ) -> None:
        """Learn from a curve that was measured on the rows that drafted, at these numbers of nodes."""
        rates = [self.rate(record) for record in drafted]
        masses = [mass_of(rate, len(corrections) - 1) for rate in rates]
        rate = sum(map(mul, masses, rates)) / sum(masses)
        guess = Curve.of_chains(len(drafted), rate, len(curve), sum(masses))
        self._growth(width).measure(curve, corrections, rate, guess, Curve(nodes, (), sum(masses), len(drafted)))

    def _nearest(self, width: int) -> int | None:
        return min(self._growths, key=lambda other: (abs(log2(other / width)), other), default=None)

    def _growth(self, width: int) -> Growth:
        if width not in self._growths:
            known = self._nearest(width)
            self._growths[width] = Growth()
            if known is not None:
                self._growths[width]._promises = Growth(self._growths[known], self.INHERITED)._promises
        return self._growths[width]
