"""One flat pass: trees of different sizes, then chunks of prompts, gives what each of them gives alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import COSTLY_PROPERTY, PROPERTY, path_to, trees
from support import VOCAB_SIZE, random_prompts, tiny_target

from selfspec import Target
from selfspec.cache.blocks import CacheRow
from selfspec.cache.kv import KVCache, Places
from selfspec.loop.selection import rank
from selfspec.model.flat import Chunks, Packing, lay_out, pack
from selfspec.tree import CandidateTree, chain, from_parents

# Two float32 evaluations in different order.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(scope="module", params=["llama", "mistral-window"])
def target(request: pytest.FixtureRequest) -> Target:
    return tiny_target(request.param, num_hidden_layers=2)


# Packing.


@st.composite
def kept_trees(draw: st.DrawFn) -> tuple[CandidateTree, list[list[int]]]:
    """Trees, and which nodes of each are kept: the root, and no node without its parent."""
    tree = draw(trees())
    kept = []
    for parents, tokens in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        nodes = [0]
        for node in range(1, tree.num_nodes):
            # Padding may be kept, too.
            has_parent = parents[node] in nodes or tokens[node] < 0
            if has_parent and draw(st.booleans()):
                nodes.append(node)
        kept.append(nodes)
    return tree, kept


def packed(tree: CandidateTree, kept: list[list[int]]) -> tuple[CandidateTree, Packing]:
    flat = [b * tree.num_nodes + node for b, nodes in enumerate(kept) for node in nodes]
    return pack(tree, torch.tensor(flat), torch.tensor([len(nodes) for nodes in kept]))


@PROPERTY
@given(kept_trees())
def test_kept_nodes_become_each_rows_first_ones(case: tuple[CandidateTree, list[list[int]]]) -> None:
    """In their order, with their parents, depths and scores; what is left of a row is padding."""
    tree, kept = case
    scores = -torch.arange(tree.tokens.numel(), dtype=torch.float32).view(tree.tokens.shape)
    smaller, packing = packed(replace(tree, scores=scores), kept)
    N = tree.num_nodes
    assert packing.starts.tolist() == [sum(map(len, kept[:b])) for b in range(len(kept) + 1)]
    assert packing.nodes.tolist() == [b * N + i for b, nodes in enumerate(kept) for i in range(len(nodes))]
    assert (smaller.max_depth, smaller.is_chain) == (tree.max_depth, tree.is_chain)
    for b, nodes in enumerate(kept):
        assert smaller.tokens[b].tolist() == [*tree.tokens[b, nodes].tolist(), *[-1] * (N - len(nodes))]
        assert smaller.depths[b].tolist() == [*tree.depths[b, nodes].tolist(), *[0] * (N - len(nodes))]
        assert smaller.scores is not None and torch.equal(smaller.scores[b, : len(nodes)], scores[b, nodes])
        assert (smaller.parents[b, len(nodes) :] == -1).all()
        for place, node in enumerate(nodes):
            old = path_to(tree.parents[b].tolist(), node)
            new = path_to(smaller.parents[b].tolist(), place)
            assert [nodes[i] for i in new] == old


@PROPERTY
@given(trees())
def test_all_nodes_packed_are_the_trees_themselves(tree: CandidateTree) -> None:
    whole = Packing.whole(tree)
    smaller, packing = packed(tree, [list(range(tree.num_nodes))] * len(tree.tokens))
    assert torch.equal(whole.nodes, packing.nodes) and torch.equal(whole.starts, packing.starts)
    for name in ("tokens", "parents", "depths"):
        assert torch.equal(getattr(smaller, name), getattr(tree, name))


@PROPERTY
@given(trees(), st.data())
def test_what_a_ranking_selects_can_be_packed(tree: CandidateTree, data: st.DataObject) -> None:
    """Every root, F nodes in all, and never a node without its parent."""
    steps = torch.tensor(
        [[data.draw(st.sampled_from([0.0, -0.5, -3.0, -torch.inf])) for _ in range(tree.num_nodes)] for _ in tree.tokens]
    )
    scores = torch.zeros_like(steps)
    for node in range(1, tree.num_nodes):
        parent = tree.parents[:, node : node + 1].clamp(min=0)
        scores[:, node] = scores.gather(1, parent)[:, 0] + steps[:, node]
    B, total = len(tree.tokens), tree.tokens.numel()
    F = data.draw(st.integers(B, total))
    ranking = rank(scores, tree.is_real, tree.depths, torch.linspace(1.0, 0.25, tree.max_depth + 1), torch.ones(B))
    kept, counts = ranking.select(F)
    smaller, packing = pack(tree, kept, counts)
    assert len(packing.nodes) == F == int(packing.starts[-1]) and (counts > 0).all()
    assert torch.equal(smaller.tokens[:, 0], tree.tokens[:, 0])
    # from_parents refuses a child before its parent, and padding with one.
    again = from_parents(smaller.tokens, smaller.parents)
    assert torch.equal(again.depths, smaller.depths)


# The pass.


def plain_logits(target: Target, tokens: list[int]) -> torch.Tensor:
    """The next token's logits [V] by one ordinary forward that knows no cache."""
    with torch.inference_mode():
        return target.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def entered(target: Target, cache: KVCache, text: list[int], num_spare: int = 0) -> CacheRow:
    """A row that holds a text, with room for more."""
    row = cache.open_row()
    target.prefill(torch.tensor(text, dtype=torch.int64), row, cache)
    cache.reserve([row], num_spare)
    return row


