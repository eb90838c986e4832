"""`selfspec bench-engine`: many streams at once, with speculation and without."""

import re
from dataclasses import asdict
from typing import Annotated

import typer

from selfspec.bench.prompts import mixed, read_benchmark
from selfspec.cli.bench_runtime import ExpandOption, drafter_names, load_for_bench
from selfspec.cli.generate import DrafterOption
from selfspec.cli.options import command
from selfspec.cli.record_options import RecordOptions
from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.model.default_target import source_of


def register(cli: typer.Typer) -> None:
    """Add the command."""
    command(cli, target=TargetOptions, draft=DraftOptions, record=RecordOptions)(bench_engine)


def bench_engine(
    *,
    target: TargetOptions,
    expand: ExpandOption = None,
    drafter: DrafterOption = "auto",
    draft: DraftOptions,
    streams: Annotated[
        str, typer.Option("--streams", help="numbers of simultaneous streams to measure, with commas")
    ] = "1,8,32,64",
    prompts: Annotated[str, typer.Option("--prompts", help="spec_bench, humaneval, or a prompt file")] = "spec_bench",
    repeats: Annotated[int, typer.Option("--repeats", help="pairs of runs, with speculation and without", min=1)] = 3,
    rounds: Annotated[int, typer.Option("--rounds", help="answers that each stream gives in a run", min=1)] = 3,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="most tokens for each answer", min=1)] = 128,
    record: RecordOptions,
) -> None:
    """Measure the tokens per second of many streams at once, with speculation and without it, greedily.

    Example: selfspec bench-engine --drafter eagle --streams 1,8,32 --output engine.jsonl

    Example: selfspec bench-engine --streams 1,8 --plot engine.png
    """
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", streams):
        raise ValueError(f"--streams {streams!r} is not a list of whole numbers such as 1,8,32")
    if len(drafter_names(drafter)) != 1:
        raise ValueError(f"--drafter {drafter} is not one drafter to compare with plain decoding: name one")
    counts = list(dict.fromkeys(map(int, streams.split(","))))
    rows = mixed(read_benchmark(prompts))
    settings = {
        **asdict(target),
        **asdict(draft),
        **{"expand": expand, "drafter": drafter, "prompts": prompts, "max_new_tokens": max_new_tokens, "rounds": rounds},
    }
    pairs = {_pair_id(count, repeat): (count, repeat) for count in counts for repeat in range(1, repeats + 1)}
    writer = record.writer("bench-engine", settings, dict.fromkeys(pairs, 2))

    from selfspec.cli import display

    with display.stage("starting"):
        from selfspec.bench import throughput
        from selfspec.bench.plot_tasks import plot_throughput
        from selfspec.bench.tasks import environment as environment_of
        from selfspec.cli.tables import show_throughput

    measured = [throughput.run_of(row) for row in writer.rows]
    environment, notes = writer.environment, list[str]()
    finished = {pair for pair_id, pair in pairs.items() if pair_id in writer.finished}
    try:
        if len(finished) < len(pairs):
            with display.stage(f"loading {source_of(target)}"):
                loaded = load_for_bench(target, drafter, draft, expand)
                model, [drafting] = loaded.target, loaded.drafters.values()
                assert drafting is not None
                encoded = [model.encode(row.prompt) for row in rows]
                prompt_ids = [ids for ids in encoded if len(ids) + max_new_tokens <= model.context_length]
                if not prompt_ids:
                    raise ValueError(
                        f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in a context of "
                        f"{model.context_length} tokens: use fewer"
                    )
            environment, notes = environment_of(model), loaded.notes
            num_new = len({count for count, _ in set(pairs.values()) - finished}) + len(pairs) - len(finished)
            with writer.open(environment), display.progress("measuring", num_new) as advance:

                def keep(pair: list[throughput.ThroughputRun]) -> None:
                    if pair:
                        writer.write(_pair_id(pair[0].num_streams, pair[0].repeat), [asdict(run) for run in pair])
                        measured.extend(pair)
                    advance()

                throughput.measure_throughput(
                    model,
                    drafting,
                    prompt_ids,
                    throughput.ThroughputSettings(
                        streams=counts,
                        num_repeats=repeats,
                        rounds=rounds,
                        sampling=SamplingParams(max_new_tokens=max_new_tokens),
                        use_cost_guard=not draft.no_cost_guard,
                    ),
                    finished=finished,
                    on_pair=keep,
                )
    finally:
        # After Ctrl-C, too.
        if measured:
            show_throughput(throughput.summarise_throughput(measured), environment)
            for note in notes:
                typer.echo(note)
            if record.plot is not None:
                plot_throughput(measured, environment, record.plot)


def _pair_id(num_streams: int, repeat: int) -> str:
    return f"{num_streams} streams, repeat {repeat}"
