"""The same prompts through several drafters in one run: speed, acceptance, and whether the output is the same.

The first mode is plain decoding: the baseline of every speed-up, and the output that every other mode must reproduce
token for token.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from selfspec.api import generate_iter
from selfspec.bench.baseline import generate_greedily, load_baseline
from selfspec.config import SamplingParams
from selfspec.drafters import Drafter
from selfspec.model.target import Target

WARM_UP = SamplingParams(max_new_tokens=8)


def warm_up_text(prompt_ids: Sequence[int]) -> list[int]:
    """What to warm up on in place of a prompt: as long, and another text, because a measured one must be new."""
    return list(reversed(prompt_ids))


# The names of the two baselines among the modes of a benchmark: plain decoding, and transformers' generate.
PLAIN = "none"
BASELINE = "transformers"


@dataclass(frozen=True)
class TimedAnswer:
    """One mode's answer to one prompt. The seconds include prefill; answers decoded together overlap in time."""

    text: str
    token_ids: list[int]
    num_target_passes: int
    seconds: float


@dataclass(frozen=True)
class Mode:
    """One way of decoding and its answers. The seconds are wall clock for all of them, prefill included."""

    name: str
    answers: list[TimedAnswer]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def num_target_passes(self) -> int:
        return sum(answer.num_target_passes for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Tokens per target pass, bonus token included."""
        return self.num_tokens / self.num_target_passes


@dataclass(frozen=True)
class Difference:
    """The first token on which two modes disagree: the index of the answer, and the token's position in it."""

    answer_index: int
    position: int


def first_difference(mode: Mode, other: Mode) -> Difference | None:
    """Find the first token that differs; None if the outputs are identical."""
    for i, (answer, expected) in enumerate(zip(mode.answers, other.answers, strict=True)):
        ours, theirs = answer.token_ids, expected.token_ids
        if ours != theirs:
            shared = min(len(ours), len(theirs))
            return Difference(i, next((k for k in range(shared) if ours[k] != theirs[k]), shared))
    return None


def race(
    runs: Mapping[str, Iterator[TimedAnswer]],
    num_answers: int,
    on_answer: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Mode]:
    """Take one answer from every run in turn, because a slow spell of the machine then slows all of them alike."""
    answers: dict[str, list[TimedAnswer]] = {name: [] for name in runs}
    seconds = dict.fromkeys(runs, 0.0)
    for _ in range(num_answers):
        for name, run in runs.items():
            start = clock()
            answers[name].append(next(run))
            seconds[name] += clock() - start
            on_answer()
    return [Mode(name, answers[name], seconds[name]) for name in runs]


def drafter_run(
    target: Target,
    prompts: Sequence[list[int]],
    drafter: Drafter | None,
    *,
    sampling: SamplingParams,
    batch_size: int = 1,
    use_cost_guard: bool = True,
) -> Iterator[TimedAnswer]:
    """Answer with one drafter, each prompt when its answer is asked for. A short warm-up has run when this returns."""

    def answers(some_prompts: Sequence[list[int]], some_sampling: SamplingParams) -> Iterator[TimedAnswer]:
        for completion in generate_iter(
            target,
            some_prompts,
            drafter=drafter,
            sampling=some_sampling,
            batch_size=batch_size,
            use_cost_guard=use_cost_guard,
        ):
            yield TimedAnswer(completion.text, completion.token_ids, completion.num_target_passes, completion.seconds)

    list(answers([warm_up_text(prompts[0])], WARM_UP))
    return answers(prompts, sampling)


def transformers_can(sampling: SamplingParams) -> bool:
    """Whether `transformers_run` can follow these settings."""
    return sampling == SamplingParams(max_new_tokens=sampling.max_new_tokens, seed=sampling.seed)


def check_transformers_can(sampling: SamplingParams) -> None:
    """Raise a ValueError unless `transformers_run` can follow these settings."""
    if not transformers_can(sampling):
        raise ValueError(
            "the transformers baseline is greedy only: leave out all sampling and stop options, or leave out the baseline"
        )


def transformers_run(
    target: Target,
    prompts: Sequence[list[int]],
    *,
    sampling: SamplingParams,
    source: str | PreTrainedModel,
    revision: str | None = None,
) -> Iterator[TimedAnswer]:
    """Answer greedily with transformers' `generate`, one prompt at a time, on a second copy of the target.

    Args:
        source: a path or Hub id to load the copy from, or the copy itself.
    """
    model = load_baseline(target, source, revision=revision) if isinstance(source, str) else source

    def answer(prompt: list[int], max_new_tokens: int) -> TimedAnswer:
        start = time.perf_counter()
        token_ids = generate_greedily(model, prompt, min(max_new_tokens, target.context_length - len(prompt)))
        seconds = time.perf_counter() - start
        text = target.tokenizer.decode(token_ids, skip_special_tokens=True)
        return TimedAnswer(text, token_ids, len(token_ids), seconds)

    answer(warm_up_text(prompts[0]), WARM_UP.max_new_tokens)
    return (answer(prompt, sampling.max_new_tokens) for prompt in prompts)
