"""Who decodes: what a round may do to those who wait, and what it tells the planner."""

from __future__ import annotations

import ast
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import exit_head, random_prompts, tiny_target

from selfspec import SamplingParams, Target, generate
from selfspec.cache.kv import KVCache
from selfspec.drafters import DraftModelDrafter, EarlyExitDrafter, NgramDrafter
from selfspec.loop.drafter import Drafter, Proposal
from selfspec.loop.planner import Plan, Planner, Shape
from selfspec.loop.scheduler import Scheduler
from selfspec.loop.sequence import Request
from selfspec.loop.stages import Stage, StageError
from selfspec.model.graphs import Graphs
from selfspec.tree import from_parents

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", num_hidden_layers=2)


def test_the_scheduler_touches_no_tensor() -> None:
    """Host only: whatever needs torch is a step's business."""
    for name in ("selfspec/loop/scheduler.py", "selfspec/loop/sequence.py", "selfspec/cache/blocks.py"):
        tree = ast.parse((ROOT / name).read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert "torch" not in imported, name


class WideDrafter(Drafter):
    """Proposes one wide bush in its first step, and nothing later."""

    name = "wide"
    num_draft_tokens = 1

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.is_wide = True

    def propose(self, batch: Any, num_draft_tokens: int) -> Proposal:
        size = self.num_nodes if self.is_wide else 1
        tokens = torch.full((len(batch), size), 5)
        tokens[:, 0] = batch.roots
        parents = torch.zeros_like(tokens)
        parents[:, 0] = -1
        return Proposal(from_parents(tokens, parents))


def test_scratch_of_larger_trees_does_not_keep_others_waiting(target: Target) -> None:
    """Two short rows that once drafted wide trees: a prompt that fits without their scratch is admitted."""
    cache = target.new_cache(block_size=4, max_tokens=80)
    scheduler = Scheduler(target, cache, max_batch=3)
    drafter = WideDrafter(24)
    group = scheduler.add_group(drafter, Planner(is_active=False))
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with torch.inference_mode():
        for _ in range(2):
            scheduler.submit(Request([3, 4, 5, 6], sampling), group)
        # The prompts, then a step.
        scheduler.round()
        scheduler.round()
        assert cache.num_free_blocks < 8
        drafter.is_wide = False
        late = scheduler.submit(Request([7] * 28, sampling), group)
        scheduler.round()
        assert late.row.blocks, "it waits for blocks that nobody needs"
        assert scheduler.num_preemptions == 0
    scheduler.close()
    assert cache.num_used_blocks == 0


def test_drafts_are_soon_tried_by_a_planner_that_knows_nothing(target: Target) -> None:
    drafter = NgramDrafter(4)
    sampling = SamplingParams(max_new_tokens=64, ignore_eos=True)
    completion = generate(target, [[5, 6, 7, 8] * 6], drafter=drafter, sampling=sampling)[0]
    assert completion.num_draft_tokens > 0


def test_a_draft_model_that_sets_itself_up_tells_no_cost(target: Target) -> None:
    """Its first passes compile and capture: their time is no other step's. Once all shapes are known it counts."""
    draft = target.truncated(1)
    draft.passes.graphs = Graphs(draft.device, is_rehearsal=True)
    cache = target.new_cache()
    scheduler = Scheduler(target, cache, max_batch=1)
    planner = Planner()
    drafter = DraftModelDrafter(draft, target.vocab_size, num_draft_tokens=3)
    planner_plan, planner_observe = planner.plan, planner.observe
    told: list[float | None] = []

    def plan(rows: Any, *, sizes: Any, **options: Any) -> Plan:
        """Draft three tokens, whatever this machine's clock says of drafting."""
        return replace(
            planner_plan(rows, sizes=sizes, **options), shape=Shape(3), num_nodes=sizes[-1], is_drafting=(True,) * len(rows)
        )

    def observe(plan: Plan, rows: Any, evidence: Any, draft_seconds: float | None, pass_seconds: float | None) -> None:
        told.append(draft_seconds)
        planner_observe(plan, rows, evidence, draft_seconds, pass_seconds)

    planner.plan, planner.observe = plan, observe  # type: ignore[method-assign]
    group = scheduler.add_group(drafter, planner)
    scheduler.submit(Request([3, 4, 5], SamplingParams(max_new_tokens=200, ignore_eos=True)), group)
    typical = []
    propose = drafter.propose

    def recorded(*args: Any) -> Proposal:
        before = draft.passes.num_set_up
        proposal = propose(*args)
        assert proposal.is_typical == (draft.passes.num_set_up == before)
        typical.append(proposal.is_typical)
        return proposal

    drafter.propose = recorded  # type: ignore[method-assign]
    with torch.inference_mode():
        for _ in range(30):
            scheduler.round()
    scheduler.close()
    assert not all(typical) and typical[-1]
    assert [seconds is not None for seconds in told] == typical


@pytest.mark.parametrize("stage", ["adopt", "prefill", "admit", "propose", "verify", "observe", "commit"])
def test_what_failed_is_blamed_on_the_stage_that_did(stage: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is the error itself that is told, not what came of it."""

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("out of order")

    failures: list[tuple[StageError, int]] = []
    cache = target.new_cache(max_tokens=512, use_sharing=True)
    drafter: Drafter = WideDrafter(3) if stage in ("admit", "commit") else NgramDrafter(4)
    scheduler = Scheduler(target, cache, max_batch=4, on_error=lambda *args: take_out(*args))

    def take_out(failure: StageError, sequences: list[Any]) -> None:
        failures.append((failure, len(sequences)))
        for sequence in sequences:
            scheduler.cancel(sequence)

    group = scheduler.add_group(drafter)
    for prompt in random_prompts(3, (3, 20)):
        scheduler.submit(Request(prompt, SamplingParams(max_new_tokens=4)), group)
    owner: object = {"adopt": cache, "prefill": target, "verify": target}.get(stage, drafter)
    with torch.inference_mode():
        if stage not in ("adopt", "prefill", "admit"):
            # The prompts are in the cache when the stage fails.
            scheduler.round()
        monkeypatch.setattr(owner, "run_flat" if stage in ("prefill", "verify") else stage, fail)
        scheduler.round()
    assert not len(scheduler) and cache.num_used_blocks == 0
    expected = Stage.TARGET if stage in ("adopt", "prefill", "verify") else Stage.DRAFT
    assert {failure.stage for failure, _ in failures} == {expected}
    assert all(str(failure.error) == "out of order" for failure, _ in failures)
    assert [count for _, count in failures] == ([1, 1, 1] if stage in ("adopt", "admit") else [3])


@pytest.mark.parametrize("num_tokens", [300, 1200])
def test_early_exit_enters_a_long_prompt_in_chunks(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass of the blocks grows with the prompt, nor with the steps for which drafting paused."""
    target = tiny_target("llama", max_position_embeddings=4096)
    drafter = EarlyExitDrafter(target, exit_head(target, 1, 2))
    sizes: list[int] = []
    layout = KVCache.layout

    def recorded(cache: KVCache, places: Any, tree: Any, num_new: int | None = None) -> Any:
        if cache is drafter._cache:
            sizes.append(tree.num_nodes)
        return layout(cache, places, tree, num_new)

    monkeypatch.setattr(KVCache, "layout", recorded)
    prompt = random_prompts(1, (num_tokens, num_tokens))[0]
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
    plain = generate(target, [prompt], sampling=sampling)[0]
    drafted = generate(target, [prompt], drafter=drafter, sampling=sampling, use_cost_guard=False)[0]
    assert drafted.token_ids == plain.token_ids
    assert max(sizes) <= 256 and sum(sizes) >= num_tokens


def test_early_exit_works_off_what_piled_up_while_nothing_was_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.drafters.early_exit.CHUNK", 16)
    target = tiny_target("llama")
    drafter = EarlyExitDrafter(target, exit_head(target, 1, 2))
    waiting: list[int] = []
    propose = drafter.propose

    def seldom(batch: Any, num_draft_tokens: int) -> Proposal:
        waiting.append(max(len(row.pending) for row in drafter._rows.values()))
        return propose(batch, num_draft_tokens if len(waiting) % 60 == 59 else 0)

    drafter.propose = seldom  # type: ignore[method-assign]
    sampling = SamplingParams(max_new_tokens=150, ignore_eos=True)
    prompts = random_prompts(2, (3, 40))
    plain = [completion.token_ids for completion in generate(target, prompts, sampling=sampling)]
    drafted = generate(target, prompts, drafter=drafter, sampling=sampling, batch_size=2, use_cost_guard=False)
    assert [completion.token_ids for completion in drafted] == plain
    assert max(waiting) <= 16


def test_early_exit_drafts_the_same_by_graphs_after_steps_without_drafts() -> None:
    """What waits from an undrafted step stays what it was, though a graph's next run overwrites its results."""
    trees: list[dict[int, list[list[int]]]] = []
    for is_rehearsed in (False, True):
        target = tiny_target("llama")
        drafter = EarlyExitDrafter(target, exit_head(target, 1, 2), num_draft_tokens=3, width=2, num_nodes=8)
        if is_rehearsed:
            target.passes.graphs = Graphs(target.device, is_rehearsal=True)
        found: dict[int, list[list[int]]] = {}
        propose, steps = drafter.propose, itertools.count()

        def seldom(batch: Any, num_draft_tokens: int) -> Proposal:
            proposal = propose(batch, 3 if next(steps) % 4 == 3 else 0)  # noqa: B023
            if proposal.tree.num_nodes > 1:
                found[batch.sequences[0].num_tokens] = proposal.tree.tokens.tolist()  # noqa: B023
            return proposal

        drafter.propose = seldom  # type: ignore[method-assign]
        sampling = SamplingParams(max_new_tokens=60, ignore_eos=True)
        generate(target, random_prompts(1, (9, 9)), drafter=drafter, sampling=sampling, use_cost_guard=False)
        trees.append(found)
    assert len(trees[0]) > 5 and trees[0] == trees[1]
