"""Steps that are launched before the last one is read: what comes of them is what comes of steps taken one by one.

On the CPU as a rehearsal of CUDA graphs, because only there steps fly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import COSTLY_PROPERTY
from support import eagle_head, identity, tiny_target

from selfspec import SamplingParams, Target, generate
from selfspec.cache.kv import KVCache
from selfspec.drafters import Drafter, DraftModelDrafter, EagleDrafter, MedusaDrafter, NgramDrafter
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.loop.drafter import NoDrafter, Proposal
from selfspec.loop.group import Group, Step
from selfspec.loop.planner import Plan, Planner
from selfspec.loop.scheduler import Scheduler
from selfspec.loop.sequence import Request, Sequence
from selfspec.loop.stages import StageError
from selfspec.model.graphs import Graphs
from selfspec.tree import chain

PROMPT = [3, 4, 5, 6, 3, 4, 5]
GREEDY = SamplingParams(max_new_tokens=30, ignore_eos=True)


def medusa(target: Target) -> MedusaDrafter:
    torch.manual_seed(2)
    head = MedusaHead(MedusaConfig(target=identity(target), num_heads=3, has_output_layer=True))
    return MedusaDrafter(target, head, num_nodes=7, width=3)


def eagle(target: Target) -> EagleDrafter:
    return EagleDrafter(target, eagle_head(target, feature_layers=(0, 1)), num_draft_tokens=4, num_nodes=10, width=3)


RESIDENT: dict[str, Callable[[Target], Drafter]] = {
    "none": lambda target: NoDrafter(),
    "ngram": lambda target: NgramDrafter(5),
    "eagle": eagle,
    "medusa": medusa,
}


@cache
def shared_target() -> Target:
    return tiny_target("llama", num_hidden_layers=2)


@pytest.fixture
def target() -> Target:
    return flying(shared_target())


def flying(target: Target) -> Target:
    """With graphs of its own for each test, because every graph is one more to overwrite at each pass."""
    target.passes.graphs = Graphs(target.device, is_rehearsal=True)
    return target


@cache
def plain_target() -> Target:
    return tiny_target("llama", num_hidden_layers=2)


@cache
def _alone(prompt: tuple[int, ...], setting: str) -> list[int]:
    return generate(plain_target(), [list(prompt)], sampling=SETTINGS[setting])[0].token_ids


def alone(prompt: list[int], sampling: SamplingParams = GREEDY) -> list[int]:
    """What a prompt gets by plain decoding, a step at a time, without graphs."""
    return generate(plain_target(), [prompt], sampling=sampling)[0].token_ids


class Loop:
    """A scheduler with one group for each drafter; what it holds must be free in the end."""

    def __init__(
        self, target: Target, *drafters: Drafter, kv: KVCache | None = None, max_batch: int = 4, **options: Any
    ) -> None:
        self.cache = kv or target.new_cache(block_size=4)
        self.scheduler = Scheduler(target, self.cache, max_batch=max_batch, **options)
        self.groups = [self.scheduler.add_group(drafter, Planner(is_active=False)) for drafter in drafters]

    @property
    def group(self) -> Group:
        return self.groups[0]

    @property
    def num_flights(self) -> int:
        return sum(len(group.flights) for group in self.groups)

    def submit(self, prompt: list[int], sampling: SamplingParams = GREEDY, group: Group | None = None) -> Sequence:
        return self.scheduler.submit(Request(prompt, sampling), group or self.group)

    @torch.inference_mode()
    def round(self, times: int = 1) -> list[Step]:
        return [step for _ in range(times) for step in self.scheduler.round()]

    def fly(self) -> None:
        """Go on until a step is in flight."""
        for _ in range(10):
            if any(flight.sequences for group in self.groups for flight in group.flights):
                return
            self.round()
        raise AssertionError("no step flies")

    def finish(self) -> None:
        for _ in range(2000):
            if not len(self.scheduler):
                break
            self.round()
        self.assert_free()

    def assert_free(self) -> None:
        state = self.cache.state
        assert not len(self.scheduler) and self.cache.num_used_blocks == 0
        assert sorted(state._free) == [*range(state.num_slots)]
        assert not state.integers[state.null].any()


# When steps fly.


@pytest.mark.parametrize("name", RESIDENT)
def test_a_step_is_launched_before_the_last_one_is_read(name: str, target: Target) -> None:
    """The host is one step behind: the first round that launches a step for a row reads none."""
    loop = Loop(target, RESIDENT[name](target))
    sequence = loop.submit(PROMPT)
    loop.fly()
    assert not sequence.token_ids
    for _ in range(3):
        [step] = loop.round()
        assert step.sequences == [sequence] and loop.num_flights == 1
    loop.finish()
    assert sequence.token_ids == alone(PROMPT)


@pytest.mark.parametrize("kind", ["penalties", "draft model", "no graphs"])
def test_what_the_next_step_needs_from_the_host_is_read_first(kind: str, target: Target) -> None:
    drafter: Drafter = NgramDrafter(4)
    if kind == "draft model":
        drafter = DraftModelDrafter(target.truncated(1), target.vocab_size)
    if kind == "no graphs":
        target = plain_target()
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True, repetition_penalty=1.3 if kind == "penalties" else 1.0)
    loop = Loop(target, drafter)
    sequence = loop.submit(PROMPT, sampling)
    while sequence.finish_reason is None:
        loop.round()
        assert loop.num_flights == 0
    loop.finish()
    assert sequence.token_ids == alone(PROMPT, sampling)


def test_a_row_that_needs_the_host_joins_rows_that_fly(target: Target) -> None:
    """All of the group's steps are read one by one from then on, and fly again when the row has left."""
    loop = Loop(target, NgramDrafter(4))
    first = loop.submit(PROMPT, SamplingParams(max_new_tokens=120, ignore_eos=True))
    loop.fly()
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True, presence_penalty=0.8)
    second = loop.submit([9, 8, 7], sampling)
    while second.finish_reason is None:
        loop.round()
    loop.fly()
    loop.finish()
    assert first.token_ids == alone(PROMPT, first.sampling)
    assert second.token_ids == alone([9, 8, 7], sampling)


