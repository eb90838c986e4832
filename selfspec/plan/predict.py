"""The memory and speed of a target with a drafter on an accelerator, before either is loaded.

The predictions come from sizes (`selfspec.plan.sizes`), formulas (`selfspec.plan.formulas`) and an assumption of how many
drafts are accepted. They are the memory, part by part, and the speed of every size of draft. A pass takes the time of its
roofline and of its launches, so tokens per second are an upper bound; a speed-up is a ratio of two such times. Where a plain
pass is launched for longer than it reads or computes, host time decides, and nothing is promised (`Plan.host_decides`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from selfspec.model.graphs import Graphs
from selfspec.model.passes import CHUNK_SIZE, MAX_ROWS, Passes
from selfspec.model.shapes import CHUNK_BUCKETS, ROW_BUCKETS, bucket
from selfspec.plan.accelerators import Card
from selfspec.plan.cards import read_figures
from selfspec.plan.formulas import (
    MAX_PLANNED_DEPTH,
    TreeGain,
    acceptance_rate_of,
    best_trees,
    expected_tokens,
    expected_tokens_by_depth,
    kv_bytes,
    speedup,
)
from selfspec.plan.sizes import DraftSize, ModelSize

# What a process needs besides all that is counted: the CUDA context and the libraries' workspaces.
RUNTIME_BYTES = 1 << 30
# The share of the card's memory that the CUDA graphs of one `Target` may hold (see `selfspec.model.graphs`).
GRAPHS_SHARE = 0.1


@dataclass(frozen=True)
class Assumption:
    """How many drafts are taken to be accepted.

    Attributes:
        trees: the trees that a pass may verify, plain decoding first, each with the tokens it is expected to emit.
        source: where these numbers come from, in words.
    """

    trees: list[TreeGain]
    source: str


NOTHING_DRAFTED = Assumption([TreeGain(1, 0, 1.0)], "nothing is drafted")


def assumed_rates(
    rank_rates: Sequence[float], draft: DraftSize, *, depth: int | None = None, num_nodes: int | None = None
) -> Assumption:
    """Assume chains from one rate, or the best trees from rates by rank, up to `depth` and `num_nodes`."""
    most = draft.depth if draft.is_depth_limit else MAX_PLANNED_DEPTH
    max_depth = min(depth or most, most)
    max_nodes = num_nodes or (max_depth + 1 if len(rank_rates) == 1 else 64)
    trees = best_trees(rank_rates, max_depth=max_depth, max_nodes=max_nodes)
    rates = ", ".join(f"{rate:g}" for rate in rank_rates)
    return Assumption(trees, f"assumed: a draft token is accepted with chance {rates}{' by rank' * (len(rank_rates) > 1)}")


def measured_length(
    length: float, draft: DraftSize, *, depth: int | None = None, num_nodes: int | None = None, source: str = "given"
) -> Assumption:
    """Assume the chain rate that explains a measured acceptance length, with the same number of nodes at each depth."""
    K = depth or draft.depth
    rate = acceptance_rate_of(length, K)
    size = max(num_nodes or (draft.num_nodes if depth is None else 0), K + 1)
    source = f"{source}: acceptance length {length:g} at depth {K}, {size} nodes"
    return Assumption(_prefixes(K, size, lambda k: expected_tokens(rate, k)), source)


def card_acceptance(draft: DraftSize, *, depth: int | None = None, num_nodes: int | None = None) -> Assumption:
    """Take the rates by depth, or the acceptance length, that the head's model card reports; at most to `depth`.

    Raises:
        ValueError: the card reports neither.
    """
    figures = read_figures(draft.card)
    size = num_nodes or figures.num_nodes or draft.num_nodes
    if figures.rates:
        K = len(figures.rates)
        trees = _prefixes(K, max(size, K + 1), lambda k: expected_tokens_by_depth(figures.rates[:k]))
        found = Assumption(trees, f"the head's card: acceptance rates to depth {K}")
    elif figures.length is not None:
        K = figures.depth if figures.depth and not draft.is_depth_limit else draft.depth
        found = measured_length(figures.length, draft, depth=K, num_nodes=size, source="the head's card")
    else:
        raise ValueError(
            f"nothing says how many of the drafts of {draft.name} are accepted: give --alpha (an assumption) or "
            "--acceptance-length (as `selfspec bench` measures it)"
        )
    return replace(found, trees=[tree for tree in found.trees if tree.depth <= (depth or K)])


def _prefixes(depth: int, num_nodes: int, tokens: Callable[[int], float]) -> list[TreeGain]:
    """A tree for every depth from 0 to `depth`, with the same number of nodes at each depth."""
    return [TreeGain(1 + round((num_nodes - 1) * k / depth), k, tokens(k)) for k in range(depth + 1)]


@dataclass(frozen=True)
class Choice:
    """The prediction for one size of draft. Costs are relative to a plain pass."""

    depth: int
    num_nodes: int
    expected_tokens: float
    draft_cost: float
    verify_cost: float
    speedup: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The predicted speed of one batch.

    Attributes:
        choices: one for each size of draft, plain decoding first.
        roofline_seconds, launch_seconds: the two parts of a plain pass.
        best: the fastest choice.
    """

    batch_size: int
    choices: list[Choice]
    roofline_seconds: float
    launch_seconds: float

    @property
    def host_decides(self) -> bool:
        """Whether a plain pass is too small for its speed to be predicted: launching it takes longer than its work."""
        return self.launch_seconds > self.roofline_seconds

    @property
    def best(self) -> Choice:
        return max(self.choices, key=lambda choice: choice.speedup)


