"""The paged KV cache: its bookkeeping, and the law that after any acceptance it equals a fresh prefill."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from strategies import COSTLY_PROPERTY, PROPERTY, path_to, trees

from selfspec.api import generate
from selfspec.cache import kv as cache_file
from selfspec.cache.blocks import CacheRow
from selfspec.cache.kv import KVCache, KVShape
from selfspec.config import SamplingParams
from selfspec.kernels.slots import slots_of
from selfspec.loop.accept import Acceptance
from selfspec.loop.batch import Batch
from selfspec.loop.decode import decode
from selfspec.loop.drafter import Drafter, Proposal
from selfspec.loop.planner import Planner
from selfspec.loop.sequence import Request
from selfspec.model.target import Target
from selfspec.tree import CandidateTree, chain, from_parents

# Two float32 evaluations of two layers in different order.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
VOCAB_SIZE = 59
# Llama 3.1's: a pool sized for it would be seen at once.
CONTEXT_LENGTH = 131072


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.4,
        eos_token_id=None,
    )
    return Target(transformers.LlamaForCausalLM(config).eval())


def plain_logits(target: Target, tokens: list[int]) -> torch.Tensor:
    """The next token's logits [V] by one ordinary forward that knows no cache."""
    with torch.inference_mode():
        return target.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


# Bookkeeping: a pool of one number a slot.


def small_pool(block_size: int = 4, max_tokens: int | None = None) -> KVCache:
    shape = KVShape(num_layers=2, num_kv_heads=1, key_dim=2, value_dim=1)
    return KVCache(shape, dtype=torch.float32, device=torch.device("cpu"), block_size=block_size, max_tokens=max_tokens)


