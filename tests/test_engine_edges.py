"""The engine's edges: whatever one request, drafter, listener or caller does wrong harms itself alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bad_requests import BAD_PROMPTS, BAD_SETTINGS, LATE, bad_requests
from support import random_prompts, tiny_target

from selfspec import SamplingParams, Target, generate
from selfspec.cache.kv import KVCache
from selfspec.drafters import EagleDrafter, NgramDrafter
from selfspec.engine import Event, Listener, SpecEngine, health
from selfspec.loop.decode import decode
from selfspec.loop.drafter import Proposal
from selfspec.loop.sampling import Grammar
from selfspec.loop.sequence import Request
from selfspec.model.flat import FlatNodes
from selfspec.model.graphs import Graphs

CACHE_TOKENS = 128
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
PROMPTS = random_prompts(6, (3, 20), seed=4)
MakeEngine = Callable[..., SpecEngine]


@pytest.fixture
def target() -> Target:
    return tiny_target("llama")


@pytest.fixture
def make_engine(target: Target) -> Iterator[MakeEngine]:
    """Builds engines that must have freed everything when the test is over."""
    engines: list[SpecEngine] = []

    def make(*drafters: Any, **settings: Any) -> SpecEngine:
        engines.append(SpecEngine(target, drafters, **{"cache_tokens": 1024, "use_cost_guard": False, **settings}))
        return engines[-1]

    yield make
    for each in engines:
        assert each.drain(timeout=30), "somebody waits for ever"
        assert each.num_used_blocks == 0 and each.num_waiting == 0
        each.close()


class Caller:
    """Collects the events of a call, and knows when the last of them has come."""

    def __init__(self, engine: SpecEngine, requests: list[Request], **options: Any) -> None:
        self.events: list[Event] = []
        self._num_left = len(requests)
        self._is_over = threading.Event()
        self.handle = engine.submit(requests, self._take, **options)

    def _take(self, event: Event) -> None:
        self.events.append(event)
        self._num_left -= event.is_last
        if not self._num_left:
            self._is_over.set()

    def ends(self) -> list[Event]:
        """The last event of each request."""
        assert self._is_over.wait(30), "no last event"
        return [event for event in self.events if event.is_last]


def expected(target: Target, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [completion.token_ids for completion in generate(target, prompts, sampling=GREEDY)]


def tokens_of(caller: Caller) -> list[list[int]]:
    ends = sorted(caller.ends(), key=lambda event: event.request.index)
    assert all(event.error is None for event in ends), [event.error for event in ends]
    return [event.completion.token_ids for event in ends if event.completion is not None]


def good_requests() -> list[Request]:
    return [Request(prompt, GREEDY, index) for index, prompt in enumerate(PROMPTS)]


# Requests.


@pytest.mark.parametrize("name", [*bad_requests(tiny_target(), CACHE_TOKENS)])
def test_a_request_that_cannot_be_served_is_refused_and_harms_nobody(
    name: str, target: Target, make_engine: MakeEngine
) -> None:
    engine = make_engine(NgramDrafter(4), cache_tokens=CACHE_TOKENS)
    request, words = bad_requests(target, CACHE_TOKENS)[name]
    innocent = Caller(engine, good_requests())
    with pytest.raises(ValueError, match=words) as refused:
        engine.submit([request], lambda event: None)
    assert len(str(refused.value).splitlines()) == 1
    with pytest.raises(ValueError, match=words):
        engine.submit([Request(PROMPTS[0], GREEDY), request], lambda event: None)
    assert tokens_of(innocent) == expected(target)


@pytest.mark.parametrize("name", LATE)
def test_what_shows_only_when_a_request_begins_is_its_own_callers_error(
    name: str, target: Target, make_engine: MakeEngine
) -> None:
    engine = make_engine(NgramDrafter(4))
    request, words = LATE[name]
    innocent = Caller(engine, good_requests())
    # Together with a good one: that is answered.
    guilty = Caller(engine, [request, Request(PROMPTS[0], GREEDY, 1)])
    failed, done = sorted(guilty.ends(), key=lambda event: event.request.index)
    assert words in str(failed.error) and done.completion is not None
    assert done.completion.token_ids == expected(target)[0]
    assert tokens_of(innocent) == expected(target)


@pytest.mark.parametrize("name", [*bad_requests(tiny_target(), CACHE_TOKENS), *LATE])
def test_the_loop_refuses_the_same(name: str, target: Target) -> None:
    request, words = {**bad_requests(target, CACHE_TOKENS), **LATE}[name]
    with pytest.raises(ValueError, match=words):
        list(decode(target, [request], cache=target.new_cache(max_tokens=CACHE_TOKENS)))


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_generate_refuses_the_same_prompts_by_their_number(name: str, target: Target) -> None:
    make, words = BAD_PROMPTS[name]
    with pytest.raises(ValueError, match=f"prompt 1 .*{words}"):
        generate(target, [[5, 6], make(target)], sampling=GREEDY)


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_generate_refuses_the_same_settings(name: str, target: Target) -> None:
    make, words = BAD_SETTINGS[name]
    with pytest.raises(ValueError, match=words):
        generate(target, [[5, 6]], sampling=make(target))


def test_one_prompt_alone_is_one_prompt(target: Target) -> None:
    """And not one for each of its letters or tokens."""
    [completion] = generate(target, PROMPTS[0], sampling=GREEDY)
    assert completion.token_ids == expected(target)[0]
    with pytest.raises(TypeError, match="or what load_drafter returns"):
        generate(target, [PROMPTS[0]], drafter=NgramDrafter)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pass SamplingParams"):
        generate(target, [PROMPTS[0]], sampling=4)  # type: ignore[arg-type]


def test_a_prompt_shows_in_no_repr() -> None:
    """Errors and logs carry objects, and other callers' errors must not carry prompts."""
    assert "12345" not in repr(Request([12345] * 3, GREEDY)) and "24" not in repr(Request([12345], GREEDY))


