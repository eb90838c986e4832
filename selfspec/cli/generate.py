"""`selfspec generate` and `selfspec chat`: answers to the prompts in a file, and to what a person types."""

from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec.cli.loading import load_quietly
from selfspec.cli.options import command
from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.model.default_target import source_of
from selfspec.traffic.prompt_files import OutputWriter, read_prompts

DrafterOption = Annotated[
    str,
    typer.Option(
        "--drafter", help="what proposes tokens: none, ngram, truncated:LAYERS, or NAME[:PATH_OR_ID] of a trained head"
    ),
]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", help="sequences decoded together", min=1)]
PROMPT_FILE_HELP = "JSON lines with an id and one of: prompt, messages, turns"


def register(cli: typer.Typer) -> None:
    """Add the two commands."""
    command(cli, target=TargetOptions, draft=DraftOptions, sampling=SamplingParams)(generate)
    command(cli, target=TargetOptions, draft=DraftOptions, sampling=SamplingParams)(chat)


def generate(
    *,
    prompt_file: Annotated[Path, typer.Option("--prompt-file", help=PROMPT_FILE_HELP)],
    output: Annotated[Path, typer.Option("--output", help="JSON lines to write, one per prompt, as each is finished")],
    target: TargetOptions,
    drafter: DrafterOption = "ngram",
    draft: DraftOptions,
    sampling: SamplingParams,
    batch_size: BatchSizeOption = 1,
    all_turns: Annotated[
        bool, typer.Option("--all-turns", help="answer every turn of a conversation, one after the other")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the output if it exists")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="keep the output, and answer only the prompts that are not in it")
    ] = False,
) -> None:
    """Answer the prompts in a file.

    Example: selfspec generate --prompt-file prompts.jsonl --output answers.jsonl --drafter eagle --batch-size 8
    """
    rows = read_prompts(prompt_file)
    if output.exists() and output.samefile(prompt_file):
        raise ValueError(f"{output} is the prompt file: choose another output")
    if all_turns and sampling.n > 1:
        raise ValueError("--all-turns goes on from one answer: leave out --n")
    num_results = {row.id: len(row.turns or [None]) if all_turns else sampling.n for row in rows}
    writer = OutputWriter(output, num_results, overwrite=overwrite, resume=resume)
    pending = [row for row in rows if row.id not in writer.finished]
    if not pending:
        typer.echo(f"{output}: every prompt is answered already")
        return

    from selfspec.cli import display
    from selfspec.drafters.options import load_drafter_of
    from selfspec.loop.sequence import check_sampling
    from selfspec.traffic import answers as answering

    with display.stage(f"loading {source_of(target)}"):
        model = load_quietly(target)
        check_sampling(model, sampling)
        settings: dict[str, Any] = {
            "drafter": load_drafter_of(draft, drafter, model),
            "sampling": sampling,
            "use_cost_guard": not draft.no_cost_guard,
        }
        prompts = answering.encode_prompts(model, pending)
    if all_turns:
        answers = answering.answer_all_turns(model, pending, **settings)
    else:
        answers = answering.answer_prompts(model, pending, prompts, batch_size=batch_size, **settings)
    num_tokens = num_passes = 0
    with writer, display.progress("generating", len(pending)) as advance:
        for results in answers:
            writer.write(results)
            advance()
            num_tokens += sum(len(result["token_ids"]) for result in results)
            num_passes += sum(result["target_passes"] for result in results)
    typer.echo(f"{output}: {len(pending)} prompts answered, {num_tokens} tokens in {num_passes} target passes")


def chat(
    *,
    target: TargetOptions,
    drafter: DrafterOption = "ngram",
    draft: DraftOptions,
    sampling: SamplingParams,
    system: Annotated[str | None, typer.Option("--system", help="system message at the start of the conversation")] = None,
) -> None:
    """Talk to the target in the terminal.

    Example: selfspec chat --drafter eagle --temperature 0.7
    """
    from selfspec.cli import display
    from selfspec.cli.chat import converse
    from selfspec.drafters.options import load_drafter_of
    from selfspec.loop.sequence import check_sampling

    with display.stage(f"loading {source_of(target)}"):
        model = load_quietly(target)
        check_sampling(model, sampling)
        loaded = load_drafter_of(draft, drafter, model)
    converse(model, drafter=loaded, sampling=sampling, use_cost_guard=not draft.no_cost_guard, system=system)
