"""What the host reads of a step: one small tensor, copied while the device goes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selfspec.loop.accept import Acceptance
from selfspec.tree import CandidateTree


@dataclass(frozen=True)
class Report:
    """One row's outcome.

    Attributes:
        num_drafted: nodes that were verified, without the root.
        tokens: the accepted drafts and the bonus token.
        facts: what the planner measured.
    """

    num_accepted: int
    is_valid: bool
    num_drafted: int
    tokens: list[int]
    facts: list[float]

    @classmethod
    def parse(cls, numbers: list[float], num_tokens: int) -> Report:
        """From a row of the tensor that `report_of` made, whose tokens take `num_tokens` columns."""
        num_accepted, is_valid, num_drafted = map(int, numbers[:3])
        tokens = [int(token) for token in numbers[3 : 4 + num_accepted]]
        return cls(num_accepted, bool(is_valid), num_drafted, tokens, numbers[3 + num_tokens :])


def report_of(tree: CandidateTree, acceptance: Acceptance, facts: torch.Tensor | None) -> torch.Tensor:
    """All that the host reads of a step: [B, 3 + K + 1 + F] float64, which holds any token exactly.

    The columns are `num_accepted`, `is_valid`, the number of drafted nodes, `tokens`, `facts`.

    Args:
        facts: [B, F] float64, passed through for the planner.
    """
    num_drafted = tree.is_real.sum(1, keepdim=True) - 1
    columns = [acceptance.num_accepted[:, None], acceptance.is_valid[:, None], num_drafted, acceptance.tokens]
    outcome = torch.cat(columns, dim=1).double()
    return outcome if facts is None else torch.cat([outcome, facts], dim=1)
