"""The target writes all answers anew, because heads learn to predict what the target says, and only its own text shows that.

Conversations are decoded together. The turns of a conversation are answered in order, each after the answers written before
it. A conversation is yielded as soon as it is complete.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from selfspec.api import Completion, generate_iter
from selfspec.config import SamplingParams
from selfspec.heads.base import tokenizer_hash
from selfspec.loop.drafter import Drafter
from selfspec.model.chat import TemplateFailure
from selfspec.model.target import Target
from selfspec.traffic.conversations import Conversation, Message, Report, without_ids
from selfspec.traffic.prepare import check_sampling
from selfspec.traffic.turns import check_chat_template


@dataclass
class _Work:
    """A conversation being answered.

    Attributes:
        turns: for each answer still to write, the messages between the answer before and this one.
        messages: the conversation so far.
        prompt: token ids of `messages` with the answer's header open.
    """

    conversation: Conversation
    turns: deque[list[Message]]
    messages: list[Message]
    prompt: list[int]
    num_answers: int = 0
    finish_reason: str | None = None
    left_out: str | None = None

    def add(self, completion: Completion) -> None:
        """Append an answer."""
        answer = {"role": "assistant", "content": completion.text, "token_ids": completion.token_ids}
        self.messages = [*self.messages, answer]
        self.finish_reason = completion.finish_reason
        self.num_answers += 1

    def goes_on(self, target: Target, report: Report) -> bool:
        """Append what comes before the next answer; False if no other answer can be written."""
        if not self.turns:
            return False
        messages = [*self.messages, *self.turns.popleft()]
        problem, prompt = None, []
        if self.finish_reason == "length":
            problem = "after an answer that max_new_tokens cut"
        else:
            try:
                prompt = target.encode(
                    [without_ids(message) for message in messages],
                    tools=self.conversation.tools,
                    chat_template_kwargs=self.conversation.chat_template_kwargs,
                )
            except TemplateFailure as error:
                problem = f"refused by the chat template: {error.reason}"
            except ValueError as error:
                problem = str(error)
            if len(prompt) >= target.context_length:
                problem = "longer than the target's context"
        if problem is not None:
            self.left_out = f"later turns {problem}" if self.num_answers else problem
            report.skip(self.left_out, self.conversation.id)
            return False
        self.messages, self.prompt = messages, prompt
        return True

    def settings(self, sampling: SamplingParams) -> SamplingParams:
        """The settings with a seed for this answer alone, because one seed for all would draw the same numbers in each."""
        return sampling.with_(seed=seed_for(sampling.seed, f"{self.conversation.id}/{self.num_answers}"))

    def result(self, own_hash: str) -> Conversation:
        """The conversation as the target has answered it."""
        return replace(
            self.conversation,
            messages=self.messages,
            finish_reason=self.finish_reason,
            tokenizer_hash=own_hash,
            left_out=self.left_out,
        )


def regenerate(
    target: Target,
    conversations: Iterable[Conversation],
    report: Report,
    *,
    sampling: SamplingParams,
    drafter: Drafter | None = None,
    batch_size: int = 1,
    last_turn_only: bool = False,
) -> Iterator[Conversation]:
    """The conversations, with their answers written by the target (see `turns_to_answer`), as text and as token ids.

    A conversation ends after an answer that `max_new_tokens` cut, and before a turn that leaves no room in the context. The
    report counts both. With a seed, an answer depends on its own conversation alone. The chat template is given the target's
    arguments and, before them, the conversation's own. The result has both.
    """
    check_sampling(sampling)
    check_chat_template(target.tokenizer)
    own_hash = tokenizer_hash(target.tokenizer)
    works = (
        _Work(
            _with_arguments(conversation, target),
            deque(turns_to_answer(conversation.messages, last_only=last_turn_only)),
            [],
            [],
        )
        for conversation in conversations
    )
    fresh = (work for work in works if work.goes_on(target, report))
    going_on: deque[_Work] = deque()
    while True:
        in_flight: list[_Work] = []
        settings: list[SamplingParams] = []
        prompts = _hand_out(going_on, fresh, sampling, in_flight, settings)
        for completion in generate_iter(target, prompts, drafter=drafter, sampling=settings, batch_size=batch_size):
            work = in_flight[completion.prompt_index]
            work.add(completion)
            if work.goes_on(target, report):
                going_on.append(work)
            else:
                report.num_kept += 1
                yield work.result(own_hash)
        # Conversations that go on after the prompts have run out form another batch.
        if not going_on:
            return


def _hand_out(
    going_on: deque[_Work],
    fresh: Iterator[_Work],
    sampling: SamplingParams,
    in_flight: list[_Work],
    settings: list[SamplingParams],
) -> Iterator[list[int]]:
    """A prompt whenever a place in the batch is free. Conversations that go on come first, which keeps few open."""
    while (work := going_on.popleft() if going_on else next(fresh, None)) is not None:
        in_flight.append(work)
        settings.append(work.settings(sampling))
        yield work.prompt


def turns_to_answer(messages: list[Message], *, last_only: bool = False) -> list[list[Message]]:
    """For each answer to write, the messages between the answer before and this one.

    Every user turn and every tool's result gets an answer. An answer that called a tool is kept, because the result belongs
    to that call; with `last_only` all answers but the last are kept. Kept answers get weight 0.
    """
    roles = [message["role"] for message in messages]
    calls = [role == "assistant" and roles[i + 1 : i + 2] == ["tool"] for i, role in enumerate(roles)]
    ends = [
        i
        for i, role in enumerate(roles)
        if role in ("user", "tool") and roles[i + 1 : i + 2] != ["tool"] and calls[i + 1 : i + 2] != [True]
    ]
    if last_only:
        ends = ends[-1:]
    turns, start = [], 0
    for end in ends:
        said = range(start, end + 1)
        turns.append([_kept(messages[i]) for i in said if last_only or calls[i] or roles[i] != "assistant"])
        start = end + 1
    return turns


def _kept(message: Message) -> Message:
    return {**without_ids(message), "weight": 0} if message["role"] == "assistant" else message


def _with_arguments(conversation: Conversation, target: Target) -> Conversation:
    """The conversation with all arguments that its chat template is given."""
    arguments = {**target.chat_template_kwargs, **(conversation.chat_template_kwargs or {})}
    return replace(conversation, chat_template_kwargs=arguments or None)


def seed_for(seed: int | None, name: str) -> int | None:
    """A seed for what `name` names, derived from `seed`; None stays None."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), signed=True)
