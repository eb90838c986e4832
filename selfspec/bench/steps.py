"""What a step costs and where its time goes, on one target, device and dtype, in one run.

The floor is the time the device takes to read every weight of the target once, at the speed of a large copy. It leaves out
the embedding table, because a step reads only a few of its rows. A step is timed as a whole, after warm-up calls: device
seconds by CUDA events (gaps between kernels included), wall seconds until the device is done, and their difference, the host
gap. The decoding loop times its own stages, on the device where it can tell, and never waits for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function
from transformers import PreTrainedModel

from selfspec.api import Completion, stream
from selfspec.bench.compare import PLAIN, WARM_UP
from selfspec.bench.synthetic import SyntheticDrafter
from selfspec.config import SamplingParams
from selfspec.loop import scheduler, step
from selfspec.loop.decode import decode
from selfspec.loop.drafter import Drafter, NoDrafter
from selfspec.loop.planner import Planner
from selfspec.loop.sequence import Request
from selfspec.model.stored_linear import StoredLinear
from selfspec.model.target import Target
from selfspec.tree import CandidateTree, from_parents

# Calls of a step before any is timed. Kernels are compiled and graphs captured during them.
NUM_WARM_UP = 5


@dataclass(frozen=True)
class Floor:
    """What it takes to read the weights once. `copy_bytes_per_second` counts bytes read and bytes written."""

    copy_bytes_per_second: float
    weight_bytes: int
    kv_bytes_per_token: int

    @property
    def seconds(self) -> float:
        return self.weight_bytes / self.copy_bytes_per_second

    def seconds_at(self, context: int) -> float:
        """The floor of a step after `context` tokens, whose keys and values it reads too."""
        return (self.weight_bytes + context * self.kv_bytes_per_token) / self.copy_bytes_per_second


@dataclass(frozen=True)
class StepTime:
    """Medians for a verify pass over a random tree. `device_seconds` is None on a device without CUDA events."""

    context: int
    num_nodes: int
    wall_seconds: float
    device_seconds: float | None

    @property
    def host_gap_seconds(self) -> float | None:
        return None if self.device_seconds is None else self.wall_seconds - self.device_seconds


@dataclass(frozen=True)
class PrefillTime:
    """Seconds to prefill the tokens from `start` to `context`."""

    start: int
    context: int
    seconds: float


@dataclass(frozen=True)
class StageTimes:
    """Median seconds of a step's stages: of the device where it can tell, of the host otherwise.

    `verify` includes acceptance and compaction. `commit` is the host's, which reads the outcome and passes it on.
    """

    mode: str
    num_steps: int
    num_nodes: int
    draft: float
    verify: float
    commit: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.commit


@dataclass(frozen=True)
class AnswerTime:
    """How long one mode took to answer one prompt.

    Attributes:
        seconds: wall clock, prefill included.
        decode_seconds_per_token: for the tokens after the first step; None if the steps cannot be told apart.
        is_identical: the tokens equal those of plain decoding.
    """

    mode: str
    prompt_index: int
    num_tokens: int
    num_target_passes: int
    seconds: float
    decode_seconds_per_token: float | None
    is_identical: bool


@dataclass(frozen=True)
class Promise:
    """A drafter with a set acceptance length: the speed-up that the cost model promises, and the one measured.

    Attributes:
        acceptance_length: as measured; below the set one if low precision changed the text.
        promised: acceptance_length * (seconds of a plain step) / (seconds of a step of this drafter), stages timed alone.
        measured: seconds per token of plain decoding over those of this drafter, end to end without prefill.
    """

    set_length: int
    num_nodes: int
    acceptance_length: float
    promised: float
    measured: float


def read_floor(target: Target, *, num_calls: int = 20) -> Floor:
    """Measure the copy bandwidth of the target's device, and count what a step has to read."""
    size = 1 << (30 if target.device.type == "cuda" else 26)
    source = torch.ones(size, dtype=torch.uint8, device=target.device)
    copy = torch.empty_like(source)
    timings = timed(lambda: copy.copy_(source), target.device, num_calls)
    seconds = median(wall if device is None else device for wall, device in timings)
    return Floor(2 * size / seconds, weight_bytes(target.model), target.kv_shape.bytes_per_token(target.dtype))


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights except the embedding table, which counts only if the LM head shares it."""
    embedding = model.get_input_embeddings()
    weights: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, StoredLinear):
            weights[id(module)] = module.num_bytes
        if module is not embedding:
            weights |= {id(p): p.numel() * p.itemsize for p in module.parameters(recurse=False)}
    return sum(weights.values())


def timed(call: Callable[[], Any], device: torch.device, num_calls: int) -> list[tuple[float, float | None]]:
    """Wall and device seconds of each of `num_calls` calls, after a few warm-up calls."""
    for _ in range(NUM_WARM_UP):
        call()
    timings: list[tuple[float, float | None]] = []
    for _ in range(num_calls):
        now = clock_of(device)
        if device.type != "cuda":
            start = now()
            call()
            timings.append((now() - start, None))
            continue
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        start = now()
        events[0].record()
        call()
        events[1].record()
        wall = now() - start
        timings.append((wall, events[0].elapsed_time(events[1]) / 1000))
    return timings


def clock_of(device: torch.device) -> Callable[[], float]:
    """A clock that waits until the device has finished all its work, then reads the host's time."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def random_tree(target: Target, num_nodes: int, seed: int = 0) -> CandidateTree:
    """A tree [1, num_nodes] with random tokens. The parent of each node is a random earlier node."""
    generator = torch.Generator().manual_seed(seed)
    parents = [-1, *(int(torch.randint(i, (1,), generator=generator)) for i in range(1, num_nodes))]
    tokens = torch.randint(target.config.vocab_size, (1, num_nodes), generator=generator)
    return from_parents(tokens.to(target.device), torch.tensor([parents], device=target.device))


