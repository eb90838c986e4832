"""What runs on CPU against the twins in `kernels/reference.py`, and the twins against code that shares nothing with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import FLOAT32, HEADS, LENGTHS, PARENTS, TOLERANCES, Case, make_case
from strategies import PROPERTY, parent_lists, path_to, trees

from selfspec.kernels.kv_compaction import kv_compaction
from selfspec.kernels.reference import tree_accept_reference
from selfspec.kernels.tree_accept import tree_accept
from selfspec.tree import CandidateTree


def attend_along_paths(
    case: Case, *, sliding_window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention of every node as the last token of an ordinary sequence, prefix and path; float64, by key."""
    B, H, N, _ = case.query.shape
    _, G, Dv = case.value_cache.shape
    out = torch.zeros(B, N, H, Dv, dtype=torch.float64)
    for b, length in enumerate(case.layout.host_lengths):
        for i in range(N):
            path = path_to(case.parents[b], i)
            sequence = [*range(length), *(length + node for node in path)]
            if sliding_window is not None:
                sequence = sequence[-sliding_window:]
            slots = [case.slot(b, index) for index in sequence]
            for h in range(H):
                query = case.query[b, h, i].double()
                scores = [float(query @ case.key_cache[slot, h * G // H].double()) * case.scaling for slot in slots]
                if softcap is not None:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                weights = [math.exp(score) for score in scores]
                total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[h])))
                for weight, slot in zip(weights, slots, strict=True):
                    out[b, i, h] += weight / total * case.value_cache[slot, h * G // H].double()
    return out


@pytest.mark.parametrize("options", [{}, {"sliding_window": 1}, {"sliding_window": 4}, {"sliding_window": 9}], ids=str)
@pytest.mark.parametrize("tree", PARENTS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_reference_is_causal_attention_along_each_nodes_path(lengths: str, tree: str, options: dict[str, int]) -> None:
    """[K3] siblings never see each other; [K4] the window is crossed inside the prefix, at its end and in the tree."""
    rows = LENGTHS[lengths]
    case = make_case([PARENTS[tree]] * len(rows), rows, (2, 1, 8, 5))
    expected = attend_along_paths(case, **options).float()
    torch.testing.assert_close(case.run_reference(**options), expected, **FLOAT32)


@pytest.mark.parametrize("heads", HEADS)
def test_reference_caps_scores_and_adds_sinks_to_the_denominator(heads: str) -> None:
    H = HEADS[heads][0]
    case = make_case([PARENTS["random"], PARENTS["random"]], [3, 10], HEADS[heads])
    sinks = torch.linspace(-1.0, 2.0, H)
    for options in ({"softcap": 0.8}, {"sinks": sinks}, {"softcap": 1.5, "sinks": sinks, "sliding_window": 5}):
        expected = attend_along_paths(case, **options).float()  # type: ignore[arg-type]
        torch.testing.assert_close(case.run_reference(**options), expected, **FLOAT32)
        torch.testing.assert_close(case.run(**options), expected, **FLOAT32)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tree", PARENTS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_tree_attention_equals_its_reference(lengths: str, tree: str, heads: str, dtype: torch.dtype) -> None:
    """Over consecutive and scattered blocks; what no row owns is NaN and must not be read."""
    rows = LENGTHS[lengths]
    for is_scattered in (False, True):
        case = make_case([PARENTS[tree]] * len(rows), rows, HEADS[heads], dtype=dtype, is_scattered=is_scattered)
        for window in (None, 1, 3, 8):
            out = case.run(sliding_window=window)
            expected = case.run_reference(sliding_window=window)
            assert out.shape == (len(rows), len(PARENTS[tree]), HEADS[heads][0], HEADS[heads][3])
            assert out.dtype == dtype and out.isfinite().all()
            torch.testing.assert_close(out, expected, **TOLERANCES[dtype])


@PROPERTY
@given(
    parent_lists(min_nodes=9, max_nodes=9),
    parent_lists(min_nodes=9, max_nodes=9),
    st.integers(0, 18),
    st.integers(1, 14),
)
def test_tree_attention_equals_its_reference_on_random_trees(
    first: list[int], second: list[int], length: int, window: int
) -> None:
    """[K4] two rows with trees of their own, one of which lies wholly inside the window when the other does not."""
    case = make_case([first, second], [length, 2], seed=length)
    for sliding_window in (None, window):
        expected = case.run_reference(sliding_window=sliding_window)
        torch.testing.assert_close(case.run(sliding_window=sliding_window), expected, **FLOAT32)


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["fused", "reference"])
@pytest.mark.parametrize("tree", PARENTS)
def test_a_tree_key_reaches_its_own_node_and_descendants_only(tree: str, softcap: float | None) -> None:
    """[K3] changing one node's key and value changes, bit for bit, nothing at a node that does not descend from it."""
    parents = PARENTS[tree]
    case = make_case([parents], [6])
    before = case.run(softcap=softcap)
    for changed in range(len(parents)):
        slot = case.slot(0, 6 + changed)
        kept = case.key_cache[slot].clone(), case.value_cache[slot].clone()
        case.key_cache[slot] += 3.0
        case.value_cache[slot] -= 50.0
        after = case.run(softcap=softcap)
        for node in range(len(parents)):
            is_seen = changed in path_to(parents, node)
            assert torch.equal(before[0, node], after[0, node]) != is_seen, (changed, node)
        case.key_cache[slot], case.value_cache[slot] = kept


def test_one_layout_serves_layers_of_different_windows() -> None:
    """[K4] masks are cached for a pass: a sliding layer's must not be a full layer's."""
    case = make_case([PARENTS["chain"]], [12])
    outs = {window: case.run(sliding_window=window) for window in (None, 2, 15, None, 2)}
    for window, out in outs.items():
        torch.testing.assert_close(out, case.run_reference(sliding_window=window), **FLOAT32)
    assert not torch.allclose(outs[None], outs[2])


@PROPERTY
@given(trees(vocab_size=3), st.data())
def test_tree_accept_equals_its_reference(tree: CandidateTree, data: st.DataObject) -> None:
    """Equal siblings, padding anywhere, and shapes deeper than any path left in them."""
    B, N = tree.tokens.shape
    choices = st.lists(st.integers(0, 2), min_size=N, max_size=N)
    chosen = torch.tensor(data.draw(st.lists(choices, min_size=B, max_size=B)))
    for cut in (tree, tree.limit_depth(torch.full((B,), data.draw(st.integers(0, 3))))):
        max_depth = max(cut.max_depth, data.draw(st.integers(0, 4)))
        path, num_accepted = tree_accept(cut.tokens, cut.parents, chosen, max_depth)
        expected_path, expected_num = tree_accept_reference(cut.tokens, cut.parents, chosen, max_depth)
        assert torch.equal(path, expected_path)
        assert torch.equal(num_accepted, expected_num)


@PROPERTY
@given(trees(num_rows=1, vocab_size=2), st.data())
def test_accepted_path_is_the_targets_own_choice_and_ends_only_where_it_must(
    tree: CandidateTree, data: st.DataObject
) -> None:
    """The reference itself, by what it promises: each step a child with the chosen token, no such child at the end."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    chosen = data.draw(st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens)))
    path, num_accepted = tree_accept_reference(tree.tokens, tree.parents, torch.tensor([chosen]), tree.max_depth)
    nodes = [node for node in path[0].tolist() if node >= 0]
    assert nodes[0] == 0 and len(nodes) == 1 + int(num_accepted[0])
    assert path[0, len(nodes) :].tolist() == [-1] * (tree.max_depth + 1 - len(nodes))
    for parent, child in pairwise(nodes):
        assert parents[child] == parent and tokens[child] == chosen[parent]
    last = nodes[-1]
    assert not any(parents[i] == last and tokens[i] == chosen[last] for i in range(1, len(tokens)))


@pytest.mark.parametrize("accept", [tree_accept, tree_accept_reference])
def test_padding_is_never_accepted_when_the_target_chooses_token_zero(
    accept: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """[K7] a padding slot clamped to token 0 anywhere would pass for a child here."""
    tokens = torch.tensor([[0, -1, -1, -1], [0, 0, -1, -1], [0, -1, 0, -1]])
    parents = torch.tensor([[-1, -1, -1, -1], [-1, 0, -1, -1], [-1, -1, 0, -1]])
    path, num_accepted = accept(tokens, parents, torch.zeros(3, 4, dtype=torch.int64), 3)
    assert num_accepted.tolist() == [0, 1, 1]
    assert path.tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [0, 2, -1, -1]]
    # Nor is a slot whose token alone marks it as padding.
    path, num_accepted = accept(tokens, torch.tensor([[-1, 0, 1, 2]] * 3), torch.zeros(3, 4, dtype=torch.int64), 3)
    assert num_accepted.tolist() == [0, 1, 0]


@PROPERTY
@given(st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True), st.integers(0, 5))
def test_compaction_moves_rows_as_if_all_were_read_first(nodes: list[int], start: int) -> None:
    """[K2] a destination that is another row's source must not be read after it was written."""
    path = sorted(nodes)
    generator = torch.Generator().manual_seed(start)
    keys = torch.randn(2, 20, 3, 4, generator=generator)
    values = torch.randn(2, 20, 3, 2, generator=generator)
    old_keys, old_values = keys.clone(), values.clone()
    source = torch.tensor([start + node for node in path])
    target = torch.arange(start, start + len(path))
    kv_compaction(keys, values, source, target)
    for slot in range(20):
        origin = int(source[slot - start]) if start <= slot < start + len(path) else slot
        assert torch.equal(keys[:, slot], old_keys[:, origin])
        assert torch.equal(values[:, slot], old_values[:, origin])


def test_compaction_may_name_one_move_twice() -> None:
    """The end of a short path is moved again to fill a batch's shape."""
    keys, values = torch.arange(8.0).view(1, 8, 1, 1), torch.arange(8.0, 16.0).view(1, 8, 1, 1)
    kv_compaction(keys, values, torch.tensor([3, 6, 6, 6]), torch.tensor([2, 3, 3, 3]))
    assert keys.flatten().tolist() == [0, 1, 3, 6, 4, 5, 6, 7]
    assert values.flatten().tolist() == [8, 9, 11, 14, 12, 13, 14, 15]
