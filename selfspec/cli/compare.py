"""`selfspec compare`: one's own prompts through plain decoding, several drafters and transformers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.bench.prompts import DEMO_PROMPTS
from selfspec.cli.generate import PROMPT_FILE_HELP, BatchSizeOption
from selfspec.cli.loading import load_quietly
from selfspec.cli.options import command
from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.model.default_target import source_of
from selfspec.traffic.prompt_files import PromptRow, read_prompts

if TYPE_CHECKING:
    from selfspec.bench.compare import Mode

DraftersOption = Annotated[str, typer.Option("--drafters", help="the drafters to compare, with commas between them")]
LEFT_OUT = "transformers is left out: it is greedy here, and answers one prompt at a time."


def register(cli: typer.Typer) -> None:
    """Add the command."""
    command(cli, target=TargetOptions, draft=DraftOptions, sampling=SamplingParams)(compare)


def compare(
    *,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help=f"{PROMPT_FILE_HELP}; a dozen packaged prompts by default")
    ] = None,
    target: TargetOptions,
    drafters: DraftersOption = "auto",
    draft: DraftOptions,
    sampling: SamplingParams,
    batch_size: BatchSizeOption = 1,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            help="transformers: also run its own generate, as is done by default where it can follow; none: leave it out",
        ),
    ] = None,
) -> None:
    """Run the same prompts through several drafters: passes saved, speed, and whether the output is the same.

    Example: selfspec compare --drafters ngram,eagle --max-new-tokens 128

    Example: selfspec compare --prompt-file prompts.jsonl --drafters eagle
    """
    if baseline not in (None, "none", "transformers"):
        raise ValueError(f"--baseline {baseline!r} is not known: use transformers or none")

    rows = read_prompts(prompt_file or DEMO_PROMPTS)

    from selfspec.cli import display

    with display.stage("starting"):
        from selfspec.bench.compare import check_transformers_can, transformers_can
        from selfspec.cli.tables import show_comparison

    if baseline == "transformers":
        check_transformers_can(sampling)
    can_follow = batch_size == 1 and transformers_can(sampling)
    use_transformers = baseline == "transformers" or (baseline is None and can_follow)
    modes = _compare(rows, target, drafters, draft, sampling, batch_size=batch_size, use_transformers=use_transformers)
    note = LEFT_OUT if baseline is None and not can_follow else ""
    show_comparison(modes, [row.id for row in rows for _ in range(sampling.n)], note=note)


def _compare(
    rows: list[PromptRow],
    target: TargetOptions,
    drafters: str,
    draft: DraftOptions,
    sampling: SamplingParams,
    *,
    batch_size: int,
    use_transformers: bool,
) -> list["Mode"]:
    """Answer the same prompts with plain decoding, every drafter and, if asked for, transformers' `generate`."""
    from selfspec.bench.compare import BASELINE, PLAIN, drafter_run, race, transformers_run
    from selfspec.cli import display
    from selfspec.drafters.options import load_drafter_of
    from selfspec.traffic import answers as answering

    if not sampling.is_greedy and sampling.seed is None:
        # Samples without a seed differ by design, so they could not be compared.
        sampling = sampling.with_(seed=0)
    runs = {}
    with display.stage(f"loading {source_of(target)}") as report:
        model = load_quietly(target)
        prompts = answering.encode_prompts(model, rows)
        for spec in dict.fromkeys([PLAIN, *(name.strip() for name in drafters.split(","))]):
            report(f"preparing {spec}")
            runs[spec] = drafter_run(
                model,
                prompts,
                load_drafter_of(draft, spec, model),
                sampling=sampling,
                batch_size=batch_size,
                use_cost_guard=not draft.no_cost_guard,
            )
        if use_transformers:
            report("preparing transformers")
            runs[BASELINE] = transformers_run(
                model, prompts, sampling=sampling, source=source_of(target), revision=target.revision
            )
    num_answers = len(rows) * sampling.n
    with display.progress("comparing", len(runs) * num_answers) as advance:
        return race(runs, num_answers, advance)