class BreakingGrammar(Grammar):
    """Allows everything for a while, then fails."""

    def allowed(self, token_ids: list[int]) -> torch.Tensor:
        if len(token_ids) > 3:
            raise RuntimeError("the automaton is lost")
        return torch.ones(61, dtype=torch.bool)


def test_a_grammar_that_fails_ends_its_own_answer(target: Target, make_engine: MakeEngine) -> None:
    engine = make_engine(NgramDrafter(4))
    innocent = Caller(engine, good_requests())
    guilty = Caller(engine, [Request([5, 6], GREEDY, begin_grammar=BreakingGrammar)])
    [failed] = guilty.ends()
    assert "the automaton is lost" in str(failed.error)
    assert tokens_of(innocent) == expected(target) and not engine.problems


class OneToken(Grammar):
    """Allows a single token."""

    def allowed(self, token_ids: list[int]) -> torch.Tensor:
        return torch.arange(61) == 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_settings_that_leave_no_token_end_their_own_answer(
    temperature: float, target: Target, make_engine: MakeEngine
) -> None:
    """No token is made up, and neither the target nor the drafter is blamed."""
    engine = make_engine(NgramDrafter(4))
    innocent = Caller(engine, good_requests())
    sampling = GREEDY.with_(temperature=temperature, logit_bias={7: float("-inf")})
    [failed] = Caller(engine, [Request([5, 6], sampling, begin_grammar=OneToken)]).ends()
    assert isinstance(failed.error, ValueError)
    assert "logit_bias and the answer's other settings leave no token to choose after 0 tokens" in str(failed.error)
    assert tokens_of(innocent) == expected(target) and not engine.problems


class BrokenTokenizer:
    """Cannot decode one of its tokens."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def decode(self, ids: list[int], **options: object) -> str:
        if self.bad in ids:
            raise KeyError(self.bad)
        return "".join(chr(65 + token % 26) for token in ids)


def test_a_text_that_cannot_be_decoded_ends_its_own_answer(target: Target, make_engine: MakeEngine) -> None:
    answers = expected(target)
    # Prompts are decoded, too, for what the answer's first characters depend on.
    known = {token for prompt in PROMPTS for token in prompt[-8:]}
    guilty, bad = next(
        (i, token)
        for i, answer in enumerate(answers)
        for token in answer
        if token not in known and not any(token in other for j, other in enumerate(answers) if j != i)
    )
    target.tokenizer = BrokenTokenizer(bad)
    engine = make_engine(NgramDrafter(4))
    caller = Caller(engine, good_requests())
    ends = {event.request.index: event for event in caller.ends()}
    assert isinstance(ends.pop(guilty).error, KeyError)
    for i, event in ends.items():
        assert event.completion is not None and event.completion.token_ids == answers[i]


# The target and the drafters.


def test_a_pass_that_fails_leaves_the_drafter_in_service(
    target: Target, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may run out once: the answers are whole, and the next requests are drafted for again."""
    drafter = NgramDrafter(4)
    engine = make_engine(drafter)
    run, calls = target.run_flat, []

    def failing(*args: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "run_flat", failing)
    assert tokens_of(Caller(engine, good_requests())) == expected(target)
    assert len(calls) > 5 and not engine.problems
    proposals = []
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *args: proposals.append(1) or propose(*args))
    assert tokens_of(Caller(engine, good_requests())) == expected(target)
    assert proposals