@dataclass(frozen=True, kw_only=True)
class Plan(Speed):
    """A prediction.

    Attributes:
        memory: bytes by purpose.
        largest_batch: how many sequences of this context fit.
        largest_context: the longest context at which this batch fits, at most the target's own limit.
        acceptance: where the expected tokens come from, in words.
    """

    target: str
    weights_from: str
    drafter: str | None
    card: Card
    dtype: str
    context: int
    memory: dict[str, int]
    largest_batch: int
    largest_context: int
    acceptance: str

    @property
    def total_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.card.memory

    def shown_choices(self, limit: int = MAX_PLANNED_DEPTH + 1) -> list[Choice]:
        """About `limit` choices, evenly spread, which include the best and the two ends."""
        count = len(self.choices)
        if count <= limit:
            return self.choices
        spread = {round(i * (count - 1) / (limit - 1)) for i in range(limit)}
        return [self.choices[i] for i in sorted(spread | {self.choices.index(self.best)})]

    def to_dict(self) -> dict[str, Any]:
        """The fields and what follows from them, for JSON. An unknown peak is null."""
        record = asdict(self)
        record["card"]["peak"] = self.card.peak if math.isfinite(self.card.peak) else None
        more = {"total_bytes": self.total_bytes, "fits": self.fits, "host_decides": self.host_decides}
        return {**record, **more, "best": asdict(self.best)}


