"""The library's front door: prompts in, completions or a stream of text out, through the loop in `selfspec.loop.decode`.

Invariant: completions come in the order of the prompts, and the pieces of a stream joined are its completion's text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from selfspec.config import SamplingParams
from selfspec.loop import sequence as decoded
from selfspec.loop.decode import decode
from selfspec.loop.drafter import Drafter
from selfspec.loop.planner import Planner
from selfspec.loop.sequence import Request, check_prompt, check_sampling
from selfspec.model.target import Target
from selfspec.model.text_side import TextSide

# Raw text, chat messages, or token ids.
Prompt = str | Sequence[dict[str, str]] | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """One answer and what it cost.

    Attributes:
        text: the answer, cut before a stop string, without special tokens unless the settings keep them.
        token_ids: every emitted token, the one that ended the answer included.
        finish_reason: `stop` (end token, stop id or stop string) or `length`.
        stop_string: the stop string that ended the answer, if one did.
        logprobs: log-probability of each emitted token under the target, where asked for.
        top_logprobs: for each emitted token, the likeliest tokens in its place and their log-probabilities, where asked for.
        num_target_passes: verify passes that the answer took; prefill is not counted.
        num_draft_tokens, num_accepted_tokens: tokens that were drafted, and drafted tokens that were emitted.
        num_paused_passes: passes without drafts because the text had outgrown the drafter's context.
        num_reused_tokens: prompt tokens whose KV was in the cache already.
        seconds, prefill_seconds: wall clock from admission to the last token, and the prefill's part of it.
        queue_seconds: wall clock before admission.
    """

    prompt_index: int
    sample_index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_string: str | None
    logprobs: list[float] | None
    num_prompt_tokens: int
    num_target_passes: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_paused_passes: int
    seconds: float
    prefill_seconds: float
    top_logprobs: list[list[tuple[int, float]]] | None = None
    num_reused_tokens: int = 0
    queue_seconds: float = 0.0

    @property
    def end_token_id(self) -> int | None:
        """The token that ended the answer and is no part of its text; None where something else ended it."""
        return self.token_ids[-1] if self.finish_reason == "stop" and self.stop_string is None else None

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target pass, bonus token included; 1 in autoregressive decoding."""
        return len(self.token_ids) / self.num_target_passes

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of wall clock, prefill included."""
        return len(self.token_ids) / self.seconds


@dataclass(frozen=True)
class StreamEvent:
    """What one step added: text that may be shown, the emitted token ids, and at the end the whole completion."""

    text: str
    token_ids: list[int]
    completion: Completion | None


def generate(
    target: Target,
    prompts: Iterable[Prompt] | Prompt,
    *,
    drafter: Drafter | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    batch_size: int = 1,
    use_cost_guard: bool = True,
) -> list[Completion]:
    """Answer every prompt with `sampling.n` completions, one after the other in the order of the prompts.

    Threads may share a target and a drafter, and then take turns. For many callers at once, `SpecEngine` is faster.

    Args:
        prompts: texts, conversations or token ids; or a single one of them.
        sampling: one setting for all prompts, or one for each; greedy by default.
        batch_size: how many sequences decode together.
        use_cost_guard: draft only as much as measurements say pays; False always drafts all it can.
    """
    return list(
        generate_iter(
            target, prompts, drafter=drafter, sampling=sampling, batch_size=batch_size, use_cost_guard=use_cost_guard
        )
    )


def generate_iter(
    target: Target,
    prompts: Iterable[Prompt] | Prompt,
    *,
    drafter: Drafter | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    batch_size: int = 1,
    use_cost_guard: bool = True,
) -> Iterator[Completion]:
    """`generate`, but yields each completion as soon as it and all before it have ended."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is not allowed: use a whole number of at least 1")
    _check_settings(drafter, sampling)
    done: dict[tuple[int, int], Completion] = {}
    order: list[tuple[int, int]] = []
    num_yielded = 0
    requests = _requests(target, _listed(prompts), sampling, order)
    planner = None if use_cost_guard else Planner(is_active=False)
    for step in decode(target, requests, drafter=drafter, max_batch=batch_size, planner=planner):
        for sequence in step.finished:
            completion = completion_of(sequence)
            done[completion.prompt_index, completion.sample_index] = completion
        while num_yielded < len(order) and order[num_yielded] in done:
            yield done.pop(order[num_yielded])
            num_yielded += 1


