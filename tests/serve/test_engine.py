"""The engine changes when tokens come, never which: under load, preemption, sharing, cancellation and faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from selfspec import SamplingParams, Target, generate
from selfspec.api import Completion
from selfspec.drafters import Drafter, DraftModelDrafter, EagleDrafter, NgramDrafter
from selfspec.drafters.shipped import identity
from selfspec.engine import EngineClosed, EngineFull, Event, Listener, SpecEngine, StepCounts
from selfspec.heads.eagle import EagleConfig, EagleHead
from selfspec.loop.sequence import Request
from selfspec.model.flat import FlatNodes
from selfspec.model.graphs import Graphs

MakeEngine = Callable[..., SpecEngine]

PROMPTS = [[5 + (7 * i + 3 * j) % 250 for j in range(4 + 13 * i % 70)] for i in range(24)]
SETTINGS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2, "min_new_tokens": 20},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
]


def requests(max_new_tokens: int = 40) -> list[Request]:
    """Greedy, sampled, filtered and penalised ones, all with seeds."""
    return [
        Request(prompt, SamplingParams(max_new_tokens=max_new_tokens, seed=i, **SETTINGS[i % len(SETTINGS)]), index=i)
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def expected(target: Target) -> list[Completion]:
    """What each request gets alone, without drafts."""
    return [generate(target, [r.prompt_ids], sampling=r.sampling)[0] for r in requests()]


def answers(events: Iterable[Event]) -> dict[int, Completion]:
    """The completions, each checked against the events before it."""
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    done = {}
    for event in events:
        assert event.error is None, event.error
        index = event.request.index
        assert index not in done, "an event after the last"
        texts[index] = texts.get(index, "") + event.text
        ids[index] = ids.get(index, []) + event.token_ids
        if event.completion is not None:
            assert (texts[index], ids[index]) == (event.completion.text, event.completion.token_ids)
            done[index] = event.completion
    return done


def assert_as_expected(done: Mapping[int, Completion], expected: list[Completion]) -> None:
    assert sorted(done) == list(range(len(expected)))
    for index, completion in done.items():
        assert completion.token_ids == expected[index].token_ids, index
        assert completion.text == expected[index].text
        assert completion.finish_reason == expected[index].finish_reason


@pytest.mark.parametrize("max_batch", [1, 5, 24])
def test_many_at_once_get_what_each_gets_alone(make_engine: MakeEngine, expected: list[Completion], max_batch: int) -> None:
    engine = make_engine(max_batch=max_batch, prefill_tokens=16)
    assert_as_expected(answers(engine.stream(requests())), expected)


def test_warming_up_leaves_graphs_and_nothing_else(
    make_engine: MakeEngine, expected: list[Completion], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = Graphs(target.device, is_rehearsal=True)
    monkeypatch.setattr(target.passes, "graphs", graphs)
    told: list[object] = []

    class Told(Listener):
        def emitted(self, pieces: Sequence[tuple[int, float, bool]]) -> None:
            told.append(pieces)

    engine = make_engine(NgramDrafter(1), max_batch=4, listener=Told(), use_cost_guard=True)
    # As on a GPU, where it has all its blocks at once.
    cache = engine._scheduler.cache
    assert cache.max_blocks is not None
    cache.grow(cache.max_blocks)
    engine.warm_up()
    assert not told and engine.num_running == engine.num_waiting == 0 and engine.num_used_blocks == 0
    planner = engine._groups["ngram"].planner
    assert planner.costs.is_calibrated and not planner._loads
    num_set_up = graphs.num_set_up
    prompt = Request([7] * 100, SamplingParams(max_new_tokens=1), 0)
    answers(engine.stream([prompt], drafter="none"))
    assert graphs.num_set_up == num_set_up > 20
    assert_as_expected(answers(engine.stream(requests())), expected)
    assert told


def test_prompts_enter_beside_rows_that_decode_within_the_budget(
    make_engine: MakeEngine, expected: list[Completion], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is cut at any token, so every pass takes as many as it may, of several prompts if there are."""
    run, passes = target.run_flat, []

    def recorded(nodes: FlatNodes, *args: object, **options: object) -> object:
        num_chunks = 0 if nodes.chunks is None else len(nodes.chunks.lengths)
        passes.append((nodes.num_nodes, len(nodes.tokens) - nodes.num_nodes, num_chunks))
        return run(nodes, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "run_flat", recorded)
    assert_as_expected(answers(make_engine(max_batch=24, prefill_tokens=20).stream(requests())), expected)
    assert sum(num_tokens for _, num_tokens, _ in passes) == sum(len(prompt) - 1 for prompt in PROMPTS)
    beside = [(num_tokens, num_chunks) for num_nodes, num_tokens, num_chunks in passes if num_nodes and num_tokens]
    # The last one has what is left.
    assert len(beside) > 5 and all(num_tokens == 20 for num_tokens, _ in beside[:-1]) and beside[-1][0] <= 20
    assert any(num_chunks > 1 for _, num_chunks in beside)


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("cache_tokens", [128, 256, 400])
def test_those_that_give_way_lose_no_token(
    make_engine: MakeEngine,
    expected: list[Completion],
    target: Target,
    cache_tokens: int,
    has_graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks run out all the time: the youngest is recomputed, sampled ones and penalties included.

    CUDA graphs, rehearsed here, fill trees up with nodes that want slots, too.
    """
    if has_graphs:
        monkeypatch.setattr(target.passes, "graphs", Graphs(target.device, is_rehearsal=True))
    draft_model = DraftModelDrafter(target.truncated(1), target.vocab_size, num_draft_tokens=4, name="draft")
    engine = make_engine(draft_model, max_batch=8, cache_tokens=cache_tokens)
    assert_as_expected(answers(engine.stream(requests())), expected)
    assert not engine.problems
    assert engine._scheduler.num_preemptions > 0
    assert not draft_model._rows and draft_model._cache.num_used_blocks == 0


def test_several_drafters_serve_at_once(make_engine: MakeEngine, expected: list[Completion], target: Target) -> None:
    draft_model = DraftModelDrafter(target.truncated(1), target.vocab_size, num_draft_tokens=3, name="draft")
    engine = make_engine(NgramDrafter(6), draft_model, max_batch=12)
    names = ["ngram", "draft", "none", None]
    with ThreadPoolExecutor(24) as pool:
        runs = [pool.submit(lambda r, n: answers(engine.stream([r], drafter=n)), r, names[r.index % 4]) for r in requests()]
        done = {index: completion for run in runs for index, completion in run.result().items()}
    assert_as_expected(done, expected)
    assert done[1].num_draft_tokens > 0 and done[2].num_draft_tokens == 0


class RecordingDrafter(NgramDrafter):
    """Wants features, and keeps those of every prompt."""

    name = "recording"
    is_resident = False

    def __init__(self, features: tuple[int, ...]) -> None:
        super().__init__(4)
        self.features = self.block_names = features
        self.seen: list[dict[int, torch.Tensor]] = []

    def admit(self, sequence: object, features: Mapping[int, torch.Tensor]) -> None:
        self.seen.append(dict(features))


def test_a_shared_beginning_is_entered_once_and_its_features_are_kept(make_engine: MakeEngine, target: Target) -> None:
    system = [9 + j % 200 for j in range(64)]
    prompts = [[*system, 20 + i, 30 + i, 40] for i in range(3)]
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    expected = [c.token_ids for c in generate(target, prompts, sampling=sampling)]
    drafter = RecordingDrafter((1, -1))
    engine = make_engine(drafter, NgramDrafter(4))
    for name, reused in (("ngram", [0, 64, 64]), ("recording", [0, 64, 64]), ("ngram", [64, 64, 64])):
        # One after the other: which of them finds what is then sure.
        done = [answers(engine.stream([Request(p, sampling)], drafter=name))[0] for p in prompts]
        assert [c.token_ids for c in done] == expected
        assert [c.num_reused_tokens for c in done] == reused
    with torch.inference_mode():
        for prompt, seen in zip(prompts, drafter.seen, strict=True):
            positions = torch.arange(len(prompt) - 1)[None]
            plain = target.hidden_states(torch.tensor([prompt[:-1]]), positions, (1, -1))
            for name in (1, -1):
                torch.testing.assert_close(seen[name], plain[name], rtol=1e-4, atol=1e-4)


def test_an_answer_is_a_shared_beginning_of_the_next_turn(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine()
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
    [first] = answers(engine.stream([Request(PROMPTS[3], sampling)])).values()
    follow_up = [*PROMPTS[3], *first.token_ids, 17, 18]
    [second] = answers(engine.stream([Request(follow_up, sampling)])).values()
    assert second.num_reused_tokens == (len(PROMPTS[3]) + 39) // 16 * 16
    assert second.token_ids == generate(target, [follow_up], sampling=sampling)[0].token_ids


def test_shared_blocks_make_way_when_the_cache_is_full(make_engine: MakeEngine, expected: list[Completion]) -> None:
    engine = make_engine(max_batch=2, cache_tokens=160)
    for _ in range(2):
        assert_as_expected(answers(engine.stream(requests())), expected)


def test_eagle_goes_on_after_giving_way(make_engine: MakeEngine, expected: list[Completion], target: Target) -> None:
    torch.manual_seed(0)
    config = EagleConfig(
        target=identity(target),
        feature_layers=(0, 1, 2),
        intermediate_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        draft_vocab_size=target.vocab_size,
    )
    drafter = EagleDrafter(target, EagleHead(config), num_draft_tokens=3, num_nodes=6, width=2)
    engine = make_engine(drafter, max_batch=8, cache_tokens=256)
    assert_as_expected(answers(engine.stream(requests())), expected)
    assert engine._scheduler.num_preemptions > 0 and not engine.problems
    state = engine._cache.state
    assert engine.num_used_blocks == 0 and sorted(state._free) == [*range(state.num_slots)]


def test_a_long_prompt_does_not_hold_the_others_up(make_engine: MakeEngine) -> None:
    """Between two chunks of its prefill everyone else takes a step."""
    engine = make_engine(NgramDrafter(1), prefill_tokens=32)
    long = Request([5 + i % 250 for i in range(32 * 40)], SamplingParams(max_new_tokens=1), index=1)
    short = Request(PROMPTS[0], SamplingParams(max_new_tokens=200, ignore_eos=True), index=0)
    is_going, order = threading.Event(), []

    def on_event(event: Event) -> None:
        order.append(event.request.index)
        is_going.set()

    engine.submit([short], on_event)
    assert is_going.wait(10)
    num_before = len(order)
    engine.submit([long], on_event)
    assert engine.drain(30)
    assert order.index(1) - num_before >= 30


@pytest.mark.parametrize("when", ["waiting", "prefill", "decoding"])
def test_cancelling_frees_every_block_within_a_step(make_engine: MakeEngine, when: str) -> None:
    engine = make_engine(max_batch=1, prefill_tokens=16)
    endless = SamplingParams(max_new_tokens=3000, ignore_eos=True)
    events: list[Event] = []
    has_begun = threading.Event()
    if when == "waiting":
        first = engine.submit([Request(PROMPTS[0], endless)], lambda event: has_begun.set())
        assert has_begun.wait(10)
    prompt = [5] * 2000 if when == "prefill" else PROMPTS[1]
    handle = engine.submit([Request(prompt, endless)], lambda event: (events.append(event), has_begun.set()))
    if when == "prefill":
        while not engine.call(lambda: engine.num_used_blocks):
            pass
    else:
        assert has_begun.wait(10)
    handle.cancel()
    # A task posted now runs before the next step, and after the cancellation.
    left = engine.call(lambda: [s.request.prompt_ids for s in engine._streams])
    assert left == ([PROMPTS[0]] if when == "waiting" else [])
    if when == "waiting":
        first.cancel()
    assert engine.call(lambda: engine.num_used_blocks) == 0
    num_events = len(events)
    # Ten more steps, in which an event would have come.
    answers(engine.stream([Request(PROMPTS[2], SamplingParams(max_new_tokens=10, ignore_eos=True))], drafter="none"))
    assert len(events) == num_events, "an event after the cancellation"
    handle.cancel()


def test_more_than_may_wait_are_refused_whole(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=2, max_waiting=2)
    sampling = SamplingParams(max_new_tokens=300, ignore_eos=True)
    request = Request(PROMPTS[0], sampling)
    handle = engine.submit([request] * 3, lambda event: None)
    with pytest.raises(EngineFull, match="4 requests are running or waiting") as refused:
        engine.submit([request] * 2, lambda event: None)
    assert refused.value.retry_seconds >= 1
    other = engine.submit([request], lambda event: None)
    with pytest.raises(ValueError, match="5 answers are more than the 4"):
        engine.submit([request] * 5, lambda event: None)
    handle.cancel()
    other.cancel()


def test_what_can_never_be_served_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(cache_tokens=64)
    with pytest.raises(ValueError, match="the prompt has 64 tokens, and the cache holds 64 with its answer"):
        engine.submit([Request([5] * 64, SamplingParams())], lambda event: None)
    with pytest.raises(ValueError, match="drafter 'oracle' is not loaded: use one of ngram, none"):
        engine.submit([Request([5], SamplingParams())], lambda event: None, drafter="oracle")
    # The cache is this engine's context: an answer that fills it ends as one that fills the model's.
    [done] = answers(engine.stream([Request([5] * 60, SamplingParams(max_new_tokens=50, ignore_eos=True))])).values()
    assert (len(done.token_ids), done.finish_reason) == (4, "length")


class BrokenDrafter(NgramDrafter):
    """Works for a while, then raises at the place named."""

    name = "broken"

    def __init__(self, place: str) -> None:
        super().__init__(4)
        # The loop admits rows only to a drafter that is not resident, and tells it of steps afterwards.
        self.is_resident = place not in ("admit", "commit")
        self.place = place
        self.num_calls = 0

    def _maybe_break(self, place: str) -> None:
        self.num_calls += place == self.place
        if place == self.place and self.num_calls > 3:
            raise RuntimeError("the head is damaged")

    def admit(self, *args: object) -> None:
        self._maybe_break("admit")

    def propose(self, *args: object) -> object:
        self._maybe_break("propose")
        return super().propose(*args)

    def observe(self, *args: object) -> None:
        self._maybe_break("observe")
        super().observe(*args)

    def commit(self, *args: object) -> None:
        self._maybe_break("commit")
        super().commit(*args)


@pytest.mark.parametrize("place", ["admit", "propose", "observe", "commit"])
def test_a_drafter_that_fails_costs_speed_and_no_answer(
    make_engine: MakeEngine, expected: list[Completion], place: str
) -> None:
    engine = make_engine(BrokenDrafter(place), max_batch=6)
    assert_as_expected(answers(engine.stream(requests())), expected)
    assert engine.problems == {"broken": "RuntimeError: the head is damaged"}
    assert_as_expected(answers(engine.stream(requests())), expected)


def test_an_answer_that_fails_ends_alone(make_engine: MakeEngine, expected: list[Completion], target: Target) -> None:
    """Logits that are not finite are one request's error; its neighbours in the batch get their answers."""
    engine = make_engine()
    bad = PROMPTS[2][-1]
    embed = target.model.get_input_embeddings()
    before = embed.weight[bad].clone()
    good = [r for r in requests() if bad not in r.prompt_ids and bad not in expected[r.index].token_ids]
    assert len(good) > 5
    with torch.no_grad():
        embed.weight[bad] = torch.nan
    try:
        events = list(engine.stream([Request([bad], SamplingParams(), index=99), *good], drafter="none"))
    finally:
        with torch.no_grad():
            embed.weight[bad] = before
    [failed] = [event for event in events if event.error is not None]
    assert failed.request.index == 99 and "not finite after 0 tokens" in str(failed.error)
    done = answers(event for event in events if event is not failed)
    assert {i: c.token_ids for i, c in done.items()} == {r.index: expected[r.index].token_ids for r in good}


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), SystemExit("killed")], ids=["bug", "thread killed"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dying_engine_answers_everyone_and_rises_again(
    make_engine: MakeEngine, expected: list[Completion], monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    engine = make_engine(max_batch=2)
    scheduler = engine._scheduler
    # As on a GPU, where it has all its blocks at once.
    assert scheduler.cache.max_blocks is not None
    scheduler.cache.grow(scheduler.cache.max_blocks)
    pool = scheduler.cache.keys.data_ptr()
    num_rounds = 0
    real_round = scheduler.round

    def round_() -> object:
        nonlocal num_rounds
        num_rounds += 1
        if num_rounds == 5:
            raise fault
        return real_round()

    monkeypatch.setattr(scheduler, "round", round_)
    events = list(engine.stream([Request(p, SamplingParams(max_new_tokens=200, ignore_eos=True)) for p in PROMPTS[:6]]))
    assert sum(event.is_last for event in events) == 6
    assert all(event.error is not None for event in events if event.is_last)
    assert_as_expected(answers(engine.stream(requests())), expected)
    assert engine._scheduler is not scheduler and engine.call(lambda: engine.num_used_blocks) == 0
    assert engine._scheduler.cache.keys.data_ptr() == pool, "no second cache"


def test_drafters_come_and_go_under_load(make_engine: MakeEngine, expected: list[Completion], target: Target) -> None:
    engine = make_engine(max_batch=6)

    def make() -> Drafter:
        return DraftModelDrafter(target.truncated(1), target.vocab_size, num_draft_tokens=3)

    with ThreadPoolExecutor(2) as pool:
        run = pool.submit(lambda: answers(engine.stream(requests())))
        assert engine.load(lambda target: make, "extra") == "extra"
        with pytest.raises(ValueError, match="drafter 'extra' is loaded already"):
            engine.load(lambda target: make, "extra")
        extra = pool.submit(lambda: answers(engine.stream(requests(), drafter="extra")))
        while not any(s.row.blocks for s in engine.call(lambda: engine._scheduler.sequences_of(engine._groups["extra"]))):
            pass
        engine.unload("extra")
        assert_as_expected(run.result(), expected)
        assert_as_expected(extra.result(), expected)
    with pytest.raises(ValueError, match="not loaded"):
        engine.submit(requests(), lambda event: None, drafter="extra")
    with pytest.raises(ValueError, match="it stays"):
        engine.unload("ngram")
    with pytest.raises(KeyError):
        engine.unload("extra")


def test_draining_finishes_what_runs_and_takes_nothing_new(make_engine: MakeEngine) -> None:
    engine = make_engine()
    events: list[Event] = []
    engine.submit([Request(PROMPTS[0], SamplingParams(max_new_tokens=100, ignore_eos=True))], events.append)
    assert not engine.drain(timeout=0)
    with pytest.raises(EngineClosed, match="shutting down"):
        engine.submit([Request([5], SamplingParams())], lambda event: None)
    assert engine.drain(timeout=30)
    assert events[-1].completion is not None and len(events[-1].completion.token_ids) == 100


def test_closing_tells_everyone(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=1)
    events: list[Event] = []
    engine.submit([Request(PROMPTS[0], SamplingParams(max_new_tokens=3000, ignore_eos=True))] * 3, events.append)
    engine.close()
    assert [type(event.error) for event in events if event.is_last] == [EngineClosed] * 3
    with pytest.raises(EngineClosed):
        engine.call(lambda: None)


def test_a_caller_that_fails_is_dropped_alone(make_engine: MakeEngine, expected: list[Completion]) -> None:
    engine = make_engine()

    def fail(event: Event) -> None:
        raise OSError("gone")

    engine.submit([Request(PROMPTS[0], SamplingParams(max_new_tokens=3000, ignore_eos=True))] * 2, fail)
    assert_as_expected(answers(engine.stream(requests())), expected)
    assert engine.drain(10)


class Counting(Listener):
    def __init__(self) -> None:
        self.num_emitted = self.num_first = self.num_finished = self.num_cancelled = self.num_drafted = 0
        self.num_accepted = 0

    def stepped(self, step: StepCounts) -> None:
        self.num_drafted += sum(step.num_drafted)
        self.num_accepted += sum(step.num_accepted)

    def emitted(self, pieces: Sequence[tuple[int, float, bool]]) -> None:
        for num_tokens, seconds, is_first in pieces:
            assert seconds >= 0
            self.num_emitted += num_tokens
            self.num_first += is_first

    def finished(self, completion: Completion, seconds: float) -> None:
        assert seconds >= completion.seconds >= completion.prefill_seconds > 0
        assert completion.queue_seconds >= 0
        self.num_finished += 1

    def failed(self, *, is_cancelled: bool) -> None:
        self.num_cancelled += is_cancelled


def test_the_listener_hears_what_was_emitted(make_engine: MakeEngine) -> None:
    listener = Counting()
    engine = make_engine(listener=listener, max_batch=4, cache_tokens=256)
    done = answers(engine.stream(requests())).values()
    assert listener.num_emitted == sum(len(c.token_ids) for c in done)
    assert listener.num_first == listener.num_finished == len(done)
    assert listener.num_drafted == sum(c.num_draft_tokens for c in done) > 0
    assert listener.num_accepted == sum(c.num_accepted_tokens for c in done) > 0


@pytest.mark.parametrize(
    ("settings", "message"), [({"max_batch": 0}, "max_batch=0"), ({"cache_tokens": 8}, "cache_tokens=8 is not allowed")]
)
def test_settings_are_checked(target: Target, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpecEngine(target, **settings)
