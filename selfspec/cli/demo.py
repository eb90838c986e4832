"""`selfspec demo`: the same prompts through transformers, plain decoding and drafters, side by side, and what came of it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.bench.prompts import DEMO_PROMPTS, SHORT_DEMO_PROMPTS
from selfspec.cli.bench_runtime import drafter_names
from selfspec.cli.loading import fetch_quietly, load_quietly
from selfspec.cli.options import command
from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.model.default_target import source_of
from selfspec.traffic.prompt_files import PromptRow, read_prompts

if TYPE_CHECKING:
    from selfspec.bench.compare import Mode
    from selfspec.cli.race_view import RaceView

EXPLANATION = """\
The contestants take turns: the one that has had the least time takes the next step, and only its own steps count for it.
Coloured text was drafted, and then accepted by the target."""
NOTE = "Taking turns empties the processor's caches: alone, each is a little faster."
PICTURE_WIDTH = 110
TINY = "The target, SmolLM2-135M-Instruct, is a tiny model, to show the speed: do not trust what it says."


def register(cli: typer.Typer) -> None:
    """Add the command."""
    command(cli, target=TargetOptions)(demo)


def demo(
    *,
    target: TargetOptions,
    drafters: Annotated[
        str | None,
        typer.Option("--drafters", help="with commas, the best first; eagle,ngram for the default target, else ngram"),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="a dozen prompts of six kinds, in place of three short ones")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="most tokens for each answer", min=1)] = 64,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="SVG file for the end of the races and the table")
    ] = None,
) -> None:
    """Race transformers' generate, plain decoding and drafters on a few prompts, in less than a minute.

    Fetches the default target if it is needed and not there yet.

    Example: selfspec demo --drafters eagle,medusa

    Example: selfspec demo --full
    """
    if picture is not None and (picture.suffix.lower() != ".svg" or not picture.parent.is_dir()):
        raise ValueError(f"--picture {picture} cannot be written: name a file that ends in .svg, in a folder that exists")
    if target.target is None:
        fetch_quietly()
    if drafters is None:
        drafters = "ngram" if target.target else "eagle,ngram"
    rows = read_prompts(DEMO_PROMPTS if full else SHORT_DEMO_PROMPTS)
    views, modes = _race_all(rows, target, drafter_names(drafters), SamplingParams(max_new_tokens=max_new_tokens))

    from selfspec.cli.tables import show_comparison

    answer_ids = [row.id for row in rows]
    show_comparison(modes, answer_ids, note=NOTE)
    if picture is not None:
        from rich.console import Console

        canvas = Console(highlight=False, record=True, file=io.StringIO(), width=PICTURE_WIDTH)
        for view in views:
            view.draw(canvas)
        show_comparison(modes, answer_ids, note=NOTE, console=canvas)
        canvas.save_svg(str(picture), title="selfspec demo")


def _race_all(
    rows: list[PromptRow], target: TargetOptions, names: list[str], sampling: SamplingParams
) -> tuple[list[RaceView], list[Mode]]:
    """Race on every prompt, after a warm-up, and show each race."""
    from selfspec.cli import display

    with display.stage(f"loading {source_of(target)}") as report:
        from selfspec.bench.baseline import load_baseline
        from selfspec.bench.compare import WARM_UP, Mode, TimedAnswer, warm_up_text
        from selfspec.bench.lanes import lane_names, race
        from selfspec.cli.race_view import RaceView
        from selfspec.drafters.options import load_drafter_of
        from selfspec.loop.text import TextStream
        from selfspec.traffic.answers import encode_prompts

        model = load_quietly(target)
        prompts = encode_prompts(model, rows)
        drafters = {name: load_drafter_of(DraftOptions(), name, model) for name in names}
        report("loading transformers' copy of the target")
        baseline = load_baseline(model, source_of(target), revision=target.revision)
        report("warming up")
        list(race(model, drafters, baseline, warm_up_text(prompts[0]), WARM_UP))
    if target.target is None:
        display.stdout.print(TINY)
    display.stdout.print(EXPLANATION)
    answers: dict[str, list[TimedAnswer]] = {name: [] for name in lane_names(drafters)}
    views = []
    for row, prompt_ids in zip(rows, prompts, strict=True):
        texts = {name: TextStream(model.tokenizer, context=prompt_ids) for name in answers}
        view = RaceView(display.stdout, row, texts, ends=model.eos_token_ids, max_tokens=sampling.max_new_tokens)
        views.append(view)
        for lane in view.follow(race(model, drafters, baseline, prompt_ids, sampling)):
            answers[lane.name].append(lane.answer(texts[lane.name].text))
    return views, [Mode(name, of, sum(answer.seconds for answer in of)) for name, of in answers.items()]
