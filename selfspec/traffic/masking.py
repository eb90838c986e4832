"""From conversations to token ids and a loss mask, for any chat template: only what the target wrote trains.

The template itself shows which part of a text is an answer. The target reads the messages before the answer, rendered with
the answer's header open; what the template adds with the answer is the answer. So no markers are needed, and no search for
the answer's words. An answer trains from its first token to the token that ends the turn. What follows that token (often a
newline) was never written by the target.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from selfspec.model.chat import TemplateFailure, apply_template
from selfspec.traffic.conversations import BadRow, Conversation, Message, Report

# Stands for a message, to see what a template puts around one.
PROBE = "selfspec-probe"


@dataclass(frozen=True)
class Sample:
    """Token ids, and whether to train on each."""

    input_ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True)
class Turn:
    """An answer as text: what the target read before it, what it wrote, and whether to train on it."""

    prompt: str
    answer: str
    is_trained: bool


def tokenize_all(conversations: Iterable[Conversation], tokenizer: Any, report: Report) -> list[Sample]:
    """Samples of the conversations that can be trained on; the report counts the others.

    Raises:
        ValueError: there is no chat template, or no assistant token in any conversation.
    """
    samples: list[Sample] = []
    for conversation in conversations:
        try:
            samples += tokenize(conversation, tokenizer)
            report.num_kept += 1
        except BadRow as error:
            report.skip(str(error), conversation.id)
    if not any(any(sample.loss_mask) for sample in samples):
        raise ValueError("no conversation has an assistant token to train on: let `selfspec data regenerate` write answers")
    return samples


def tokenize(conversation: Conversation, tokenizer: Any) -> list[Sample]:
    """One sample with all answers, or one sample for each answer if the template rewrites earlier turns.

    Templates of thinking models strip the reasoning from earlier answers, and then no single text holds every answer as
    the target wrote it.

    Raises:
        ValueError: the tokenizer has no chat template.
        BadRow: the template refuses the conversation, or there is no answer to train on.
    """
    try:
        turns = answer_turns(conversation, tokenizer)
    except TemplateFailure as error:
        raise BadRow(f"refused by the chat template: {error.reason}") from error
    if not any(turn.is_trained for turn in turns):
        raise BadRow("no answer to train on")
    text = turns[-1].prompt + turns[-1].answer
    if all(text.startswith(turn.prompt + turn.answer) for turn in turns):
        return [_sample(text, turns, tokenizer)]
    return [_sample(turn.prompt + turn.answer, [turn], tokenizer) for turn in turns if turn.is_trained]


def answer_turns(conversation: Conversation, tokenizer: Any) -> list[Turn]:
    """All assistant turns, rendered."""
    messages = conversation.messages
    turns = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:i], add_generation_prompt=True)
        through = render(tokenizer, messages[: i + 1])
        closing = closing_after(tokenizer, messages[:i], "assistant")
        # The prompt is no prefix of the text if its header opens the reasoning and the template then leaves that out.
        answer = through[len(prompt) :] if through.startswith(prompt) else message["content"] + closing
        if answer.endswith(closing):
            is_cut = conversation.finish_reason == "length" and i == len(messages) - 1
            answer = answer[: len(answer) - len(closing)] + ("" if is_cut else end_of_turn(tokenizer, closing))
        turns.append(Turn(prompt, answer, message.get("weight", 1) != 0))
    return turns


def render(tokenizer: Any, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
    """The messages in the chat template's form."""
    _check_chat_template(tokenizer)
    return apply_template(tokenizer, messages, tokenize=False, add_generation_prompt=add_generation_prompt)


def closing_after(tokenizer: Any, messages: list[Message], role: str) -> str:
    """What the template writes after a last message by `role`."""
    return render(tokenizer, [*messages, {"role": role, "content": PROBE}]).rpartition(PROBE)[2]


def end_of_turn(tokenizer: Any, closing: str) -> str:
    """The part of a closing that ends the turn: up to its first added token; without one, all but trailing white space."""
    token = first_added_token(tokenizer, closing)
    return closing.rstrip() if token is None else closing[: closing.index(token) + len(token)]


def first_added_token(tokenizer: Any, text: str) -> str | None:
    """The first added token in a text, such as a special token; tokens of white space do not count."""
    tokens = [token for token in tokenizer.get_added_vocab() if token.strip() and token in text]
    return min(tokens, key=lambda token: (text.index(token), -len(token)), default=None)


def read_template(file: Path | None) -> str | None:
    """The chat template in a file; None if no file is named.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the chat template {file} cannot be read ({error.strerror}): check the path") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the chat template {file} is not UTF-8 text: save it as UTF-8") from error


def check_chat_target(source: str, template: str | None) -> None:
    """Raise a ValueError if a target in a local folder cannot be talked to; its weights are not read.

    Args:
        source: folder or Hub id of the target.
        template: chat template to use instead of the target's own.
    """
    if not (Path(source) / "config.json").is_file():
        return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{source} has no tokenizer that can be read: save the target's tokenizer there") from error
    use_chat_template(tokenizer, template)


def use_chat_template(tokenizer: Any, template: str | None) -> None:
    """Give a tokenizer a chat template; None leaves it its own.

    Raises:
        ValueError: there is no tokenizer or no template, or the template cannot be parsed.
    """
    if template is not None and tokenizer is not None:
        tokenizer.chat_template = template
    _check_chat_template(tokenizer)
    try:
        render(tokenizer, [{"role": "user", "content": PROBE}])
    except TemplateFailure as error:
        syntax = error.__cause__
        if isinstance(syntax, TemplateSyntaxError):
            raise ValueError(
                f"the chat template cannot be parsed (line {syntax.lineno}: {syntax.message}): mend it, or give another "
                "with --chat-template FILE"
            ) from error
        # A template may refuse this conversation and accept others.


def _check_chat_template(tokenizer: Any) -> None:
    if tokenizer is None:
        raise ValueError("the target has no tokenizer: save the model's tokenizer into its folder")
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: give it one with --chat-template FILE")


def _sample(text: str, turns: list[Turn], tokenizer: Any) -> Sample:
    """A text's tokens, with those of the answers to train on marked. Each turn's prompt and answer begin the text."""
    spans = [(len(turn.prompt), len(turn.prompt) + len(turn.answer)) for turn in turns if turn.is_trained]
    if not tokenizer.is_fast:
        return _sample_without_offsets(text, spans, tokenizer)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    loss_mask = [False] * len(offsets)
    for start, end in spans:
        for i, (token_start, token_end) in enumerate(offsets):
            # Byte-level tokenizers may leave white space out of the offsets: a token of white space alone has an empty
            # range, at its end.
            if token_end > start and min(token_start, token_end - 1) < end:
                loss_mask[i] = True
    return Sample(encoded["input_ids"], loss_mask)


def _sample_without_offsets(text: str, spans: list[tuple[int, int]], tokenizer: Any) -> Sample:
    """`_sample` for a tokenizer without offsets: an answer's borders must be borders of tokens, which are counted."""
    input_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    loss_mask = [False] * len(input_ids)
    for span in spans:
        heads = [tokenizer(text[:border], add_special_tokens=False)["input_ids"] for border in span]
        if any(input_ids[: len(head)] != head for head in heads):
            raise BadRow("a token lies across the border of an answer, and this tokenizer gives no offsets")
        start, end = map(len, heads)
        loss_mask[start:end] = [True] * (end - start)
    return Sample(input_ids, loss_mask)
