"""One run of the runtime benchmark: its parts one after the other, each kept as soon as it is there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from selfspec.bench.report import RuntimeReport
from selfspec.bench.steps import (
    answer,
    check_contexts,
    end_to_end,
    peak_bytes,
    profile,
    promises,
    read_floor,
    stage_times,
    step_times,
    transformers_answers,
)
from selfspec.bench.tasks import environment
from selfspec.config import SamplingParams
from selfspec.loop.drafter import Drafter
from selfspec.model.target import Target
from selfspec.traffic.prompt_files import PromptRow

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What to measure; an empty list leaves its part out.

    Attributes:
        baselines: of `eager` and `static`.
        baseline: what transformers runs: where to load it from, or the model.
        profile: where to write a trace of the last drafter.
        revision: of the baseline, where it is loaded from the Hub.
        notes: what the report is to say beside its figures.
    """

    contexts: Sequence[int]
    nodes: Sequence[int]
    num_calls: int
    prompts: Sequence[PromptRow]
    sampling: SamplingParams
    baselines: Sequence[str]
    baseline: str | PreTrainedModel
    acceptance_lengths: Sequence[int]
    synthetic_nodes: int
    profile: Path | None
    revision: str | None = None
    notes: Sequence[str] = ()


def run(
    target: Target,
    drafters: Mapping[str, Drafter | None],
    plan: Plan,
    *,
    on_part: Callable[[str], None] = lambda _: None,
    on_result: Callable[[RuntimeReport], None] = lambda _: None,
) -> RuntimeReport:
    """Measure; `on_part` hears what comes next, `on_result` gets the report after every part."""
    check_contexts(target, plan.contexts, plan.nodes)
    report = RuntimeReport(environment(target), notes=list(plan.notes))
    prompts = [target.encode(row.prompt) for row in plan.prompts]

    def finish(part: str) -> None:
        report.peak_bytes[part] = peak_bytes(target.device)
        if target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(target.device)
        on_result(report)

    finish("loading")
    on_part("measuring the floor and the steps")
    report.floor = read_floor(target)
    report.steps, report.prefills = step_times(target, plan.contexts, plan.nodes, num_calls=plan.num_calls)
    finish("steps")
    if not prompts:
        return report

    on_part("measuring the stages of the loop")
    stage_sampling = plan.sampling.with_(ignore_eos=True)
    for drafter in (None, *drafters.values()):
        report.stages.append(stage_times(target, prompts[0], drafter, stage_sampling))
    finish("stages")

    on_part("measuring end to end")
    report.answers = end_to_end(target, prompts, drafters, plan.sampling)
    finish("end to end")

    if plan.acceptance_lengths:
        on_part("measuring against the cost model")
        report.promises = promises(
            target,
            prompts[:2],
            plan.acceptance_lengths,
            plan.synthetic_nodes,
            max_new_tokens=plan.sampling.max_new_tokens,
        )
        finish("cost model")

    if plan.profile is not None:
        on_part("profiling")
        last = list(drafters.values())[-1] if drafters else None
        report.kernels = profile(target, prompts[0], last, plan.profile)
        finish("profile")

    if plan.baselines:
        on_part("measuring transformers")
        _baselines(target, prompts, plan, report)
        finish("transformers")
    return report


def _baselines(target: Target, prompts: list[list[int]], plan: Plan, report: RuntimeReport) -> None:
    model: Any = plan.baseline
    if isinstance(model, str):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=target.dtype, revision=plan.revision)
        model = model.to(target.device).eval()
    expected = [answer(target, prompt, None, plan.sampling, use_cost_guard=True)[0].token_ids for prompt in prompts]
    if "eager" in plan.baselines:
        report.answers += transformers_answers(model, prompts, expected, plan.sampling, mode="transformers")
    if "static" in plan.baselines:
        # One prompt: every length of answer and prompt is compiled anew.
        try:
            report.answers += transformers_answers(
                model,
                prompts[:1],
                expected[:1],
                plan.sampling,
                mode="transformers, static cache",
                cache_implementation="static",
            )
        except Exception as error:
            # Somebody else's compiler: what was measured before it is worth more than its failure.
            logger.debug("static cache", exc_info=True)
            first = (str(error).strip().splitlines() or [""])[0]
            report.notes.append(f"transformers with a static cache failed: {type(error).__name__}: {first}")
