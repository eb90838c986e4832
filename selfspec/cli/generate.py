"""`selfspec generate`: one question answered in the terminal, or the prompts of a file."""

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli.loading import load_quietly, loading
from selfspec.cli.options import command
from selfspec.cli.question import answer, figures
from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.drafters.specs import FORMS
from selfspec.traffic.prompt_files import STANDARD, OutputWriter, Printer, PromptRow, read_prompts

if TYPE_CHECKING:
    from selfspec.drafters import Drafter
    from selfspec.model.target import Target

DrafterOption = Annotated[str, typer.Option("--drafter", help=f"what proposes tokens: {FORMS}", rich_help_panel="Drafting")]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", help="sequences decoded together", min=1)]
PROMPT_FILE_HELP = "JSON lines with an id and one of: prompt, messages, turns"


def in_out(*flags: str, help: str) -> Any:
    """An option among those of input and output."""
    return typer.Option(*flags, help=help, rich_help_panel="Input and output")


def register(cli: typer.Typer) -> None:
    """Add the command."""
    command(cli, target=TargetOptions, draft=DraftOptions, sampling=SamplingParams)(generate)


def generate(
    *,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="a question, in quotes; - reads it from standard input")
    ] = None,
    prompt_file: Annotated[Path | None, in_out("--prompt-file", help=f"{PROMPT_FILE_HELP}; - for standard input")] = None,
    output: Annotated[
        Path | None,
        in_out("--output", help="JSON lines to write, one per prompt, as each is finished; - for standard output"),
    ] = None,
    overwrite: Annotated[bool, in_out("--overwrite", help="replace the output if it exists")] = False,
    resume: Annotated[
        bool, in_out("--resume", help="keep the output, and answer only the prompts that are not in it")
    ] = False,
    all_turns: Annotated[
        bool, in_out("--all-turns", help="answer every turn of a conversation, one after the other")
    ] = False,
    batch_size: BatchSizeOption = 1,
    target: TargetOptions,
    drafter: DrafterOption = "auto",
    draft: DraftOptions,
    sampling: SamplingParams,
) -> None:
    """Answer a question, or the prompts in a file.

    Example: selfspec generate "What is the capital of France?"

    Example: selfspec generate --prompt-file prompts.jsonl --output answers.jsonl --drafter eagle --batch-size 8
    """
    rows = _rows(prompt, prompt_file)
    if output is None:
        if prompt_file is not None:
            raise typer.BadParameter("--prompt-file needs an --output for the answers; --output - prints them")
        if sampling.n > 1 or sampling.logprobs:
            raise ValueError("--n and --logprobs need JSON lines to be told in: add --output FILE; --output - prints them")
    if output is not None and STANDARD not in (output, prompt_file) and _is_same(output, prompt_file):
        raise ValueError(f"{output} is the prompt file: choose another output")
    if all_turns and sampling.n > 1:
        raise ValueError("--all-turns goes on from one answer: leave out --n")
    num_results = {row.id: len(row.turns or [None]) if all_turns else sampling.n for row in rows}
    writer = _writer(output, num_results, overwrite=overwrite, resume=resume)
    pending = [row for row in rows if row.id not in writer.finished]
    if not pending:
        typer.echo(f"{output}: every prompt is answered already")
        return
    with loading(target):
        from selfspec.drafters.options import load_drafter_of
        from selfspec.loop.sequence import check_sampling
        from selfspec.traffic import answers as answering

        model = load_quietly(target)
        check_sampling(model, sampling)
        settings: dict[str, Any] = {
            "drafter": load_drafter_of(draft, drafter, model),
            "sampling": sampling,
            "use_cost_guard": not draft.no_cost_guard,
        }
        if prompt is not None:
            pending = [_as_it_is_asked(row, model) for row in pending]
        prompts = answering.encode_prompts(model, pending)
    if output is None:
        answer(model, prompts[0], **settings)
        return
    if all_turns:
        answers = answering.answer_all_turns(model, pending, **settings)
    else:
        answers = answering.answer_prompts(model, pending, prompts, batch_size=batch_size, **settings)
    _write(answers, writer, len(pending), "" if output == STANDARD else f"{output}: ", settings["drafter"])


def _is_same(output: Path, prompt_file: Path | None) -> bool:
    return prompt_file is not None and output.exists() and output.samefile(prompt_file)


def _rows(prompt: str | None, prompt_file: Path | None) -> list[PromptRow]:
    """The question as a row, or the rows of the file."""
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter(f"the prompt {prompt!r} and --prompt-file exclude each other: give one of them")
    if prompt_file is not None:
        return read_prompts(prompt_file)
    if prompt is None:
        raise typer.BadParameter('nothing is asked: give a prompt in quotes, such as "What is 2+2?", or a --prompt-file')
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise ValueError("the prompt is empty: write a question")
    return [PromptRow("prompt", [{"role": "user", "content": text}], turns=[text])]


def _as_it_is_asked(row: PromptRow, target: "Target") -> PromptRow:
    """The question, as plain text for a target without a chat template, which goes on with it."""
    assert row.turns is not None
    return row if getattr(target.tokenizer, "chat_template", None) else replace(row, prompt=row.turns[0], turns=None)


def _writer(
    output: Path | None, num_results: Mapping[str | int, int], *, overwrite: bool, resume: bool
) -> OutputWriter | Printer:
    if output not in (None, STANDARD):
        return OutputWriter(output, num_results, overwrite=overwrite, resume=resume)
    if overwrite or resume:
        raise ValueError("--overwrite and --resume are about a file: name it with --output")
    return Printer()


def _write(
    answers: Iterator[list[dict[str, Any]]],
    writer: OutputWriter | Printer,
    num_prompts: int,
    place: str,
    drafter: "Drafter | None",
) -> None:
    """Write the answers as they come, and say at the end how fast they came."""
    from selfspec.cli import display

    num_tokens = num_passes = 0
    start = time.perf_counter()
    with writer, display.progress("generating", num_prompts) as advance:
        for results in answers:
            writer.write(results)
            advance()
            num_tokens += sum(len(result["token_ids"]) for result in results)
            num_passes += sum(result["target_passes"] for result in results)
    speed = figures(num_tokens, num_passes, time.perf_counter() - start, drafter)
    answered = f"{num_prompts} prompt{'' if num_prompts == 1 else 's'} answered"
    # Standard output that has the answers has nothing else.
    typer.echo(f"{place}{answered}, {speed}", err=isinstance(writer, Printer))
