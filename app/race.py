"""Columns of a race: one prompt through several drafters, a timed record of every verify step, and the replay's schedule.

When a column is measured alone, its clock runs only while the decode loop runs, so the time that the page takes to show a
step is never part of a figure. A step's tensors become plain numbers and text here, so the rest of the page needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import cast

import torch

from selfspec.bench.compare import WARM_UP
from selfspec.drafters import Drafter
from selfspec.loop.decode import decode
from selfspec.loop.group import Step
from selfspec.loop.planner import Planner
from selfspec.loop.sequence import Request
from selfspec.loop.text import TextStream
from selfspec.model.target import Target
from selfspec.tree import chain

# The page is drawn at most this often.
SECONDS_PER_FRAME = 1 / 15


@dataclass(frozen=True)
class Node:
    """A node of a candidate tree. `probability` is the drafter's estimate that the whole path to it is accepted."""

    token_id: int
    text: str
    parent: int
    depth: int
    probability: float | None


@dataclass(frozen=True)
class StepRecord:
    """One verify step of one answer.

    Attributes:
        at: seconds from the start of the answer, prefill included, to the end of this step.
        draft_seconds, verify_seconds, commit_seconds, host_seconds: parts of the step; host is the loop's time between them.
        nodes: the candidate tree without padding, the root first.
        path: the accepted nodes, the root first.
        chosen: the target's own token at each node of the path, as text: the accepted drafts, then the bonus token.
        token_ids: the emitted tokens; fewer than `chosen` if the answer ended within the step.
        pieces: the text that each emitted token completes. Joined over all steps, they are the answer.
    """

    at: float
    draft_seconds: float
    verify_seconds: float
    commit_seconds: float
    host_seconds: float
    nodes: list[Node]
    path: list[int]
    chosen: list[str]
    token_ids: list[int]
    pieces: list[str]

    @property
    def num_accepted(self) -> int:
        return len(self.path) - 1

    @property
    def max_depth(self) -> int:
        return max(node.depth for node in self.nodes)

    @property
    def has_refused(self) -> bool:
        return len(self.nodes) > len(self.path)


@dataclass(frozen=True)
class Figures:
    """Speed and acceptance so far, as `selfspec compare` defines them. `first_seconds` runs to the first step's end."""

    num_tokens: int
    num_target_passes: int
    seconds: float
    first_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Tokens per target pass, bonus token included."""
        return self.num_tokens / self.num_target_passes


@dataclass
class Column:
    """One drafter's answer so far. `finish_reason` is None while it runs, and stays None if it was stopped."""

    name: str
    label: str
    steps: list[StepRecord] = field(default_factory=list)
    prefill_seconds: float = 0.0
    finish_reason: str | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token_id for step in self.steps for token_id in step.token_ids]

    @property
    def text(self) -> str:
        return "".join(piece for step in self.steps for piece in step.pieces)

    def until(self, seconds: float) -> Column:
        """The column as it stood at `seconds` of its own clock."""
        steps = [step for step in self.steps if step.at <= seconds]
        is_whole = len(steps) == len(self.steps)
        return Column(self.name, self.label, steps, self.prefill_seconds, self.finish_reason if is_whole else None)

    def figures(self) -> Figures | None:
        """None before the first step."""
        if not self.steps:
            return None
        return Figures(len(self.token_ids), len(self.steps), self.steps[-1].at, self.steps[0].at)


@dataclass(frozen=True)
class Parting:
    """Where a column first differs from the reference: position, both tokens, and the gap between the target's logits."""

    position: int
    text: str
    expected_text: str
    logit_gap: float


def measure(
    target: Target,
    request: Request,
    contestants: Sequence[tuple[Column, Drafter | None]],
    *,
    use_cost_guard: bool,
    is_stopped: Callable[[], bool],
) -> Iterator[Column]:
    """Run every column alone after a warm-up, and yield it after each of its steps. A stop ends this column and the rest."""
    for column, drafter in contestants:
        warm_up = Request(request.prompt_ids, WARM_UP)
        for _ in _records(target, warm_up, Column("", ""), drafter, use_cost_guard, is_stopped):
            pass
        yield from _records(target, request, column, drafter, use_cost_guard, is_stopped)


def run_together(
    target: Target,
    request: Request,
    contestants: Sequence[tuple[Column, Drafter | None]],
    *,
    use_cost_guard: bool,
    is_stopped: Callable[[], bool],
) -> Iterator[Column]:
    """Let the columns take steps in turn on one shared clock, so each column's time includes the others' steps."""
    start = time.perf_counter()
    with ExitStack() as stack:
        running = [
            stack.enter_context(closing(_records(target, request, column, drafter, use_cost_guard, is_stopped, start)))
            for column, drafter in contestants
        ]
        while running:
            for records in list(running):
                try:
                    yield next(records)
                except StopIteration:
                    running.remove(records)


