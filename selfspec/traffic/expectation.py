"""What a long piece of writing will take, told before it starts: at most so much time and disk, by a short measurement."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec.config import SamplingParams
from selfspec.traffic.conversations import Conversation, without_ids
from selfspec.traffic.progress import clock

if TYPE_CHECKING:
    from selfspec.loop.drafter import Drafter
    from selfspec.model.target import Target

# Tokens of each measured answer, besides the first, which comes from prefill.
NUM_MEASURED = 8
# Most conversations that are measured together. Larger batches are faster by row, so the rest takes no longer.
MOST_MEASURED = 4
# Of JSON lines, for a token: about 4.5 of its text, and its id with a comma.
BYTES_PER_TOKEN = 12


def seconds_per_answer(
    target: Target,
    drafter: Drafter | None,
    conversations: Sequence[Conversation],
    sampling: SamplingParams,
    batch_size: int,
) -> float:
    """Seconds that a whole answer takes at most, measured on the first turns of a few conversations.

    0 if none of them can be measured.
    """
    from selfspec.api import generate

    prompts = [prompt for c in conversations[: min(batch_size, MOST_MEASURED)] if (prompt := first_prompt(target, c))]
    if not prompts:
        return 0.0

    def seconds(num_tokens: int, some: Sequence[list[int]]) -> float:
        started = time.perf_counter()
        short = sampling.with_(max_new_tokens=num_tokens, min_new_tokens=0)
        generate(target, some, drafter=drafter, sampling=short, batch_size=batch_size)
        return time.perf_counter() - started

    # The first pass of all allocates and compiles.
    seconds(1, prompts[:1])
    prefill = seconds(1, prompts)
    per_token = max(0.0, seconds(1 + NUM_MEASURED, prompts) - prefill) / NUM_MEASURED
    return (prefill + per_token * sampling.max_new_tokens) / len(prompts)


def first_prompt(target: Target, conversation: Conversation) -> list[int]:
    """Token ids up to the first answer to write; none if the target does not take them."""
    roles = [message["role"] for message in conversation.messages]
    if "user" not in roles:
        return []
    messages = [without_ids(message) for message in conversation.messages[: roles.index("user") + 1]]
    try:
        prompt = target.encode(messages, tools=conversation.tools, chat_template_kwargs=conversation.chat_template_kwargs)
    except ValueError:
        return []
    # With room for what is measured.
    return prompt if len(prompt) + NUM_MEASURED + 1 < target.context_length else []


def expected(
    target: Target,
    drafter: Drafter | None,
    conversations: Sequence[Conversation],
    sampling: SamplingParams,
    batch_size: int,
    directory: Path,
) -> str:
    """One line with the most time and disk that answering these conversations takes.

    Raises:
        ValueError: the folder's disk has too little room.
    """
    num_answers = sum(max(1, len(c.user_turns)) for c in conversations)
    seconds = num_answers * seconds_per_answer(target, drafter, conversations, sampling, batch_size)
    said = sum(len(message.get("content") or "") for c in conversations for message in c.messages)
    num_bytes = said + num_answers * sampling.max_new_tokens * BYTES_PER_TOKEN
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        raise ValueError(
            f"the answers may take {num_bytes / 2**20:.0f} MiB, and {directory} has room for {free / 2**20:.0f}: make room, "
            "or choose another folder"
        )
    return (
        f"{num_answers} answers of at most {sampling.max_new_tokens} tokens: {clock(seconds)} and "
        f"{num_bytes / 2**20:.1f} MiB at most; the same command goes on after an interruption"
    )
