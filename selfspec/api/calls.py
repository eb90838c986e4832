"""Calls for one thread: all completions, each as soon as it is there, or one answer step by step.

Invariant: completions come in the order of the prompts, and the pieces of a stream joined are its completion's text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from selfspec.api.arguments import (
    DrafterLike,
    SamplingLike,
    check_target,
    check_top_logprobs,
    planner_of,
    resolve_drafter,
    sampling_of,
    samplings_of,
)
from selfspec.api.prompts import Prompt, encode, listed
from selfspec.config import SamplingParams
from selfspec.loop.answer import Completion, StreamEvent, Teller, completion_of
from selfspec.loop.decode import decode
from selfspec.loop.drafter import Drafter
from selfspec.loop.planner import Planner
from selfspec.loop.sequence import Request, check_sampling
from selfspec.model.target import Target


def generate(
    target: Target,
    prompts: Iterable[Prompt] | Prompt,
    *,
    drafter: DrafterLike = None,
    sampling: SamplingLike | Sequence[SamplingLike] | None = None,
    top_logprobs: int = 0,
    batch_size: int = 1,
    use_cost_guard: bool = True,
    **settings: Any,
) -> list[Completion]:
    """Answer every prompt with `n` completions, one after the other in the order of the prompts.

    Threads may share a target and a drafter, and then take turns. For many callers at once, `AsyncEngine` is faster.

    Args:
        prompts: texts, conversations or token ids; or a single one of them, which has a list of completions too.
        drafter: what proposes tokens, or its name, as `load_drafter` knows it; None for plain decoding.
        sampling: one `SamplingParams`, or a dict of its fields, for all prompts; or a list with one for each prompt. Greedy
            by default.
        top_logprobs: how many of the likeliest tokens to report in each token's place.
        batch_size: how many sequences decode together.
        use_cost_guard: draft only as much as measurements say pays; False always drafts all it can.
        settings: fields of `SamplingParams`, such as `max_new_tokens=64`. They come before those of `sampling`.
    """
    return list(
        generate_iter(
            target,
            prompts,
            drafter=drafter,
            sampling=sampling,
            top_logprobs=top_logprobs,
            batch_size=batch_size,
            use_cost_guard=use_cost_guard,
            **settings,
        )
    )


def generate_iter(
    target: Target,
    prompts: Iterable[Prompt] | Prompt,
    *,
    drafter: DrafterLike = None,
    sampling: SamplingLike | Sequence[SamplingLike] | None = None,
    top_logprobs: int = 0,
    batch_size: int = 1,
    use_cost_guard: bool = True,
    **settings: Any,
) -> Iterator[Completion]:
    """`generate`, but yields each completion as soon as it and all before it have ended."""
    check_target(target)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r} is not allowed: use a whole number of at least 1")
    params = samplings_of(sampling, settings, top_logprobs=top_logprobs)
    order: list[tuple[int, int]] = []
    requests = requests_of(target, listed(prompts), params, order, top_logprobs)
    return _in_order(target, requests, order, resolve_drafter(drafter, target), planner_of(use_cost_guard), batch_size)


def stream(
    target: Target,
    prompt: Prompt,
    *,
    drafter: DrafterLike = None,
    sampling: SamplingLike | None = None,
    top_logprobs: int = 0,
    use_cost_guard: bool = True,
    **settings: Any,
) -> Iterator[StreamEvent]:
    """Answer one prompt with an event for each step; the pieces of text joined are the completion's text."""
    check_target(target)
    request = request_of(target, prompt, sampling, settings, top_logprobs)
    return _events(target, request, resolve_drafter(drafter, target), planner_of(use_cost_guard))


def request_of(
    target: Target, prompt: Prompt, sampling: SamplingLike | None, settings: dict[str, Any], top_logprobs: int
) -> Request:
    """The request of a stream.

    Raises:
        ValueError: it asks for several answers, or could never be served.
    """
    check_top_logprobs(top_logprobs)
    if isinstance(sampling, list | tuple):
        raise TypeError("sampling is a list, and a stream answers one prompt: pass one setting")
    params = sampling_of(sampling, settings, top_logprobs=top_logprobs)
    if params.n != 1:
        raise ValueError(f"n={params.n} is not allowed in a stream: use generate for several samples")
    check_sampling(target, params)
    return Request(encode(target, prompt, 0), params, num_top_logprobs=top_logprobs)


def requests_of(
    target: Target,
    prompts: Iterable[Prompt],
    sampling: Callable[[int], SamplingParams],
    order: list[tuple[int, int]],
    top_logprobs: int,
) -> Iterator[Request]:
    """Requests, made when places become free; `order` gets the completions to expect."""
    for index, prompt in enumerate(prompts):
        params = sampling(index)
        token_ids = encode(target, prompt, index)
        check_sampling(target, params)
        for sample_index in range(params.n):
            order.append((index, sample_index))
            yield Request(token_ids, params, index, sample_index, top_logprobs)


def _in_order(
    target: Target,
    requests: Iterator[Request],
    order: list[tuple[int, int]],
    drafter: Drafter | None,
    planner: Planner | None,
    batch_size: int,
) -> Iterator[Completion]:
    done: dict[tuple[int, int], Completion] = {}
    num_yielded = 0
    for step in decode(target, requests, drafter=drafter, max_batch=batch_size, planner=planner):
        for sequence in step.finished:
            completion = completion_of(sequence)
            done[completion.prompt_index, completion.sample_index] = completion
        while num_yielded < len(order) and order[num_yielded] in done:
            yield done.pop(order[num_yielded])
            num_yielded += 1


def _events(target: Target, request: Request, drafter: Drafter | None, planner: Planner | None) -> Iterator[StreamEvent]:
    teller: Teller | None = None
    for step in decode(target, [request], drafter=drafter, planner=planner):
        teller = teller or Teller(step.sequences[0])
        yield teller.news()
