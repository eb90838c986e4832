"""How well a head drafts: prompts are decoded greedily, as in serving, and accepted drafts are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from selfspec.config import SamplingParams
from selfspec.drafters import Drafter
from selfspec.heads.base import DraftHead
from selfspec.loop.decode import decode
from selfspec.loop.planner import Planner
from selfspec.loop.sequence import Request
from selfspec.model.target import Target

BATCH_SIZES = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class EvalPrompt:
    """A prompt to decode, and its task."""

    token_ids: list[int]
    category: str | None = None


@dataclass(frozen=True)
class EvalPrompts:
    """Prompts of every evaluation during training, and of the last one (the same ones if no others are given)."""

    held_out: list[EvalPrompt]
    final: list[EvalPrompt]


@dataclass(frozen=True)
class AcceptanceReport:
    """How well a head drafts.

    Attributes:
        length: acceptance length, tokens emitted per target pass, the bonus token included.
        rates: for each depth d from 1, the share of the passes that drafted to depth d which accepted at least d tokens.
        lengths: acceptance length of each task that the prompts name.
        num_nodes: the most nodes of a candidate tree, root included.
    """

    num_prompts: int
    num_tokens: int
    length: float
    rates: list[float]
    lengths: dict[str, float] = field(default_factory=dict)
    num_nodes: int | None = None

    def record(self) -> dict[str, float]:
        """One number under each name, for trackers and the history."""
        record = {"acceptance_length": self.length}
        record |= {f"acceptance_rate_{depth}": rate for depth, rate in enumerate(self.rates, start=1)}
        return record | {f"acceptance_length_{task}": length for task, length in self.lengths.items()}


def acceptance(target: Target, drafter: Drafter, prompts: Sequence[EvalPrompt], num_tokens: int) -> AcceptanceReport:
    """Decode at most `num_tokens` for each prompt, always drafting as much as the drafter can."""
    sampling = SamplingParams(max_new_tokens=num_tokens)
    requests = [Request(prompt.token_ids, sampling, index) for index, prompt in enumerate(prompts)]
    num_emitted, num_passes = Counter[str | None](), Counter[str | None]()
    num_drafted, num_accepted = Counter[int](), Counter[int]()
    num_nodes = drafter.num_nodes or drafter.num_draft_tokens + 1
    # The most prompts at a time that leave every tree whole.
    batch_size = next((size for size in BATCH_SIZES if target.passes.most_nodes(size) >= num_nodes), BATCH_SIZES[-1])
    for step in decode(target, requests, drafter=drafter, max_batch=batch_size, planner=Planner(is_active=False)):
        reached = torch.stack([step.tree.depths.amax(1), step.acceptance.num_accepted], dim=1).tolist()
        for sequence, emitted, (depth, accepted) in zip(step.sequences, step.emitted, reached, strict=True):
            task = prompts[sequence.request.index].category
            num_emitted[task] += len(emitted)
            num_passes[task] += 1
            num_drafted.update(range(1, depth + 1))
            num_accepted.update(range(1, accepted + 1))
    return AcceptanceReport(
        num_prompts=len(prompts),
        num_tokens=num_emitted.total(),
        length=num_emitted.total() / num_passes.total(),
        rates=[num_accepted[depth] / num_drafted[depth] for depth in sorted(num_drafted)],
        lengths={task: num_emitted[task] / num_passes[task] for task in num_passes if task is not None},
        num_nodes=num_nodes,
    )


@torch.no_grad()
def snapshot(head: DraftHead) -> DraftHead:
    """A copy of the head as it is now, to serve or to save. If the head is sharded, all processes must take part."""
    # Its initial weights are overwritten, and drawing them must not change the training's random numbers.
    with torch.random.fork_rng(devices=[]):
        twin = type(head)(head.config)
    state = head.state_dict().items()
    twin.load_state_dict({name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state})
    return twin.eval().requires_grad_(False)


@dataclass(frozen=True)
class Evaluator:
    """Decodes with a copy of a head; the head in training keeps its weights, dtype and mode."""

    head: DraftHead
    target: Target
    make_drafter: Callable[[DraftHead], Drafter]
    num_tokens: int

    def __call__(self, prompts: Sequence[EvalPrompt], *, is_decoding: bool = True) -> AcceptanceReport | None:
        """The report; None on a process that is not decoding and only lends its part of a sharded head."""
        twin = snapshot(self.head)
        return acceptance(self.target, self.make_drafter(twin), prompts, self.num_tokens) if is_decoding else None
