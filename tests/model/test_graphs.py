"""Steps through CUDA graphs, rehearsed on the CPU: fixed shapes, fixed addresses, results that the next graph overwrites."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from support import OracleTreeDrafter, eagle_head, identity, random_prompts, tiny_model
from transformers import PreTrainedModel

from selfspec import SamplingParams, Target, generate
from selfspec.drafters import Drafter, DraftModelDrafter, EagleDrafter, MedusaDrafter, NgramDrafter
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.model.graphs import Graphs
from selfspec.model.passes import Passes
from selfspec.model.shapes import DEPTH_BUCKETS, NODE_BUCKETS, FlatShape, GraphShape, bucket, column_bucket, fill_rows
from selfspec.tree import chain, from_parents


def medusa(target: Target) -> MedusaDrafter:
    torch.manual_seed(2)
    head = MedusaHead(MedusaConfig(target=identity(target), num_heads=3, has_output_layer=True))
    return MedusaDrafter(target, head, num_nodes=7, width=3)


def small_model() -> PreTrainedModel:
    """Two layers: a layer for a drafter to leave out."""
    return tiny_model("llama", num_hidden_layers=2)


@cache
def answers() -> dict[tuple[int, ...], list[int]]:
    """What plain greedy decoding emits."""
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
    completions = generate(Target(small_model()), PROMPTS, sampling=sampling, batch_size=len(PROMPTS))
    return {tuple(prompt): completion.token_ids for prompt, completion in zip(PROMPTS, completions, strict=True)}


PROMPTS = random_prompts(5, (1, 40))
DRAFTERS: dict[str, Callable[[Target], Drafter | None]] = {
    "none": lambda target: None,
    "ngram": lambda target: NgramDrafter(5),
    "eagle": lambda target: EagleDrafter(
        target, eagle_head(target, feature_layers=(0, 1)), num_draft_tokens=4, num_nodes=10, width=3
    ),
    "medusa": medusa,
    "draft_model": lambda target: DraftModelDrafter(target.truncated(1), target.vocab_size, width=2, num_nodes=6),
    # Deep trees whose accepted paths lie scattered.
    "oracle": lambda target: OracleTreeDrafter(answers()),
}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=24, ignore_eos=True),
    "sampled": SamplingParams(max_new_tokens=16, temperature=0.9, seed=3),
}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_run_by_graphs_emits_what_a_run_without_them_does(device: str, name: str, sampling: str, batch_size: int) -> None:
    """On the CPU as a rehearsal."""
    target = Target(small_model().to(device), name="tiny")
    options = {"sampling": SAMPLINGS[sampling], "batch_size": batch_size, "use_cost_guard": False}
    target.passes.graphs = None
    plain = generate(target, PROMPTS, drafter=DRAFTERS[name](target), **options)
    target.passes.graphs = Graphs(target.device, is_rehearsal=device == "cpu")
    by_graphs = generate(target, PROMPTS, drafter=DRAFTERS[name](target), **options)
    assert len(target.passes.graphs) > 0 and not target.passes.graphs.refused
    for ours, theirs in zip(by_graphs, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.num_target_passes == theirs.num_target_passes


@pytest.mark.gpu
def test_what_cannot_be_captured_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    graphs = Graphs(torch.device("cuda"))
    asks = lambda x: (x * int(x.sum().item()),)  # noqa: E731
    for i in range(4):
        (result,) = graphs("asks", asks, [torch.full((2,), float(i))])
        assert result.tolist() == [2.0 * i * i] * 2
    assert len(graphs) == 0 and len(caplog.records) == 1 and "no CUDA graph" in caplog.text
    # The device is as it was.
    assert torch.ones(3, device="cuda").sum().item() == 3


FILTERED = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.05}


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_steps_emit_what_plain_sampling_does(name: str) -> None:
    """With a seed, through graphs, alone and in mixed batches: what the walk with transformers' filters emits, undrafted.

    Settings are no part of a graph: each batch size has its own rows in it.
    """
    target = Target(small_model())
    common = {"max_new_tokens": 16, "ignore_eos": True}
    settings = [FILTERED, {}, {"temperature": 1.3}, {"temperature": 1.0, "top_k": 3}, {"temperature": 0.9, "top_p": 0.6}]
    params = [SamplingParams(seed=i, **common, **each) for i, each in enumerate(settings)]
    for sampling in (SamplingParams(seed=7, **common, **FILTERED), params):
        target.passes.graphs = None
        expected = [c.token_ids for c in generate(target, PROMPTS, sampling=sampling)]
        target.passes.graphs = Graphs(target.device, is_rehearsal=True)
        for max_batch in (1, 3):
            got = generate(
                target,
                PROMPTS,
                drafter=DRAFTERS[name](target),
                sampling=sampling,
                batch_size=max_batch,
                use_cost_guard=False,
            )
            assert [c.token_ids for c in got] == expected, max_batch
        assert len(target.passes.graphs) > 0


def test_a_tree_is_padded_with_what_can_change_nothing() -> None:
    tree = from_parents(torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 0, 0]]))
    passes = Passes(Graphs(torch.device("cpu"), is_rehearsal=True))
    shape = passes.shape_of(tree, 1)
    assert shape == GraphShape(num_rows=1, num_nodes=4, max_depth=1, is_chain=False)
    tokens, parents, depths = shape.pad(tree).unbind(1)
    assert tokens.tolist() == [[5, 6, 7, -1]] and parents.tolist() == [[-1, 0, 0, -1]] and depths.tolist() == [[0, 1, 1, 0]]
    one = chain(torch.tensor([3, 4, 9]))
    shape = passes.shape_of(one, 3)
    assert shape == GraphShape(num_rows=4, num_nodes=1, max_depth=0, is_chain=True)
    assert fill_rows(shape.pad(one), shape.num_rows)[:, 0].tolist() == [[3], [4], [9], [9]]
    # Without graphs nothing is padded.
    assert Passes().shape_of(tree, 1) is None and Passes().num_flat_slots(tree, 1, 9) == tree.num_nodes


def test_buckets() -> None:
    assert bucket(5, NODE_BUCKETS) == 8 and bucket(129, NODE_BUCKETS) is None and bucket(0, DEPTH_BUCKETS) == 0
    assert column_bucket(3) == 128 and column_bucket(129) == 512


def test_results_stay_with_the_caller_as_far_as_was_asked() -> None:
    graphs = Graphs(torch.device("cpu"), is_rehearsal=True)
    double = lambda x: (x * 2, x * 3)  # noqa: E731
    calls = [graphs("double", double, [torch.full((2,), float(i))], num_kept=1) for i in range(4)]
    assert [call[0].tolist() for call in calls] == [[2.0 * i] * 2 for i in range(4)]
    # Once as it is, then captured: the last results that were not kept are those of the newest call.
    assert calls[0][1].tolist() == [0.0, 0.0] and calls[1][1] is calls[3][1]
    graphs("other", double, [torch.zeros(2)])
    graphs("other", double, [torch.zeros(2)])
    assert calls[3][1].isnan().all() and calls[3][0].tolist() == [6.0, 6.0]
    # Another shape is another graph.
    assert len(graphs) == 2
    graphs("double", double, [torch.zeros(3)])
    assert graphs("double", double, [torch.ones(3)])[0].tolist() == [2.0] * 3 and len(graphs) == 3


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 200])
def test_a_prompt_is_read_by_graphs_as_without(size: int) -> None:
    """In padded chunks, twice, so that the second comes from a graph; no block is kept for the padding."""
    target = Target(tiny_model("llama"))
    ids = (torch.arange(size) * 7 + 3) % 61
    tree = from_parents(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-1, 0, 0, 1]]))
    results = []
    for graphs in (None, Graphs(target.device, is_rehearsal=True)):
        target.passes.graphs = graphs
        cache = target.new_cache(block_size=4)
        for _ in range(3):
            row = cache.open_row()
            features = target.prefill(ids, row, cache, features=(1, 2), chunk_size=80)
            assert row.length == size and len(row.blocks) == -(-size // 4)
            target.passes.graphs = None
            results.append([target.verify(tree, [row], cache).logits, *features.values()])
            target.passes.graphs = graphs
            cache.release(row)
        assert graphs is None or len(graphs) > 0
    for other in results[1:]:
        for ours, theirs in zip(other, results[0], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_full_cache_takes_a_prompt_without_padding() -> None:
    target = Target(tiny_model("llama"))
    target.passes.graphs = Graphs(target.device, is_rehearsal=True)
    cache = target.new_cache(block_size=4, max_tokens=24)
    row = cache.open_row()
    target.prefill(torch.arange(3, 23), row, cache)
    assert row.length == 20 and cache.num_used_blocks == 5 and len(target.passes.graphs) == 0


@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_no_graph_has_more_rows_than_keep_a_rows_bits(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """[N1] what rows and nodes are filled up with counts."""
    target = Target(small_model(), name="tiny")
    target.passes.graphs = Graphs(target.device, is_rehearsal=True)
    target.passes.max_rows = 24
    shapes: list[FlatShape] = []
    flat_shape = target.passes.flat_shape

    def recorded(*args: object) -> FlatShape | None:
        shape = flat_shape(*args)  # type: ignore[arg-type]
        assert shape is not None
        shapes.append(shape)
        return shape

    monkeypatch.setattr(target.passes, "flat_shape", recorded)
    drafter = DRAFTERS["eagle"](target)
    generate(target, PROMPTS, drafter=drafter, sampling=SAMPLINGS["greedy"], batch_size=batch_size, use_cost_guard=False)
    steps = [shape for shape in shapes if shape.num_tree_nodes > 1]
    assert steps and all(shape.num_rows * shape.num_tree_nodes <= 24 for shape in steps)
    # As many as there is room for, of the ten that are drafted.
    full = [shape.num_tree_nodes for shape in steps if shape.num_rows >= batch_size]
    assert max(full) == {1: 12, 3: 4, 5: 2}[batch_size]
