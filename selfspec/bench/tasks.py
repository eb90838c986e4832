"""Speed on real prompts, task by task, against two baselines of the same run.

Every mode answers every prompt in turn, because a slow spell of a shared machine then slows all modes alike. A task's
speed-up is the median, over its prompts, of the ratio of seconds per token. Prefill is the same work in every mode and is
timed apart: `decode` ratios leave it out, `total` ratios include it.

Next to each measured speed-up stands the cost model's prediction (`selfspec.plan.formulas.speedup`): a task's acceptance
length over the cost of a step, with one pair of cost ratios for the whole run. The model leaves out the host's time between
drafts and passes. It also ignores that costs differ between tasks, with the length of the text and the number of drafts.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import transformers
from transformers import PreTrainedModel

from selfspec.api import Completion, completion_of
from selfspec.bench.compare import PLAIN, WARM_UP, TimedAnswer, transformers_run
from selfspec.config import SamplingParams
from selfspec.drafters import Drafter
from selfspec.loop.decode import decode
from selfspec.loop.planner import Planner
from selfspec.loop.sequence import Request
from selfspec.model.target import Target
from selfspec.plan.formulas import speedup
from selfspec.traffic.prompt_files import PromptRow

# The baselines are this runtime's plain decoding (`PLAIN`) and transformers' generate.
BASELINE = "transformers"


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
        baseline_source: what transformers runs: a path or Hub id to load, or the model itself; None leaves it out.
    """

    sampling: SamplingParams
    use_cost_guard: bool = True
    baseline_source: str | PreTrainedModel | None = None


# What answered, and the seconds of its prefill, its drafting and its target passes, as far as they are known.
Answered = tuple[Completion | TimedAnswer, float | None, float | None, float | None]


def measure_tasks(
    target: Target,
    tasks: Mapping[str, Sequence[PromptRow]],
    drafters: Mapping[str, Drafter | None],
    settings: TaskSettings,
    *,
    on_prompt: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Answer every prompt with plain decoding, with each drafter, and with transformers if the settings name a baseline."""
    modes = {PLAIN: None, **drafters}
    prompts = [(task, row, target.encode(row.prompt)) for task, rows in tasks.items() for row in rows]
    sampling, source = settings.sampling, settings.baseline_source
    for drafter in modes.values():
        _answer(target, prompts[0][2], drafter, WARM_UP)
    baseline = None
    if source is not None:
        baseline = transformers_run(target, [ids for _, _, ids in prompts], sampling=sampling, source=source)
    measurements = []
    for task, row, ids in prompts:
        answers = {
            mode: _answer(target, ids, drafter, sampling, use_cost_guard=settings.use_cost_guard)
            for mode, drafter in modes.items()
        }
        if baseline is not None:
            answers[BASELINE] = next(baseline), None, None, None
        expected = answers[PLAIN][0].token_ids
        for mode, (answer, prefill_seconds, draft_seconds, verify_seconds) in answers.items():
            measurements.append(
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
            )
        on_prompt()
    return measurements


def _answer(
    target: Target, ids: list[int], drafter: Drafter | None, sampling: SamplingParams, *, use_cost_guard: bool = True
) -> Answered:
    """Answer one prompt. The times of drafting and target passes are by the host clock that the planner uses."""
    draft_seconds = verify_seconds = 0.0
    planner = None if use_cost_guard else Planner(is_active=False)
    for step in decode(target, [Request(ids, sampling)], drafter=drafter, planner=planner):
        draft_seconds += step.seconds.draft
        verify_seconds += step.seconds.verify + step.seconds.commit
    completion = completion_of(step.sequences[0])
    return completion, completion.prefill_seconds, draft_seconds, verify_seconds


def summarise_tasks(measurements: Sequence[Measurement]) -> dict[str, dict[str, Summary]]:
    """Task -> mode -> summary. The last task, `overall`, covers all prompts."""
    by_prompt: dict[tuple[str, str], dict[str, Measurement]] = {}
    for m in measurements:
        by_prompt.setdefault((m.task, m.prompt_id), {})[m.mode] = m
    tasks = list(dict.fromkeys(m.task for m in measurements))
    modes = list(dict.fromkeys(m.mode for m in measurements))
    out: dict[str, dict[str, Summary]] = {}
    costs = {mode: _costs(measurements, mode) for mode in modes if mode != BASELINE}
    for task in [*tasks, "overall"]:
        prompts = [of for (of_task, _), of in by_prompt.items() if task in (of_task, "overall")]
        out[task] = {mode: _summary(prompts, mode, costs.get(mode)) for mode in modes}
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
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else platform.machine()
    return {
        "target": Path(target.name).name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def save_tasks(path: Path, target: Target, sampling: SamplingParams, measurements: Sequence[Measurement]) -> None:
    """Write every measurement and the summary as one JSON file."""
    record = {
        "environment": environment(target),
        "sampling": asdict(sampling),
        "summary": {
            task: {mode: asdict(summary) for mode, summary in modes.items()}
            for task, modes in summarise_tasks(measurements).items()
        },
        "measurements": [asdict(m) for m in measurements],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
