"""A target's text side: what a prompt needs on its way to token ids, and what is checked about it. It has no weights.

Another process than the target's works with a copy of this alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfspec.model.chat import LiteralText, apply_template, check_arguments


class TextSide:
    """The tokenizer, its templates and the limits of a target.

    Attributes:
        tokenizer: the model's; None for work on token ids only.
        name: path or Hub id, for reports.
        config: the text model's.
        context_length: the most tokens of a prompt and its answer.
        vocab_size: tokens that there are logits for.
        eos_token_ids: the ids that end an answer.
        chat_template_kwargs: arguments that every prompt's chat template is given, such as {"enable_thinking": False}.
    """

    tokenizer: Any
    name: str
    config: Any
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    chat_template_kwargs: dict[str, Any]

    def text_side(self) -> TextSide:
        """A copy of this alone, for another process."""
        side = TextSide()
        for name in TextSide.__annotations__:
            setattr(side, name, getattr(self, name))
        return side

    @property
    def label(self) -> str:
        """Its name for messages: without the folders above it, which are no business of a server's clients."""
        return Path(self.name).name or self.name

    def set_chat_template_kwargs(self, arguments: Mapping[str, Any]) -> None:
        """Give every prompt's chat template these arguments.

        Raises:
            ValueError: the template does not read one of them.
        """
        check_arguments(self.tokenizer, arguments)
        self.chat_template_kwargs = dict(arguments)

    def encode(
        self,
        prompt: str | Sequence[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        literal: LiteralText | None = None,
    ) -> list[int]:
        """The token ids of raw text, or of chat messages by the chat template, which ends with the assistant's header.

        Args:
            tools: what the model may call, for messages: OpenAI's definitions.
            chat_template_kwargs: arguments of the chat template, beside and before this target's own.
            literal: encodes control tokens in the messages as text.

        Raises:
            ValueError: the target cannot read such a prompt, or its template refuses it (see `TemplateFailure`).
        """
        if self.tokenizer is None:
            raise ValueError("this target has no tokenizer: pass token ids")
        texts = [prompt] if isinstance(prompt, str) else [str(value) for message in prompt for value in message.values()]
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            raise ValueError("the prompt has half a character (a lone surrogate): send valid Unicode") from None
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt).input_ids)
        if not self.tokenizer.chat_template:
            raise ValueError(f"{self.label} has no chat template: pass the prompt as raw text")
        arguments = {**self.chat_template_kwargs, **(chat_template_kwargs or {})}
        settings = {**arguments, "tools": tools, "add_generation_prompt": True, "return_dict": True}
        if literal is not None and literal.concerns(prompt, tools, arguments):
            encoded = literal.apply_template(prompt, **settings)
        else:
            encoded = apply_template(self.tokenizer, prompt, **settings)
        return list(encoded["input_ids"])
