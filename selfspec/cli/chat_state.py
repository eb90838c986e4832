"""A conversation and its settings, and the commands that change them. Nothing here reads or prints."""

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from selfspec.config import DraftOptions, SamplingParams
from selfspec.drafters.specs import FORMS

if TYPE_CHECKING:
    from selfspec.api import StreamEvent
    from selfspec.drafters import Drafter
    from selfspec.model.target import Target

# An answer is one text, without numbers.
FIXED = ("n", "logprobs")


class Chat:
    """What was said so far, and how the next answer is made.

    Attributes:
        has_marks: drafts that were accepted are shown in colour.
    """

    def __init__(
        self,
        target: "Target",
        draft: DraftOptions,
        sampling: SamplingParams,
        *,
        drafter: "Drafter | None",
        system: str | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self._draft = draft
        self._loaded: dict[str, Drafter | None] = {}
        self.sampling = sampling
        self.has_marks = True
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    @property
    def drafter_name(self) -> str:
        return "none" if self.drafter is None else self.drafter.name

    def stream(self, text: str) -> "Generator[StreamEvent]":
        """The answer to a message, step by step. `note` makes both part of the conversation.

        Raises:
            ValueError: it cannot be answered, because the context is full for instance.
        """
        from selfspec.api import stream

        messages = [*self.messages, {"role": "user", "content": text}]
        settings: dict[str, Any] = {"sampling": self.sampling, "use_cost_guard": not self._draft.no_cost_guard}
        return cast("Generator[StreamEvent]", stream(self.target, messages, drafter=self.drafter, **settings))

    def note(self, text: str, answer: str) -> None:
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def use_drafter(self, spec: str) -> None:
        """Draft with another drafter from now on.

        Raises:
            ValueError: there is none of this name, or it does not fit the target.
        """
        from selfspec.drafters.options import load_drafter_of

        if spec not in self._loaded:
            self._loaded[spec] = load_drafter_of(self._draft, spec, self.target)
        self.drafter = self._loaded[spec]

    def reset(self) -> None:
        self.messages = list(self._opening)


@dataclass(frozen=True)
class Command:
    """What a line that begins with / may be.

    Attributes:
        argument: what may follow the name, for people.
        run: from the conversation and the argument to what is told; None ends the conversation.
    """

    names: tuple[str, ...]
    help: str
    run: Callable[[Chat, str], str | None]
    argument: str = ""


def run_command(state: Chat, line: str) -> str | None:
    """Do what a line that begins with / says; returns what to tell the person, None where the conversation is over."""
    name, _, argument = line.strip().partition(" ")
    for command in COMMANDS:
        if name in command.names:
            try:
                return command.run(state, argument.strip())
            except (ValueError, TypeError) as error:
                return str(error)
    return f"{name} is not a command: /help lists them, and a space before it makes it a message"


def _help(state: Chat, argument: str) -> str:
    forms = [f"{', '.join(command.names)} {command.argument}" for command in COMMANDS]
    width = max(map(len, forms)) + 1
    return "\n".join(f"{form:<{width}}{command.help}" for form, command in zip(forms, COMMANDS, strict=True))


def _reset(state: Chat, argument: str) -> str:
    state.reset()
    return ""


def _set(state: Chat, argument: str) -> str:
    name, _, text = argument.partition(" ")
    if name:
        _check_setting(name)
    if text:
        from selfspec.loop.sequence import check_sampling

        sampling = state.sampling.with_(**{name: _value(name, text.strip())})
        check_sampling(state.target, sampling)
        state.sampling = sampling
    shown = [name] if name else [field.name for field in fields(SamplingParams) if field.name not in FIXED]
    return "\n".join(f"{each} = {_shown(getattr(state.sampling, each))}" for each in shown)


def _drafter(state: Chat, argument: str) -> str:
    if argument:
        state.use_drafter(argument)
        return f"drafter = {state.drafter_name}"
    return f"drafter = {state.drafter_name}; there are {FORMS}"


def _marks(state: Chat, argument: str) -> str:
    state.has_marks = not state.has_marks
    return f"Drafts that are accepted are {'green' if state.has_marks else 'not marked'}."


COMMANDS = (
    Command(("/help",), "list the commands", _help),
    Command(("/reset",), "start a new conversation", _reset),
    Command(("/set",), "show the settings, or change one, as in /set temperature 0.7", _set, "[NAME VALUE]"),
    Command(("/drafter",), "show what drafts, or change it, as in /drafter ngram", _drafter, "[NAME]"),
    Command(("/marks",), "show accepted drafts in green, or stop that", _marks),
    Command(("/quit", "/exit"), "end the conversation, as Ctrl-D does", lambda state, argument: None),
)


def _check_setting(name: str) -> None:
    from selfspec.api.arguments import check_name

    check_name(name)
    if name in FIXED:
        raise ValueError(f"{name} cannot be set in a chat: use selfspec generate")


def _value(name: str, text: str) -> Any:
    """What is meant by a setting's value, as it is typed: JSON, or plain text."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None if text.lower() == "none" else text
    default = next(field.default for field in fields(SamplingParams) if field.name == name)
    if isinstance(default, bool) and not isinstance(value, bool):
        raise ValueError(f"{name}={text} is not allowed: use true or false")
    if name == "stop":
        # Any text is one, a number too.
        return value if isinstance(value, list) else [value if isinstance(value, str) else text]
    if name == "stop_token_ids":
        return value if isinstance(value, list) else [value]
    if name == "logit_bias" and not isinstance(value, dict):
        raise ValueError(f'{name}={text} is not allowed: use an object such as {{"42": -5}}')
    return value


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str | tuple | dict | bool) else str(value)