def check_contexts(target: Target, contexts: Sequence[int], nodes: Sequence[int]) -> None:
    """Raise a ValueError for a prefix length that leaves no room for the largest tree."""
    most = target.context_length - max(nodes)
    for context in contexts:
        if not 1 <= context <= most:
            raise ValueError(
                f"context {context} is not possible: {target.name} takes 1 to {most} with trees of {max(nodes)} nodes"
            )


def step_times(
    target: Target, contexts: Sequence[int], nodes: Sequence[int], *, num_calls: int = 30
) -> tuple[list[StepTime], list[PrefillTime]]:
    """Time `target.verify` at batch 1 for every prefix length and tree size. Prefixes are prefilled random tokens."""
    check_contexts(target, contexts, nodes)
    cache = target.new_cache()
    row = cache.open_row()
    now = clock_of(target.device)
    generator = torch.Generator().manual_seed(1)
    steps, prefills = [], []
    for context in sorted(set(contexts)):
        start = row.length
        tokens = torch.randint(target.config.vocab_size, (context - start,), generator=generator).to(target.device)
        began = now()
        target.prefill(tokens, row, cache)
        prefills.append(PrefillTime(start, context, now() - began))
        for num_nodes in nodes:
            tree = random_tree(target, num_nodes)
            timings = timed(lambda tree=tree: target.verify(tree, [row], cache), target.device, num_calls)  # type: ignore[misc]
            on_device = [device for _, device in timings if device is not None]
            wall = median(wall for wall, _ in timings)
            steps.append(StepTime(context, num_nodes, wall, median(on_device) if on_device else None))
    cache.release(row)
    return steps, prefills


# What a profile calls the functions that run each stage.
STAGES = (("draft", step, "propose"), ("verify", step, "_enter"), ("commit", scheduler, "land"))


@contextmanager
def marked_stages() -> Iterator[None]:
    """Mark the stages of every step in a profile. The loop itself does not, because marks take time at every step."""
    before = [getattr(module, name) for _, module, name in STAGES]
    try:
        for (label, module, name), function in zip(STAGES, before, strict=True):
            setattr(module, name, record_function(label)(function))
        yield
    finally:
        for (_, module, name), function in zip(STAGES, before, strict=True):
            setattr(module, name, function)


def stage_times(target: Target, prompt_ids: list[int], drafter: Drafter | None, sampling: SamplingParams) -> StageTimes:
    """Answer one prompt with the cost guard off, and take each stage's time."""
    inner = drafter or NoDrafter()
    answer_times(target, prompt_ids, inner, sampling, use_cost_guard=False)
    planner = Planner(is_active=False)
    steps = list(decode(target, [Request(prompt_ids, sampling)], drafter=inner, planner=planner))
    stages = {name: median(getattr(each.seconds, name) for each in steps) for name, _, _ in STAGES}
    return StageTimes(inner.name, len(steps), int(median(each.tree.num_nodes for each in steps)), **stages)


def answer_times(
    target: Target, prompt_ids: list[int], drafter: Drafter | None, sampling: SamplingParams, *, use_cost_guard: bool
) -> tuple[Completion, float | None]:
    """Answer one prompt. Also returns seconds per token, without the first step because that includes the prefill."""
    times, counts = [], []
    completion = None
    for event in stream(target, prompt_ids, drafter=drafter, sampling=sampling, use_cost_guard=use_cost_guard):
        times.append(time.perf_counter())
        counts.append(len(event.token_ids))
        completion = event.completion
    assert completion is not None
    num_later = sum(counts[1:])
    return completion, (times[-1] - times[0]) / num_later if num_later else None