def test_a_row_that_makes_every_pass_fail_ends_alone(
    target: Target, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch whose pass fails is taken apart: whoever fails alone is to blame."""
    engine = make_engine(NgramDrafter(4))
    answers = {request.index: tokens for request, tokens in zip(good_requests(), expected(target), strict=True)}
    texts = {request.index: {*request.prompt_ids, *answers[request.index]} for request in good_requests()}
    poison = min(range(3, 61), key=lambda token: sum(token in text for text in texts.values()))
    good = [request for request in good_requests() if poison not in texts[request.index]]
    assert len(good) >= 4
    run = target.run_flat

    def failing(nodes: FlatNodes, *args: object, **options: object) -> object:
        if (nodes.tokens == poison).any():
            raise RuntimeError("this row cannot be computed")
        return run(nodes, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "run_flat", failing)
    guilty = Caller(engine, [Request([5, poison], GREEDY, 99)])
    innocent = Caller(engine, good)
    [failed] = guilty.ends()
    assert "cannot be computed" in str(failed.error)
    assert tokens_of(innocent) == [answers[request.index] for request in good]
    assert not engine.problems


class SometimesBroken(NgramDrafter):
    """Fails when it is told to."""

    is_broken = True

    def propose(self, *args: Any) -> Proposal:
        if self.is_broken:
            raise RuntimeError("the head is damaged")
        return super().propose(*args)


def test_a_drafter_that_failed_is_tried_again_later(
    target: Target, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    failures: list[str] = []

    class Counting(Listener):
        def drafter_failed(self, name: str) -> None:
            failures.append(name)

    drafter = SometimesBroken(4)
    engine = make_engine(drafter, listener=Counting())
    assert tokens_of(Caller(engine, good_requests())) == expected(target)
    assert engine.problems == {"ngram": "RuntimeError: the head is damaged"} and failures == ["ngram"]
    now[0] += health.RETRY_SECONDS + 1
    assert not engine.problems
    assert tokens_of(Caller(engine, good_requests())) == expected(target)
    assert failures == ["ngram"] * 2
    # Twice as long after the second failure.
    now[0] += health.RETRY_SECONDS + 1
    assert engine.problems
    now[0] += health.RETRY_SECONDS
    drafter.is_broken = False
    assert not engine.problems
    assert tokens_of(Caller(engine, good_requests())) == expected(target)
    assert not engine.health._problems, "one that drafts again has no past"


# Listeners and callers.


@pytest.mark.parametrize("what", ["stepped", "emitted", "finished", "failed", "drafter_failed", "preempted", "published"])
def test_a_listener_that_raises_harms_nobody(what: str, target: Target, make_engine: MakeEngine) -> None:
    listener = Listener()

    def fail(*args: object, **options: object) -> None:
        raise KeyError("a label that nobody declared")

    setattr(listener, what, fail)
    drafter = SometimesBroken(4)
    drafter.is_broken = what == "drafter_failed"
    engine = make_engine(drafter, listener=listener, cache_tokens=96 if what == "preempted" else 1024)
    bad = Caller(engine, [Request([5], GREEDY, begin_grammar=LATE["a grammar that cannot begin"][0].begin_grammar)])
    assert bad.ends()[0].error is not None
    assert tokens_of(Caller(engine, good_requests())) == expected(target)


def test_a_caller_that_raises_while_an_error_is_told_takes_nobody_along(target: Target, make_engine: MakeEngine) -> None:
    """Its siblings are cancelled once, and no other caller sees its requests."""
    drafter = SometimesBroken(4)
    engine = make_engine(drafter)
    innocent = Caller(engine, good_requests())

    def fail(event: Event) -> None:
        raise OSError("gone")

    engine.submit([Request([7] * 9, GREEDY, i) for i in range(3)], fail)
    assert tokens_of(innocent) == expected(target)


def test_a_retire_that_raises_leaves_nobody_untold(
    target: Target, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = NgramDrafter(4)
    engine = make_engine(drafter)

    def fail(*args: object) -> None:
        raise RuntimeError("no such row")

    monkeypatch.setattr(drafter, "retire", fail)
    assert tokens_of(Caller(engine, good_requests())) == expected(target)
    monkeypatch.undo()
    assert tokens_of(Caller(engine, good_requests())) == expected(target)


# Warming up.


def test_warming_up_teaches_nothing_and_keeps_the_listener(
    target: Target, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.passes.graphs = Graphs(target.device, is_rehearsal=True)
    drafter, listener = NgramDrafter(4), Listener()
    before = drafter._counts.clone()
    engine = make_engine(drafter, max_batch=4, listener=listener, use_cost_guard=True)
    engine.warm_up()
    assert torch.equal(drafter._counts, before) and not engine._cache._published
    assert engine.listener is listener and target.passes.num_set_up > 10

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no memory for graphs")

    monkeypatch.setattr(target, "run_flat", fail)
    with pytest.raises(RuntimeError, match="no memory for graphs"):
        engine.warm_up()
    monkeypatch.undo()
    assert engine.listener is listener and engine._cache.use_sharing
    assert tokens_of(Caller(engine, good_requests())) == expected(target)


def test_a_drafter_keeps_its_own_name(target: Target, make_engine: MakeEngine) -> None:
    """Requests call it by the name it was loaded under; the object that was given is not changed."""
    engine = make_engine()
    drafter = NgramDrafter(4)
    names: list[str] = []

    class Names(Listener):
        def stepped(self, step: Any) -> None:
            names.append(step.name)

    engine.listener = Names()
    assert engine.load(lambda target: lambda: drafter, "lookup") == "lookup"
    assert drafter.name == "ngram"
    assert tokens_of(Caller(engine, good_requests(), drafter="lookup")) == expected(target)
    assert set(names) == {"lookup"}


# Threads.


def test_threads_that_share_a_target_and_a_drafter_take_turns() -> None:
    """As the handlers of a web framework do: every answer is what one thread alone gets."""
    from support import eagle_head

    target = tiny_target("llama")
    eagle = EagleDrafter(target, eagle_head(target))
    drafters = {"none": None, "ngram": NgramDrafter(4), "eagle": eagle}
    prompts = random_prompts(4, (3, 30), seed=9)
    alone = expected(target, prompts)
    results: dict[tuple[str, int], list[list[int]]] = {}
    errors: list[BaseException] = []
    caches: list[KVCache] = []
    new_cache = target.new_cache

    def recorded(*args: Any, **options: Any) -> KVCache:
        caches.append(new_cache(*args, **options))
        return caches[-1]

    target.new_cache = recorded  # type: ignore[method-assign]

    def work(number: int) -> None:
        try:
            for name in [*drafters][number % 3 :] + [*drafters][: number % 3]:
                done = generate(target, prompts, drafter=drafters[name], sampling=GREEDY, batch_size=1 + number % 3)
                results[name, number] = [completion.token_ids for completion in done]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(results) == 12 and all(tokens == alone for tokens in results.values())
    assert caches and not any(cache.num_used_blocks for cache in caches)
    assert all(sorted(cache.state._free) == [*range(cache.state.num_slots)] for cache in caches)


def test_an_engine_and_threads_share_a_target(target: Target, make_engine: MakeEngine) -> None:
    engine = make_engine(NgramDrafter(4))
    caller = Caller(engine, good_requests())
    assert expected(target) == tokens_of(caller)


@pytest.mark.parametrize("prompt", ["half \ud83d", [{"role": "user", "content": "\udc00"}]])
def test_half_a_character_is_refused_in_one_sentence(prompt: Any, tiny_target_dir: Any) -> None:
    target = Target.from_pretrained(tiny_target_dir, device="cpu")
    with pytest.raises(ValueError, match="half a character"):
        generate(target, [prompt], sampling=GREEDY)


def test_a_top_k_that_no_vocabulary_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"top_k=.* is not allowed: use 0 \(off\) or a positive whole number below"):
        SamplingParams(top_k=2**70)
