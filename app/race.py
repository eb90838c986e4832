"""Columns of a race: one prompt through several drafters, a timed record of every verify step, and the replay's schedule.

A column's clock runs only while its own step runs, so neither the other columns' steps nor the time that the page takes to
show one are part of a figure. A step's tensors become plain numbers and text here, so the rest of the page needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Protocol, TypeAlias, cast

import torch
from transformers import PreTrainedModel

from selfspec.app.records import Column, Node, Parting, StepRecord
from selfspec.bench.baseline import stream_transformers
from selfspec.bench.compare import WARM_UP, warm_up_text
from selfspec.bench.lanes import take_turns
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


class Timed(Protocol):
    """What a replay needs of a column, local or remote."""

    @property
    def times(self) -> list[float]:
        """When its steps ended, by its own clock."""


# A drafter that takes part; None decodes plainly. transformers' own `generate` takes part as its model.
Racer: TypeAlias = Drafter | PreTrainedModel | None
Contestant = tuple[Column, Racer]


def warm_up(target: Target, prompt_ids: list[int], racer: Racer) -> None:
    """Answer shortly, because what runs for the first time runs slowly."""
    for _ in _steps(target, Request(prompt_ids, WARM_UP), (Column("", ""), racer), use_cost_guard=False):
        pass


def run_level(
    target: Target,
    request: Request,
    contestants: Sequence[Contestant],
    *,
    use_cost_guard: bool,
    is_stopped: Callable[[], bool],
) -> Iterator[Column]:
    """Run with level clocks, and yield a column after each of its steps.

    The column whose clock is furthest behind takes the next step. So at every moment all columns have had the same time, and
    a slow spell of the machine meets all of them.
    """
    with ExitStack() as stack:
        lanes = [
            (contestant[0], stack.enter_context(closing(_steps(target, request, contestant, use_cost_guard=use_cost_guard))))
            for contestant in contestants
        ]

        def step(lane: tuple[Column, Generator[Column]]) -> bool:
            return not is_stopped() and next(lane[1], None) is not None

        for (column, _), is_taken in take_turns(lanes, lambda lane: lane[0].seconds, step):
            if is_taken:
                yield column


def run_alone(
    target: Target,
    request: Request,
    contestants: Sequence[Contestant],
    *,
    use_cost_guard: bool,
    is_stopped: Callable[[], bool],
) -> Iterator[Column]:
    """Run one column after the other, each after a warm-up, and yield a column after each of its steps."""
    for contestant in contestants:
        if is_stopped():
            return
        warm_up(target, warm_up_text(request.prompt_ids), contestant[1])
        with closing(_steps(target, request, contestant, use_cost_guard=use_cost_guard)) as steps:
            while not is_stopped() and next(steps, None) is not None:
                yield contestant[0]


def _steps(target: Target, request: Request, contestant: Contestant, *, use_cost_guard: bool) -> Generator[Column]:
    """Decode into the column, one step each time. Its clock runs only while a step is asked for."""
    column, racer = contestant
    if isinstance(racer, PreTrainedModel):
        yield from _transformers_steps(target, request, column, racer)
        return
    recorder = Recorder(target.tokenizer, request.prompt_ids)
    planner = None if use_cost_guard else Planner(is_active=False)
    elapsed = 0.0
    # `decode` returns a generator, though its signature says Iterator. Closing it frees cache and drafter state.
    decoding = cast("Generator[Step]", decode(target, [request], drafter=racer, planner=planner))
    with closing(decoding) as steps:
        while True:
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
            column.steps.append(recorder.record(step, at=elapsed, seconds=seconds))
            column.finish_reason = sequence.finish_reason
            yield column


def _transformers_steps(target: Target, request: Request, column: Column, model: PreTrainedModel) -> Generator[Column]:
    """The same for transformers' own `generate`, a token each time. The first one's time is the prompt's."""
    recorder = Recorder(target.tokenizer, request.prompt_ids)
    ends = frozenset(target.eos_token_ids)
    limit = min(request.sampling.max_new_tokens, target.context_length - len(request.prompt_ids))
    before, elapsed = request.prompt_ids[-1], 0.0
    tokens = cast("Generator[int]", stream_transformers(model, request.prompt_ids, limit))
    with closing(tokens):
        for number in range(1, limit + 1):
            start = time.perf_counter()
            token_id = next(tokens, None)
            seconds = time.perf_counter() - start
            if token_id is None:
                # It ended by a rule of the model's own generation config.
                column.finish_reason = "stop"
                return
            elapsed += seconds
            if token_id in ends:
                column.finish_reason = "stop"
            elif number == limit:
                column.finish_reason = "length"
            if number == 1:
                column.prefill_seconds, seconds = seconds, 0.0
            column.steps.append(
                recorder.record_token(
                    before, token_id, at=elapsed, seconds=seconds, ends=ends, is_last=column.finish_reason is not None
                )
            )
            before = token_id
            yield column
            if column.finish_reason is not None:
                return


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

    def record_token(
        self, before: int, token_id: int, *, at: float, seconds: float, ends: frozenset[int], is_last: bool
    ) -> StepRecord:
        """A record of a pass that gave one token after the token `before`, without drafts."""
        return StepRecord(
            at=at,
            draft_seconds=0.0,
            verify_seconds=seconds,
            commit_seconds=0.0,
            host_seconds=0.0,
            nodes=[Node(before, self._text(before), -1, 0, None)],
            path=[0],
            chosen=[self._text(token_id)],
            token_ids=[token_id],
            pieces=self._pieces([token_id], ends, is_last=is_last),
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


def frame_times(columns: Iterable[Timed], speed: float = 1.0) -> Iterator[float]:
    """When to draw, in seconds of the race: at the end of every step, but no two frames closer than `SECONDS_PER_FRAME`.

    Args:
        speed: the race's seconds for each second of its replay.
    """
    last = float("-inf")
    for at in sorted(at for column in columns for at in column.times):
        if at > last:
            last = max(at, last + SECONDS_PER_FRAME * speed)
            yield last
