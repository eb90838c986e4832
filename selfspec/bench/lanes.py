"""A race of one prompt with level clocks: one sees true proportions at once, and a slow spell of the machine meets all.

Each lane's clock runs during its own steps only. The lane whose clock is furthest behind takes the next step, so at every
moment all lanes have had the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from transformers import PreTrainedModel

from selfspec.bench.baseline import stream_transformers
from selfspec.bench.compare import BASELINE, PLAIN, TimedAnswer
from selfspec.config import SamplingParams
from selfspec.loop.decode import decode
from selfspec.loop.drafter import Drafter
from selfspec.loop.planner import Planner
from selfspec.loop.sequence import Request
from selfspec.model.target import Target

T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """What one step emitted: tokens, of which the first `num_accepted` were drafted."""

    token_ids: list[int]
    num_accepted: int = 0


@dataclass
class Lane:
    """One contestant's answer so far. `seconds` is by its own clock, which begins with the reading of the prompt."""

    name: str
    turns: list[Turn] = field(default_factory=list)
    seconds: float = 0.0
    is_done: bool = False

    @property
    def token_ids(self) -> list[int]:
        return [token_id for turn in self.turns for token_id in turn.token_ids]

    def answer(self, text: str) -> TimedAnswer:
        """The finished answer, for a comparison."""
        return TimedAnswer(text, self.token_ids, len(self.turns), self.seconds)


def lane_names(drafters: Iterable[str]) -> list[str]:
    """A race's contestants: the first drafter, transformers to be compared with, the other drafters, plain decoding."""
    first, others = list(drafters)[:1], list(drafters)[1:]
    return [*first, BASELINE, *others, PLAIN]


def race(
    target: Target,
    drafters: Mapping[str, Drafter | None],
    baseline: PreTrainedModel,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
) -> Iterator[Lane]:
    """Race the drafters, transformers' `generate` and plain decoding on one prompt, named in the order of `lane_names`.

    Args:
        baseline: what transformers runs, see `load_baseline`.
        sampling: greedy, because transformers is.
    """
    room = min(sampling.max_new_tokens, target.context_length - len(prompt_ids))

    def turns(name: str) -> Iterator[Turn]:
        if name == BASELINE:
            return transformers_turns(baseline, prompt_ids, room)
        return drafter_turns(target, prompt_ids, drafters.get(name), sampling)

    return race_level({name: turns(name) for name in lane_names(drafters)})


def drafter_turns(
    target: Target, prompt_ids: Sequence[int], drafter: Drafter | None, sampling: SamplingParams
) -> Iterator[Turn]:
    """One drafter's steps through an answer, each made when it is asked for; plain decoding's without a drafter.

    It always drafts all it can. So it takes the same passes every time, whatever else the machine does.
    """
    planner = Planner(is_active=False)
    for step in decode(target, [Request(list(prompt_ids), sampling)], drafter=drafter, planner=planner):
        [emission] = step.emissions
        yield Turn(emission.tokens, emission.num_accepted)


def transformers_turns(model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int) -> Iterator[Turn]:
    """The same for transformers' `generate`, a token at a time."""
    for token_id in stream_transformers(model, prompt_ids, max_new_tokens):
        yield Turn([token_id])


def race_level(contestants: Mapping[str, Iterator[Turn]], clock: Callable[[], float] = time.perf_counter) -> Iterator[Lane]:
    """Run all lanes to their ends, and yield a lane after each of its turns and once more when it is done."""

    def step(lane: Lane) -> bool:
        start = clock()
        turn = next(contestants[lane.name], None)
        lane.seconds += clock() - start
        if turn is not None:
            lane.turns.append(turn)
        lane.is_done = turn is None
        return turn is not None

    for lane, _ in take_turns([Lane(name) for name in contestants], lambda lane: lane.seconds, step):
        yield lane


def take_turns(lanes: Iterable[T], seconds_of: Callable[[T], float], step: Callable[[T], bool]) -> Iterator[tuple[T, bool]]:
    """Let the lane whose clock is furthest behind take the next step, until all have ended; of level ones the first.

    Args:
        step: takes a lane's next step; false where there is none.

    Yields:
        The lane, and whether there was a step to take.
    """
    running = list(lanes)
    while running:
        lane = min(running, key=seconds_of)
        is_taken = step(lane)
        if not is_taken:
            running.remove(lane)
        yield lane, is_taken
