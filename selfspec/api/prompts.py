"""Prompts of every kind on their way to token ids. Invariant: what is no prompt is refused with one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from selfspec.loop.sequence import check_prompt
from selfspec.model.text_side import TextSide

# Raw text, chat messages, or token ids.
Prompt = str | Sequence[dict[str, Any]] | Sequence[int]

KINDS = "give a text, a list of messages, or a list of token ids"


def listed(prompts: Iterable[Prompt] | Prompt) -> Iterable[Prompt]:
    """The prompts as an iterable, also where a single text, conversation or list of token ids was given.

    Raises:
        TypeError: neither prompts nor one of them.
    """
    # In a tensor padding could not be told from tokens.
    if isinstance(prompts, Mapping | bytes | torch.Tensor | np.ndarray) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts of type {type(prompts).__name__} are not allowed: {KINDS}, or a list of such prompts")
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], Mapping | Integral):
        return [prompts]
    return prompts  # type: ignore[return-value]


def encode(target: TextSide, prompt: Prompt, index: int) -> list[int]:
    """The token ids of a prompt of any kind: at least one, all in the vocabulary, and with room for an answer.

    Args:
        index: the prompt's number, for the error's sentence.
    """
    if isinstance(prompt, str):
        token_ids = target.encode(prompt) if prompt else []
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise TypeError(f"prompt {index} is of type {type(prompt).__name__}: {KINDS}")
    elif any(isinstance(part, Mapping) for part in prompt):
        for number, message in enumerate(prompt):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(
                    f"prompt {index} has no message at {number}: give each as {{'role': 'user', 'content': TEXT}}"
                )
        token_ids = target.encode(prompt)  # type: ignore[arg-type]
    else:
        token_ids = list(prompt)  # type: ignore[arg-type]
    check_prompt(target, token_ids, name=f"prompt {index}")
    return token_ids
