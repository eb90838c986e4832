"""Speed on real prompts, task by task, against two baselines of the same run.

Every mode answers every prompt in turn, because a slow spell of a shared machine then slows all modes alike. A task's
speed-up is the median, over its prompts, of the ratio of seconds per token. Prefill is the same work in every mode and is
timed apart: `decode` ratios leave it out, `total` ratios include it.

Next to each measured speed-up stands the cost model's prediction (`selfspec.plan.formulas.speedup`): a task's acceptance
length over the cost of a step, with one pair of cost ratios for the whole run. The model leaves out the host's time between
drafts and passes. It also ignores that costs differ between tasks, with the length of the text and the number of drafts.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from selfspec.api import Completion, completion_of
from selfspec.bench.compare import BASELINE, PLAIN, WARM_UP, TimedAnswer, transformers_run, warm_up_text
from selfspec.config import SamplingParams
from selfspec.drafters import Drafter
from selfspec.loop.decode import decode
from selfspec.loop.planner import Planner
from selfspec.loop.sequence import Request
from selfspec.model.target import Target
from selfspec.plan.formulas import speedup
from selfspec.traffic.answers import encode_prompts
from selfspec.traffic.prompt_files import PromptRow


@dataclass(frozen=True)
class Measurement:
    """One mode's answer to one prompt. For transformers only the whole time is known; the parts are None.

    Attributes:
        draft_seconds: spent on all drafting.
        verify_seconds: spent on all target passes, acceptance included.
    """

    task: str
    prompt_id: str
    mode: str
    seconds: float
    prefill_seconds: float | None
    num_tokens: int
    num_target_passes: int
    is_identical: bool
    draft_seconds: float | None = None
    verify_seconds: float | None = None

    @property
    def decode_seconds_per_token(self) -> float:
        assert self.prefill_seconds is not None
        return (self.seconds - self.prefill_seconds) / self.num_tokens


@dataclass(frozen=True)
class Costs:
    """The mean cost of a mode's step, relative to a plain pass: of its drafting and of its pass over the tree."""

    draft: float
    verify: float


@dataclass(frozen=True)
class Summary:
    """A mode's figures over the prompts of a task. Ratios are medians over prompts; above 1 is faster.

    Attributes:
        tokens_per_second: all tokens over all seconds, prefill included.
        acceptance_length: tokens per target pass, bonus token included.
        decode_speedup, total_speedup: over plain decoding, without and with prefill.
        predicted_speedup: the cost model's prediction of `decode_speedup`, from `costs` and the acceptance length.
        baseline_speedup: over transformers' generate, with prefill; None if that did not run.
        num_identical: prompts whose tokens equal those of plain decoding.
    """

    num_prompts: int
    tokens_per_second: float
    acceptance_length: float
    decode_speedup: float | None
    total_speedup: float
    baseline_speedup: float | None
    num_identical: int
    costs: Costs | None
    predicted_speedup: float | None


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """How to answer the prompts.

    Attributes:
        baseline: what transformers runs, see `load_baseline`; None leaves it out.
    """

    sampling: SamplingParams
    use_cost_guard: bool = True
    baseline: PreTrainedModel | None = None


# What answered, and the seconds of its prefill, its drafting and its target passes, as far as they are known.
Answered = tuple[Completion | TimedAnswer, float | None, float | None, float | None]


