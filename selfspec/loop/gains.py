"""Gain curves: how many accepted tokens the likeliest nodes of all rows bring, and how they are learnt (see `Survival`).

A curve holds for other rows by their *mass*, the number of drafts that would be accepted if all were verified:
`gain(n) = m * curve(n / m)` for rows whose mass is m times that of the rows it was measured on. Twice as many rows of the
same kind gain twice as much from twice the nodes, and a row that gains nothing changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add


class Ratio:
    """What came over what was expected, where older counts fade; a surprise forgets all but the latest.

    Args:
        memory: how many additions the counts remember.
        spread: the variance of a count over its mean is never believed to be less.
    """

    # The latest counts are those of so many expected tokens. A surprise is so many standard deviations off.
    LATEST = 8.0
    SURPRISE = 2.5

    __slots__ = ("_fade", "_spread", "came", "expected", "latest_came", "latest_expected")

    def __init__(self, memory: float, spread: float = 0.1) -> None:
        self._fade = 1 - 1 / memory
        self._spread = spread
        self.came = self.expected = self.latest_came = self.latest_expected = 0.0

    def add(self, came: float, expected: float) -> int:
        """Count; returns 1 if that much was a surprise, -1 if that little was, 0 if it was none."""
        kept = max(1 - expected / self.LATEST, 0.0)
        self.latest_came = self.latest_came * kept + came
        self.latest_expected = self.latest_expected * kept + expected
        self.came = self.came * self._fade + came
        self.expected = self.expected * self._fade + expected
        ratio = self.came / self.expected if self.expected else 0.0
        usual = self.latest_expected * ratio
        # Half a token more, because small counts are not normally distributed.
        variance = usual * max(1 - ratio, self._spread) + 0.5
        is_surprise = (self.latest_came - usual) ** 2 > self.SURPRISE**2 * variance
        if not is_surprise:
            return 0
        self.came, self.expected = self.latest_came, self.latest_expected
        return 1 if self.latest_came > usual else -1

    def fade(self, share: float) -> None:
        """Keep only a share of what is known."""
        self.came, self.expected = self.came * share, self.expected * share
        self.latest_came, self.latest_expected = self.latest_came * share, self.latest_expected * share

    def value(self, prior: float, weight: float) -> float:
        """The ratio, where `prior` counts for as much as `weight` expected tokens."""
        return (self.came + prior * weight) / (self.expected + weight)

    def copy(self, share: float) -> Ratio:
        other = Ratio(1 / (1 - self._fade), self._spread)
        other.came, other.expected = self.came, self.expected
        other.latest_came, other.latest_expected = self.latest_came, self.latest_expected
        other.fade(share)
        return other


@dataclass(frozen=True)
class Curve:
    """Gains of the likeliest nodes, measured on rows of one mass.

    Attributes:
        nodes: [S] ascending numbers of drafted nodes, the first is 0.
        layers: [K][S] what each depth adds to the gain.
        num_rows: how many rows' drafts it is the mean of, lately.
    """

    nodes: Sequence[float]
    layers: Sequence[Sequence[float]]
    mass: float
    num_rows: float

    # How many drafted rows are remembered, but no less than so many steps.
    ROWS = 160
    STEPS = 3
    # As how many rows' drafts a guess counts, and how far a depth that was not drafted moves in a step.
    GUESSED = 4
    REGRESS = 0.03

    @classmethod
    def of_chains(cls, num_rows: int, rate: float, depth: int, mass: float) -> Curve:
        """Chains that are accepted at one rate per token, as long as little is measured: the expected length of
        https://arxiv.org/abs/2211.17192.
        """
        nodes = [float(num_rows * count) for count in range(depth + 1)]
        layers = [[num_rows * rate**d if count >= d else 0.0 for count in range(depth + 1)] for d in range(1, depth + 1)]
        return cls(nodes, layers, mass, cls.GUESSED)

    def at(self, mass: float, nodes: Sequence[float]) -> list[list[float]]:
        """The layers for rows of another mass and other numbers of nodes."""
        share = mass / self.mass
        places = [self._place(count / share) for count in nodes]
        return [[share * (layer[i] + (layer[i + 1] - layer[i]) * part) for i, part in places] for layer in self.layers]

    def _place(self, count: float) -> tuple[int, float]:
        nodes = self.nodes
        if count >= nodes[-1]:
            return len(nodes) - 2, 1.0
        i = max(bisect_left(nodes, count) - 1, 0)
        return i, (count - nodes[i]) / (nodes[i + 1] - nodes[i])

    def updated(self, measured: Curve, rate: float) -> Curve:
        """This curve after a measurement, which may be less deep.

        A depth below it moves towards what the one above suggests, because the text may have changed.
        """
        layers = self.at(measured.mass, measured.nodes)
        num_rows = measured.num_rows + min(self.num_rows, max(self.ROWS, self.STEPS * measured.num_rows))
        for d in range(max(len(layers), len(measured.layers))):
            suggested = [gain * rate for gain in layers[d - 1]]
            if d == len(layers):
                layers.append(suggested)
            is_measured = d < len(measured.layers)
            aim = measured.layers[d] if is_measured else suggested
            share = measured.num_rows / num_rows if is_measured else self.REGRESS
            layers[d] = [a + (b - a) * share for a, b in zip(layers[d], aim, strict=True)]
        return Curve(measured.nodes, layers, measured.mass, num_rows)

    def gains(self, mass: float, nodes: Sequence[float], depths: Sequence[int], rate: float) -> list[list[float]]:
        """Expected accepted drafts of rows of a mass, for each depth and for each number of nodes.

        Of depths that were never drafted each is guessed to add `rate` times what the one above it adds, where all nodes are
        verified. Deeper trees are otherwise like more rows of the same kind.
        """
        known = len(self.layers)
        totals = self._totals(mass, nodes)
        result = []
        for depth in depths:
            gains = totals[min(depth, known)]
            if depth > known:
                all_nodes = sum(layer[-1] for layer in self.layers)
                beyond = self.layers[-1][-1] * sum(rate**j for j in range(1, depth - known + 1))
                gains = self._totals(mass * (1 + beyond / all_nodes) if all_nodes else mass, nodes)[known]
            result.append(list(map(min, gains, nodes)))
        return result

    def _totals(self, mass: float, nodes: Sequence[float]) -> list[list[float]]:
        """Gains of trees of each depth, 0 included."""
        totals = [[0.0] * len(nodes)]
        for layer in self.at(mass, nodes):
            totals.append(list(map(add, totals[-1], layer)))
        return totals


class Growth:
    """What is known of trees of one width, under one load: what their scores promise, and what their nodes gain."""

    # In how many promised tokens a promise is doubted, and how many steps are remembered.
    WEIGHT = 0.5
    MEMORY = 50.0
    # By which factor a step's curve may differ from what the rows' rates say.
    PLAUSIBLE = 1.5

    def __init__(self, parent: Growth | None = None, share: float = 1.0) -> None:
        self._promises: list[Ratio] = []
        self.curve: Curve | None = None
        if parent is not None:
            self._promises = [ratio.copy(share) for ratio in parent._promises]
            # Another load's curve is a guess.
            self.curve = parent.curve and replace(parent.curve, num_rows=Curve.GUESSED)

    def corrections(self, depth: int) -> list[float]:
        """For depths 0 to `depth`: accepted over promised drafts, made to fall with the depth by pooling neighbours."""
        pools: list[tuple[float, float, int]] = []
        for ratio in self._promises:
            pool = (ratio.came + self.WEIGHT, ratio.expected + self.WEIGHT, 1)
            while pools and pool[0] * pools[-1][1] > pools[-1][0] * pool[1]:
                came, expected, count = pools.pop()
                pool = (pool[0] + came, pool[1] + expected, pool[2] + count)
            pools.append(pool)
        factors = [came / expected for came, expected, count in pools for _ in range(count)] or [1.0]
        factors += factors[-1:] * (depth - len(factors))
        return [max(1.0, factors[0]), *factors[:depth]]

    def compare(self, promised: Sequence[float], came: Sequence[int]) -> None:
        """Count what the scores of a step promised at each depth, and what was accepted there."""
        for d, (expected, accepted) in enumerate(zip(promised, came, strict=True)):
            if d == len(self._promises):
                self._promises.append(Ratio(self.MEMORY, spread=1.0))
            if expected > 0:
                self._promises[d].add(accepted, expected)

    def measure(
        self, curve: Sequence[Sequence[float]], corrections: Sequence[float], rate: float, guess: Curve, known: Curve
    ) -> None:
        """Learn from a measured curve [K][S], which has the chances that these corrections gave.

        Args:
            rate: of the rows that drafted.
            guess: what is taken for known before the first measurement.
            known: where and on what it was measured; its layers are not read.
        """
        below, layers = [0.0] * len(known.nodes), []
        for row, new, old in zip(curve, self.corrections(len(corrections) - 1)[1:], corrections[1:], strict=False):
            layers.append([max(a - b, 0.0) * new / old for a, b in zip(row, below, strict=True)])
            below = list(row)
        promised, usual = sum(layer[-1] for layer in layers), sum(layer[-1] for layer in guess.layers)
        if promised > 0:
            # Scores change with the text at once, rates a few steps later.
            share = min(max(promised, usual / self.PLAUSIBLE), usual * self.PLAUSIBLE) / promised
            layers = [[gain * share for gain in layer] for layer in layers]
        self.curve = (self.curve or guess).updated(replace(known, layers=layers), rate)


def mass_of(rate: float, depth: int) -> float:
    """Expected accepted tokens of a chain of `depth` drafts that are each accepted at this rate."""
    return max(rate * (1 - rate**depth) / (1 - rate), 1e-3)
