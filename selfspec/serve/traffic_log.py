"""What `--capture` logs of answers: conversations in the form that `selfspec data` reads, and facts about their making.

Invariant: nothing that a client may write freely is logged besides messages, tools and the chat template's arguments, which
the log's redaction knows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from selfspec.api import Completion
from selfspec.heads.base import tokenizer_hash
from selfspec.model.text_side import TextSide
from selfspec.serve.protocol import ChatRequest, CompletionRequest
from selfspec.traffic.capture import Capture
from selfspec.traffic.conversations import Conversation, without_ids
from selfspec.traffic.forms import known_fields

# What the log has of a request's settings: numbers and names that the server knows. What a client writes freely may hold
# personal data.
CAPTURED = {
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop_token_ids",
    "ignore_eos",
}


class TrafficLog:
    """Logs the answers of one model."""

    def __init__(self, capture: Capture, model: str, target: TextSide) -> None:
        self.capture = capture
        self._model = model
        self._target = target
        self._tokenizer_hash = tokenizer_hash(target.tokenizer)

    def add_chat(
        self,
        answer_id: str,
        body: ChatRequest,
        messages: Sequence[Mapping[str, Any]],
        answer: dict[str, Any],
        completion: Completion,
        drafter: str,
    ) -> None:
        """Log a chat: its messages, and the answer's message as the client sees it."""
        # A client's token ids would be nobody's word, and the answer's go on where a stop string ends its text.
        said = [*map(without_ids, messages), answer]
        if completion.stop_string is None:
            said[-1]["token_ids"] = completion.token_ids
        arguments = {**self._target.chat_template_kwargs, **(body.chat_template_kwargs or {})}
        given = {"tools": body.offered_tools or None, "chat_template_kwargs": arguments or None}
        self._add(answer_id, body, said, completion, drafter, **given)

    def add_completion(self, answer_id: str, body: CompletionRequest, completion: Completion, drafter: str) -> None:
        """Log a completion as a conversation of two messages."""
        prompt = body.prompts[completion.prompt_index]
        text = prompt if isinstance(prompt, str) else self._target.tokenizer.decode(prompt)
        # Without token ids: they were written after raw text, and training reads what a chat template renders.
        said = [{"role": "user", "content": text}, {"role": "assistant", "content": completion.text}]
        self._add(answer_id, body, said, completion, drafter)

    def _add(
        self,
        answer_id: str,
        body: ChatRequest | CompletionRequest,
        messages: Sequence[Mapping[str, Any]],
        completion: Completion,
        drafter: str,
        **given: Any,
    ) -> None:
        # The samples of one prompt count as one conversation.
        if completion.sample_index > 0:
            return
        conversation = Conversation(
            f"{answer_id}-{completion.prompt_index}",
            [known_fields({**message, "content": message["content"] or ""}) for message in messages],
            finish_reason=completion.finish_reason,
            tokenizer_hash=self._tokenizer_hash,
            **given,
        )
        facts = {
            "model": self._model,
            "drafter": drafter,
            "time": round(time.time(), 3),
            "seconds": {
                "queue": round(completion.queue_seconds, 4),
                "prefill": round(completion.prefill_seconds, 4),
                "total": round(completion.seconds, 4),
            },
            "settings": body.model_dump(include=CAPTURED, exclude_unset=True),
            "token_counts": {
                "prompt": completion.num_prompt_tokens,
                "answer": len(completion.token_ids),
                "drafted": completion.num_draft_tokens,
                "accepted": completion.num_accepted_tokens,
            },
        }
        self.capture.record(conversation, facts)
