"""What the device knows of rows by slot: written once, kept up to date by passes, and nobody's slot stays empty."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY

from selfspec.cache.kv import KVCache, KVShape
from selfspec.cache.rows import KEY, LENGTH, MAX_WALK, MIN_CAPACITY, ROOT, TOP_K, RowState

SETTINGS = {"key": 7, "top_k": 3, "fractions": (0.5, 0.9, 0.125)}


class Owner:
    """A drafter that keeps a vector for each row."""


def state_of(num_slots: int = 3) -> RowState:
    return RowState(num_slots, torch.device("cpu"))


def text_of(state: RowState, slot: int) -> list[int]:
    """Prompt and output, the root included."""
    return state.history[slot, : int(state.integers[slot, LENGTH]) + 1].tolist()


def advance(state: RowState, new: list[tuple[int, list[int]]]) -> None:
    """Append tokens to slots, as a pass does that emits at most five for a row."""
    tokens = torch.tensor([emitted + [-1] * (5 - len(emitted)) for _, emitted in new])
    state.advance(torch.tensor([slot for slot, _ in new]), tokens, torch.tensor([len(emitted) for _, emitted in new]))


def test_a_slot_begins_with_what_was_put_there() -> None:
    state = state_of()
    slot = state.open()
    state.put(slot, [4, 5, 6], **SETTINGS)
    assert state.integers[slot, [LENGTH, ROOT, KEY, TOP_K]].tolist() == [2, 6, 7, 3]
    assert state.fractions[slot].tolist() == [0.5, pytest.approx(0.9), 0.125]
    assert text_of(state, slot) == [4, 5, 6]
    # A prompt of one token has no prefix.
    other = state.open()
    state.put(other, [9], **SETTINGS)
    assert state.integers[other, [LENGTH, ROOT]].tolist() == [0, 9] and text_of(state, other) == [9]


def test_slots_are_given_out_lowest_first_and_again() -> None:
    state = state_of(3)
    assert [state.open() for _ in range(3)] == [0, 1, 2]
    state.close(1)
    state.close(0)
    assert (state.open(), state.open()) == (0, 1)
    with pytest.raises(IndexError):
        state.open()


def test_the_next_row_of_a_slot_sees_nothing_of_the_last_one() -> None:
    state = state_of()
    slot = state.open()
    state.put(slot, list(range(10, 40)), **SETTINGS)
    advance(state, [(slot, [1, 2, 3])])
    state.close(slot)
    assert state.open() == slot
    state.put(slot, [5, 6], key=1, top_k=0, fractions=(0.0, 1.0, 0.0))
    assert text_of(state, slot) == [5, 6] and state.integers[slot].tolist() == [1, 6, 1, 0]


# Any order of what can happen to rows.
Events = list[tuple[str, int, int]]


@PROPERTY
@given(
    st.lists(
        st.tuples(st.sampled_from(["open", "step", "step", "step", "close", "grow"]), st.integers(0, 9), st.integers(1, 5)),
        max_size=25,
    )
)
def test_rows_follow_their_texts_whatever_happens_to_others(events: Events) -> None:
    """Slots opened, advanced together with padding rows, closed and moved to other addresses."""
    state, owner = state_of(2), Owner()
    texts: dict[int, list[int]] = {}
    held = {}
    for number, (action, which, count) in enumerate(events):
        if action == "open" and len(texts) < state.num_slots:
            slot = state.open()
            assert slot not in texts and slot != state.null
            texts[slot] = [10 * number + i for i in range(which + 1)]
            state.put(slot, texts[slot], key=number, top_k=0, fractions=(0.0, 1.0, 0.0))
            held[slot] = float(number)
            state.owned(owner, 4, torch.float32)[slot] = number
        elif action == "step" and texts:
            # Some rows, in any order, filled up with nobody's, which may come more than once.
            rows = sorted(texts, key=lambda slot: (slot + which) % 3)[: 1 + which % len(texts)]
            new = [(slot, [1000 + number + i for i in range(1 + (count + slot) % 5)]) for slot in rows]
            advance(state, [*new, *[(state.null, [77, 78, 79])] * (which % 3)])
            for slot, emitted in new:
                texts[slot] += emitted
        elif action == "close" and texts:
            slot = sorted(texts)[which % len(texts)]
            state.close(slot)
            del texts[slot]
        elif action == "grow":
            state.grow(state.num_slots + which % 3, 10)
        assert not state.integers[state.null].any()
        assert sorted(state._free) == [slot for slot in range(state.num_slots) if slot not in texts]
        for slot, text in texts.items():
            assert text_of(state, slot) == text and int(state.integers[slot, ROOT]) == text[-1]
            assert state.owned(owner, 4, torch.float32)[slot].tolist() == [held[slot]] * 4


def test_a_row_that_had_no_token_to_choose_keeps_its_text() -> None:
    """Its tokens are -1; what it has is no token of any vocabulary's, and no index below zero."""
    state = state_of()
    slot = state.open()
    state.put(slot, [4, 5], **SETTINGS)
    state.advance(torch.tensor([slot]), torch.tensor([[-1, -1]]), torch.tensor([1]))
    assert state.integers[slot, [LENGTH, ROOT]].tolist() == [2, 0] and text_of(state, slot) == [4, 5, 0]