# Ends that are found a step late.


@pytest.mark.parametrize("name", RESIDENT)
def test_an_end_token_found_a_step_late_is_the_last(name: str, target: Target) -> None:
    answer = alone(PROMPT)
    for token in [*dict.fromkeys(answer)][::5]:
        sampling = SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=(token,))
        loop = Loop(target, RESIDENT[name](target))
        sequence, other = loop.submit(PROMPT, sampling), loop.submit([8, 9])
        told: list[int] = []
        while len(loop.scheduler):
            for step in loop.round():
                for row, emitted in zip(step.sequences, step.emitted, strict=True):
                    told += emitted if row is sequence else []
                assert step.sequences and len(step.sequences) == len(step.tree.tokens) == len(step.acceptance.tokens) == len(
                    step.emissions
                )
        loop.assert_free()
        assert sequence.token_ids == told == answer[: answer.index(token) + 1]
        assert sequence.finish_reason == "stop" and other.token_ids == alone([8, 9])
        assert sequence.num_accepted_tokens < len(told) and sequence.num_target_passes <= len(told)


def test_a_stop_string_found_a_step_late_ends_the_text(tiny_target_dir: Path) -> None:
    target = Target.from_pretrained(tiny_target_dir, dtype="float32", device="cpu")
    plain = generate(target, ["the cat sat on"], sampling=GREEDY)[0]
    stop = plain.text[7:10]
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True, stop=[stop])
    expected = generate(target, ["the cat sat on"], sampling=sampling)[0]
    assert expected.finish_reason == "stop"
    flying(target)
    for drafter in (NoDrafter(), NgramDrafter(4)):
        got = generate(target, ["the cat sat on"], drafter=drafter, sampling=sampling, use_cost_guard=False)[0]
        assert (got.token_ids, got.text, got.finish_reason) == (expected.token_ids, expected.text, "stop")


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7])
def test_no_step_is_launched_for_a_row_that_ends_with_those_in_flight(max_new_tokens: int, target: Target) -> None:
    loop = Loop(target, NoDrafter())
    sequence = loop.submit(PROMPT, SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True))
    loop.finish()
    assert sequence.num_target_passes == max_new_tokens and sequence.token_ids == alone(PROMPT)[:max_new_tokens]
    assert loop.num_flights == 0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("name", RESIDENT)
