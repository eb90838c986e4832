"""`selfspec plan`: the memory and speed-up of a target with a drafter, before either is loaded."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.options import command, quiet_libraries
from selfspec.config import TargetOptions
from selfspec.drafters.specs import FORMS
from selfspec.model.default_target import source_of

if TYPE_CHECKING:
    from selfspec.plan.accelerators import Card
    from selfspec.plan.predict import Assumption
    from selfspec.plan.sizes import DraftSize


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The accelerator, the load, and how many drafts are accepted."""

    gpu: str | None = field(
        default=None, metadata={"help": "an accelerator from the built-in table, such as h100; this machine's by default"}
    )
    gpu_memory_gb: float | None = field(default=None, metadata={"help": "its memory, in GB of 10^9 bytes"})
    bandwidth: float | None = field(default=None, metadata={"help": "its memory bandwidth, in GB/s"})
    tflops: float | None = field(default=None, metadata={"help": "its dense bfloat16 peak, in TFLOP/s"})
    batch_size: int = field(default=1, metadata={"help": "sequences decoded together"})
    context: int = field(default=2048, metadata={"help": "tokens that each sequence holds, prompt and answer"})
    alpha: str | None = field(
        default=None,
        metadata={"help": "chance that a draft token is accepted; with commas, the drafter's first choice, its second, ..."},
    )
    acceptance_length: float | None = field(
        default=None, metadata={"help": "tokens per target pass, as measured; instead of --alpha"}
    )
    num_draft_tokens: int | None = field(
        default=None,
        metadata={"help": "most tokens to draft in a step; the depth at which --acceptance-length was measured"},
    )
    num_nodes: int | None = field(
        default=None, metadata={"help": "most nodes of a candidate tree, root included; each drafter has its default"}
    )

    def __post_init__(self) -> None:
        for name in ("gpu_memory_gb", "bandwidth", "tflops", "num_draft_tokens", "num_nodes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value} is not allowed: use a number above 0")
        if self.alpha is not None and self.acceptance_length is not None:
            raise ValueError("alpha and acceptance_length both say how many drafts are accepted: give one of them")

    @property
    def rank_rates(self) -> list[float]:
        """`alpha` as a list of numbers."""
        assert self.alpha is not None
        try:
            return [float(part) for part in self.alpha.split(",")]
        except ValueError:
            raise ValueError(f"alpha={self.alpha!r} is not allowed: use a number, or several with commas") from None

    def card(self, device: str) -> "Card":
        """The accelerator that the options name, or else this machine's."""
        from selfspec.plan.accelerators import GB, LAYER_SECONDS, Card, card_named

        memory = self.gpu_memory_gb and self.gpu_memory_gb * GB
        if self.gpu is None and memory and self.bandwidth:
            base = Card("given", memory, self.bandwidth * GB, layer_seconds=LAYER_SECONDS)
        else:
            base = present_card(device) if self.gpu is None else card_named(self.gpu)
        bandwidth = self.bandwidth * GB if self.bandwidth else base.bandwidth
        peak = self.tflops * 1e12 if self.tflops else base.peak
        return dataclasses.replace(base, memory=memory or base.memory, bandwidth=bandwidth, peak=peak)

    def acceptance(self, draft: "DraftSize | None") -> "Assumption":
        """The assumption that the options give, or else the one in the head's card."""
        from selfspec.plan.predict import NOTHING_DRAFTED, assumed_rates, card_acceptance, measured_length

        depth, num_nodes = self.num_draft_tokens, self.num_nodes
        if draft is None:
            if self.alpha is not None or self.acceptance_length is not None:
                raise ValueError("no drafter is given: name one with --drafter (ngram drafts at no cost)")
            return NOTHING_DRAFTED
        if self.alpha is not None:
            return assumed_rates(self.rank_rates, draft, depth=depth, num_nodes=num_nodes)
        if self.acceptance_length is not None:
            return measured_length(self.acceptance_length, draft, depth=depth, num_nodes=num_nodes)
        return card_acceptance(draft, depth=depth, num_nodes=num_nodes)


def present_card(device: str) -> "Card":
    """This machine's accelerator, with the bandwidth and peak in the table."""
    import torch

    from selfspec.model.devices import resolve_device
    from selfspec.plan.accelerators import card_of_device

    found = resolve_device(device)
    if found.type != "cuda":
        raise ValueError("this machine has no accelerator: name one with --gpu, or give --gpu-memory-gb and --bandwidth")
    properties = torch.cuda.get_device_properties(found)
    card = card_of_device(properties.name, properties.total_memory)
    if card is None:
        raise ValueError(
            f"{properties.name} is not in the table: give --gpu-memory-gb and --bandwidth, and perhaps --tflops"
        )
    return card


def register(cli: typer.Typer) -> None:
    """Add the command."""

    @command(cli, target=TargetOptions, options=PlanOptions)
    def plan(
        *,
        target: TargetOptions,
        drafter: Annotated[str, typer.Option("--drafter", help=FORMS)] = "none",
        options: PlanOptions,
        as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    ) -> None:
        """Predict memory, the best draft size and the speed-up on an accelerator, without loading weights.

        Example: selfspec plan --drafter eagle --gpu h100 --batch-size 8

        Example: selfspec plan PATH_OR_ID --drafter draft_model:PATH_OR_ID --gpu l4 --alpha 0.7
        """
        quiet_libraries()
        from selfspec.cli import display
        from selfspec.cli.plan_view import show_plan
        from selfspec.plan.predict import make_plan
        from selfspec.plan.sizes import ModelSize, draft_size

        card = options.card(target.device)
        with display.stage(f"reading {source_of(target)}"):
            model = ModelSize.of(source_of(target), revision=target.revision, dtype=target.dtype)
            draft = None if drafter == "none" else draft_size(drafter, model)
        prediction = make_plan(
            model, draft, options.acceptance(draft), card, batch_size=options.batch_size, context=options.context
        )
        if as_json:
            typer.echo(json.dumps(prediction.to_dict(), indent=1))
        else:
            show_plan(prediction)
