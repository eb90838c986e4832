"""`selfspec chat`: answers appear as they are decoded, with the drafts that were accepted in colour and figures below."""

import os
import re
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.chat_input import Reader
from selfspec.cli.chat_state import Chat, run_command
from selfspec.cli.generate import DrafterOption
from selfspec.cli.loading import load_quietly, loading
from selfspec.cli.options import command
from selfspec.config import DEFAULT_TARGET, DraftOptions, SamplingParams, TargetOptions

if TYPE_CHECKING:
    from selfspec.api import Completion, Piece

WELCOME = 'Type a message; """ begins and ends one of several lines. /help lists commands. Ctrl-C stops an answer.'
TINY = "The default target is a tiny model: it shows the speed, and is often wrong. --target takes a larger one."


def register(cli: typer.Typer) -> None:
    """Add the command."""
    # A conversation has one answer at a time, and shows no numbers of its tokens.
    command(cli, without=("n", "logprobs"), target=TargetOptions, draft=DraftOptions, sampling=SamplingParams)(chat)


def chat(
    *,
    message: Annotated[str | None, typer.Argument(metavar="MESSAGE", help="the first message, in quotes")] = None,
    target: TargetOptions,
    drafter: DrafterOption = "auto",
    draft: DraftOptions,
    sampling: SamplingParams,
    system: Annotated[str | None, typer.Option("--system", help="system message at the start of the conversation")] = None,
) -> None:
    """Talk to the target in the terminal.

    Example: selfspec chat "Explain how rainbows form." --temperature 0.7

    Example: selfspec chat --target Qwen/Qwen3-0.6B --drafter ngram
    """
    if message is not None and looks_like_target(message):
        raise ValueError(f"{message} looks like a target: write --target {message}, or type it as a message later")
    with loading(target):
        from selfspec.drafters.options import load_drafter_of
        from selfspec.loop.sequence import check_sampling

        model = load_quietly(target)
        if not getattr(model.tokenizer, "chat_template", None):
            raise ValueError(f"{model.label} has no chat template, so it cannot chat: use selfspec generate")
        check_sampling(model, sampling)
        loaded = load_drafter_of(draft, drafter, model)
    reader = Reader()
    if reader.is_interactive:
        typer.echo(WELCOME)
        if target.target is None:
            typer.secho(TINY, dim=True)
    converse(Chat(model, draft, sampling, drafter=loaded, system=system), reader, message)


def looks_like_target(message: str) -> bool:
    """Whether a message may be meant as a target, which other commands take as their argument."""
    return message == DEFAULT_TARGET or bool(re.fullmatch(r"[\w.-]+/[\w.-]+", message)) or os.path.isdir(message)


def converse(state: Chat, reader: Reader, message: str | None = None) -> None:
    """Answer messages until there are no more or one of them ends the conversation.

    Args:
        message: what is said first, before anything is read.
    """
    text = message if message is not None else reader.read()
    while text is not None:
        if text.startswith("/"):
            said = run_command(state, text)
            if said is None:
                return
            if said:
                typer.echo(said)
        elif text.strip():
            answer(state, text.strip())
        text = reader.read()


def answer(state: Chat, text: str) -> None:
    """Show the answer to a message as it comes. One that was stopped stays in the conversation as far as it came."""
    said, completion = "", None
    try:
        with closing(state.stream(text)) as events:
            for event in events:
                for piece in event.pieces:
                    typer.echo(_marked(piece) if state.has_marks else piece.text, nl=False)
                    said += piece.text
                completion = event.completion
    except KeyboardInterrupt:
        typer.echo(" [stopped]", nl=False)
    except ValueError as error:
        # For example, the conversation has outgrown the context.
        typer.echo(f"{error} (/reset starts a new conversation)", err=True)
        return
    state.note(text, said)
    if completion is not None and completion.finish_reason == "length":
        typer.secho(" …", nl=False, dim=True)
    typer.echo()
    if completion is not None:
        typer.secho(summary(completion, state), dim=True)
    sys.stdout.flush()


def _marked(piece: "Piece") -> str:
    return typer.style(piece.text, fg="green") if piece.source == "draft" else piece.text


def summary(completion: "Completion", state: Chat) -> str:
    """The figures under an answer, and why it is not whole where it was cut."""
    num_tokens = len(completion.token_ids)
    line = (
        f"{num_tokens} tokens, {num_tokens / completion.seconds:.1f} tokens/s, "
        f"acceptance length {completion.acceptance_length:.2f}, drafter {state.drafter_name}"
    )
    if completion.finish_reason == "length":
        most = state.sampling.max_new_tokens
        is_at_limit = num_tokens == most
        line += f"; cut: /set max_new_tokens {2 * most}" if is_at_limit else "; cut, because the context is full: /reset"
    return f"[{line}]"