def chunks_of(rows: list[CacheRow], parts: list[list[int]], *, is_known: bool) -> Chunks:
    """Tokens to enter in rows, as the host or as a graph knows them."""
    num_columns = max(len(row.blocks) for row in rows)
    numbers = [
        [row.length, len(part), 0, *row.blocks, *[0] * (num_columns - len(row.blocks))]
        for row, part in zip(rows, parts, strict=True)
    ]
    tokens = [token for part in parts for token in part]
    chunks = Chunks.unpack(torch.tensor(numbers), torch.tensor([tokens, [*tokens[1:], 0]]))
    return replace(chunks, rows=rows, host_starts=chunks.starts.tolist()) if is_known else chunks


def stored(cache: KVCache, row: CacheRow, num_tokens: int) -> torch.Tensor:
    size = cache.block_size
    slots = [row.blocks[t // size] * size + t % size for t in range(num_tokens)]
    return torch.cat([cache.keys[:, slots].flatten(1), cache.values[:, slots].flatten(1)], dim=1)


@pytest.mark.parametrize("is_known", [True, False], ids=["host", "graph"])
@COSTLY_PROPERTY
@given(
    kept_trees(),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=4),
    st.lists(st.integers(0, 14), min_size=3, max_size=3),
    st.integers(0, 99),
)
def test_trees_and_chunks_give_what_each_gives_alone(
    target: Target,
    is_known: bool,
    case: tuple[CandidateTree, list[list[int]]],
    parts: list[tuple[int, int]],
    lengths: list[int],
    seed: int,
) -> None:
    """The logits of every kept node are those of its own path; a chunk's keys, values and features those of its text."""
    tree, kept = case
    B = len(tree.tokens)
    texts = random_prompts(B + len(parts), (40, 40), seed=seed)
    prefixes = [text[:length] for text, length in zip(texts, lengths, strict=False)][:B]
    cache = target.new_cache(block_size=4)
    rows = [entered(target, cache, prefix, tree.num_nodes) for prefix in prefixes]
    begun = [entered(target, cache, text[:first], count) for text, (first, count) in zip(texts[B:], parts, strict=True)]
    smaller, packing = packed(tree, kept)
    places = cache.locate(rows)
    if not is_known:
        places = Places(places.lengths, places.block_tables)
    pieces = [text[first : first + count] for text, (first, count) in zip(texts[B:], parts, strict=True)]
    chunks = chunks_of(begun, pieces, is_known=is_known) if parts else None
    with torch.inference_mode():
        nodes = lay_out(cache, places, smaller, packing, chunks)
        output = target.run_flat(nodes, cache, features=(1, -1))
    assert output.logits.shape == (sum(map(len, kept)), VOCAB_SIZE)
    place = 0
    for b, chosen in enumerate(kept):
        for node in chosen:
            path = path_to(tree.parents[b].tolist(), node)
            tokens = tree.tokens[b, path].clamp(min=0).tolist()
            if tree.tokens[b, node] >= 0:
                torch.testing.assert_close(output.logits[place], plain_logits(target, [*prefixes[b], *tokens]), **TOLERANCE)
            place += 1
    for row, text, (first, count) in zip(begun, texts[B:], parts, strict=True):
        alone = target.new_cache(block_size=4)
        row_alone = alone.open_row()
        features = target.prefill(torch.tensor(text[: first + count]), row_alone, alone, features=(1, -1))
        torch.testing.assert_close(stored(cache, row, first + count), stored(alone, row_alone, first + count), **TOLERANCE)
        for name in (1, -1):
            ours = output.features[name][place : place + count]
            torch.testing.assert_close(ours, features[name][0, first:], **TOLERANCE)
        place += count


def test_prompts_alone_are_a_pass_without_logits(target: Target) -> None:
    cache = target.new_cache(block_size=4)
    texts = random_prompts(3, (5, 12))
    rows = [entered(target, cache, [], len(text)) for text in texts]
    with torch.inference_mode():
        nodes = lay_out(cache, None, None, None, chunks_of(rows, texts, is_known=True))
        output = target.run_flat(nodes, cache)
    assert nodes.num_nodes == 0 and output.logits.shape[0] == 0
    for row, text in zip(rows, texts, strict=True):
        cache.advance(row, len(text))
        tree = chain(torch.tensor([7]))
        found = target.verify(tree, [row], cache).logits[0, 0]
        torch.testing.assert_close(found, plain_logits(target, [*text, 7]), **TOLERANCE)


def test_a_pass_writes_nothing_but_its_own_rows_room(target: Target) -> None:
    """Neither the prefixes, nor others' rows, nor a free block."""
    cache = target.new_cache(block_size=4, max_tokens=128)
    prefixes = random_prompts(2, (6, 11))
    rows = [entered(target, cache, prefix, 5) for prefix in prefixes]
    begun, bystander = entered(target, cache, [5, 6, 7], 6), entered(target, cache, [8] * 9)
    tree = from_parents(torch.tensor([[3, 4, 5, 6, 7]] * 2), torch.tensor([[-1, 0, 0, 1, 2]] * 2))
    smaller, packing = packed(tree, [[0, 1, 3], [0, 2]])
    # Bits, because memory that nobody has written may hold NaNs.
    before_keys, before_values = (each.view(torch.int32).clone() for each in (cache.keys, cache.values))
    chunks = chunks_of([begun], [[9, 10]], is_known=True)
    with torch.inference_mode():
        target.run_flat(lay_out(cache, cache.locate(rows), smaller, packing, chunks), cache)
    written = {
        row.blocks[t // 4] * 4 + t % 4
        for row, count in ((rows[0], 3), (rows[1], 2), (begun, 2))
        for t in range(row.length, row.length + count)
    }
    kept = [slot for slot in range(cache.keys.shape[1]) if slot not in written]
    assert torch.equal(cache.keys.view(torch.int32)[:, kept], before_keys[:, kept])
    assert torch.equal(cache.values.view(torch.int32)[:, kept], before_values[:, kept])
    assert bystander.length == 9
