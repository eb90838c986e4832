"""`selfspec bench-runtime`: what a step costs and where its time goes. Also what every benchmark loads, expanded or not."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.options import command, quiet_libraries
from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.model.default_target import source_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfspec.bench.runtime import RuntimeSettings
    from selfspec.drafters import Drafter
    from selfspec.model.target import Target

ExpandOption = Annotated[
    str | None,
    typer.Option(
        "--expand",
        help="put the target and its heads into a larger model that computes the same function: 8b, or "
        "HIDDENxLAYERSxINTERMEDIATExHEAD_DIM",
    ),
]
DraftersOption = Annotated[str, typer.Option("--drafters", help="the drafters to measure, with commas between them")]

CONTEXTS = (512, 4096, 16384)
BASELINES = ("eager", "static")


@dataclass(frozen=True)
class Loaded:
    """What a benchmark runs.

    Attributes:
        drafters: by the names given, without plain decoding.
        baseline_source: what transformers' `generate` runs: a path or Hub id to load, or the model itself.
        notes: what to print below the figures.
    """

    target: "Target"
    drafters: "dict[str, Drafter | None]"
    baseline_source: "str | PreTrainedModel"
    notes: list[str]

    def baseline(self, revision: str | None) -> "PreTrainedModel":
        """The model that transformers' `generate` runs."""
        from selfspec.bench.baseline import load_baseline

        source = self.baseline_source
        return load_baseline(self.target, source, revision=revision) if isinstance(source, str) else source


def drafter_names(drafters: str) -> list[str]:
    """The names in `--drafters`, each once, without plain decoding."""
    return [name for name in dict.fromkeys(name.strip() for name in drafters.split(",")) if name not in ("", "none")]


def load_for_bench(
    options: TargetOptions, drafters: str, draft: DraftOptions, expand_to: str | None, *, use_packing: bool = True
) -> Loaded:
    """Load the target and the named drafters, separated by commas. `expand_to` names a shape to expand them all to."""
    from selfspec.drafters.options import load_drafter_of, load_target

    quiet_libraries()
    names = drafter_names(drafters)
    source = load_target(options, use_packing=use_packing)
    if expand_to is None:
        return Loaded(source, {name: load_drafter_of(draft, name, source) for name in names}, source_of(options), [])

    from selfspec.bench.baseline import plain_twin
    from selfspec.bench.expand import ExpandedShape, expand, expanded_drafter, logit_gap, serve_expanded

    shape = ExpandedShape.parse(expand_to)
    model = expand(source.model, shape)
    # Serving swaps the model's layers for ours, so copy it first.
    baseline = plain_twin(model)
    target = serve_expanded(source, model, shape)
    settings = {"num_draft_tokens": draft.num_draft_tokens, "num_nodes": draft.num_nodes, "width": draft.width}
    loaded = {name: expanded_drafter(name, source, target, **settings) for name in names}
    gap = logit_gap(source, target)
    note = f"Every figure is of an expanded model: its logits equal the original's to a relative gap of {gap:.1g}."
    return Loaded(target, loaded, baseline, [note])


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """What `bench-runtime` measures, and where it writes the results."""

    contexts: str | None = field(
        default=None,
        metadata={"help": "prefix lengths of the timed steps; by default 512,4096,16384, up to the target's context length"},
    )
    nodes: str = field(default="1,8,16,32,64", metadata={"help": "tree sizes of the timed steps"})
    repeats: int = field(default=30, metadata={"help": "timed steps of each kind"})
    prompts: str = field(
        default="spec_bench", metadata={"help": "spec_bench, humaneval, or a prompt file, for the end-to-end part"}
    )
    num_prompts: int = field(
        default=3, metadata={"help": "how many of the prompts to use, spread evenly; 0 leaves the decoding loop out"}
    )
    max_new_tokens: int = field(default=64, metadata={"help": "most tokens for each answer"})
    baselines: str = field(
        default="eager",
        metadata={
            "help": "transformers' generate: eager, static (compiled on CUDA in some minutes), both with a comma, or none"
        },
    )
    acceptance_lengths: str = field(
        default="3,4,5", metadata={"help": "acceptance lengths to set the synthetic drafter to; empty leaves it out"}
    )
    synthetic_nodes: int = field(default=16, metadata={"help": "tree size of the synthetic drafter"})
    json: Path | None = field(default=None, metadata={"help": "file for every figure, rewritten after each part of the run"})
    plots: Path | None = field(default=None, metadata={"help": "directory for PNG files; needs matplotlib"})
    profile: Path | None = field(
        default=None, metadata={"help": "file for a Chrome trace of the last drafter's steps, which Perfetto can show"}
    )

    def __post_init__(self) -> None:
        least = {"repeats": 1, "num_prompts": 0, "max_new_tokens": 2, "synthetic_nodes": 1}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} is not allowed: use {limit} or more")
        _numbers("--nodes", self.nodes)
        if unknown := sorted(set(self.wanted_baselines) - set(BASELINES)):
            raise ValueError(f"--baselines {','.join(unknown)} is not known: use eager, static, both, or none")
        lengths = self.set_lengths
        if lengths and max(lengths) > self.synthetic_nodes:
            raise ValueError(f"--acceptance-lengths {max(lengths)} needs at least as many --synthetic-nodes")
        for file in (self.json, self.profile):
            if file is not None and not file.parent.is_dir():
                raise ValueError(f"{file}: its folder does not exist, so the results could not be written: make it first")

    @property
    def tree_sizes(self) -> list[int]:
        return _numbers("--nodes", self.nodes)

    @property
    def set_lengths(self) -> list[int]:
        return _numbers("--acceptance-lengths", self.acceptance_lengths) if self.acceptance_lengths else []

    @property
    def wanted_baselines(self) -> list[str]:
        return [name for name in self.baselines.split(",") if name != "none"]

    def settings(self, loaded: Loaded, revision: str | None) -> "RuntimeSettings":
        """These options for a loaded target; the prompts are read, and contexts without a value follow the target."""
        from selfspec.bench.prompts import read_benchmark, spread
        from selfspec.bench.runtime import RuntimeSettings

        most = loaded.target.context_length - max(self.tree_sizes)
        default = [context for context in CONTEXTS if context <= most]
        return RuntimeSettings(
            contexts=default if self.contexts is None else _numbers("--contexts", self.contexts),
            nodes=self.tree_sizes,
            num_calls=self.repeats,
            prompts=spread(read_benchmark(self.prompts), self.num_prompts),
            sampling=SamplingParams(max_new_tokens=self.max_new_tokens),
            baselines=self.wanted_baselines,
            baseline=loaded.baseline_source,
            acceptance_lengths=self.set_lengths,
            synthetic_nodes=self.synthetic_nodes,
            profile=self.profile,
            revision=revision,
            notes=loaded.notes,
        )