def test_a_text_that_fills_the_context_ends_there(name: str, family: str) -> None:
    """Drafts and steps in flight may reach past it, where learned positions end."""
    changes = {"n_positions": 24} if family == "gpt2" else {"max_position_embeddings": 24}
    plain = tiny_target(family, num_hidden_layers=2, **changes)
    sampling = SamplingParams(max_new_tokens=60, ignore_eos=True)
    prompts = [PROMPT, [7, 8], [5] * 20]
    expected = generate(plain, prompts, sampling=sampling)
    assert [len(prompt) + len(each.token_ids) for prompt, each in zip(prompts, expected, strict=True)] == [24] * 3
    target = flying(tiny_target(family, num_hidden_layers=2, **changes))
    for batch_size in (1, 3):
        got = generate(
            target,
            prompts,
            drafter=RESIDENT[name](target),
            sampling=sampling,
            batch_size=batch_size,
            use_cost_guard=False,
        )
        assert [each.token_ids for each in got] == [each.token_ids for each in expected]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_log_probabilities_come_with_their_own_tokens(temperature: float, target: Target) -> None:
    settings = {"temperature": temperature, "seed": 4, "logprobs": True}
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True, **settings)

    def answer(loop: Loop) -> Sequence:
        request = Request(PROMPT, sampling, num_top_logprobs=3)
        sequence = loop.scheduler.submit(request, loop.group)
        loop.submit([8, 9])
        loop.finish()
        return sequence

    expected = answer(Loop(plain_target(), NoDrafter()))
    for name, make in RESIDENT.items():
        got = answer(Loop(target, make(target)))
        assert got.token_ids == expected.token_ids and len(got.logprobs) == 12, name
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        for ours, theirs in zip(got.top_logprobs, expected.top_logprobs, strict=True):
            assert [token for token, _ in ours] == [token for token, _ in theirs]


# Rows that leave while a step is in flight.


@pytest.mark.parametrize("name", RESIDENT)
def test_a_row_that_is_cancelled_in_flight_leaves_its_slot_to_the_next(name: str, target: Target) -> None:
    """The step in flight still writes for the old row; nothing of it reaches the new one, nor anybody else."""
    loop = Loop(target, RESIDENT[name](target), max_batch=2)
    first, other = loop.submit(PROMPT), loop.submit([8, 9])
    loop.fly()
    loop.round(2)
    slot, emitted = first.row.slot, list(first.token_ids)
    loop.scheduler.cancel(first)
    assert first.row.slot is None and loop.num_flights == 1
    late = loop.submit([11, 12, 13, 14, 15])
    steps = loop.round(2)
    assert late.row.slot == slot
    assert not any(first in step.sequences for step in steps) and first.token_ids == emitted
    loop.finish()
    assert late.token_ids == alone([11, 12, 13, 14, 15]) and other.token_ids == alone([8, 9])


@pytest.mark.parametrize("name", RESIDENT)
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(max_new_tokens=30, temperature=0.9, seed=5, ignore_eos=True)])
def test_a_row_that_changes_its_drafter_in_flight_loses_no_token(
    name: str, sampling: SamplingParams, target: Target
) -> None:
    """Its drafter is unloaded, for instance: the tokens of the step in flight come again, the same ones."""
    loop = Loop(target, RESIDENT[name](target), NgramDrafter(3))
    rows = [loop.submit(PROMPT, sampling), loop.submit([8, 9], sampling)]
    loop.fly()
    loop.round(2)
    for sequence in reversed(rows):
        loop.scheduler.move(sequence, loop.groups[1])
    loop.scheduler.remove_group(loop.groups.pop(0))
    loop.finish()
    assert [sequence.token_ids for sequence in rows] == [alone(PROMPT, sampling), alone([8, 9], sampling)]


