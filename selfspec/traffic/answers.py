"""From prompt rows to the result rows that `selfspec generate` writes: one list for each prompt, in order."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from selfspec.api import Completion, encode, generate, generate_iter
from selfspec.config import SamplingParams
from selfspec.loop.drafter import Drafter
from selfspec.model.target import Target
from selfspec.traffic.prompt_files import PromptRow


def encode_prompts(target: Target, rows: Sequence[PromptRow]) -> list[list[int]]:
    """Token ids of every first turn. A prompt that the target cannot take is named before any is answered."""
    prompts = []
    for i, row in enumerate(rows):
        with _naming(row):
            prompts.append(encode(target, row.prompt, i))
    return prompts


def answer_prompts(
    target: Target,
    rows: Sequence[PromptRow],
    prompts: Sequence[list[int]],
    *,
    drafter: Drafter | None,
    sampling: SamplingParams,
    batch_size: int,
    use_cost_guard: bool,
) -> Iterator[list[dict[str, Any]]]:
    """Answer the encoded first turn of each row, with `sampling.n` result rows for each.

    Args:
        prompts: token ids, one list for each row.
    """
    completions = generate_iter(
        target,
        prompts,
        drafter=drafter,
        sampling=sampling,
        batch_size=batch_size,
        use_cost_guard=use_cost_guard,
    )
    for row in rows:
        yield [result_row(row, sample, sampling) for sample in itertools.islice(completions, sampling.n)]


def answer_all_turns(
    target: Target,
    rows: Sequence[PromptRow],
    *,
    drafter: Drafter | None,
    sampling: SamplingParams,
    use_cost_guard: bool,
) -> Iterator[list[dict[str, Any]]]:
    """Answer each prompt turn by turn, with a result row for each turn. Each answer is part of the next turn's prompt."""
    for row in rows:
        messages: list[dict[str, str]] = []
        results = []
        for i, text in enumerate(row.turns or [None]):
            if text is not None:
                messages.append({"role": "user", "content": text})
            prompt = messages or row.prompt
            with _naming(row):
                [completion] = generate(target, [prompt], drafter=drafter, sampling=sampling, use_cost_guard=use_cost_guard)
            messages.append({"role": "assistant", "content": completion.text})
            results.append({**result_row(row, completion, sampling), "turn": i})
        yield results


def result_row(row: PromptRow, completion: Completion, sampling: SamplingParams) -> dict[str, Any]:
    """One line of the output file."""
    result: dict[str, Any] = {
        "id": row.id,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "target_passes": completion.num_target_passes,
        "acceptance_length": round(completion.acceptance_length, 4),
        "seconds": round(completion.seconds, 4),
    }
    if sampling.n > 1:
        result["sample"] = completion.sample_index
    if sampling.logprobs:
        result["logprobs"] = completion.logprobs
    return result


@contextlib.contextmanager
def _naming(row: PromptRow) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"id {row.id!r}: {error}") from error
