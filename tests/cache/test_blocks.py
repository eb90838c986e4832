"""Blocks: who has which, what is shared, what is given up. No tensor is needed for that."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY

from selfspec.cache.blocks import BlockPool, CacheFull, CacheRow

SIZE = 4


def pool(max_tokens: int | None = 40, **options: bool) -> BlockPool:
    return BlockPool(block_size=SIZE, max_tokens=max_tokens, use_sharing=max_tokens is not None, **options)


def filled(blocks: BlockPool, text: list[int]) -> CacheRow:
    """A row that holds a text."""
    row = blocks.open_row()
    blocks.reserve([row], len(text))
    blocks.advance(row, len(text))
    return row


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import selfspec.cache.blocks"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rows_that_begin_alike_share_full_blocks() -> None:
    blocks = pool()
    text = list(range(10))
    first = filled(blocks, text)
    blocks.publish_blocks(first, text)
    second = blocks.open_row()
    # Eight of nine tokens fill blocks; the third block is not full.
    assert [block.number for block in blocks.adopt_blocks(second, text[:9])] == first.blocks[:2]
    assert second.length == 8 and blocks.num_used_blocks == 3
    other = blocks.open_row()
    blocks.adopt_blocks(other, [0, 1, 2, 3, 9, 9, 9, 9])
    assert other.length == 4


def test_a_block_without_users_is_kept_until_its_place_is_needed() -> None:
    blocks = pool(max_tokens=16)
    old, new = filled(blocks, [1] * 8), filled(blocks, [2] * 8)
    blocks.publish_blocks(old, [1] * 8)
    blocks.publish_blocks(new, [2] * 8)
    blocks.release(old)
    blocks.release(new)
    assert blocks.num_used_blocks == 0
    taker = blocks.open_row()
    blocks.reserve([taker], 8)
    assert not blocks.adopt_blocks(blocks.open_row(), [1] * 8), "the one unused for longest went first"
    assert len(blocks.adopt_blocks(blocks.open_row(), [2] * 8)) == 2


def test_what_is_kept_with_a_block_goes_with_it() -> None:
    blocks = pool(max_tokens=8)
    row = filled(blocks, [1] * 8)
    for block in blocks.publish_blocks(row, [1] * 8):
        block.kept[7] = "a feature"
    blocks.release(row)
    assert not blocks.adopt_blocks(blocks.open_row(), [1] * 8, names=(7, 8)), "it lacks feature 8"
    sharer = blocks.open_row()
    assert len(blocks.adopt_blocks(sharer, [1] * 8, names=(7,))) == 2
    blocks.release(sharer)
    blocks.release(filled(blocks, [2] * 8))
    assert not any(block.kept for block in blocks._blocks)


def test_whether_a_text_fits_is_known_without_taking_anything() -> None:
    blocks = pool(max_tokens=24)
    text = list(range(8))
    row = filled(blocks, text)
    blocks.publish_blocks(row, text)
    waiting = blocks.open_row()
    # Two blocks are shared with a row that lives: four are free, and so 24 tokens in all are possible.
    assert blocks.can_adopt(waiting, text, (), 24, num_spare=0)
    assert not blocks.can_adopt(waiting, text, (), 24, num_spare=1)
    assert waiting.blocks == [] and blocks.num_used_blocks == 2
    blocks.release(row)
    assert blocks.can_adopt(waiting, text, (), 24, num_spare=0)
    assert not blocks.can_adopt(waiting, text, (), 25, num_spare=0)


def test_a_texts_digests_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that waits for room is looked up in every round."""
    blocks, row, text = pool(max_tokens=400), CacheRow(), list(range(300))
    known = [blocks.can_adopt(row, text, (), 300, 0) for _ in range(2)]
    digests = list(row.digests)
    assert len(digests) == 300 // SIZE

    def fail(*args: object, **options: object) -> None:
        raise AssertionError("hashed again")

    monkeypatch.setattr("selfspec.cache.blocks.hashlib.blake2b", fail)
    assert [blocks.can_adopt(row, text, (), 300, 0) for _ in range(2)] == known
    assert row.digests == digests


def test_a_full_pool_changes_nothing() -> None:
    blocks = pool(max_tokens=8)
    row, other = filled(blocks, [1] * 5), blocks.open_row()
    with pytest.raises(CacheFull, match=r"holds 2 blocks of 4 tokens and needs 2 more"):
        blocks.reserve([row, other], 4)
    assert len(row.blocks) == 2 and not other.blocks


def test_trimming_gives_back_what_the_prefix_does_not_need() -> None:
    blocks = pool()
    row = filled(blocks, [1] * 5)
    blocks.reserve([row], 20)
    assert len(row.blocks) == 7
    blocks.trim(row)
    assert len(row.blocks) == 2 and blocks.num_free_blocks == blocks.num_blocks - 2


ACTIONS = st.lists(st.tuples(st.sampled_from("ogrptx"), st.integers(0, 30)), max_size=40)


@PROPERTY
@given(ACTIONS)
def test_no_block_is_lost_and_none_has_two_owners_that_differ(actions: list[tuple[str, int]]) -> None:
    """Rows of a few texts opened, grown, rewound, published, trimmed and released in any order."""
    blocks = pool(max_tokens=64)
    texts = [[t] * 200 for t in range(3)]
    rows: list[tuple[CacheRow, list[int]]] = []
    for action, number in actions:
        if action == "o" or not rows:
            row, text = blocks.open_row(), texts[number % 3]
            blocks.adopt_blocks(row, text[:number])
            rows.append((row, text))
            continue
        row, text = rows[number % len(rows)]
        if action == "g" and blocks.can_reserve([row], number):
            blocks.reserve([row], number)
            blocks.advance(row, number)
        elif action == "p":
            blocks.publish_blocks(row, text[: row.length])
        elif action == "t":
            blocks.trim(row)
        elif action == "x":
            blocks.release(row)
            rows.remove((row, text))
        owners: dict[int, set[int]] = {}
        for each, its_text in rows:
            for block in each.blocks:
                owners.setdefault(block, set()).add(its_text[0])
        assert all(len(who) == 1 for who in owners.values())
        assert len(owners) == blocks.num_used_blocks
        assert blocks.num_used_blocks + blocks.num_free_blocks == blocks.num_blocks <= 16
        for number_of, block in enumerate(blocks._blocks):
            assert block.number == number_of
            assert block.num_users == sum(number_of in each.blocks for each, _ in rows)
