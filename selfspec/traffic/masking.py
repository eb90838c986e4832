"""From conversations to token ids and a loss mask, for any chat template: only what the target wrote trains.

An answer trains from its first token to the token that ends the turn. What the target read before it is the template's
rendering of everything before, as it is when the target is served. Answers share a sample as long as each is read after the
others as they were written; where the template rewrites earlier turns, as those of thinking models do, a new sample begins.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from selfspec.heads.base import tokenizer_hash
from selfspec.model.chat import TemplateFailure
from selfspec.traffic.conversations import BadRow, Conversation, Report
from selfspec.traffic.turns import PROBE, Turn, check_chat_template, render, trained_turns

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """Token ids, and whether to train on each."""

    input_ids: list[int]
    loss_mask: list[bool]


def tokenize_all(
    conversations: Iterable[Conversation],
    tokenizer: Any,
    report: Report,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Sample]:
    """Samples of the conversations that can be trained on; the report counts the others.

    Args:
        chat_template_kwargs: arguments of the chat template beside a conversation's own, which come before these.

    Raises:
        ValueError: there is no chat template, or no assistant token in any conversation.
    """
    check_chat_template(tokenizer)
    own_hash, notes, num_answers = tokenizer_hash(tokenizer), Counter[str](), 0
    samples: list[Sample] = []
    for conversation in conversations:
        try:
            turns = _turns(conversation, tokenizer, own_hash, chat_template_kwargs)
            samples += _samples(turns, tokenizer)
        except BadRow as error:
            report.skip(str(error), conversation.id)
            continue
        report.num_kept += 1
        num_answers += len(turns)
        notes.update(turn.note for turn in turns if turn.note is not None)
    for note, count in notes.items():
        logger.warning("%d of %d answers %s", count, num_answers, note)
    if not any(any(sample.loss_mask) for sample in samples):
        raise ValueError("no conversation has an assistant token to train on: let `selfspec data regenerate` write answers")
    return samples


def tokenize(conversation: Conversation, tokenizer: Any) -> list[Sample]:
    """The samples that a conversation's answers make; one if each is read after those before it as they were written.

    Raises:
        ValueError: the tokenizer has no chat template.
        BadRow: the template refuses the conversation, or there is no answer to train on.
    """
    own_hash = None if conversation.tokenizer_hash is None else tokenizer_hash(tokenizer)
    return _samples(_turns(conversation, tokenizer, own_hash), tokenizer)


def _turns(
    conversation: Conversation,
    tokenizer: Any,
    own_hash: str | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Turn]:
    try:
        turns = trained_turns(conversation, tokenizer, own_hash, chat_template_kwargs)
    except TemplateFailure as error:
        raise BadRow(f"refused by the chat template: {error.reason}") from error
    if not turns:
        raise BadRow("no answer to train on")
    return turns


def _samples(turns: Sequence[Turn], tokenizer: Any) -> list[Sample]:
    samples: list[Sample] = []
    for group in _grouped(turns):
        sample = _sample(group, tokenizer)
        if samples and sample.input_ids[: len(samples[-1].input_ids)] == samples[-1].input_ids:
            before = samples.pop().loss_mask
            sample = Sample(sample.input_ids, [*before, *sample.loss_mask[len(before) :]])
        samples.append(sample)
    return samples


def _grouped(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Turns that are tokenized as one text: neighbours without ids, each of whose prompts begins with all before it."""
    groups: list[list[Turn]] = []
    for turn in turns:
        last = groups[-1][-1] if groups else None
        are_texts = last is not None and last.token_ids is None and turn.token_ids is None
        if last is not None and are_texts and turn.prompt.startswith(last.prompt + last.answer):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    return groups


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
    check_chat_template(tokenizer)
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


def _sample(turns: Sequence[Turn], tokenizer: Any) -> Sample:
    """The tokens of a group of turns, with those of their answers marked."""
    last = turns[-1]
    if last.token_ids is not None:
        prompt_ids = tokenizer(last.prompt, add_special_tokens=False)["input_ids"]
        loss_mask = [False] * len(prompt_ids) + [True] * len(last.token_ids)
        return Sample([*prompt_ids, *last.token_ids], loss_mask)
    text = last.prompt + last.answer
    spans = [(len(turn.prompt), len(turn.prompt) + len(turn.answer)) for turn in turns]
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
