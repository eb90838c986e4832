"""`selfspec compare`, `demo`, `bench` and `bench-engine`: drafters measured against plain decoding, on real prompts."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.bench_runtime import ExpandOption, load_for_bench
from selfspec.cli.generate import PROMPT_FILE_HELP, BatchSizeOption, DrafterOption
from selfspec.cli.loading import fetch_quietly, load_quietly
from selfspec.cli.options import command
from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.model.default_target import source_of
from selfspec.traffic.prompt_files import PromptRow, read_prompts

if TYPE_CHECKING:
    from selfspec.bench.compare import Mode

DraftersOption = Annotated[str, typer.Option("--drafters", help="the drafters to compare, with commas between them")]
MaxNewTokensOption = Annotated[int, typer.Option("--max-new-tokens", help="most tokens for each answer", min=1)]


def register(cli: typer.Typer) -> None:
    """Add the four commands."""
    command(cli, target=TargetOptions, draft=DraftOptions, sampling=SamplingParams)(compare)
    command(cli, target=TargetOptions)(demo)
    command(cli, target=TargetOptions, draft=DraftOptions)(bench)
    command(cli, target=TargetOptions, draft=DraftOptions)(bench_engine)


def compare(
    *,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help=f"{PROMPT_FILE_HELP}; a dozen packaged prompts by default")
    ] = None,
    target: TargetOptions,
    drafters: DraftersOption = "none,ngram",
    draft: DraftOptions,
    sampling: SamplingParams,
    batch_size: BatchSizeOption = 1,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", help="transformers: also run its own generate, which is greedy"),
    ] = None,
) -> None:
    """Run the same prompts through several drafters: speed, acceptance, and whether the output is the same.

    Example: selfspec compare --drafters ngram,eagle --max-new-tokens 128
    """
    if baseline not in (None, "transformers"):
        raise ValueError(f"--baseline {baseline!r} is not known: use transformers or leave it out")

    from selfspec.bench.prompts import DEMO_PROMPTS
    from selfspec.cli import display

    rows = read_prompts(prompt_file or DEMO_PROMPTS)
    modes = _compare(
        rows,
        target,
        drafters,
        draft,
        sampling,
        batch_size=batch_size,
        use_transformers=baseline is not None,
    )
    display.show_comparison(modes, [row.id for row in rows for _ in range(sampling.n)])


def demo(
    *,
    target: TargetOptions,
    drafters: Annotated[
        str | None,
        typer.Option("--drafters", help="with commas; none,ngram by default, and eagle for the default target"),
    ] = None,
    max_new_tokens: MaxNewTokensOption = 64,
) -> None:
    """Fetch the default target if needed, answer a dozen packaged prompts with and without drafting, and compare.

    Example: selfspec demo --drafters ngram,medusa,eagle
    """
    if target.target is None:
        fetch_quietly()

    from selfspec.bench.prompts import DEMO_PROMPTS
    from selfspec.cli import display

    rows = read_prompts(DEMO_PROMPTS)
    if drafters is None:
        drafters = "none,ngram" if target.target else "none,ngram,eagle"
    modes = _compare(rows, target, drafters, DraftOptions(), SamplingParams(max_new_tokens=max_new_tokens))
    for row, answer in list(zip(rows, modes[-1].answers, strict=True))[:: len(rows) // 3]:
        display.show_answer(row, answer)
    display.show_comparison(modes, [row.id for row in rows])


def bench(
    *,
    target: TargetOptions,
    expand: ExpandOption = None,
    drafters: DraftersOption = "ngram",
    draft: DraftOptions,
    prompts: Annotated[
        str, typer.Option("--prompts", help="spec_bench, humaneval, or a prompt file with a category in each row")
    ] = "spec_bench",
    per_task: Annotated[
        int | None, typer.Option("--per-task", help="prompts of each task, spread over it; all by default", min=1)
    ] = None,
    max_new_tokens: MaxNewTokensOption = 128,
    baseline: Annotated[bool, typer.Option(help="also run transformers' own generate")] = True,
    output: Annotated[Path | None, typer.Option("--output", help="JSON file for every measurement")] = None,
) -> None:
    """Measure speed task by task, greedily and one prompt at a time, against plain decoding and transformers.

    Example: selfspec bench --drafters ngram,eagle --per-task 5 --output bench.json
    """
    from selfspec.bench import tasks as benchmark
    from selfspec.bench.prompts import choose_prompts, read_benchmark
    from selfspec.cli import display

    tasks = choose_prompts(read_benchmark(prompts), per_task)
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    with display.stage(f"loading {source_of(target)}"):
        loaded = load_for_bench(target, drafters, draft, expand)
    with display.progress("measuring", sum(map(len, tasks.values()))) as advance:
        measurements = benchmark.measure_tasks(
            loaded.target,
            tasks,
            loaded.drafters,
            benchmark.TaskSettings(
                sampling=sampling,
                use_cost_guard=not draft.no_cost_guard,
                baseline_source=loaded.baseline if baseline else None,
            ),
            on_prompt=advance,
        )
    display.show_benchmark(benchmark.summarise_tasks(measurements), benchmark.environment(loaded.target))
    for note in loaded.notes:
        typer.echo(note)
    if output is not None:
        benchmark.save_tasks(output, loaded.target, sampling, measurements)


def bench_engine(
    *,
    target: TargetOptions,
    expand: ExpandOption = None,
    drafter: DrafterOption = "ngram",
    draft: DraftOptions,
    streams: Annotated[
        str, typer.Option("--streams", help="numbers of simultaneous streams to measure, with commas")
    ] = "1,8,32,64",
    prompts: Annotated[str, typer.Option("--prompts", help="spec_bench, humaneval, or a prompt file")] = "spec_bench",
    repeats: Annotated[int, typer.Option("--repeats", help="pairs of runs, with speculation and without", min=1)] = 3,
    rounds: Annotated[int, typer.Option("--rounds", help="answers that each stream gives in a run", min=1)] = 3,
    max_new_tokens: MaxNewTokensOption = 128,
    output: Annotated[Path | None, typer.Option("--output", help="JSON file for every run")] = None,
) -> None:
    """Measure the tokens per second of many streams at once, with speculation and without it, greedily.

    Example: selfspec bench-engine --drafter eagle --streams 1,8,32
    """
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", streams):
        raise ValueError(f"--streams {streams!r} is not a list of whole numbers such as 1,8,32")
    counts = list(map(int, streams.split(",")))

    from selfspec.bench import tasks as benchmark
    from selfspec.bench import throughput
    from selfspec.bench.prompts import mixed, read_benchmark
    from selfspec.cli import display

    rows = mixed(read_benchmark(prompts))
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    with display.stage(f"loading {source_of(target)}"):
        loaded = load_for_bench(target, drafter, draft, expand)
        if len(loaded.drafters) != 1:
            raise ValueError(f"--drafter {drafter} is not one drafter to compare with plain decoding: name one")
        model, [measured] = loaded.target, loaded.drafters.values()
        assert measured is not None
        encoded = [model.encode(row.prompt) for row in rows]
        prompt_ids = [ids for ids in encoded if len(ids) + max_new_tokens <= model.context_length]
        if not prompt_ids:
            raise ValueError(
                f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in a context of {model.context_length} "
                "tokens: use fewer"
            )
    with display.progress("measuring", len(counts) * (repeats + 1)) as advance:
        runs = throughput.measure_throughput(
            model,
            measured,
            prompt_ids,
            throughput.ThroughputSettings(
                streams=counts,
                num_repeats=repeats,
                rounds=rounds,
                sampling=sampling,
                use_cost_guard=not draft.no_cost_guard,
            ),
            on_run=advance,
        )
    display.show_throughput(throughput.summarise_throughput(runs), benchmark.environment(model))
    for note in loaded.notes:
        typer.echo(note)
    if output is not None:
        throughput.save_throughput(output, model, sampling, runs)


def _compare(
    rows: list[PromptRow],
    target: TargetOptions,
    drafters: str,
    draft: DraftOptions,
    sampling: SamplingParams,
    *,
    batch_size: int = 1,
    use_transformers: bool = False,
) -> list["Mode"]:
    """Answer the same prompts with plain decoding, every drafter and, if asked for, transformers' `generate`."""
    from selfspec.bench.compare import check_transformers_can, drafter_run, race, transformers_run
    from selfspec.cli import display
    from selfspec.drafters.options import load_drafter_of
    from selfspec.traffic import answers as answering

    if use_transformers:
        check_transformers_can(sampling)
    if not sampling.is_greedy and sampling.seed is None:
        # Samples without a seed differ by design, so they could not be compared.
        sampling = sampling.with_(seed=0)
    runs = {}
    with display.stage(f"loading {source_of(target)}") as report:
        model = load_quietly(target)
        prompts = answering.encode_prompts(model, rows)
        for spec in dict.fromkeys(["none", *(name.strip() for name in drafters.split(","))]):
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
            runs["transformers"] = transformers_run(
                model, prompts, sampling=sampling, source=source_of(target), revision=target.revision
            )
    num_answers = len(rows) * sampling.n
    with display.progress("comparing", len(runs) * num_answers) as advance:
        return race(runs, num_answers, advance)