def test_room_is_made_for_a_walk_after_the_longest_text() -> None:
    state = state_of()
    assert state.has_room(MIN_CAPACITY - MAX_WALK) and not state.has_room(MIN_CAPACITY - MAX_WALK + 1)
    slot = state.open()
    text = list(range(MIN_CAPACITY - MAX_WALK))
    state.put(slot, text, **SETTINGS)
    state.grow(1, len(text) + 1)
    assert state.has_room(len(text) + 1) and state.num_slots == 3, "no slot is lost"
    advance(state, [(slot, [1, 2, 3, 4, 5])])
    assert text_of(state, slot) == [*text, 1, 2, 3, 4, 5] and state.fractions[slot, 0] == 0.5


def pool(block_size: int = 4) -> KVCache:
    shape = KVShape(num_layers=1, num_kv_heads=1, key_dim=2, value_dim=1)
    return KVCache(shape, dtype=torch.float32, device=torch.device("cpu"), block_size=block_size)


def test_a_batch_is_packed_with_each_rows_blocks_and_nobodys_after_them() -> None:
    """However rows grow, shrink, change slots and the pool changes its size; unused columns are any block."""
    cache = pool()
    cache.make_room(2)
    first, second = cache.open_row(), cache.open_row()
    for row in (first, second):
        cache.open_slot(row)
    cache.reserve([first, second], 6)

    def packed(rows: list, num_rows: int, num_columns: int) -> list[list[int]]:
        numbers = cache.pack_slots(rows, num_rows, num_columns).tolist()
        for row, (slot, *blocks) in zip(rows, numbers, strict=False):
            assert slot == row.slot and blocks[: len(row.blocks)] == row.blocks
        for slot, *blocks in numbers[len(rows) :]:
            assert slot == cache.state.null and blocks == [cache.num_blocks] * num_columns
        return numbers

    packed([first, second], 4, 3)
    packed([second], 1, 8)
    # A row that gave scratch back gets other blocks for it.
    cache.advance(first, 2)
    cache.trim(first)
    cache.reserve([second], 20)
    cache.reserve([first], 20)
    packed([second, first], 2, 8)
    # More slots: nobody's is another one.
    cache.make_room(5)
    packed([first, second], 4, 8)
    cache.grow(3)
    packed([first, second], 4, 8)
    # A slot's next row has blocks of its own.
    slot = first.slot
    cache.close_slot(first)
    cache.release(first)
    third = cache.open_row()
    assert cache.open_slot(third) == slot
    cache.reserve([third, second], 3)
    packed([third, second], 2, 8)


def test_a_row_keeps_the_blocks_that_a_step_in_flight_may_fill() -> None:
    cache = pool()
    row = cache.open_row()
    cache.reserve([row], 30)
    cache.advance(row, 5)
    cache.trim(row, 6)
    assert len(row.blocks) == 3
    cache.trim(row)
    assert len(row.blocks) == 2


def test_a_block_is_offered_only_with_what_lies_in_it() -> None:
    """What a drafter keeps in a row's own slots is not in another row's block, though the texts are the same."""
    shape = KVShape(num_layers=1, num_kv_heads=1, key_dim=2, value_dim=1)
    cache = KVCache(shape, dtype=torch.float32, device=torch.device("cpu"), block_size=4, max_tokens=64, use_sharing=True)
    text, name = list(range(8)), ("entries", 1)
    rows = []
    for kept in ({}, {name: None, 2: torch.arange(8.0)[None, :, None]}):
        row = cache.open_row()
        cache.reserve([row], 8)
        cache.advance(row, 8)
        cache.publish(row, text, kept)
        rows.append(row)
    plain, wants_feature, wants_entries = cache.open_row(), cache.open_row(), cache.open_row()
    cache.adopt(plain, text)
    assert plain.blocks == rows[0].blocks
    features = cache.adopt(wants_feature, text, (2,))
    assert wants_feature.length == 8 and torch.equal(features[2], torch.arange(8.0)[None, :, None])
    cache.adopt(wants_entries, text, (name,))
    assert not set(wants_entries.blocks) & set(rows[0].blocks)