def slots(cache: KVCache, row: CacheRow, num_tokens: int) -> list[int]:
    return [row.blocks[t // cache.block_size] * cache.block_size + t % cache.block_size for t in range(num_tokens)]


def fill(cache: KVCache, row: CacheRow, mark: float, num_tokens: int) -> None:
    """Commit tokens whose stored numbers tell the row and the position."""
    cache.reserve([row], num_tokens)
    new = slots(cache, row, row.length + num_tokens)[row.length :]
    numbers = mark + torch.arange(row.length, row.length + num_tokens) / 1024
    cache.keys[:, new] = numbers[None, :, None, None]
    cache.values[:, new] = -numbers[None, :, None, None]
    cache.advance(row, num_tokens)


def assert_holds(cache: KVCache, row: CacheRow, mark: float) -> None:
    numbers = mark + torch.arange(row.length) / 1024
    stored = slots(cache, row, row.length)
    assert torch.equal(cache.keys[:, stored], numbers[None, :, None, None].expand(2, -1, 1, 2))
    assert torch.equal(cache.values[:, stored], -numbers[None, :, None, None].expand(2, -1, 1, 1))


@PROPERTY
@given(st.lists(st.tuples(st.sampled_from(["open", "grow", "grow", "release", "rewind"]), st.integers(0, 40)), max_size=30))
def test_rows_keep_their_contents_and_no_block_is_lost_or_shared(steps: list[tuple[str, int]]) -> None:
    """Rows of any size opened, grown, shortened and released in any order, while the pool grows under them."""
    cache = small_pool()
    rows: dict[float, CacheRow] = {}
    for mark, (action, number) in enumerate(steps, start=1):
        if action == "open" or not rows:
            rows[float(mark)] = cache.open_row()
            continue
        chosen = sorted(rows)[number % len(rows)]
        if action == "grow":
            fill(cache, rows[chosen], chosen, number)
        elif action == "rewind":
            cache.rewind(rows[chosen], min(number, rows[chosen].length))
        else:
            cache.release(rows.pop(chosen))
        for row_mark, row in rows.items():
            assert_holds(cache, row, row_mark)
            assert row.is_contiguous == all(second == first + 1 for first, second in pairwise(row.blocks))
        used = [block for row in rows.values() for block in row.blocks]
        assert len(used) == len(set(used)) == cache.num_used_blocks
        # The last block is nobody's.
        assert cache.num_used_blocks + cache.num_free_blocks == cache.keys.shape[1] // cache.block_size - 1
    for row in rows.values():
        cache.release(row)
    assert cache.num_used_blocks == 0


def test_reserving_what_is_there_takes_no_block() -> None:
    cache = small_pool()
    row = cache.open_row()
    cache.reserve([row], 4)
    assert len(row.blocks) == 1
    cache.reserve([row], 4)
    cache.reserve([row], 1)
    assert len(row.blocks) == 1
    cache.reserve([row], 5)
    assert len(row.blocks) == 2


def test_a_released_row_is_empty_and_its_blocks_are_used_again() -> None:
    cache = small_pool()
    row = cache.open_row()
    fill(cache, row, 1.0, 80)
    size = cache.keys.shape[1]
    beside = cache.open_row()
    cache.reserve([beside], 1)
    fill(cache, row, 1.0, 20)
    assert not row.is_contiguous and cache.keys.shape[1] == size
    cache.release(beside)
    cache.release(row)
    assert (row.blocks, row.length, row.is_contiguous) == ([], 0, True)
    for mark in range(20):
        again = cache.open_row()
        fill(cache, again, float(mark), 100)
        cache.release(again)
    assert cache.keys.shape[1] == size


def test_a_full_pool_says_what_to_do_and_stays_as_it_was() -> None:
    cache = small_pool(max_tokens=16)
    kept, other = cache.open_row(), cache.open_row()
    fill(cache, kept, 1.0, 9)
    message = r"holds 4 blocks of 4 tokens and needs 2 more: lower the batch size or raise the cache's max_tokens"
    with pytest.raises(MemoryError, match=message):
        cache.reserve([kept, other], 5)
    assert other.blocks == [] and cache.num_used_blocks == 3
    assert_holds(cache, kept, 1.0)
    cache.reserve([other], 4)
    assert cache.num_used_blocks == 4


def test_bytes_per_token_counts_both_caches_of_every_layer(target: Target) -> None:
    assert target.kv_shape == KVShape(num_layers=2, num_kv_heads=2, key_dim=8, value_dim=8)
    assert target.kv_shape.bytes_per_token(torch.float32) == 2 * 2 * (8 + 8) * 4
    assert target.kv_shape.bytes_per_token(torch.bfloat16) == 2 * 2 * (8 + 8) * 2


# With a model: what is stored must be what a plain forward would compute.


def acceptance_of(tree: CandidateTree, last_nodes: list[int], bonus: list[int]) -> Acceptance:
    """The acceptance whose path ends at the given node of each row, in the shapes that `accept` gives."""
    width = tree.max_depth + 1
    paths = [path_to(tree.parents[b].tolist(), node) for b, node in enumerate(last_nodes)]
    tokens = [[int(tree.tokens[b, i]) for i in path[1:]] + [bonus[b]] for b, path in enumerate(paths)]

    def padded(lists: list[list[int]]) -> torch.Tensor:
        return torch.tensor([entries + [-1] * (width - len(entries)) for entries in lists])

    num_accepted = torch.tensor([len(path) - 1 for path in paths])
    return Acceptance(padded(paths), num_accepted, padded(tokens), torch.ones(len(paths), dtype=torch.bool))


@COSTLY_PROPERTY
@given(data=st.data())
@torch.inference_mode()
def test_next_logits_after_any_acceptance_equal_a_fresh_forward(target: Target, data: st.DataObject) -> None:
    """[K1] [K2] random trees and chains, any accepted path (mostly rejections), rows that accept different counts.

    Five rounds in a row, small blocks interleaved between the rows, and one row released and opened anew half way.
    """
    cache = target.new_cache(block_size=data.draw(st.sampled_from([1, 3, 16])))
    B = data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def random_tokens(*shape: int) -> torch.Tensor:
        return torch.randint(VOCAB_SIZE, shape, generator=generator)

    def open_row(length: int) -> tuple[CacheRow, list[int]]:
        """A prefilled row, and its tokens with the root behind them."""
        tokens = random_tokens(length + 1)
        row = cache.open_row()
        target.prefill(tokens[:-1], row, cache, chunk_size=5)
        return row, tokens.tolist()

    opened = [open_row(data.draw(st.integers(0, 12))) for _ in range(B)]
    rows, texts = [row for row, _ in opened], [text for _, text in opened]
    for round_number in range(5):
        if round_number == 3:
            cache.release(rows[0])
            rows[0], texts[0] = open_row(4)
        roots = torch.tensor([text[-1] for text in texts])
        if data.draw(st.booleans()):
            tree = chain(roots, random_tokens(B, data.draw(st.integers(0, 5))))
        else:
            shape = data.draw(trees(num_rows=B, max_nodes=9))
            tokens = torch.where(shape.is_real, random_tokens(B, shape.num_nodes), -1)
            tokens[:, 0] = roots
            tree = from_parents(tokens, shape.parents)
        logits = target.verify(tree, rows, cache).logits
        last_nodes = []
        for b in range(B):
            real = [i for i in range(tree.num_nodes) if tree.tokens[b, i] >= 0]
            last_nodes.append(data.draw(st.sampled_from(real)))
            path = path_to(tree.parents[b].tolist(), last_nodes[b])
            text = texts[b][:-1] + [int(tree.tokens[b, i]) for i in path]
            torch.testing.assert_close(logits[b, last_nodes[b]], plain_logits(target, text), **TOLERANCE)
        acceptance = acceptance_of(tree, last_nodes, random_tokens(B).tolist())
        cache.compact(cache.locate(rows), tree, acceptance.path, acceptance.num_accepted)
        for b, row in enumerate(rows):
            cache.advance(row, int(acceptance.num_accepted[b]) + 1)
            texts[b] += [token for token in acceptance.tokens[b].tolist() if token >= 0]
            assert row.length == len(texts[b]) - 1
    # Not the next logits alone: the stored numbers themselves equal those of a prefill in one go.
    for row, text in zip(rows, texts, strict=True):
        fresh_cache = target.new_cache()
        fresh = fresh_cache.open_row()
        target.prefill(torch.tensor(text[:-1]), fresh, fresh_cache)
        for name in ("keys", "values"):
            stored = getattr(cache, name)[:, slots(cache, row, row.length)]
            expected = getattr(fresh_cache, name)[:, slots(fresh_cache, fresh, row.length)]
            torch.testing.assert_close(stored, expected, **TOLERANCE)


@torch.inference_mode()
def test_repeated_rows_are_compacted_once(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """[K2] a batch filled up with its last row: whoever moves the path again would move what has been moved already."""

    def one_row_after_the_other(keys: torch.Tensor, values: torch.Tensor, source: torch.Tensor, to: torch.Tensor) -> None:
        for b in range(len(source)):
            for pool in (keys, values):
                pool[:, to[b]] = pool[:, source[b]].clone()

    monkeypatch.setattr(cache_file, "kv_compaction", one_row_after_the_other)
    cache = target.new_cache()
    rows = [cache.open_row(), cache.open_row()]
    for row in rows:
        target.prefill(torch.arange(3, 10), row, cache)
    cache.reserve(rows, 5)
    tree = from_parents(torch.tensor([[4, 5, 6, 7, 8]] * 4), torch.tensor([[-1, 0, 0, 2, 3]] * 4))
    nodes = torch.arange(5).expand(2, 5)
    lengths = torch.tensor([[7], [7]])
    tables = cache.locate(rows).block_tables
    at = slots_of(tables, lengths + nodes, cache.block_size)
    cache.keys[:, at.flatten()] = torch.arange(10.0).view(1, 10, 1, 1).expand_as(cache.keys[:, :10])
    acceptance = acceptance_of(tree, [4] * 4, [9] * 4)
    cache.compact(cache.locate([rows[0], rows[1], rows[1], rows[1]]), tree, acceptance.path, acceptance.num_accepted)
    moved = cache.keys[0, at[:, :4].flatten(), 0, 0].view(2, 4).tolist()
    assert moved == [[0.0, 2.0, 3.0, 4.0], [5.0, 7.0, 8.0, 9.0]]


def test_a_row_rebuilt_from_scattered_blocks_decodes_like_a_consecutive_one(target: Target) -> None:
    """Fragmentation: rows that grew in turn, were released and opened again own blocks far apart."""
    tokens = (torch.arange(30) * 11) % VOCAB_SIZE
    cache = target.new_cache(block_size=4)
    first, second = cache.open_row(), cache.open_row()
    for _ in range(3):
        for row in (first, second):
            cache.reserve([row], 4)
            cache.advance(row, 4)
    assert first.blocks == [0, 2, 4] and not first.is_contiguous
    cache.release(first)
    third = cache.open_row()
    target.prefill(tokens[:-1], third, cache)
    assert not third.is_contiguous
    scattered = target.verify(chain(tokens[-1:]), [third], cache).logits[0, 0]
    torch.testing.assert_close(scattered, plain_logits(target, tokens.tolist()), **TOLERANCE)


class TwigDrafter(Drafter):
    """Hides the next true tokens in a tree whose storage order is not the path's, beside siblings that are wrong.

    Every third tree ends in a wrong token after one true one, and every fourth is wrong at once.
    """

    name = "twig"
    num_draft_tokens = 3

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.answers = answers
        self.count = 0

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        parents = [-1, 0, 0, 1, 2, 2, 5, 5]
        rows = []
        for b, sequence in enumerate(batch.sequences):
            self.count += 1
            truth = self.answers[tuple(sequence.request.prompt_ids)][len(sequence.token_ids) :][:3]
            num_true = 1 if self.count % 3 == 0 else 0 if self.count % 4 == 0 else 3
            tokens = [int(batch.roots[b])] + [VOCAB_SIZE - 1] * 7
            for node, token in zip((2, 5, 7), truth[:num_true], strict=False):
                tokens[node] = token
            rows.append(tokens)
        return Proposal(from_parents(torch.tensor(rows), torch.tensor([parents] * len(rows))))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_decoding_on_after_compaction_equals_decoding_without_speculation(target: Target, batch_size: int) -> None:
    """[K1] [K2] every pass accepts a scattered path, a part of one, or none, and the next builds on it."""
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], list(range(20, 45)), [7]]
    sampling = SamplingParams(max_new_tokens=30)
    expected = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(30):
            text.append(int(plain_logits(target, text).argmax()))
        expected.append(text[len(prompt) :])
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
    done = generate(
        target,
        prompts,
        drafter=TwigDrafter(answers),
        sampling=sampling,
        batch_size=batch_size,
        use_cost_guard=False,
    )
    assert [completion.token_ids for completion in done] == expected
    assert all(completion.num_target_passes < 20 for completion in done), "hardly anything was accepted"


def test_a_pool_holds_what_is_used_and_not_what_the_model_allows(target: Target) -> None:
    """[K8] nothing is allocated for the model's maximum, before or after a short prompt."""
    assert target.context_length == CONTEXT_LENGTH
    cache = target.new_cache()
    # Nobody's block alone.
    assert cache.keys.shape[1] == cache.block_size
    requests = [Request([5] * 20, SamplingParams(max_new_tokens=10))]
    for _ in decode(target, requests, cache=cache, planner=Planner(is_active=False)):
        assert cache.num_used_blocks * cache.block_size <= 20 + 10 + cache.block_size
    assert cache.keys.shape[1] <= 1024
    assert cache.num_used_blocks == 0


def test_prompts_longer_than_2048_tokens_are_served(target: Target) -> None:
    """[K8] no fixed limit in cache, chunks or positions."""
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(VOCAB_SIZE, (2100,), generator=generator).tolist()
    first = int(plain_logits(target, prompt).argmax())
    second = int(plain_logits(target, [*prompt, first]).argmax())
    (done,) = generate(target, [prompt], sampling=SamplingParams(max_new_tokens=2))
    assert done.token_ids == [first, second]