def test_all_are_cancelled_in_flight(target: Target) -> None:
    loop = Loop(target, eagle(target))
    rows = [loop.submit(PROMPT), loop.submit([8, 9])]
    loop.fly()
    for sequence in rows:
        loop.scheduler.cancel(sequence)
    loop.assert_free()
    assert not any(step.sequences for step in loop.round())
    assert loop.num_flights == 0 and not loop.round()
    again = loop.submit(PROMPT)
    loop.finish()
    assert again.token_ids == alone(PROMPT)


@pytest.mark.parametrize("stage", ["target", "drafter"])
def test_the_steps_in_flight_are_read_before_a_failure_is_told(
    stage: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they emitted is emitted, and the rows go on where they were."""
    told: list[tuple[StageError, list[Sequence], list[int]]] = []

    def take_out(failure: StageError, sequences: list[Sequence]) -> None:
        told.append((failure, sequences, list(sequences[0].token_ids)))
        for sequence in reversed(sequences):
            loop.scheduler.move(sequence, loop.groups[1])

    loop = Loop(target, NgramDrafter(4), NoDrafter(), on_error=take_out)
    rows = [loop.submit(PROMPT), loop.submit([8, 9])]
    loop.fly()
    loop.round()
    before = list(rows[0].token_ids)

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("out of order")

    with monkeypatch.context() as broken:
        owner, method = (target.passes, "replay") if stage == "target" else (loop.group.drafter, "propose")
        broken.setattr(owner, method, fail)
        with torch.inference_mode():
            loop.scheduler.round()
    [(failure, sequences, emitted)] = told[:1]
    assert str(failure.error) == "out of order" and sequences == rows and len(emitted) > len(before)
    loop.finish()
    assert [sequence.token_ids for sequence in rows] == [alone(PROMPT), alone([8, 9])]


def test_a_failure_that_stops_nobody_is_nobodys(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in flight ends the only row, after the next one could not be launched."""
    answer = alone(PROMPT)
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=(answer[4],))
    loop = Loop(target, NoDrafter(), on_error=lambda *args: pytest.fail(f"told of {args}"))
    sequence = loop.submit(PROMPT, sampling)
    loop.fly()
    while len(sequence.token_ids) < 4:
        loop.round()

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("out of order")

    with monkeypatch.context() as broken:
        broken.setattr(target.passes, "replay", fail)
        [step] = loop.round()
    assert step.finished == [sequence] and sequence.token_ids == answer[:5]
    loop.assert_free()


# Room.


def test_a_draft_without_room_teaches_no_cost(target: Target) -> None:
    """The step is taken without it, so neither its time nor its outcome says anything about drafts."""
    loop = Loop(target, eagle(target), kv=target.new_cache(block_size=4, max_tokens=24))
    planner = loop.group.planner = Partial(1)
    told: list[Plan] = []
    planner.observe = lambda plan, *args: told.append(plan)  # type: ignore[method-assign]
    sequence = loop.submit(PROMPT, SamplingParams(max_new_tokens=17, ignore_eos=True))
    loop.finish()
    assert sequence.token_ids == alone(PROMPT)[:17]
    assert told[0].shape is not None and told[-1].shape is None and told[-1].num_nodes == 1


@pytest.mark.parametrize("name", RESIDENT)
@pytest.mark.parametrize("max_tokens", [48, 96])
def test_the_cache_is_full_with_steps_in_flight(name: str, max_tokens: int, target: Target) -> None:
    """Rows give way and come back, prompts wait for blocks, and the step in flight keeps those that it writes."""
    kv = target.new_cache(block_size=4, max_tokens=max_tokens, use_sharing=True)
    loop = Loop(target, RESIDENT[name](target), kv=kv, prefill_tokens=6)
    prompts = [PROMPT, [8, 9], [7] * 18, [5, 6] * 5, PROMPT, [9]]
    rows = [loop.submit(prompt) for prompt in prompts]
    loop.finish()
    assert loop.scheduler.num_preemptions > 0 or max_tokens > 64
    for prompt, sequence in zip(prompts, rows, strict=True):
        assert sequence.token_ids == alone(prompt)[: max_tokens - len(prompt)]


