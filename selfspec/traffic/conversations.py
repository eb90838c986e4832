"""Conversations on their way from a log to training, and the count of what is lost on that way.

Invariant: an answer's `token_ids` are what the target wrote, and its text is a view of them. Whatever changes the text of a
message goes through `changed`, which drops the ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# `role` and `content`; the fields of a tool's call or result, if it is one; `reasoning_content` beside the content of an
# answer; `weight` 0 for an answer not to train on; `token_ids` of an answer that the target wrote, with its end.
Message = dict[str, Any]

# Examples kept for each reason to skip a row.
NUM_EXAMPLES = 3


class BadRow(ValueError):
    """A row that cannot be used. The message is the reason that it is counted under."""


@dataclass(frozen=True)
class Conversation:
    """Messages in the order they were said.

    Attributes:
        finish_reason: how the last answer ended if the target wrote it: `stop` or `length`.
        tools: what the target may call, by OpenAI's definitions.
        chat_template_kwargs: the chat template's own settings, such as `enable_thinking`.
        left_out: why the target answered none of the later turns, if it did not.
        tokenizer_hash: the tokenizer that the answers' `token_ids` belong to (see `selfspec.heads.base.tokenizer_hash`).
    """

    id: str
    messages: list[Message]
    category: str | None = None
    finish_reason: str | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tokenizer_hash: str | None = None
    left_out: str | None = None

    @property
    def user_turns(self) -> list[str]:
        """What the user says, turn by turn."""
        return [message["content"] for message in self.messages if message["role"] == "user"]

    def record(self) -> dict[str, Any]:
        """The conversation as a row of a data file."""
        record = {
            "id": self.id,
            "category": self.category,
            "tools": self.tools,
            "chat_template_kwargs": self.chat_template_kwargs,
            "messages": self.messages,
            "tokenizer_hash": self.tokenizer_hash,
            "finish_reason": self.finish_reason,
            "left_out": self.left_out,
        }
        return {key: value for key, value in record.items() if value is not None}


def changed(message: Message, **fields: Any) -> Message:
    """The message with other fields. If it then says something else, it has no token ids."""
    now = {**message, **fields}
    return now if now == message else without_ids(now)


def without_ids(message: Mapping[str, Any]) -> Message:
    """The message as a chat template reads it, which knows no token ids."""
    return {key: value for key, value in message.items() if key != "token_ids"}


@dataclass
class Report:
    """How many rows were kept and how many skipped for each reason, with the places of the first ones."""

    num_kept: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, reason: str, place: str) -> None:
        """Count a row that is skipped."""
        self.skipped[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < NUM_EXAMPLES:
            examples.append(place)

    def record(self) -> dict[str, Any]:
        """The report as an object for JSON."""
        return {"kept": self.num_kept, "forms": self.forms, "skipped": self.skipped, "examples": self.examples}
