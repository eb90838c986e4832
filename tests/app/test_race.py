"""Columns hold what the loop did, on a clock of their own; stopping frees everything; the replay keeps its pace."""

from __future__ import annotations

import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec import SamplingParams, generate, load_drafter
from selfspec.app import race
from selfspec.app.race import SECONDS_PER_FRAME, frame_times, logit_gap, parting, run_alone, run_level
from selfspec.app.records import Column, Node, StepRecord
from selfspec.bench.baseline import load_baseline
from selfspec.drafters import NgramDrafter
from selfspec.loop.sequence import Request

PROMPT = "the cat sat on the mat and the cat sat on é☃"
SAMPLING = SamplingParams(max_new_tokens=40, ignore_eos=True)


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def request_(target):
    return Request(target.encode(PROMPT), SAMPLING)


def drafters(target):
    """The tree of the last has branches and, near the answer's end, padding."""
    return {"none": None, "ngram": NgramDrafter(), "truncated:1": load_drafter("truncated:1", target, width=3, num_nodes=9)}


def contestants(target):
    return [(Column(name, name), drafter) for name, drafter in drafters(target).items()]


@pytest.mark.parametrize("run", [run_alone, run_level])
def test_columns_hold_the_answers_of_generate(target, request_, run):
    racing = contestants(target)
    for _ in run(target, request_, racing, use_cost_guard=False, is_stopped=never):
        pass
    [expected] = generate(target, [PROMPT], sampling=SAMPLING)
    for column, _ in racing:
        assert column.token_ids == expected.token_ids
        assert column.text == expected.text
        assert column.finish_reason == "length"
        assert len(column.steps) == column.figures().num_target_passes


def test_an_answer_keeps_its_first_space():
    """SentencePiece tokenizers drop a space at the very beginning, and an answer comes after its prompt."""
    words = ["hello", " that", " is"]
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(words[i] for i in ids).removeprefix(" "))
    assert race.Recorder(tokenizer, [0])._pieces([1, 2], frozenset(), is_last=True) == [" that", " is"]


def test_the_end_token_is_no_text(target, request_, monkeypatch):
    [whole] = generate(target, [PROMPT], sampling=SAMPLING)
    # An end token that the tokenizer would write like any other.
    monkeypatch.setattr(target, "eos_token_ids", (whole.token_ids[5],))
    ending = Request(request_.prompt_ids, SamplingParams(max_new_tokens=40))
    [expected] = generate(target, [PROMPT], sampling=ending.sampling)
    racing = [(Column("none", ""), None)]
    for _ in run_alone(target, ending, racing, use_cost_guard=True, is_stopped=never):
        pass
    assert racing[0][0].finish_reason == expected.finish_reason == "stop"
    assert racing[0][0].text == expected.text != target.tokenizer.decode(expected.token_ids)


def test_records_describe_the_tree_and_the_walk(target, request_):
    racing = contestants(target)
    for _ in run_alone(target, request_, racing, use_cost_guard=False, is_stopped=never):
        pass
    branching = racing[2][0]
    num_branches = 0
    for column, _ in racing:
        before = request_.prompt_ids[-1]
        for step in column.steps:
            assert step.nodes[0].token_id == before and step.nodes[0].parent == -1
            assert all(step.nodes[node.parent].depth + 1 == node.depth for node in step.nodes[1:])
            assert [step.nodes[child].parent for child in step.path[1:]] == step.path[:-1]
            emitted_drafts = [step.nodes[i].token_id for i in step.path[1:]]
            assert step.token_ids[: len(emitted_drafts)] == emitted_drafts[: len(step.token_ids)]
            assert len(step.pieces) == len(step.token_ids) <= len(step.chosen) == step.num_accepted + 1
            num_branches += len(step.nodes) > step.max_depth + 1
            before = step.token_ids[-1]
    assert num_branches > 0
    # No draft may go past the last token, so the last trees hold less than the first.
    assert branching.steps[-1].max_depth < branching.steps[0].max_depth


@pytest.mark.parametrize("run", [run_alone, run_level])
def test_the_clock_stands_still_while_the_page_works(target, request_, monkeypatch, run):
    racing = [(Column("none", ""), None)]
    # What the page does takes an hour each time, by this clock alone.
    seconds_of_page = 0.0
    perf_counter = time.perf_counter
    monkeypatch.setattr(race, "time", SimpleNamespace(perf_counter=lambda: perf_counter() + seconds_of_page))
    for _ in run(target, request_, racing, use_cost_guard=True, is_stopped=never):
        seconds_of_page += 3600
    steps = racing[0][0].steps
    assert len(steps) > 1 and steps[-1].at < 3600
    assert all(before.at < after.at for before, after in pairwise(steps))
    parts = racing[0][0].prefill_seconds + sum(
        step.draft_seconds + step.verify_seconds + step.commit_seconds + step.host_seconds for step in steps
    )
    assert parts == pytest.approx(steps[-1].at, rel=0.05)