def test_room_is_made_without_the_blocks_of_a_step_in_flight(target: Target) -> None:
    """A prompt that finds no place has scratch given back, but not what the host has not counted in yet."""
    answer = alone([3, 4, 5])
    kv = target.new_cache(block_size=4, max_tokens=64)
    loop = Loop(target, Told(answer), kv=kv, max_batch=2)
    first = loop.submit([3, 4, 5])
    loop.fly()
    blocks, length = list(first.row.blocks), int(kv.state.integers[first.row.slot, 0])
    assert length > first.row.length, "the device is ahead"
    loop.scheduler._trim()
    assert first.row.blocks == blocks[: len(first.row.blocks)] and len(first.row.blocks) * 4 >= length
    loop.submit([7] * 50)
    loop.finish()
    assert first.token_ids == answer


class Told(NgramDrafter):
    """Drafts the next tokens of one answer, so every step accepts all of them."""

    def __init__(self, answer: list[int]) -> None:
        super().__init__(4)
        self.answer = torch.tensor([*answer, *[0] * 200])

    def propose(self, batch: Any, num_draft_tokens: int) -> Proposal:
        state, slots = batch.cache.state, batch.slots
        first = state.integers[slots, 0] + 1 - 3
        drafts = self.answer[first[:, None] + torch.arange(num_draft_tokens)]
        return Proposal(chain(state.integers[slots, 1], drafts))

    def observe(self, *args: object) -> None:
        pass


