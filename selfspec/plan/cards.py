"""The acceptance that a head's model card reports, in both directions.

Training writes it into the card's metadata, as evaluation results in `model-index`
(https://github.com/huggingface/hub-docs/blob/main/modelcard.md). Cards without such results say it in their text alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard

LENGTH = "acceptance_length"
RATE = "acceptance_rate"


@dataclass(frozen=True)
class CardFigures:
    """What a card reports; None or empty if it does not say.

    Attributes:
        length: acceptance length, tokens per target pass, the bonus token included.
        rates: for each depth d from 1 on, of the passes that drafted d deep, the share that accepted at least d tokens.
        depth: how deep the drafts were.
        num_nodes: the most nodes of their trees, root included.
    """

    length: float | None = None
    rates: tuple[float, ...] = ()
    depth: int | None = None
    num_nodes: int | None = None


def eval_results(prompts: str, figures: CardFigures, lengths_by_task: Mapping[str, float] | None = None) -> list[EvalResult]:
    """The figures as evaluation results for `ModelCardData`, which `read_figures` reads back.

    Args:
        prompts: name of the prompt file that was decoded.
        lengths_by_task: acceptance length of each task in that file.
    """

    def result(metric: str, name: str, value: float, *, task: str | None = None, args: dict[str, int]) -> EvalResult:
        return EvalResult(
            task_type="text-generation",
            dataset_type="prompts",
            dataset_name=prompts,
            dataset_config=task,
            metric_type=metric,
            metric_name=name,
            metric_value=round(value, 4),
            metric_args=args,
        )

    size = {"depth": figures.depth or len(figures.rates), "num_nodes": figures.num_nodes}
    tree = {name: value for name, value in size.items() if value}
    results = [] if figures.length is None else [result(LENGTH, "acceptance length", figures.length, args=tree)]
    for depth, rate in enumerate(figures.rates, start=1):
        results.append(result(RATE, f"acceptance rate at depth {depth}", rate, args={**tree, "depth": depth}))
    for task, length in sorted((lengths_by_task or {}).items()):
        results.append(result(LENGTH, "acceptance length", length, task=task, args=tree))
    return results


def read_figures(card: str) -> CardFigures:
    """The figures in the text of a card: those of its metadata, or else those of its tables."""
    try:
        data: Any = ModelCard(card, ignore_metadata_errors=True).data
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the head's README.md has metadata that cannot be read ({reason}): correct it") from error
    overall = [result for result in data.eval_results or () if result.dataset_config is None]
    found = _figures_of(overall)
    return found if found.length is not None or found.rates else _figures_in_text(card)


def read_task_lengths(card: str) -> dict[str, float]:
    """Acceptance length by task, from a card's metadata, or else from the rows of its table."""
    try:
        data: Any = ModelCard(card, ignore_metadata_errors=True).data
    except (ValueError, yaml.YAMLError):
        return {}
    results = [each for each in data.eval_results or () if each.dataset_config and each.metric_type == LENGTH]
    return {each.dataset_config: float(each.metric_value) for each in results} or _task_lengths_in_text(card)


def _task_lengths_in_text(card: str) -> dict[str, float]:
    """The rows of the table of acceptance lengths; a row may hold several tasks, with strokes between them."""
    table = re.search(r"^\|[^|\n]*\| acceptance length \|\n\|[ |:-]+\|\n((?:\|.*\|\n?)+)", card, re.MULTILINE)
    lengths: dict[str, float] = {}
    for line in table[1].splitlines() if table else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names, values = (cell.split(" / ") for cell in cells[:2])
        if len(names) == len(values):
            # What is said of a row in brackets is for readers of the card.
            found = {re.sub(r" \(.*\)$|, all.*$", "", name): value for name, value in zip(names, values, strict=True)}
            lengths |= {name: float(value) for name, value in found.items() if re.fullmatch(r"[\d.]+", value)}
    return lengths


def _figures_of(results: Sequence[EvalResult]) -> CardFigures:
    sizes = [result.metric_args or {} for result in results if result.metric_type in (LENGTH, RATE)]
    length = next((float(result.metric_value) for result in results if result.metric_type == LENGTH), None)
    by_depth = {
        int((result.metric_args or {})["depth"]): float(result.metric_value)
        for result in results
        if result.metric_type == RATE
    }
    return CardFigures(
        length=length,
        rates=tuple(by_depth[depth] for depth in sorted(by_depth)),
        depth=max((size["depth"] for size in sizes if "depth" in size), default=None),
        num_nodes=next((size["num_nodes"] for size in sizes if "num_nodes" in size), None),
    )


def _figures_in_text(card: str) -> CardFigures:
    """The figures in the tables that training writes, and the tree's size in the sentences before them."""
    rates = re.search(r"^\| acceptance rate \|(.+)\|$", card, re.MULTILINE)
    length = re.search(r"^\|[^|\n]*\| acceptance length \|\n\|[ |:-]+\|\n\|[^|\n]*\| ([\d.]+) \|", card, re.MULTILINE)
    num_nodes = re.search(r"tree\s+of\s+(?:at\s+most\s+)?(\d+)\s+nodes", card)
    depth = re.search(r"\bdepth\s+(\d+)", card)
    by_depth = tuple(float(cell) for cell in rates[1].split("|")) if rates else ()
    return CardFigures(
        length=float(length[1]) if length else None,
        rates=by_depth,
        depth=len(by_depth) or (int(depth[1]) if depth else None),
        num_nodes=int(num_nodes[1]) if num_nodes else None,
    )
