"""The target writes the answers anew: heads learn to foresee what the target says, and only its own words show that.

Conversations are decoded together. The turns of one follow each other, each on top of the answers written before it; a
conversation is yielded as soon as it is complete.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jinja2 import TemplateError

from selfspec.api import Completion, generate_iter
from selfspec.config import SamplingParams
from selfspec.loop.drafter import Drafter
from selfspec.model.target import Target
from selfspec.traffic.conversations import Conversation, Message, Report


@dataclass
class _Work:
    """A conversation being answered.

    Attributes:
        turns: for each answer still to come, the messages before it that are not yet said.
        messages: what is said so far.
        prompt: the token ids of `messages` with the answer's header open.
    """

    conversation: Conversation
    turns: deque[list[Message]]
    messages: list[Message]
    prompt: list[int]
    num_answers: int = 0
    finish_reason: str | None = None

    def add(self, completion: Completion) -> None:
        self.messages = [*self.messages, {"role": "assistant", "content": completion.text}]
        self.finish_reason = completion.finish_reason
        self.num_answers += 1

    def goes_on(self, target: Target, report: Report) -> bool:
        """Says what comes before the next answer; False where no other answer can be written."""
        if not self.turns:
            return False
        messages = [*self.messages, *self.turns.popleft()]
        problem, prompt = None, []
        if self.finish_reason == "length":
            problem = "after an answer that max_new_tokens cut"
        else:
            try:
                prompt = target.encode(messages)
            except (TemplateError, TypeError) as error:
                problem = f"refused by the chat template: {error}"
            if len(prompt) >= target.context_length:
                problem = "longer than the target's context"
        if problem is not None:
            report.skip(f"later turns {problem}" if self.num_answers else problem, self.conversation.id)
            return False
        self.messages, self.prompt = messages, prompt
        return True

    def settings(self, sampling: SamplingParams) -> SamplingParams:
        """A seed of its own for every answer: one seed for all would draw the same numbers in each of them."""
        return sampling.with_(seed=seed_for(sampling.seed, f"{self.conversation.id}/{self.num_answers}"))

    def result(self) -> Conversation:
        return replace(self.conversation, messages=self.messages, finish_reason=self.finish_reason)


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
    """Conversations with the answers that `turns_to_answer` leaves out written by the target.

    A conversation ends with an answer that `max_new_tokens` cut, and before a turn that leaves no room in the context; the
    report counts both. With a seed, an answer depends on its own conversation alone.
    """
    check_sampling(sampling)
    works = (
        _Work(conversation, deque(turns_to_answer(conversation.messages, last_only=last_turn_only)), [], [])
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
                yield work.result()
        # The last ones to be handed out may go on: they are a batch of their own.
        if not going_on:
            return


def _hand_out(
    going_on: deque[_Work],
    fresh: Iterator[_Work],
    sampling: SamplingParams,
    in_flight: list[_Work],
    settings: list[SamplingParams],
) -> Iterator[list[int]]:
    """A prompt whenever a place in the batch is free: conversations that go on come first, so that few are open."""
    while (work := going_on.popleft() if going_on else next(fresh, None)) is not None:
        in_flight.append(work)
        settings.append(work.settings(sampling))
        yield work.prompt


def turns_to_answer(messages: list[Message], *, last_only: bool = False) -> list[list[Message]]:
    """For each answer to write, the messages that come before it and after the answer before.

    Every user turn and every tool's result gets an answer. Kept as they are, with weight 0, are answers that called a tool,
    since the result belongs to that call, and with `last_only` all answers but the last.
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
    return {**message, "weight": 0} if message["role"] == "assistant" else message


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse what would end an answer other than the target does, or give more than one."""
    if sampling != sampling.with_(n=1, stop=(), stop_token_ids=(), ignore_eos=False, logprobs=False):
        raise ValueError("training takes one whole answer a prompt: leave out n, stop, stop_token_ids, ignore_eos, logprobs")


def seed_for(seed: int | None, name: str) -> int | None:
    """A seed of its own for whatever is named; None stays None."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), signed=True)
