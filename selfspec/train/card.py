"""The model card of a trained head: its target, its training, and how many of its drafts are accepted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from selfspec.plan.cards import CardFigures, eval_results
from selfspec.train.evaluation import AcceptanceReport

CARD_NAME = "README.md"


@dataclass(frozen=True)
class CardFacts:
    """What a card says.

    Attributes:
        kind: the drafter that serves the head, as in `--drafter KIND:PATH`.
        target: Hub id of the target, or the name of its folder.
        data, training: what the head was trained on, and how; each entry is a line of a list.
        eval_file: name of the evaluation's prompt file, without its folder.
        num_eval_tokens: most tokens decoded for each of its prompts.
        command: the command that trained the head.
        versions: versions of the packages that matter, by name.
        adapter: Hub id of the LoRA adapter in the target, or the name of its folder.
        curves: file beside the card with the training's curves.
    """

    kind: str
    target: str
    num_parameters: int
    data: dict[str, str]
    training: dict[str, str]
    acceptance: AcceptanceReport | None
    eval_file: str | None
    num_eval_tokens: int
    command: str
    versions: dict[str, str]
    adapter: str | None = None
    curves: str | None = None


def write_card(directory: Path, facts: CardFacts) -> None:
    """Write the card into a head's folder. `selfspec plan` reads the acceptance from its metadata."""
    measured: dict[str, Any] = {}
    report = facts.acceptance
    if report is not None:
        depth = len(report.rates)
        figures = CardFigures(report.length, tuple(report.rates), depth=depth, num_nodes=report.num_nodes)
        measured = {
            "model_name": f"{facts.kind} head for {re.sub('.*/', '', facts.target)}",
            "eval_results": eval_results(facts.eval_file or "prompts", figures, report.lengths),
        }
    data = ModelCardData(
        **measured,
        library_name="selfspec",
        base_model=facts.target,
        base_model_relation="adapter",
        tags=["selfspec", "speculative-decoding", facts.kind],
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_body(facts)}").save(directory / CARD_NAME)


@dataclass(frozen=True)
class Compared:
    """One way of decoding held-out prompts, and what it gave.

    Attributes:
        vs_plain, vs_transformers: speed, relative to plain decoding and to transformers' own `generate`.
        is_identical: its tokens are those of plain decoding.
    """

    name: str
    tokens_per_second: float
    vs_plain: float
    vs_transformers: float
    acceptance_length: float
    is_identical: bool
    num_prompts: int
    num_tokens: int

    def figures(self) -> list[str]:
        """What a table says of it, after its name."""
        speeds = [f"{self.tokens_per_second:.1f}", f"{self.vs_plain:.2f}x", f"{self.vs_transformers:.2f}x"]
        return [f"{self.acceptance_length:.2f}", *speeds, "yes" if self.is_identical else "no"]


def add_comparison(directory: Path, rows: Sequence[Compared]) -> None:
    """Write a comparison on held-out prompts into a head's card."""
    lines = "\n".join(f"| {' | '.join([row.name, *row.figures()])} |" for row in rows)
    section = (
        f"## Speed\n\n{rows[0].num_prompts} held-out prompts, greedy, one at a time, {rows[0].num_tokens} tokens, on the "
        "machine that trained the head; prefill included. Every pass drafts, without the cost "
        "guard. `none` is selfspec without drafts.\n\n"
        "| | tokens per pass | tokens/s | vs plain | vs transformers | same tokens |\n"
        f"| --- | --- | --- | --- | --- | --- |\n{lines}\n"
    )
    file = directory / CARD_NAME
    before, mark, versions = file.read_text(encoding="utf-8").rpartition("Versions: ")
    file.write_text(f"{before}{section}\n{mark}{versions}", encoding="utf-8")


def without_token(arguments: Sequence[str]) -> list[str]:
    """A command line without access tokens."""
    hidden = ["…" if re.fullmatch("--hub.token", before) else now for before, now in pairwise(["", *arguments])]
    return [re.sub("^(--hub.token=).*", r"\1…", argument) for argument in hidden]


def public_command(arguments: Sequence[str]) -> str:
    """A command line for others to see: without access tokens, and without the folders of the machine it ran on."""
    program, *others = without_token(arguments)
    # As `python -m selfspec` is called in full.
    program = program.removesuffix("/__main__.py")
    parts = [argument.rpartition("=") for argument in (program, *others)]
    return " ".join(
        name + equals + (Path(value).name if Path(value).is_absolute() else value) for name, equals, value in parts
    )


def _body(facts: CardFacts) -> str:
    title = re.sub(r".*/", "", facts.target)
    adapter = ""
    if facts.adapter is not None:
        title += f" with {re.sub('.*/', '', facts.adapter)}"
        adapter = f" --adapter {facts.adapter}"
    sections = [
        f"# {facts.kind} head for {title}",
        f"A draft head of {facts.num_parameters / 1e6:.1f}M parameters for speculative decoding with selfspec. The target's "
        "output stays the same; the head makes it emit several tokens per pass.",
        f"    selfspec generate --target {facts.target}{adapter} --drafter {facts.kind}:PATH_OR_ID_OF_THIS_HEAD \\\n"
        "        --prompt-file prompts.jsonl --output out.jsonl",
        "## Training data\n\n" + _list(facts.data),
        "## Training\n\n" + _list(facts.training) + f"\n\n    {facts.command}",
    ]
    if facts.curves is not None:
        sections.append(f"![Curves of the training: loss, acceptance length, acceptance by depth]({facts.curves})")
    if facts.acceptance is not None:
        sections.append("## Acceptance\n\n" + _acceptance(facts.acceptance, facts))
    sections.append("Versions: " + ", ".join(f"{name} {version}" for name, version in facts.versions.items()) + ".")
    return "\n\n".join(sections) + "\n"


def _acceptance(report: AcceptanceReport, facts: CardFacts) -> str:
    lengths = "\n".join(f"| {task} | {length:.2f} |" for task, length in sorted(report.lengths.items()))
    depths = " | ".join(str(depth) for depth in range(1, len(report.rates) + 1))
    rates = " | ".join(f"{rate:.2f}" for rate in report.rates)
    return (
        f"{report.num_prompts} prompts of {facts.eval_file}, greedy, at most {facts.num_eval_tokens} tokens each "
        f"({report.num_tokens} in all).\n\n"
        "Acceptance length: tokens emitted per target pass, the bonus token included.\n\n"
        f"| prompts | acceptance length |\n| --- | --- |\n| all | {report.length:.2f} |\n{lengths}".rstrip()
        + "\n\nAcceptance rate: of the passes that drafted to a depth, the share that accepted at least as many tokens.\n\n"
        f"| depth | {depths} |\n| --- |{' --- |' * len(report.rates)}\n| acceptance rate | {rates} |"
    )


def _list(items: dict[str, str]) -> str:
    return "\n".join(f"* {name}: {value}" for name, value in items.items())
