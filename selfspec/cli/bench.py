"""`selfspec bench`: drafters measured against plain decoding and transformers, task by task."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.bench.prompts import choose_prompts, choose_tasks, read_benchmark
from selfspec.bench.records import RecordWriter
from selfspec.cli import bench_engine, demo, plot
from selfspec.cli import compare as comparing
from selfspec.cli.bench_runtime import ExpandOption, drafter_names, load_for_bench
from selfspec.cli.options import command
from selfspec.cli.record_options import RecordOptions
from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.model.default_target import source_of
from selfspec.traffic.prompt_files import PromptRow

if TYPE_CHECKING:
    from selfspec.bench.tasks import Measurement, TaskSettings
    from selfspec.cli.bench_runtime import Loaded

# One in so many prompts is left by --quick.
QUICK = 5

MaxNewTokensOption = Annotated[int, typer.Option("--max-new-tokens", help="most tokens for each answer", min=1)]


def register(cli: typer.Typer) -> None:
    """Add the command, and the others that measure drafters."""
    demo.register(cli)
    comparing.register(cli)
    command(cli, target=TargetOptions, draft=DraftOptions, record=RecordOptions)(bench)
    bench_engine.register(cli)
    plot.register(cli)


def bench(
    *,
    target: TargetOptions,
    expand: ExpandOption = None,
    drafters: comparing.DraftersOption = "auto",
    draft: DraftOptions,
    prompts: Annotated[
        str, typer.Option("--prompts", help="spec_bench, humaneval, or a prompt file with a category in each row")
    ] = "spec_bench",
    tasks: Annotated[
        str | None, typer.Option("--tasks", help="the categories to measure, with commas, such as mt_bench; all by default")
    ] = None,
    per_task: Annotated[
        int, typer.Option("--per-task", help="prompts of each task, spread over it; 0 takes all", min=0)
    ] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="a fifth of these prompts")] = False,
    max_new_tokens: MaxNewTokensOption = 128,
    baseline: Annotated[bool, typer.Option(help="also run transformers' own generate")] = True,
    plain_layers: Annotated[
        bool,
        typer.Option("--plain-layers", help="leave the target's layers as transformers has them, to see what ours bring"),
    ] = False,
    record: RecordOptions,
) -> None:
    """Measure speed task by task, greedily and one prompt at a time, against plain decoding and transformers.

    Example: selfspec bench --drafters ngram,eagle --tasks mt_bench --output bench.jsonl

    Example: selfspec bench --quick
    """
    rows = read_benchmark(prompts)
    chosen = choose_prompts(choose_tasks(rows, tasks), per_task or None)
    if quick:
        chosen = {task: of[::QUICK] for task, of in chosen.items()}
    names = drafter_names(drafters)
    settings = {
        **asdict(target),
        **asdict(draft),
        **{"expand": expand, "drafters": names, "prompts": prompts, "max_new_tokens": max_new_tokens, "baseline": baseline},
        "plain_layers": plain_layers,
    }
    if plain_layers and expand is not None:
        raise ValueError("--expand makes layers of its own: leave it out, or leave out --plain-layers")
    num_modes = 1 + len(names) + baseline
    writer = record.writer("bench", settings, {row.id: num_modes for row in rows})
    pending = {task: left for task, of in chosen.items() if (left := [r for r in of if r.id not in writer.finished])}

    from selfspec.cli import display

    with display.stage("starting"):
        from selfspec.bench import tasks as benchmark
        from selfspec.bench.plot_tasks import plot_tasks
        from selfspec.cli.tables import show_benchmark

    measured = [benchmark.measurement_of(row) for row in writer.rows]
    environment, notes = writer.environment, list[str]()
    try:
        if pending:
            with display.stage(f"loading {source_of(target)}"):
                loaded = load_for_bench(target, drafters, draft, expand, use_packing=not plain_layers)
                task_settings = benchmark.TaskSettings(
                    sampling=SamplingParams(max_new_tokens=max_new_tokens),
                    use_cost_guard=not draft.no_cost_guard,
                    baseline=loaded.baseline(target.revision) if baseline else None,
                )
            environment, notes = benchmark.environment(loaded.target), loaded.notes
            with writer.open(environment):
                _measure(writer, loaded, pending, task_settings, measured)
    finally:
        # After Ctrl-C, too.
        if measured:
            show_benchmark(benchmark.summarise_tasks(measured), environment)
            for note in notes:
                typer.echo(note)
            if record.plot is not None:
                plot_tasks(measured, environment, record.plot)


def _measure(
    writer: RecordWriter,
    loaded: "Loaded",
    tasks: Mapping[str, Sequence[PromptRow]],
    settings: "TaskSettings",
    measured: "list[Measurement]",
) -> None:
    """Add every measurement to the file and to `measured` as soon as it is made."""
    from selfspec.bench.tasks import measure_tasks, row_of
    from selfspec.cli import display

    num_prompts = sum(map(len, tasks.values()))
    num_modes = 1 + len(loaded.drafters) + (settings.baseline is not None)

    def announce(seconds: float) -> None:
        size = f"{num_prompts} prompts, {num_modes} answers each, of at most {settings.sampling.max_new_tokens} tokens"
        display.stderr.print(f"{size}: {display.about(seconds)} or less. Ctrl-C ends with what is measured by then.")

    with display.progress("measuring", num_prompts) as advance:

        def keep(row: PromptRow, of_prompt: "list[Measurement]") -> None:
            writer.write(row.id, [row_of(measurement) for measurement in of_prompt])
            measured.extend(of_prompt)
            advance()

        measure_tasks(loaded.target, tasks, loaded.drafters, settings, on_start=announce, on_prompt=keep)
