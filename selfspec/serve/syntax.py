"""How a model writes the parts of its answers: the tags of its reasoning and the form of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from selfspec.model.chat import template_text
from selfspec.serve.channels import ChannelParser
from selfspec.serve.options import CHANNELS
from selfspec.serve.parts import PartParser, TagParser
from selfspec.serve.tool_calls import FORMATS, ToolFormat

TAGS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
# As many of a prompt's last tokens hold the tag that it may end with.
NUM_LAST = 16


@dataclass(frozen=True)
class Syntax:
    """One model's way to write.

    Attributes:
        tool_format, reasoning_format: names; None where the model has none, or where nobody wants to know.
    """

    tokenizer: Any
    tool_format: str | None
    reasoning_format: str | None

    @classmethod
    def of(cls, tokenizer: Any, *, tool_format: str = "auto", reasoning_format: str = "auto") -> Syntax:
        """The syntax that the options name; `auto` asks the chat template, `none` is none."""
        text = template_text(tokenizer)
        channels = CHANNELS if all(mark in text for mark in ("<|channel|>", "<|message|>")) else None
        tools = (name for name, form in FORMATS.items() if any(hint in text for hint in form.hints))
        tags = (name for name, (opening, closing) in TAGS.items() if opening in text or closing in text)

        def choose(option: str, found: str | None) -> str | None:
            return {"auto": channels or found, "none": None}.get(option, option)

        return cls(tokenizer, choose(tool_format, next(tools, None)), choose(reasoning_format, next(tags, None)))

    @property
    def form(self) -> ToolFormat | None:
        """The form of calls, but for gpt-oss."""
        return FORMATS.get(self.tool_format or "")

    @property
    def tags(self) -> tuple[str, str] | None:
        """The tags of the reasoning, but for gpt-oss."""
        return TAGS.get(self.reasoning_format or "")

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The tokens that an answer's text does not have."""
        tokens = self.tokenizer.added_tokens_decoder.values()
        return tuple(dict.fromkeys([*self.tokenizer.all_special_tokens, *(str(t) for t in tokens if t.special)]))

    def marks(self, *, has_tools: bool) -> tuple[str, ...]:
        """What marks the parts of an answer."""
        if CHANNELS in (self.reasoning_format, self.tool_format if has_tools else None):
            return ChannelParser.MARKS
        form = self.form if has_tools else None
        return (*(self.tags or ()), *((form.opening, form.closing or "") if form else ()))

    def needs_special_tokens(self, *, has_tools: bool) -> bool:
        """Whether a mark is a token that is left out of texts, unless one asks for it."""
        marks = self.marks(has_tools=has_tools)
        return bool(marks) and not set(self.special_tokens).isdisjoint(marks)

    def is_open(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends with the tag that opens the reasoning."""
        if self.tags is None:
            return False
        end = self.tokenizer.decode(list(prompt_ids[-NUM_LAST:]), skip_special_tokens=False)
        return end.rstrip().endswith(self.tags[0])

    def parser(
        self, tools: Sequence[dict[str, Any]], *, is_open: bool = False, is_hiding: bool = False
    ) -> PartParser | None:
        """What takes one answer apart; None where an answer has no parts.

        Args:
            tools: what the answer may call.
            is_open: the answer begins with reasoning, because the prompt opened it.
            is_hiding: the answer's text has special tokens, and its parts must not have them.
        """
        marks = self.marks(has_tools=bool(tools))
        if not marks:
            return None
        hidden = self.special_tokens if is_hiding else ()
        if marks == ChannelParser.MARKS:
            return ChannelParser(
                has_reasoning=self.reasoning_format == CHANNELS,
                has_calls=self.tool_format == CHANNELS and bool(tools),
                hidden=hidden,
            )
        form = (self.form, tools) if self.form is not None and tools else None
        return TagParser(self.tags, form, is_open=is_open, hidden=hidden)