def measure_tasks(
    target: Target,
    tasks: Mapping[str, Sequence[PromptRow]],
    drafters: Mapping[str, Drafter | None],
    settings: TaskSettings,
    *,
    on_start: Callable[[float], None] = lambda _: None,
    on_prompt: Callable[[PromptRow, list[Measurement]], None] = lambda *_: None,
) -> list[Measurement]:
    """Answer every prompt with plain decoding, with each drafter, and with transformers if the settings name a baseline.

    Args:
        on_start: is told, after a warm-up, how many seconds all will take if no answer ends early.
        on_prompt: gets the measurements of each prompt as soon as all modes have answered it.
    """
    modes = {PLAIN: None, **drafters}
    rows = [(task, row) for task, of in tasks.items() for row in of]
    prompts = encode_prompts(target, [row for _, row in rows])
    on_start(len(prompts) * _warm_up(target, warm_up_text(sorted(prompts, key=len)[len(prompts) // 2]), modes, settings))
    baseline = None
    if settings.baseline is not None:
        baseline = transformers_run(target, prompts, sampling=settings.sampling, source=settings.baseline)
    measurements = []
    for (task, row), ids in zip(rows, prompts, strict=True):
        answers = {mode: _answer(target, ids, drafter, settings) for mode, drafter in modes.items()}
        if baseline is not None:
            answers[BASELINE] = next(baseline), None, None, None
        expected = answers[PLAIN][0].token_ids
        of_prompt = [
            Measurement(
                task=task,
                prompt_id=str(row.id),
                mode=mode,
                seconds=answer.seconds,
                prefill_seconds=prefill_seconds,
                num_tokens=len(answer.token_ids),
                num_target_passes=answer.num_target_passes,
                is_identical=answer.token_ids == expected,
                draft_seconds=draft_seconds,
                verify_seconds=verify_seconds,
            )
            for mode, (answer, prefill_seconds, draft_seconds, verify_seconds) in answers.items()
        ]
        on_prompt(row, of_prompt)
        measurements += of_prompt
    return measurements


def _warm_up(target: Target, ids: list[int], modes: Mapping[str, Drafter | None], settings: TaskSettings) -> float:
    """Answer shortly with every mode; returns the seconds that all whole answers to a prompt of this length would take."""
    short = replace(settings, sampling=WARM_UP)
    expected = {}
    for mode, drafter in modes.items():
        _answer(target, ids, drafter, short)
        answer, prefill_seconds, *_ = _answer(target, ids, drafter, short)
        assert prefill_seconds is not None
        per_token = (answer.seconds - prefill_seconds) / len(answer.token_ids)
        expected[mode] = prefill_seconds + per_token * settings.sampling.max_new_tokens
    # transformers warms up when its run begins, and is taken to be as fast as plain decoding.
    return sum(expected.values()) + (expected[PLAIN] if settings.baseline is not None else 0.0)


def _answer(target: Target, ids: list[int], drafter: Drafter | None, settings: TaskSettings) -> Answered:
    """Answer one prompt. The times of drafting and target passes are by the host clock that the planner uses."""
    draft_seconds = verify_seconds = 0.0
    planner = None if settings.use_cost_guard else Planner(is_active=False)
    for step in decode(target, [Request(ids, settings.sampling)], drafter=drafter, planner=planner):
        draft_seconds += step.seconds.draft
        verify_seconds += step.seconds.verify + step.seconds.commit
    completion = completion_of(step.sequences[0])
    return completion, completion.prefill_seconds, draft_seconds, verify_seconds


def summarise_tasks(measurements: Sequence[Measurement]) -> dict[str, dict[str, Summary]]:
    """Task -> mode -> summary. The last task, `overall`, covers all prompts."""
    tasks = list(dict.fromkeys(m.task for m in measurements))
    modes = list(dict.fromkeys(m.mode for m in measurements))
    out: dict[str, dict[str, Summary]] = {}
    costs = {mode: _costs(measurements, mode) for mode in modes if mode != BASELINE}
    for task in [*tasks, "overall"]:
        prompts = [of for (of_task, _), of in by_prompt(measurements).items() if task in (of_task, "overall")]
        out[task] = {mode: _summary(prompts, mode, costs.get(mode)) for mode in modes}
    return out


def by_prompt(measurements: Sequence[Measurement]) -> dict[tuple[str, str], dict[str, Measurement]]:
    """Task and prompt -> mode -> measurement."""
    out: dict[tuple[str, str], dict[str, Measurement]] = {}
    for m in measurements:
        out.setdefault((m.task, m.prompt_id), {})[m.mode] = m
    return out


def _costs(measurements: Sequence[Measurement], mode: str) -> Costs:
    """The mode's costs, as means over all passes of the run."""

    def seconds_per_pass(measured_mode: str, part: str) -> float:
        own = [m for m in measurements if m.mode == measured_mode]
        return sum(getattr(m, part) for m in own) / sum(m.num_target_passes for m in own)

    plain = seconds_per_pass(PLAIN, "verify_seconds")
    return Costs(seconds_per_pass(mode, "draft_seconds") / plain, seconds_per_pass(mode, "verify_seconds") / plain)


def _summary(prompts: Sequence[Mapping[str, Measurement]], mode: str, costs: Costs | None) -> Summary:
    own = [of[mode] for of in prompts]

    def ratio(other: str) -> float:
        return median(
            (of[other].seconds / of[other].num_tokens) / (of[mode].seconds / of[mode].num_tokens) for of in prompts
        )

    decode = None
    if mode != BASELINE:
        decode = median(of[PLAIN].decode_seconds_per_token / of[mode].decode_seconds_per_token for of in prompts)
    acceptance_length = sum(m.num_tokens for m in own) / sum(m.num_target_passes for m in own)
    return Summary(
        num_prompts=len(own),
        tokens_per_second=sum(m.num_tokens for m in own) / sum(m.seconds for m in own),
        acceptance_length=acceptance_length,
        decode_speedup=decode,
        total_speedup=ratio(PLAIN),
        baseline_speedup=ratio(BASELINE) if BASELINE in prompts[0] else None,
        num_identical=sum(m.is_identical for m in own),
        costs=costs,
        predicted_speedup=speedup(acceptance_length, costs.draft, costs.verify) if costs else None,
    )


def environment(target: Target) -> dict[str, object]:
    """What a reader needs to judge the numbers."""
    if target.device.type == "cuda":
        device = torch.cuda.get_device_name(target.device)
    else:
        # The instruction set decides how much wide passes gain.
        device = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "target": Path(target.name).name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def row_of(measurement: Measurement) -> dict[str, object]:
    """A measurement for a record's row, which names the prompt itself."""
    row = asdict(measurement)
    del row["prompt_id"]
    return row


def measurement_of(row: Mapping[str, Any]) -> Measurement:
    """The measurement in a record's row."""
    return Measurement(prompt_id=str(row["id"]), **{name: value for name, value in row.items() if name != "id"})
