"""One answer in the terminal: its text on stdout as it is decoded, and its figures on stderr."""

from typing import TYPE_CHECKING

import typer

from selfspec.config import SamplingParams

if TYPE_CHECKING:
    from selfspec.drafters import Drafter
    from selfspec.model.target import Target


def answer(
    target: "Target", prompt_ids: list[int], *, drafter: "Drafter | None", sampling: SamplingParams, use_cost_guard: bool
) -> None:
    """Stream one answer to stdout."""
    from selfspec.api import stream

    completion = None
    try:
        for event in stream(target, prompt_ids, drafter=drafter, sampling=sampling, use_cost_guard=use_cost_guard):
            typer.echo(event.text, nl=False)
            completion = event.completion
    finally:
        typer.echo()
    assert completion is not None
    line = figures(len(completion.token_ids), completion.num_target_passes, completion.seconds, drafter)
    if completion.finish_reason == "length":
        line += f"; cut off at --max-new-tokens {sampling.max_new_tokens}"
    typer.secho(line, dim=True, err=True)


def figures(num_tokens: int, num_passes: int, seconds: float, drafter: "Drafter | None") -> str:
    """Speed and acceptance in words, and what drafted."""
    return (
        f"{num_tokens} tokens in {num_passes} target passes: {num_tokens / seconds:.1f} tokens/s, "
        f"acceptance length {num_tokens / num_passes:.2f}, drafter {'none' if drafter is None else drafter.name}"
    )
