"""What a resident drafter keeps on the device is right however a text came there: its trees are the same for the same text.

Chunks of any size, rows that come and go beside it, blocks that others left, steps in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import eagle_head, identity, random_prompts, tiny_target

from selfspec import SamplingParams, Target
from selfspec.cache.kv import KVCache
from selfspec.drafters import Drafter, EagleDrafter, MedusaDrafter, NgramDrafter
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.loop.drafter import NoDrafter, Proposal
from selfspec.loop.planner import Planner
from selfspec.loop.scheduler import Scheduler
from selfspec.loop.sequence import Request
from selfspec.model.graphs import Graphs

SAMPLING = SamplingParams(max_new_tokens=12, ignore_eos=True)
PROMPT = random_prompts(1, (37, 37), seed=3)[0]
OTHERS = random_prompts(5, (1, 40), seed=5)
# Tokens and parents of each text's tree.
Trees = dict[tuple[int, ...], tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


def eagle(target: Target) -> EagleDrafter:
    head = eagle_head(target, feature_layers=(1, 2, 3)).eval()
    return EagleDrafter(target, head, num_draft_tokens=3, num_nodes=8, width=2)


def medusa(target: Target) -> MedusaDrafter:
    torch.manual_seed(2)
    head = MedusaHead(MedusaConfig(target=identity(target), num_heads=3, has_output_layer=True)).eval()
    # Not all alike, as they are before they are trained.
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return MedusaDrafter(target, head, num_nodes=7, width=3)


DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "eagle": eagle,
    "medusa": medusa,
    "ngram": lambda target: NgramDrafter(4),
}


class Run:
    """A scheduler whose drafter's trees are written down."""

    def __init__(self, target: Target, drafter: Drafter, kv: KVCache | None = None, **options: Any) -> None:
        self.trees: Trees = {}
        self.drafter = drafter
        self.cache = kv or target.new_cache(block_size=4)
        self.scheduler = Scheduler(target, self.cache, **{"max_batch": 3, **options})
        self.group = self.scheduler.add_group(drafter, Planner(is_active=False))
        self.plain = self.scheduler.add_group(NoDrafter(), Planner(is_active=False))
        propose = drafter.propose

        def recorded(batch: Any, num_draft_tokens: int) -> Proposal:
            proposal = propose(batch, num_draft_tokens)
            tree, sizes = proposal.tree, batch.num_tokens.tolist()
            texts = [tuple(row[:size]) for row, size in zip(batch.history.tolist(), sizes, strict=True)]
            for text, tokens, parents in zip(texts, tree.tokens.tolist(), tree.parents.tolist(), strict=True):
                size = sum(token >= 0 for token in tokens)
                self.trees[text] = tokens[:size], parents[:size]
            return proposal

        drafter.propose = recorded  # type: ignore[method-assign]

    @torch.inference_mode()
    def answer(self, *prompts: list[int], is_plain: bool = False) -> int:
        """Answer prompts together; returns how many tokens the last one found in the cache."""
        sequences = [
            self.scheduler.submit(Request(prompt, SAMPLING), self.plain if is_plain else self.group) for prompt in prompts
        ]
        while len(self.scheduler):
            self.scheduler.round()
        return sequences[-1].num_reused_tokens


def fresh(target: Target, name: str, prompt: list[int] = PROMPT) -> Trees:
    """The trees for one text that is alone in the cache, as long as its end does not cut them."""
    run = Run(target, DRAFTERS[name](target))
    run.answer(prompt)
    assert any(len(tokens) > 1 for tokens, _ in run.trees.values())
    most = len(prompt) + SAMPLING.max_new_tokens - 1 - run.drafter.num_draft_tokens
    return {text: tree for text, tree in run.trees.items() if len(text) <= most}


def assert_same(trees: Trees, expected: Trees, *, least: int = 3) -> None:
    """For the texts of both; a step that found no room for a draft leads to other texts."""
    shared = trees.keys() & expected.keys()
    assert len(shared) >= least
    assert {text: trees[text] for text in shared} == {text: expected[text] for text in shared}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("prefill_tokens", [1, 5, None])
def test_trees_do_not_depend_on_chunks_and_neighbours(name: str, prefill_tokens: int | None, target: Target) -> None:
    run = Run(target, DRAFTERS[name](target), prefill_tokens=prefill_tokens)
    run.answer(*OTHERS[:2], PROMPT, *OTHERS[2:])
    assert_same(run.trees, fresh(target, name))


@pytest.mark.parametrize("name", DRAFTERS)
def test_trees_do_not_depend_on_steps_in_flight(name: str) -> None:
    target = tiny_target("llama")
    expected = fresh(target, name)
    target.passes.graphs = Graphs(target.device, is_rehearsal=True)
    run = Run(target, DRAFTERS[name](target), prefill_tokens=9)
    run.answer(*OTHERS[:2], PROMPT, *OTHERS[2:])
    assert_same(run.trees, expected)


@pytest.mark.parametrize("first", ["drafted", "plain", "both"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_trees_do_not_depend_on_who_left_a_shared_beginning(name: str, first: str, target: Target) -> None:
    """A drafter's own entries are in the blocks of its own rows alone."""
    kv = target.new_cache(block_size=4, max_tokens=400, use_sharing=True)
    # Not zeros, which a head would hardly notice.
    kv.grow(100)
    kv.keys.uniform_(-9, 9)
    kv.values.uniform_(-9, 9)
    run = Run(target, DRAFTERS[name](target), kv)
    for side in kv._sides.values():
        side.keys.uniform_(-9, 9)
        side.values.uniform_(-9, 9)
    if first != "drafted":
        run.answer(PROMPT, is_plain=True)
    if first != "plain":
        run.answer(PROMPT)
    run.trees.clear()
    num_reused = run.answer(PROMPT)
    assert_same(run.trees, fresh(target, name))
    assert num_reused > 0 or first != "drafted"


@pytest.mark.parametrize("name", DRAFTERS)
def test_trees_do_not_depend_on_giving_way(name: str, target: Target) -> None:
    kv = target.new_cache(block_size=4, max_tokens=64, use_sharing=True)
    run = Run(target, DRAFTERS[name](target), kv)
    run.answer(PROMPT[:12], PROMPT, PROMPT[:9])
    assert run.scheduler.num_preemptions > 0
    for prompt in (PROMPT[:12], PROMPT, PROMPT[:9]):
        assert_same(run.trees, fresh(target, name, prompt), least=1)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_cache_that_moves_takes_what_drafters_keep_along(name: str, target: Target) -> None:
    """More slots, a larger pool, longer texts."""
    run = Run(target, DRAFTERS[name](target), max_batch=1)
    run.cache.least_growth = 1
    round_ = run.scheduler.round

    def moved() -> Any:
        run.cache.grow(1)
        run.cache.make_room(run.cache.state.num_slots + 1, run.cache.state.history.shape[1])
        return round_()

    run.scheduler.round = moved  # type: ignore[method-assign]
    run.answer(PROMPT)
    assert_same(run.trees, fresh(target, name))
