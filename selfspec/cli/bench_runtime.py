"""`selfspec bench-runtime`: what a step costs, and where its time goes; and loading for benchmarks, expanded or not."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.options import command, quiet_libraries
from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.model.default_target import source_of
from selfspec.traffic.prompt_files import PromptRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfspec.drafters import Drafter
    from selfspec.model.target import Target

ExpandOption = Annotated[
    str | None,
    typer.Option(
        "--expand",
        help="put the target and its heads into a larger frame of the same function: 8b, or "
        "HIDDENxLAYERSxINTERMEDIATExHEAD_DIM",
    ),
]

CONTEXTS = (512, 4096, 16384)
BASELINES = ("eager", "static")


@dataclass(frozen=True)
class Loaded:
    """What a benchmark runs.

    Attributes:
        drafters: by the names given, plain decoding left out.
        baseline: what transformers' `generate` runs: where to load it from, or the model.
        notes: what to say beside the figures.
    """

    target: "Target"
    drafters: "dict[str, Drafter | None]"
    baseline: "str | PreTrainedModel"
    notes: list[str]


def load_for_bench(options: TargetOptions, drafters: str, draft: DraftOptions, expand_to: str | None) -> Loaded:
    """The target and the drafters named, with commas between them; all of them expanded where a shape is named."""
    from selfspec.drafters.options import load_drafter_of, load_target

    quiet_libraries()
    named = [name.strip() for name in drafters.split(",")]
    names = [name for name in dict.fromkeys(named) if name not in ("", "none")]
    source = load_target(options)
    if expand_to is None:
        return Loaded(source, {name: load_drafter_of(draft, name, source) for name in names}, source_of(options), [])

    from selfspec.bench.compare import plain_twin
    from selfspec.bench.expand import Shape, expand, expanded_drafter, logit_gap, serve_expanded

    shape = Shape.parse(expand_to)
    model = expand(source.model, shape)
    # Before its layers are swapped for ours.
    baseline = plain_twin(model)
    target = serve_expanded(source, model, shape)
    settings = {"num_draft_tokens": draft.num_draft_tokens, "num_nodes": draft.num_nodes, "width": draft.width}
    loaded = {name: expanded_drafter(name, source, target, **settings) for name in names}
    gap = logit_gap(source, target)
    note = f"Every figure is of an expanded model: its logits are the original's up to a relative gap of {gap:.1g}."
    return Loaded(target, loaded, baseline, [note])


def register(cli: typer.Typer) -> None:
    """Add the command."""

    @command(cli, target=TargetOptions, draft=DraftOptions)
    def bench_runtime(
        *,
        target: TargetOptions,
        expand: ExpandOption = None,
        drafters: Annotated[
            str, typer.Option("--drafters", help="the drafters to measure, with commas between them")
        ] = "ngram,medusa,eagle",
        draft: DraftOptions,
        contexts: Annotated[
            str | None,
            typer.Option("--contexts", help="prefix lengths of the timed steps; 512,4096,16384 as far as the target goes"),
        ] = None,
        nodes: Annotated[str, typer.Option("--nodes", help="tree sizes of the timed steps")] = "1,8,16,32,64",
        repeats: Annotated[int, typer.Option("--repeats", help="timed steps of each kind", min=1)] = 30,
        prompts: Annotated[
            str, typer.Option("--prompts", help="spec_bench, humaneval, or a prompt file, for the end-to-end part")
        ] = "spec_bench",
        num_prompts: Annotated[
            int, typer.Option("--num-prompts", help="how many of them, spread evenly; 0 leaves the loop out", min=0)
        ] = 3,
        max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="most tokens for each answer", min=2)] = 64,
        baselines: Annotated[
            str,
            typer.Option(
                "--baselines",
                help="transformers' generate: eager, static (compiled on CUDA, which takes minutes), both with a comma, "
                "or none",
            ),
        ] = "eager",
        acceptance_lengths: Annotated[
            str, typer.Option("--acceptance-lengths", help="set lengths of the synthetic drafter; empty leaves it out")
        ] = "3,4,5",
        synthetic_nodes: Annotated[
            int, typer.Option("--synthetic-nodes", help="tree size of the synthetic drafter", min=1)
        ] = 16,
        json: Annotated[Path | None, typer.Option("--json", help="file for every figure, kept up to date")] = None,
        plots: Annotated[Path | None, typer.Option("--plots", help="directory for PNG files; needs matplotlib")] = None,
        profile: Annotated[
            Path | None, typer.Option("--profile", help="Chrome trace of the last drafter's steps, for Perfetto")
        ] = None,
    ) -> None:
        """Measure steps against the device's floor, the loop's stages, tokens per second, and the cost model's promise."""
        sizes = _numbers("--nodes", nodes)
        lengths = _numbers("--acceptance-lengths", acceptance_lengths) if acceptance_lengths else []
        wanted = [name for name in baselines.split(",") if name != "none"]
        if unknown := sorted(set(wanted) - set(BASELINES)):
            raise ValueError(f"--baselines {','.join(unknown)} is not known: use eager, static, both, or none")
        if lengths and max(lengths) > synthetic_nodes:
            raise ValueError(f"--acceptance-lengths {max(lengths)} needs at least as many --synthetic-nodes")
        for file in (json, profile):
            if file is not None and not file.parent.is_dir():
                raise ValueError(f"{file}: its folder does not exist, so nothing could be written at the end")

        from selfspec.bench import report as runtime_report
        from selfspec.bench import tasks as bench
        from selfspec.bench.runtime import Plan, run
        from selfspec.cli import display

        with display.stage(f"loading {source_of(target)}") as report_stage:
            loaded = load_for_bench(target, drafters, draft, expand)
            most = loaded.target.context_length - max(sizes)
            plan = Plan(
                contexts=[c for c in CONTEXTS if c <= most] if contexts is None else _numbers("--contexts", contexts),
                nodes=sizes,
                num_calls=repeats,
                prompts=_spread(bench.read_benchmark(prompts), num_prompts),
                sampling=SamplingParams(max_new_tokens=max_new_tokens),
                baselines=wanted,
                baseline=loaded.baseline,
                acceptance_lengths=lengths,
                synthetic_nodes=synthetic_nodes,
                profile=profile,
                revision=target.revision,
                notes=loaded.notes,
            )
            report = run(
                loaded.target,
                loaded.drafters,
                plan,
                on_part=report_stage,
                on_result=lambda r: r.save(json) if json else None,
            )
        if plots is not None:
            if runtime_report.has_matplotlib():
                runtime_report.plot(report, plots)
            else:
                report.notes.append("Plots were left out: they need matplotlib (pip install matplotlib).")
        if json is not None:
            report.save(json)
        runtime_report.show(report, display.stdout)


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{option} {text!r} is not a list of positive whole numbers such as 1,8,16")
    return [int(part) for part in parts]


def _spread(rows: list[PromptRow], count: int) -> list[PromptRow]:
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]
