"""What the target read before each answer of a conversation, and what it wrote, for any chat template.

Where a row has the target's own token ids for an answer, they are the answer. Otherwise the template shows it: the target
reads the messages before the answer, rendered with the answer's header open, and what the template adds with the answer is
the answer. So no markers are needed, and no search for the answer's words. What follows the token that ends a turn (often a
newline) was never written by the target.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from selfspec.model.chat import TemplateFailure, apply_template
from selfspec.traffic.conversations import Conversation, Message, without_ids

# Stand for messages, to see what a template puts around and between them.
PROBE = "selfspec-probe"
NEXT_PROBE = "selfspec-next"
# A tag that opens something, such as <think>, at the end of a header.
OPEN_TAG = re.compile(r"(<[^<>/\s|]+>|\[[A-Z_]+\])(\s*)\Z")

# What is worth a warning about answers.
OTHER_TOKENIZER = "have token_ids of another tokenizer, so their text is trained on"
OTHER_TEXT = "have token_ids that are not those of their text, so the text is trained on"
NO_END = "are not trained to end, because the chat template puts no token of its own after an answer"

# Renders messages, with or without the header of an answer.
Write = Callable[..., str]


@dataclass(frozen=True)
class Turn:
    """An answer to train on.

    Attributes:
        prompt: what the target read.
        answer: what it wrote, as text.
        token_ids: what it wrote; None if only the text is known.
        note: what the user should know of it.
    """

    prompt: str
    answer: str
    token_ids: Sequence[int] | None = None
    note: str | None = None


def trained_turns(
    conversation: Conversation,
    tokenizer: Any,
    tokenizer_hash: str | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Turn]:
    """The answers to train on, in order.

    Args:
        tokenizer_hash: of the tokenizer. Only its own token ids are used.
        chat_template_kwargs: arguments of the chat template beside the conversation's own, which come before these.

    Raises:
        ValueError: the tokenizer has no chat template.
        TemplateFailure: the template refuses the conversation, or fails on it.
    """
    arguments = {**(chat_template_kwargs or {}), **(conversation.chat_template_kwargs or {})}
    write = partial(render, tokenizer, tools=conversation.tools, chat_template_kwargs=arguments)
    messages = conversation.messages
    turns = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight", 1) == 0:
            continue
        prompt = write(messages[:i], add_generation_prompt=True)
        token_ids, note = _own_ids(message, tokenizer, is_own=conversation.tokenizer_hash == tokenizer_hash)
        if token_ids is not None:
            turns.append(Turn(prompt, message["content"], token_ids))
            continue
        is_cut = conversation.finish_reason == "length" and i == len(messages) - 1
        answer, ending = _answer(tokenizer, write, messages, i, prompt)
        if not is_cut:
            answer += ending or ""
            note = note or (NO_END if ending == "" else None)
        turns.append(Turn(prompt, answer, note=note))
    return turns


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The messages in the chat template's form.

    Raises:
        ValueError: the tokenizer has no chat template.
        TemplateFailure: the template refuses the messages, or fails on them.
    """
    check_chat_template(tokenizer)
    own = {"tools": tools, "tokenize": False, "add_generation_prompt": add_generation_prompt}
    return apply_template(
        tokenizer, [without_ids(message) for message in messages], **{**(chat_template_kwargs or {}), **own}
    )


def check_chat_template(tokenizer: Any) -> None:
    """Raise a ValueError if there is no chat template."""
    if tokenizer is None:
        raise ValueError("the target has no tokenizer: save the model's tokenizer into its folder")
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: give it one with --chat-template FILE")


def closing_after(write: Write, messages: Sequence[Message], role: str) -> str:
    """What the template writes after a last message by `role`."""
    return write([*messages, {"role": role, "content": PROBE}]).rpartition(PROBE)[2]


def first_added_token(tokenizer: Any, text: str) -> str | None:
    """The first added token in a text, such as a special token; tokens of white space do not count."""
    tokens = [token for token in tokenizer.get_added_vocab() if token.strip() and token in text]
    return min(tokens, key=lambda token: (text.index(token), -len(token)), default=None)


def _own_ids(message: Message, tokenizer: Any, *, is_own: bool) -> tuple[list[int] | None, str | None]:
    """An answer's token ids if they can be used, and what is to be said if they cannot."""
    token_ids = message.get("token_ids") or None
    if token_ids is None:
        return None, None
    if not is_own:
        return None, OTHER_TOKENIZER
    return (token_ids, None) if _is_view(message["content"], tokenizer.decode(token_ids)) else (None, OTHER_TEXT)


def _is_view(content: str, text: str) -> bool:
    """Whether the content is left of the text if parts of it are taken out, such as reasoning, calls and their marks."""
    letters = iter(text)
    return all(letter in letters for letter in content if not letter.isspace())


def _answer(tokenizer: Any, write: Write, messages: Sequence[Message], i: int, prompt: str) -> tuple[str, str | None]:
    """The text of answer `i`, and what ends it unless it was cut; None if the answer has an end of its own."""
    through, closing = write(messages[: i + 1]), closing_after(write, messages[:i], "assistant")
    # The prompt is no prefix of the text if its header opens the reasoning and the template then leaves that out.
    answer = through[len(prompt) :] if through.startswith(prompt) else messages[i]["content"] + closing
    answer = _without_open_tag(answer, prompt)
    if not answer.endswith(closing):
        # As a call of a tool may have.
        return answer, None
    ending = _through_added_token(tokenizer, closing)
    if ending is None:
        ending = _through_added_token(tokenizer, _between(write, messages, i)) or closing.rstrip()
    return answer[: len(answer) - len(closing)], ending


def _through_added_token(tokenizer: Any, text: str) -> str | None:
    """The part of a text that ends with its first added token; None without one."""
    token = first_added_token(tokenizer, text)
    return None if token is None else text[: text.index(token) + len(token)]


def _between(write: Write, messages: Sequence[Message], i: int) -> str:
    """What comes after answer `i` before the words of the next message, whatever those are.

    Some templates have no end of a turn: their models write the token that begins the next one.
    """
    if i + 1 < len(messages):
        role = messages[i + 1]["role"]
    else:
        role = "tool" if messages[i].get("tool_calls") else "user"
    answer, following = {"role": "assistant", "content": PROBE}, {"role": role, "content": NEXT_PROBE}
    try:
        after = write([*messages[:i], answer, following]).partition(PROBE)[2]
    except TemplateFailure:
        return ""
    between, found, _ = after.partition(NEXT_PROBE)
    return between if found else ""


def _without_open_tag(answer: str, prompt: str) -> str:
    """The answer without a tag such as <think> at its beginning that the end of the prompt has opened already."""
    tag = OPEN_TAG.search(prompt)
    if tag is None or not answer.lstrip().startswith(tag[1]):
        return answer
    return answer.lstrip().removeprefix(tag[1]).removeprefix(tag[2])
