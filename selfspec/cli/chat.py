"""The loop of `selfspec chat`: each answer appears as it is decoded, with its acceptance length below it."""

import sys

import typer

from selfspec.api import Completion, stream
from selfspec.config import SamplingParams
from selfspec.loop.drafter import Drafter
from selfspec.model.target import Target

WELCOME = "Type a message. /reset starts a new conversation, /quit ends; Ctrl-C stops an answer."


def converse(
    target: Target, *, drafter: Drafter | None, sampling: SamplingParams, use_cost_guard: bool, system: str | None
) -> None:
    """Answer messages from stdin until it ends or says /quit, in a terminal or in a pipe."""
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        typer.echo(WELCOME)
    while (text := _read_message("> " if is_interactive else "")) is not None and text != "/quit":
        if text == "/reset":
            messages = list(opening)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        answer, completion = "", None
        try:
            for event in stream(target, messages, drafter=drafter, sampling=sampling, use_cost_guard=use_cost_guard):
                typer.echo(event.text, nl=False)
                answer += event.text
                completion = event.completion
        except KeyboardInterrupt:
            typer.echo(" [stopped]", nl=False)
        except ValueError as error:
            # For example, the conversation has outgrown the context: it can go on after /reset.
            messages.pop()
            typer.echo(f"{error} (/reset starts a new conversation)", err=True)
            continue
        messages.append({"role": "assistant", "content": answer})
        typer.echo()
        if completion is not None:
            typer.secho(summary(completion), dim=True)


def summary(completion: Completion) -> str:
    """The figures under an answer."""
    num_tokens = len(completion.token_ids)
    return (
        f"[{num_tokens} tokens, {num_tokens / completion.seconds:.1f} tokens/s, "
        f"acceptance length {completion.acceptance_length:.2f}]"
    )


def _read_message(prompt: str) -> str | None:
    try:
        return input(prompt).strip()
    except EOFError:
        return None