def stream(
    target: Target,
    prompt: Prompt,
    *,
    drafter: Drafter | None = None,
    sampling: SamplingParams | None = None,
    use_cost_guard: bool = True,
) -> Iterator[StreamEvent]:
    """Answer one prompt with an event for each step; the pieces of text joined are the completion's text."""
    sampling = sampling or SamplingParams()
    if sampling.n != 1:
        raise ValueError(f"n={sampling.n} is not allowed in a stream: use generate for several samples")
    _check_settings(drafter, sampling)
    check_sampling(target, sampling)
    requests = [Request(encode(target, prompt, 0), sampling)]
    planner = None if use_cost_guard else Planner(is_active=False)
    for step in decode(target, requests, drafter=drafter, planner=planner):
        sequence = step.sequences[0]
        completion = completion_of(sequence) if step.finished else None
        yield StreamEvent(sequence.text_stream.take(is_last=completion is not None), step.emitted[0], completion)


def encode(target: TextSide, prompt: Prompt, index: int) -> list[int]:
    """The token ids of a prompt of any kind: at least one, all in the vocabulary, and with room for an answer.

    Args:
        index: the prompt's number, for the error's sentence.
    """
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], dict)):
        token_ids = target.encode(prompt) if len(prompt) else []  # type: ignore[arg-type]
    else:
        token_ids = list(prompt)  # type: ignore[arg-type]
    check_prompt(target, token_ids, name=f"prompt {index}")
    return token_ids


def _listed(prompts: Iterable[Prompt] | Prompt) -> Iterable[Prompt]:
    """The prompts as an iterable, also where a single text, conversation or list of token ids was given."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], dict | int):
        return [prompts]
    return prompts  # type: ignore[return-value]


def _check_settings(drafter: object, sampling: object) -> None:
    if drafter is not None and not isinstance(drafter, Drafter):
        raise TypeError(f"drafter={drafter!r} is not a drafter: pass load_drafter({drafter!r}, target)")
    for params in sampling if isinstance(sampling, list | tuple) else [sampling]:
        if params is not None and not isinstance(params, SamplingParams):
            raise TypeError(f"sampling={params!r} is not a SamplingParams: pass SamplingParams(max_new_tokens=64)")


def _requests(
    target: Target,
    prompts: Iterable[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    order: list[tuple[int, int]],
) -> Iterator[Request]:
    """Requests, made when places become free; `order` gets the completions to expect."""
    for index, prompt in enumerate(prompts):
        if isinstance(sampling, Sequence):
            if index >= len(sampling):
                raise ValueError(f"sampling has {len(sampling)} settings and there are more prompts: give one for each")
            params = sampling[index]
        else:
            params = sampling or SamplingParams()
        token_ids = encode(target, prompt, index)
        check_sampling(target, params)
        for sample_index in range(params.n):
            order.append((index, sample_index))
            yield Request(token_ids, params, index, sample_index)


def completion_of(sequence: decoded.Sequence) -> Completion:
    """The answer of a sequence that has ended."""
    assert sequence.finish_reason is not None
    return Completion(
        prompt_index=sequence.request.index,
        sample_index=sequence.request.sample_index,
        text=sequence.text_stream.text,
        token_ids=sequence.token_ids,
        finish_reason=sequence.finish_reason,
        stop_string=sequence.text_stream.stop_string,
        logprobs=sequence.logprobs if sequence.sampling.logprobs else None,
        num_prompt_tokens=len(sequence.request.prompt_ids),
        num_target_passes=sequence.num_target_passes,
        num_draft_tokens=sequence.num_draft_tokens,
        num_accepted_tokens=sequence.num_accepted_tokens,
        num_paused_passes=sequence.num_paused_passes,
        seconds=sequence.seconds,
        prefill_seconds=sequence.prefill_seconds,
        top_logprobs=sequence.top_logprobs if sequence.request.num_top_logprobs else None,
        num_reused_tokens=sequence.num_reused_tokens,
        queue_seconds=sequence.started - sequence.created,
    )