def _records(
    target: Target,
    request: Request,
    column: Column,
    drafter: Drafter | None,
    use_cost_guard: bool,
    is_stopped: Callable[[], bool],
    shared_start: float | None = None,
) -> Generator[Column]:
    """Decode into `column`. Its clock stops between steps, unless `shared_start` makes it a wall clock."""
    recorder = Recorder(target.tokenizer, request.prompt_ids)
    planner = None if use_cost_guard else Planner(is_active=False)
    elapsed = 0.0
    # `decode` returns a generator, though its signature says Iterator. Closing it frees cache and drafter state.
    decoding = cast("Generator[Step]", decode(target, [request], drafter=drafter, planner=planner))
    with closing(decoding) as steps:
        while not is_stopped():
            start = time.perf_counter()
            step = next(steps, None)
            seconds = time.perf_counter() - start
            if step is None:
                return
            elapsed += seconds
            [sequence] = step.sequences
            if not column.steps:
                # The first step includes the prompt's prefill.
                column.prefill_seconds = sequence.prefill_seconds
                seconds -= sequence.prefill_seconds
            at = elapsed if shared_start is None else time.perf_counter() - shared_start
            column.steps.append(recorder.record(step, at=at, seconds=seconds))
            column.finish_reason = sequence.finish_reason
            yield column


class Recorder:
    """Turns the steps of one answer into records, and keeps the state of detokenisation between steps."""

    def __init__(self, tokenizer: object, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, context=prompt_ids)

    def record(self, step: Step, *, at: float, seconds: float) -> StepRecord:
        """A record of the first row of `step`, which took `seconds` in all."""
        parts = step.seconds
        nodes, index = self._nodes(step)
        num_accepted = int(step.acceptance.num_accepted[0])
        path = [index[node] for node in step.acceptance.path[0, : num_accepted + 1].tolist()]
        chosen = step.acceptance.tokens[0, : num_accepted + 1].tolist()
        return StepRecord(
            at=at,
            draft_seconds=parts.draft,
            verify_seconds=parts.verify,
            commit_seconds=parts.commit,
            host_seconds=max(0.0, seconds - parts.draft - parts.verify - parts.commit),
            nodes=nodes,
            path=path,
            chosen=[self._text(token_id) for token_id in chosen],
            token_ids=step.emitted[0],
            pieces=self._pieces(step.emitted[0], step.sequences[0].eos_token_ids, is_last=bool(step.finished)),
        )

    def _nodes(self, step: Step) -> tuple[list[Node], dict[int, int]]:
        """The real nodes (padding left out), and their indices in this list by their index in the tensors."""
        tree = step.tree
        tokens, parents, depths = tree.tokens[0].tolist(), tree.parents[0].tolist(), tree.depths[0].tolist()
        scores: list[float] | None = None if tree.scores is None else tree.scores[0].exp().tolist()
        index: dict[int, int] = {}
        nodes: list[Node] = []
        for i, token_id in enumerate(tokens):
            if token_id >= 0:
                index[i] = len(nodes)
                parent = index[parents[i]] if parents[i] >= 0 else -1
                nodes.append(Node(token_id, self._text(token_id), parent, depths[i], scores[i] if scores else None))
        return nodes, index

    def _pieces(self, token_ids: list[int], ends: frozenset[int], *, is_last: bool) -> list[str]:
        """The text that each token adds. A character of several tokens counts for the last one; the end token adds none."""
        pieces = []
        for token_id in token_ids:
            if token_id not in ends:
                self._stream.push(token_id)
            pieces.append(self._stream.take())
        if is_last:
            self._stream.finish()
            pieces[-1] += self._stream.take(is_last=True)
        return pieces

    def _text(self, token_id: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode([token_id])  # type: ignore[attr-defined]


def parting(target: Target, prompt_ids: list[int], column: Column, reference: Column) -> Parting | None:
    """Where two complete answers first differ; None if they are the same token for token."""
    ours, theirs = column.token_ids, reference.token_ids
    # Neither is a prefix of the other, because the same end token or limit ends both.
    at = next((i for i, (our_id, their_id) in enumerate(zip(ours, theirs, strict=False)) if our_id != their_id), None)
    if at is None:
        return None
    gap = logit_gap(target, prompt_ids + theirs[:at], ours[at], theirs[at])
    return Parting(at, target.tokenizer.decode([ours[at]]), target.tokenizer.decode([theirs[at]]), gap)


@torch.inference_mode()
def logit_gap(target: Target, prefix_ids: list[int], token_id: int, other_id: int) -> float:
    """How far apart the target's logits of two tokens are after a prefix, from a pass over one node."""
    cache = target.new_cache()
    row = cache.open_row()
    prefix = torch.tensor(prefix_ids, device=target.device)
    target.prefill(prefix[:-1], row, cache)
    logits = target.verify(chain(prefix[-1:]), [row], cache).logits[0, 0].float()
    return abs(float(logits[token_id] - logits[other_id]))


def frame_times(columns: Iterable[Column]) -> Iterator[float]:
    """When to draw, in seconds of the race: at the end of every step, but no two frames closer than `SECONDS_PER_FRAME`."""
    last = float("-inf")
    for at in sorted(step.at for column in columns for step in column.steps):
        if at > last:
            last = max(at, last + SECONDS_PER_FRAME)
            yield last