def register(cli: typer.Typer) -> None:
    """Add the command."""

    @command(cli, target=TargetOptions, draft=DraftOptions, options=RuntimeOptions)
    def bench_runtime(
        *,
        target: TargetOptions,
        expand: ExpandOption = None,
        drafters: DraftersOption = "ngram,medusa,eagle",
        draft: DraftOptions,
        options: RuntimeOptions,
    ) -> None:
        """Measure steps against the device's floor, the loop's stages, tokens per second, and the cost model's promise.

        Example: selfspec bench-runtime --drafters ngram,eagle --nodes 1,16 --json runtime.json

        Example: selfspec bench-runtime --expand 8b --device cuda --dtype bfloat16 --plots plots
        """
        from selfspec.bench.pictures import has_matplotlib
        from selfspec.cli import display

        with display.stage(f"loading {source_of(target)}") as show_stage:
            from selfspec.bench import report as runtime_report
            from selfspec.bench.plot_runtime import plot_runtime
            from selfspec.bench.runtime import measure_runtime

            loaded = load_for_bench(target, drafters, draft, expand)
            report = measure_runtime(
                loaded.target,
                loaded.drafters,
                options.settings(loaded, target.revision),
                on_part=show_stage,
                on_result=lambda part: part.save(options.json) if options.json else None,
            )
        if options.plots is not None:
            if has_matplotlib():
                plot_runtime(report, options.plots)
            else:
                report.notes.append("Plots were left out: they need matplotlib (pip install 'selfspec[plots]').")
        if options.json is not None:
            report.save(options.json)
        runtime_report.show(report, display.stdout)


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{option} {text!r} is not a list of positive whole numbers such as 1,8,16")
    return [int(part) for part in parts]