def make_plan(
    target: ModelSize,
    draft: DraftSize | None,
    assumption: Assumption,
    card: Card,
    *,
    batch_size: int = 1,
    context: int = 4096,
) -> Plan:
    """Predict memory and speed for `batch_size` sequences that hold `context` tokens each.

    Raises:
        ValueError: the batch is empty, or the context is longer than the target's limit.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is not allowed: use 1 or more")
    if not 1 <= context <= target.context_length:
        raise ValueError(f"context={context} is not allowed: {target.name} takes 1 to {target.context_length} tokens")

    speed = predict_speed(target, draft, assumption, card, batch_size=batch_size, context=context)
    num_nodes = speed.best.num_nodes

    def total(num_rows: int, num_tokens: int) -> int:
        return sum(memory_of(target, draft, card, num_rows=num_rows, num_tokens=num_tokens, num_nodes=num_nodes).values())

    return Plan(
        target=target.name,
        weights_from=target.weights_from,
        drafter=draft.name if draft else None,
        card=card,
        dtype=str(target.dtype).removeprefix("torch."),
        batch_size=batch_size,
        context=context,
        memory=memory_of(target, draft, card, num_rows=batch_size, num_tokens=context, num_nodes=num_nodes),
        largest_batch=_largest(lambda rows: total(rows, context) <= card.memory, 1 << 20),
        largest_context=_largest(lambda tokens: total(batch_size, tokens) <= card.memory, target.context_length),
        acceptance=assumption.source,
        choices=speed.choices,
        roofline_seconds=speed.roofline_seconds,
        launch_seconds=speed.launch_seconds,
    )


def predict_speed(
    target: ModelSize, draft: DraftSize | None, assumption: Assumption, card: Card, *, batch_size: int, context: int
) -> Speed:
    """Predict the speed of every size of draft, for `batch_size` sequences that hold `context` tokens each."""
    rows = {"num_rows": batch_size, "num_tokens": context}

    def choice(tree: TreeGain) -> Choice:
        plain = target.forward.seconds(card, num_nodes=1, **rows)
        verify = target.forward.seconds(card, num_nodes=tree.num_nodes, **rows) / plain
        drafting = draft.seconds(card, tree, **rows) / plain if draft else 0.0
        gain = speedup(tree.expected_tokens, drafting, verify)
        return Choice(tree.depth, tree.num_nodes, tree.expected_tokens, drafting, verify, gain, batch_size * gain / plain)

    # A larger pass is never made.
    trees = [tree for tree in assumption.trees if tree.depth == 0 or batch_size * tree.num_nodes <= MAX_ROWS]
    choices = [choice(tree) for tree in trees]
    return Speed(
        batch_size=batch_size,
        choices=choices,
        roofline_seconds=target.forward.roofline_seconds(card, num_nodes=1, **rows),
        launch_seconds=target.forward.launch_seconds(card),
    )


def memory_of(
    target: ModelSize, draft: DraftSize | None, card: Card, *, num_rows: int, num_tokens: int, num_nodes: int
) -> dict[str, int]:
    """Bytes by purpose.

    Three parts are bounds. Prompt features are those that a server keeps with every block it may share between prompts.
    CUDA graphs are those of all batches up to this one. The last part is the process on the card (`RUNTIME_BYTES`) with the
    activations and logits of the largest pass.
    """
    itemsize = target.dtype.itemsize
    num_slots = {"num_rows": num_rows, "num_tokens": num_tokens + num_nodes}
    nodes = num_rows * num_nodes
    num_targets = 2 if draft and draft.is_second_target else 1
    graphs = min(graph_bytes(target, num_rows=num_rows, num_nodes=num_nodes), GRAPHS_SHARE * card.memory)
    # Logits in their dtype and in float32.
    logits = nodes * target.config.get_text_config().vocab_size * (itemsize + 4)
    return {
        "weights": target.weight_bytes,
        "KV cache": kv_bytes(target.kv_shape.bytes_per_token(target.dtype), **num_slots),
        "draft weights": draft.weight_bytes if draft else 0,
        "draft KV cache": kv_bytes(draft.kv_bytes_per_token if draft else 0, **num_slots),
        "prompt features, at most": kv_bytes(draft.feature_bytes_per_token if draft else 0, **num_slots),
        "CUDA graphs, at most": round(num_targets * graphs),
        "activations, runtime": RUNTIME_BYTES + _activation_bytes(target, max(nodes, CHUNK_SIZE)) + logits,
    }


def graph_bytes(target: ModelSize, *, num_rows: int, num_nodes: int) -> int:
    """What the CUDA graphs of one target hold for batches of up to `num_rows` rows with trees of up to `num_nodes` nodes.

    Each graph keeps its logits. All else that passes compute lies in one pool, which the largest captured pass fills.
    """
    # A rehearsal captures nothing, and has the shapes of a GPU.
    passes = Passes(Graphs(torch.device("cpu"), is_rehearsal=True), max_rows=MAX_ROWS)
    largest = bucket(num_rows, ROW_BUCKETS) or ROW_BUCKETS[-1]
    num_kept = 0
    for size in ROW_BUCKETS[: ROW_BUCKETS.index(largest) + 1]:
        alone, beside = (passes.flat_sizes(size, num_nodes, num_prompt_tokens=n) for n in (0, 1))
        num_kept += sum(alone) + len(CHUNK_BUCKETS) * sum(beside)
    logits = num_kept * target.config.get_text_config().vocab_size * target.dtype.itemsize
    return logits + _activation_bytes(target, CHUNK_BUCKETS[-1])


def _activation_bytes(target: ModelSize, num_tokens: int) -> int:
    """A layer's inputs, residual, norms and projections, and the two halves of its MLP, for all tokens of a pass."""
    text = target.config.get_text_config()
    width = 6 * text.hidden_size + 3 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    return num_tokens * width * target.dtype.itemsize


def _largest(is_fine: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that is fine, if every smaller number is fine too; 0 if none is."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_fine(middle) else (low, middle - 1)
    return low
