"""One run of the runtime benchmark, part after part. The caller gets the report after each, so a failure loses little."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from selfspec.bench.baseline import load_baseline
from selfspec.bench.report import RuntimeReport
from selfspec.bench.steps import (
    answer_times,
    check_contexts,
    end_to_end,
    peak_bytes,
    profile,
    promises,
    read_floor,
    stage_times,
    step_times,
    transformers_times,
)
from selfspec.bench.tasks import environment
from selfspec.config import SamplingParams
from selfspec.loop.drafter import Drafter
from selfspec.model.target import Target
from selfspec.traffic.prompt_files import PromptRow

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RuntimeSettings:
    """What to measure. An empty list leaves its part out.

    Attributes:
        baselines: any of `eager` and `static`.
        baseline: what transformers runs: a path or Hub id to load, or the model itself.
        profile: where to write a trace of the last drafter.
        revision: the baseline's, if it is loaded from the Hub.
        notes: what the report should say besides its figures.
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


def measure_runtime(
    target: Target,
    drafters: Mapping[str, Drafter | None],
    settings: RuntimeSettings,
    *,
    on_part: Callable[[str], None] = lambda _: None,
    on_result: Callable[[RuntimeReport], None] = lambda _: None,
) -> RuntimeReport:
    """Measure every part. `on_part` is told what comes next; `on_result` gets the report after every part."""
    check_contexts(target, settings.contexts, settings.nodes)
    report = RuntimeReport(environment(target), notes=list(settings.notes))
    prompts = [target.encode(row.prompt) for row in settings.prompts]

    def finish(part: str) -> None:
        report.peak_bytes[part] = peak_bytes(target.device)
        if target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(target.device)
        on_result(report)

    finish("loading")
    on_part("measuring the floor and the steps")
    report.floor = read_floor(target)
    report.steps, report.prefills = step_times(target, settings.contexts, settings.nodes, num_calls=settings.num_calls)
    finish("steps")
    if not prompts:
        return report

    on_part("measuring the stages of the loop")
    stage_sampling = settings.sampling.with_(ignore_eos=True)
    for drafter in (None, *drafters.values()):
        report.stages.append(stage_times(target, prompts[0], drafter, stage_sampling))
    finish("stages")

    on_part("measuring end to end")
    report.answers = end_to_end(target, prompts, drafters, settings.sampling)
    finish("end to end")

    if settings.acceptance_lengths:
        on_part("measuring against the cost model")
        lengths, num_nodes = settings.acceptance_lengths, settings.synthetic_nodes
        most = settings.sampling.max_new_tokens
        report.promises = promises(target, prompts[:2], lengths, num_nodes, max_new_tokens=most)
        finish("cost model")

    if settings.profile is not None:
        on_part("profiling")
        last = list(drafters.values())[-1] if drafters else None
        report.kernels = profile(target, prompts[0], last, settings.profile)
        finish("profile")

    if settings.baselines:
        on_part("measuring transformers")
        _measure_baselines(target, prompts, settings, report)
        finish("transformers")
    return report


def _measure_baselines(target: Target, prompts: list[list[int]], settings: RuntimeSettings, report: RuntimeReport) -> None:
    model, sampling = settings.baseline, settings.sampling
    if isinstance(model, str):
        model = load_baseline(target, model, revision=settings.revision)
    plain = [answer_times(target, prompt, None, sampling, use_cost_guard=True)[0] for prompt in prompts]
    expected = [completion.token_ids for completion in plain]
    if "eager" in settings.baselines:
        report.answers += transformers_times(model, prompts, expected, sampling, mode="transformers")
    if "static" in settings.baselines:
        mode = "transformers, static cache"
        # One prompt only, because every length of prompt and answer is compiled separately.
        one, its_answer = prompts[:1], expected[:1]
        try:
            report.answers += transformers_times(model, one, its_answer, sampling, mode=mode, cache_implementation="static")
        except Exception as error:
            # The compiler is not ours. Its failure must not cost what was measured before it.
            logger.debug("static cache", exc_info=True)
            first = (str(error).strip().splitlines() or [""])[0]
            report.notes.append(f"transformers with a static cache failed: {type(error).__name__}: {first}")