def end_to_end(
    target: Target,
    prompts: Sequence[list[int]],
    drafters: Mapping[str, Drafter | None],
    sampling: SamplingParams,
    *,
    on_answer: Callable[[], None] = lambda: None,
) -> list[AnswerTime]:
    """Answer every prompt with every mode in turn, plain decoding first, with the cost guard on."""
    modes = {PLAIN: None, **drafters}
    for drafter in modes.values():
        answer_times(target, prompts[0], drafter, sampling, use_cost_guard=True)
    answers = []
    for index, prompt in enumerate(prompts):
        expected: list[int] = []
        for mode, drafter in modes.items():
            completion, per_token = answer_times(target, prompt, drafter, sampling, use_cost_guard=True)
            expected = completion.token_ids if mode == PLAIN else expected
            answers.append(
                AnswerTime(
                    mode,
                    index,
                    len(completion.token_ids),
                    completion.num_target_passes,
                    completion.seconds,
                    per_token,
                    completion.token_ids == expected,
                )
            )
            on_answer()
    return answers


def transformers_times(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    expected: Sequence[list[int]],
    sampling: SamplingParams,
    *,
    mode: str,
    **options: Any,
) -> list[AnswerTime]:
    """Answer the same prompts with transformers' greedy `generate`, each once untimed because it compiles for each length.

    Args:
        expected: the tokens of plain decoding for each prompt.
        options: more options of `generate`; `cache_implementation="static"` compiles the forward on CUDA.
    """
    device = model.device
    now = clock_of(device)
    answers = []
    for index, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
        input_ids = torch.tensor([prompt], device=device)
        settings = {"max_new_tokens": sampling.max_new_tokens, "do_sample": False, **options}
        # A whole answer, because a static cache has the size of the whole answer.
        model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **settings)
        start = now()
        output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **settings)
        seconds = now() - start
        got = output[0, len(prompt) :].tolist()
        answers.append(AnswerTime(mode, index, len(got), len(got), seconds, None, got == tokens))
    return answers


def promises(
    target: Target, prompts: Sequence[list[int]], lengths: Sequence[int], num_nodes: int, *, max_new_tokens: int
) -> list[Promise]:
    """Measure drafters with these acceptance lengths, and compare each with what the cost model promises for it."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    answer_times(target, prompts[0], None, sampling, use_cost_guard=False)
    plain = [answer_times(target, prompt, None, sampling, use_cost_guard=False) for prompt in prompts]
    answers = {tuple(prompt): done.token_ids for prompt, (done, _) in zip(prompts, plain, strict=True)}
    plain_stages = stage_times(target, prompts[0], None, sampling)
    results = []
    for length in lengths:
        drafter = SyntheticDrafter(answers, acceptance_length=length, num_nodes=num_nodes)
        stages = stage_times(target, prompts[0], drafter, sampling)
        runs = [answer_times(target, prompt, drafter, sampling, use_cost_guard=False) for prompt in prompts]
        num_tokens = sum(len(done.token_ids) for done, _ in runs)
        acceptance_length = num_tokens / sum(done.num_target_passes for done, _ in runs)
        ratios = [
            before / after for (_, before), (_, after) in zip(plain, runs, strict=True) if before is not None and after
        ]
        if not ratios:
            raise ValueError(f"max_new_tokens={max_new_tokens} is reached in one step of {length} tokens: use more")
        promised = acceptance_length * plain_stages.total / stages.total
        results.append(Promise(length, num_nodes, acceptance_length, promised, median(ratios)))
    return results


def profile(target: Target, prompt_ids: list[int], drafter: Drafter | None, path: Path) -> list[dict[str, Any]]:
    """Write a Chrome trace of a short answer with its stages marked. Returns the kernels that took the most device time."""
    answer_times(target, prompt_ids, drafter, WARM_UP, use_cost_guard=False)
    activities = [ProfilerActivity.CPU]
    if target.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with marked_stages(), torch.profiler.profile(activities=activities) as trace:
        answer_times(target, prompt_ids, drafter, WARM_UP.with_(max_new_tokens=32), use_cost_guard=False)
    trace.export_chrome_trace(str(path))
    on_device = target.device.type == "cuda"
    rows = []
    for event in trace.key_averages():
        if not on_device:
            rows.append((event.self_cpu_time_total, event.count, event.key))
        elif event.device_type == DeviceType.CUDA and event.key not in {label for label, _, _ in STAGES}:
            rows.append((event.self_device_time_total, event.count, event.key))
    rows.sort(reverse=True)
    return [{"name": name, "calls": count, "ms": microseconds / 1000} for microseconds, count, name in rows[:20]]


def peak_bytes(device: torch.device) -> int | None:
    """The most memory that torch has held on the device since the last reset; None on a device without such a count."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
