"""What an answer cost: tokens as OpenAI counts them, and what speculation did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from selfspec.api import Completion


def usage(completions: Sequence[Completion], drafter: str) -> dict[str, Any]:
    """The usage of a whole call. A prompt counts once, however many samples it has."""
    firsts = [completion for completion in completions if completion.sample_index == 0]
    num_prompt = sum(completion.num_prompt_tokens for completion in firsts)
    num_completion = sum(len(completion.token_ids) for completion in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(completion.num_reused_tokens for completion in firsts)},
        "speculation": speculation(completions, drafter),
    }


def speculation(completions: Sequence[Completion], drafter: str) -> dict[str, Any]:
    num_completion = sum(len(completion.token_ids) for completion in completions)
    num_passes = sum(completion.num_target_passes for completion in completions)
    return {
        "drafter": drafter,
        "draft_tokens": sum(completion.num_draft_tokens for completion in completions),
        "accepted_tokens": sum(completion.num_accepted_tokens for completion in completions),
        "verify_passes": num_passes,
        "acceptance_length": num_completion / num_passes,
        "queue_seconds": max(completion.queue_seconds for completion in completions),
        "prefill_seconds": sum(completion.prefill_seconds for completion in completions),
        "decode_seconds": sum(completion.seconds - completion.prefill_seconds for completion in completions),
    }


def running_usage(num_prompt: int, num_completion: int, num_passes: int) -> dict[str, Any]:
    """The usage of one choice so far."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "speculation": {"verify_passes": num_passes},
    }
