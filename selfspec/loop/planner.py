"""How much to draft in the next step, zero included. It stands before the stage "draft a candidate tree".

Invariant: speculation does not cost more than it brings. For a group of B rows the planner picks which rows draft, a shape
of their trees, and the number F of nodes to verify in all (roots included), with the most expected tokens a second:

    rate = (B + gain(rows, shape, F)) / (pass seconds(F) + draft seconds(rows, shape))

`gain` is the expected number of accepted drafts (https://arxiv.org/abs/2211.17192) among the F - B likeliest nodes,
whichever rows they belong to (`selfspec.loop.survival`, `selfspec.loop.selection`). The seconds come from
`selfspec.loop.costs`. The rate is the goodput of https://arxiv.org/abs/2406.14066. The seconds of prompts in the pass
are owed anyway. Beside prompts the planner therefore maximizes what a step is worth at the price of a token without them:

    gain / best rate - (pass seconds(F + prompts) - pass seconds(B + prompts)) - draft seconds

What is not tried is not learnt, so now and then a step is a probe (`selfspec.loop.probes`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from selfspec.loop.costs import Costs
from selfspec.loop.gains import mass_of
from selfspec.loop.probes import Draft, Option, Prices, Probes, Shape
from selfspec.loop.survival import Record, Survival


@dataclass(frozen=True)
class Plan:
    """What one step shall do.

    Attributes:
        shape: of the trees; None for no draft.
        num_nodes: F, the nodes to verify in all rows, roots included.
        is_drafting: [B] the rows that draft.
        is_probe: the step is taken to learn, not because it pays.
        corrections: [K + 1] factor by depth from a score's chance to the observed one; never rises with the depth.
        factors: [B] factor by row, at most 1.
        sizes, num_prompt_tokens, mean_length: as they were given.
    """

    shape: Shape | None
    num_nodes: int
    is_drafting: tuple[bool, ...]
    is_probe: bool
    corrections: tuple[float, ...]
    factors: tuple[float, ...]
    sizes: tuple[int, ...]
    num_prompt_tokens: int
    mean_length: float


@dataclass(frozen=True)
class Evidence:
    """What came of a step, as lists on the host.

    Attributes:
        depths: [B] how deep each row drafted; 0 if it did not.
        num_accepted: [B] accepted drafts.
        promised: [B][K] sums of the verified nodes' chances by depth, as the scores alone have them; None without scores.
        curve: [K][S] what `Ranking.curve` measured over all drafted nodes, for the plan's sizes; None without scores.
    """

    depths: Sequence[int]
    num_accepted: Sequence[int]
    promised: Sequence[Sequence[float]] | None = None
    curve: Sequence[Sequence[float]] | None = None


class Planner:
    """Chooses what to draft, for the rows that one drafter serves.

    Args:
        costs: seconds of passes and drafts. Without a calibration they are learnt from the steps.
        is_active: False always drafts as much as the drafter can.
    """

    # A row that promises less than this share of what the others promise on average does not draft.
    LEAST_SHARE = 0.03

    def __init__(self, costs: Costs | None = None, *, is_active: bool = True) -> None:
        self.costs = Costs() if costs is None else costs
        self.is_active = is_active
        # By log2 of the number of rows.
        self._loads: dict[int, Survival] = {}
        self._probes = Probes(self.costs)

    @staticmethod
    def row(bucket: int = 0) -> Record:
        """A new sequence's record. Sequences of one bucket share a prior: greedy ones, say, or those of one temperature."""
        return Record(bucket)

    def use(self, costs: Costs) -> None:
        """Take other costs, and forget what was accepted."""
        self.costs = costs
        self.forget()

    def forget(self) -> None:
        """Forget what was accepted, but keep what passes cost."""
        self._loads.clear()
        self._probes = Probes(self.costs)

    def plan(
        self,
        rows: Sequence[Record],
        *,
        sizes: Sequence[int],
        shapes: Sequence[Shape],
        limit: int,
        is_costly: bool = True,
        num_prompt_tokens: int = 0,
        mean_length: float = 0.0,
    ) -> Plan:
        """What to draft and verify in the next step.

        Args:
            sizes: numbers of nodes that a pass can have, ascending; the first is B.
            shapes: trees that the drafter can grow, the cheapest first.
            limit: the deepest draft that is of any use.
            is_costly: drafts take time of the device. Others are free, so all rows draft as much as they can.
            num_prompt_tokens: tokens of prompts in the same pass.
            mean_length: mean length of the rows' prefixes.
        """
        B, load = len(rows), self._load_of(len(rows))
        usable = [shape for shape in shapes if shape.depth <= limit] or list(shapes[: int(limit > 0)])
        plain = Option(usable[-1], range(B)) if usable and not is_costly else Option(None, ())
        best, probe = plain, None
        if usable and not self.is_active:
            best = Option(usable[-1], range(B), max(bisect_right(sizes, usable[-1].most_nodes(B)) - 1, 0))
        elif usable and len(sizes) > 1:
            alone = [self.costs.pass_seconds(size, B, mean_length) for size in sizes]
            owed = alone
            if num_prompt_tokens:
                owed = [self.costs.pass_seconds(size + num_prompt_tokens, B, mean_length) for size in sizes]
            deepest = max(shape.depth for shape in shapes)
            drafts = list(self._drafts(rows, load, sizes, usable, deepest, limit, is_costly))
            prices = Prices(sizes, alone, owed, min([alone[0] / B, *(draft.token(alone, B) for draft in drafts)]))
            options = [plain, *(draft.best(prices) for draft in drafts)]
            best = min(options, key=prices.loss)
            probe = self._probes.next(best, plain, options, rows, load, usable[0], prices)
        shape, drafting, size = (probe or best)[:3]
        is_drafting = set(drafting)
        return Plan(
            shape,
            sizes[size],
            tuple(i in is_drafting for i in range(B)),
            probe is not None,
            tuple(load.corrections(shape.width if shape else 1, max((each.depth for each in shapes), default=0))),
            tuple(map(load.factor, rows)),
            tuple(sizes),
            num_prompt_tokens,
            mean_length,
        )

    def observe(
        self,
        plan: Plan,
        rows: Sequence[Record],
        evidence: Evidence,
        draft_seconds: float | None = None,
        pass_seconds: float | None = None,
    ) -> None:
        """Learn from a step that is over, in the order of the steps.

        Args:
            rows: those that were given to `plan`.
            draft_seconds, pass_seconds: None where they are unknown or not typical.
        """
        if not self.is_active:
            return
        B, shape, load = len(rows), plan.shape, self._load_of(len(rows))
        if pass_seconds is not None:
            num_nodes = plan.num_nodes + plan.num_prompt_tokens
            self.costs.correct("pass", (num_nodes, B, round(plan.mean_length)), pass_seconds)
        if shape is None:
            load.learn(rows, plan.is_drafting, [0] * B, [0] * B)
            return
        if draft_seconds is not None:
            self.costs.correct("draft", (sum(plan.is_drafting), shape.depth, shape.width), draft_seconds)
        depths = evidence.depths
        if evidence.promised is not None:
            # A row that drafted may have had no node verified, or not its deepest ones.
            depths = [sum(chance > 0 for chance in chances) for chances in evidence.promised]
        load.learn(rows, plan.is_drafting, depths, evidence.num_accepted)
        if evidence.promised is not None and any(depths):
            load.compare(rows, shape.width, depths, evidence.num_accepted, evidence.promised, plan.factors)
        if evidence.curve is not None and len(plan.sizes) > 1:
            drafted = [record for record, is_drafting in zip(rows, plan.is_drafting, strict=True) if is_drafting]
            nodes = [float(size - B) for size in plan.sizes]
            load.measure(drafted, shape.width, nodes, evidence.curve[: shape.depth], plan.corrections)

    def _load_of(self, num_rows: int) -> Survival:
        """What is known of the drafts of about so many rows; at first, a part of what is known of the nearest load."""
        number = (num_rows - 1).bit_length()
        if number not in self._loads:
            nearest = min(self._loads, key=lambda other: (abs(other - number), other), default=None)
            parent = None if nearest is None else self._loads[nearest]
            is_known = self.costs.is_calibrated
            first_rate = Survival.FIRST_RATE if is_known else Survival.FIRST_RATE_UNCALIBRATED
            self._loads[number] = Survival(parent, first_rate=first_rate)
        return self._loads[number]

    def _drafts(
        self,
        rows: Sequence[Record],
        load: Survival,
        sizes: Sequence[int],
        shapes: Sequence[Shape],
        deepest: int,
        limit: int,
        is_costly: bool,
    ) -> Iterator[Draft]:
        """Every shape for the rows that promise the most, with what it gains at each size."""
        rates = [load.rate(record) for record in rows]
        nodes = [float(size - len(rows)) for size in sizes]
        by_width: dict[int, list[Shape]] = {}
        for shape in shapes if is_costly else shapes[-1:]:
            by_width.setdefault(shape.width, []).append(shape)
        masses = [mass_of(rate, deepest) for rate in rates]
        for drafting in _choices(masses) if is_costly else [range(len(rows))]:
            chosen = [rates[i] for i in drafting], [masses[i] for i in drafting]
            for width, shapes in by_width.items():
                depths = [min(shape.depth, limit) for shape in shapes]
                for shape, gains in zip(shapes, load.gains(*chosen, width, nodes, depths, deepest), strict=True):
                    seconds = self.costs.draft_seconds(len(drafting), shape.depth, width) if is_costly else 0.0
                    # No larger pass than one with all drafts, than all trees have nodes for, or than is known what it costs.
                    enough = bisect_left(sizes, len(rows) + len(drafting) * shape.most_drafts) + 1
                    num_sizes = min(enough, bisect_right(sizes, min(shape.most_nodes(len(rows)), self.costs.reach)))
                    if num_sizes > 1:
                        yield Draft(shape, drafting, gains[:num_sizes], seconds)


def _choices(masses: Sequence[float]) -> list[list[int]]:
    """Sets of rows that may draft: the best rows, with half of all mass, with nine tenths of it, and all of them.

    A draft costs as much as one for the next power of two of rows, so each set is filled up to it.
    """
    order = sorted(range(len(masses)), key=lambda i: -masses[i])
    sums = list(accumulate(masses[i] for i in order))
    counts = set()
    for share in (0.5, 0.9, 1.0):
        count = next(i for i, mass in enumerate(sums, start=1) if mass >= share * sums[-1])
        counts.add(min(1 << (count - 1).bit_length(), len(masses)))
    return [
        [i for i in order[:count] if masses[i] * count >= Planner.LEAST_SHARE * sums[count - 1]] for count in sorted(counts)
    ]