def test_texts_outgrow_their_histories_and_the_pool_in_flight(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors move to other addresses, with what the steps in flight have written."""
    monkeypatch.setattr("selfspec.cache.rows.MIN_CAPACITY", 160)
    monkeypatch.setattr("selfspec.cache.kv.CAPTURED_GROWTH", 1)
    sampling = SamplingParams(max_new_tokens=60, ignore_eos=True)
    prompts = [PROMPT * 3, [8, 9]]
    for name, make in RESIDENT.items():
        flying(target)
        loop = Loop(target, make(target), max_batch=3)
        loop.cache.least_growth = 6
        before = loop.cache.state.history.shape[1]
        rows = [loop.submit(prompt, sampling) for prompt in prompts]
        serials = set()
        while len(loop.scheduler):
            loop.round()
            serials.add(loop.cache.serial)
        loop.assert_free()
        assert [sequence.token_ids for sequence in rows] == [alone(prompt, sampling) for prompt in prompts], name
        assert loop.cache.state.history.shape[1] > before == 160 and len(serials) > 3


def test_two_schedulers_share_a_cache(target: Target) -> None:
    """As where an engine is warmed up while it serves: each has slots for all of its rows."""
    loop = Loop(target, eagle(target), max_batch=2)
    rows = [loop.submit(PROMPT), loop.submit([8, 9])]
    loop.fly()
    other = Loop(target, NgramDrafter(4), kv=loop.cache, max_batch=2)
    others = [other.submit([11, 12]), other.submit([13] * 9)]
    for _ in range(40):
        loop.round()
        other.round()
    assert [sequence.token_ids for sequence in rows] == [alone(PROMPT), alone([8, 9])]
    assert [sequence.token_ids for sequence in others] == [alone([11, 12]), alone([13] * 9)]
    loop.assert_free()


# Many at once.


def test_a_drafter_of_some_rows_is_told_of_all(target: Target) -> None:
    """The planner has some rows draft, each time others."""
    for make in RESIDENT.values():
        for each in (flying(target), plain_target()):
            loop = Loop(each, make(each))
            loop.group.planner = Partial()
            rows = [loop.submit([3 + i, 4, 5, 3 + i, 4]) for i in range(4)]
            loop.finish()
            assert [sequence.token_ids for sequence in rows] == [alone([3 + i, 4, 5, 3 + i, 4]) for i in range(4)]


class Partial(Planner):
    """Every row leaves out one of `every` steps, others each time; none if `every` is 1."""

    def __init__(self, every: int = 3) -> None:
        super().__init__()
        self.every = every
        self.num_plans = 0

    def plan(self, rows: Any, *, sizes: Any, **options: Any) -> Plan:
        plan = super().plan(rows, sizes=sizes, **options)
        shapes = options["shapes"]
        self.num_plans += 1
        is_drafting = tuple((i + self.num_plans) % self.every > 0 or self.every == 1 for i in range(len(rows)))
        if not shapes or not any(is_drafting):
            return plan
        return replace(plan, shape=shapes[-1], num_nodes=sizes[self.num_plans % len(sizes)], is_drafting=is_drafting)


SETTINGS = {
    "greedy": SamplingParams(max_new_tokens=14, ignore_eos=True),
    "short": SamplingParams(max_new_tokens=2),
    "stop": SamplingParams(max_new_tokens=14, stop_token_ids=tuple(range(20, 30))),
    "sampled": SamplingParams(max_new_tokens=14, temperature=0.9, seed=3),
    "filtered": SamplingParams(max_new_tokens=14, temperature=0.8, top_k=9, top_p=0.9, seed=4, ignore_eos=True),
    "penalty": SamplingParams(max_new_tokens=9, repetition_penalty=1.3),
}
PROMPTS = [(5,), (3, 4), tuple(PROMPT), (9, 8) * 6, (7,) * 19]


@st.composite
def actions(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    kinds = ["submit"] * 4 + ["round"] * 7 + ["cancel", "move"]
    numbers = st.integers(0, 59)
    return draw(st.lists(st.tuples(st.sampled_from(kinds), numbers, numbers, numbers), min_size=12, max_size=40))


@pytest.mark.parametrize("is_active", [False, True])
@COSTLY_PROPERTY
@given(actions(), st.sampled_from([40, 64, 200]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 7, None]), st.booleans())
def test_any_interleaving_emits_what_each_gets_alone(
    is_active: bool,
    steps: list[tuple[str, int, int, int]],
    max_tokens: int,
    max_batch: int,
    prefill_tokens: int | None,
    use_sharing: bool,
) -> None:
    """Sequences of four drafters and all settings come, go, change their drafter and give way, with steps in flight."""
    target, drafters = drafted_target()
    flying(target)
    kv = target.new_cache(block_size=4, max_tokens=max_tokens, use_sharing=use_sharing)
    loop = Loop(target, *drafters, kv=kv, max_batch=max_batch, prefill_tokens=prefill_tokens)
    for group in loop.groups:
        group.planner = Planner(is_active=is_active)
    rows: list[tuple[Sequence, tuple[int, ...], str]] = []
    names = [*SETTINGS]
    for action, first, second, third in steps:
        open_rows = [row for row in rows if row[0].finish_reason is None]
        if action == "submit":
            prompt, setting = PROMPTS[first % len(PROMPTS)], names[second % len(names)]
            group = loop.groups[third % len(loop.groups)]
            rows.append((loop.submit(list(prompt), SETTINGS[setting], group), prompt, setting))
        elif action == "round" or not open_rows:
            loop.round()
        elif action == "cancel":
            chosen = open_rows[first % len(open_rows)]
            rows.remove(chosen)
            loop.scheduler.cancel(chosen[0])
        else:
            loop.scheduler.move(open_rows[first % len(open_rows)][0], loop.groups[second % len(loop.groups)])
    loop.finish()
    for sequence, prompt, setting in rows:
        assert sequence.error is None
        assert sequence.token_ids == _alone(prompt, setting)[: max_tokens - len(prompt)]


@cache
def drafted_target() -> tuple[Target, list[Drafter]]:
    target = tiny_target("llama", num_hidden_layers=2)
    return target, [make(target) for make in RESIDENT.values()]