def test_the_column_whose_clock_is_furthest_behind_takes_the_next_step(target, request_):
    racing = contestants(target)
    clocks = {id(column): 0.0 for column, _ in racing}
    num_steps = 0
    for column in run_level(target, request_, racing, use_cost_guard=False, is_stopped=never):
        running = [clocks[id(other)] for other, _ in racing if other.finish_reason is None or other is column]
        assert clocks[id(column)] == min(running)
        clocks[id(column)] = column.seconds
        num_steps += 1
    assert num_steps == sum(len(column.steps) for column, _ in racing)


@pytest.mark.parametrize("run", [run_alone, run_level])
def test_transformers_races_as_itself(target, request_, run):
    plain, theirs = Column("none", ""), Column("transformers", "")
    greedy = Request(request_.prompt_ids, SamplingParams(max_new_tokens=40))
    racing = [(plain, None), (theirs, load_baseline(target))]
    for _ in run(target, greedy, racing, use_cost_guard=False, is_stopped=never):
        pass
    assert (theirs.token_ids, theirs.text, theirs.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
    assert [tick.num_drafted for tick in theirs.ticks()] == [0] * len(plain.token_ids)
    before = request_.prompt_ids[-1]
    for step in theirs.steps:
        assert [node.token_id for node in step.nodes] == [before]
        [before] = step.token_ids


class CountingDrafter(NgramDrafter):
    """Counts the sequences it holds state of."""

    is_resident = False
    num_held = 0

    def admit(self, sequence, features):
        self.num_held += 1

    def retire(self, sequence):
        self.num_held -= 1


@pytest.mark.parametrize("run", [run_alone, run_level])
def test_a_stop_ends_the_work_and_frees_what_it_held(target, request_, run):
    drafter = CountingDrafter()
    racing = [(Column("a", ""), drafter), (Column("b", ""), None)]
    num_steps = 0

    def after_six() -> bool:
        return num_steps >= 6

    for _ in run(target, request_, racing, use_cost_guard=False, is_stopped=after_six):
        assert drafter.num_held == 1
        num_steps += 1
    assert drafter.num_held == 0
    assert num_steps == 6
    assert [column.finish_reason for column, _ in racing] == [None, None]


@pytest.mark.parametrize("run", [run_alone, run_level])
def test_closing_early_frees_too(target, request_, run):
    drafter = CountingDrafter()
    running = run(target, request_, [(Column("a", ""), drafter)], use_cost_guard=False, is_stopped=never)
    next(running)
    assert drafter.num_held == 1
    running.close()
    assert drafter.num_held == 0


def test_parting_names_the_place_and_the_gap(target, request_):
    reference, column = Column("none", ""), Column("other", "")
    for each in reference, column:
        for _ in run_alone(target, request_, [(each, None)], use_cost_guard=True, is_stopped=never):
            pass
    assert parting(target, request_.prompt_ids, column, reference) is None

    at = 7
    expected = reference.token_ids[at]
    column.steps[at].token_ids[0] = other = (expected + 1) % 300
    found = parting(target, request_.prompt_ids, column, reference)
    prefix = request_.prompt_ids + reference.token_ids[:at]
    with torch.inference_mode():
        plain = target.model(input_ids=torch.tensor([prefix])).logits[0, -1]
    assert found is not None and found.position == at
    assert (found.text, found.expected_text) == (target.tokenizer.decode([other]), target.tokenizer.decode([expected]))
    assert found.logit_gap == pytest.approx(float(plain[expected] - plain[other]), rel=1e-4)


def test_logit_gap_needs_one_token_of_prefix_only(target):
    assert logit_gap(target, [5], 3, 3) == 0
    assert logit_gap(target, [5], 3, 4) > 0


def at_times(*times: float) -> Column:
    node = Node(1, "", -1, 0, None)
    return Column("", "", [StepRecord(at, 0, 0, 0, 0, [node], [0], [""], [1], ["x"]) for at in times])


@given(st.lists(st.lists(st.floats(0.001, 3), min_size=1, max_size=30).map(sorted), min_size=1, max_size=4))
def test_frames_show_every_step_soon_and_keep_their_distance(times):
    columns = [at_times(*of) for of in times]
    frames = list(frame_times(columns))
    assert all(after - before >= SECONDS_PER_FRAME - 1e-9 for before, after in pairwise(frames))
    for at in (at for of in times for at in of):
        assert any(at <= frame <= at + SECONDS_PER_FRAME + 1e-9 for frame in frames)
    assert all(column.until(frames[-1]).token_ids == column.token_ids for column in columns)


def test_half_the_speed_has_twice_the_frames():
    column = at_times(*(i / 100 for i in range(1, 400)))
    counts = [len(list(frame_times([column], speed))) for speed in (2.0, 1.0, 0.5)]
    assert counts[2] == pytest.approx(2 * counts[1], abs=3) and counts[1] == pytest.approx(2 * counts[0], abs=3)


def test_a_column_at_a_time_is_not_finished_before_its_end():
    column = at_times(0.1, 0.2, 0.3)
    column.finish_reason = "length"
    assert (len(column.until(0.25).steps), column.until(0.25).finish_reason) == (2, None)
    assert (len(column.until(0.3).steps), column.until(0.3).finish_reason) == (3, "length")
