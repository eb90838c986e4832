"""What a newcomer writes first: every form of prompts, drafters and settings, and one sentence for what is wrong."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from support import OracleTreeDrafter, random_prompts, tiny_model, tiny_target
from transformers import PreTrainedTokenizerFast

import selfspec
from selfspec import SamplingParams, Target, generate, generate_iter, load_drafter, stream
from selfspec.api.arguments import OTHER_NAMES, SETTINGS

LENGTH = {"max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def target(tiny_tokenizer: PreTrainedTokenizerFast) -> Target:
    return Target(tiny_model("llama", vocab_size=len(tiny_tokenizer)), tiny_tokenizer)


def tokens(completions: list[selfspec.Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize(
    "prompt",
    ["the cat", [{"role": "user", "content": "the cat"}], [5, 6, 7], (5, 6, 7), list(np.array([5, 6, 7]))],
    ids=["text", "conversation", "token ids", "tuple", "numpy numbers"],
)
def test_one_prompt_is_answered_as_a_list_of_one(target: Target, prompt: Any) -> None:
    [alone] = generate(target, prompt, **LENGTH)
    [listed, other] = generate(target, [prompt, "the dog"], **LENGTH)
    assert alone.token_ids == listed.token_ids != other.token_ids
    assert [event.completion for event in stream(target, prompt, **LENGTH)][-1].token_ids == alone.token_ids


def test_prompts_may_come_from_a_generator(target: Target) -> None:
    assert len(generate(target, (text for text in ("the cat", "the dog")), **LENGTH)) == 2
    assert generate(target, []) == []


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ({"role": "user", "content": "Hi"}, "prompts of type dict are not allowed"),
        (torch.tensor([[5, 6]]), "prompts of type Tensor are not allowed"),
        (np.array([5, 6]), "prompts of type ndarray are not allowed"),
        (b"the cat", "prompts of type bytes are not allowed"),
        (None, "prompts of type NoneType are not allowed"),
        (7, "prompts of type int are not allowed"),
        ([None], "prompt 0 is of type NoneType"),
        (["the cat", torch.tensor([5])], "prompt 1 is of type Tensor"),
        ([["the cat"]], "prompt 0 has 'the cat' among its token ids"),
        ([[{"content": "Hi"}]], "prompt 0 has no message at 0"),
        ([[{"role": "user", "content": "Hi"}, "there"]], "prompt 0 has no message at 1"),
        ("", "prompt 0 is empty"),
        ([[]], "prompt 0 is empty"),
    ],
)
def test_what_is_no_prompt_is_told_in_a_sentence(target: Target, prompts: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words) as told:
        generate(target, prompts, **LENGTH)
    assert "\n" not in str(told.value)


def test_settings_are_an_object_a_dict_or_keywords(target: Target) -> None:
    prompts = ["the cat", "the dog"]
    expected = tokens(generate(target, prompts, sampling=SamplingParams(temperature=1, seed=3, **LENGTH)))
    assert tokens(generate(target, prompts, sampling={"temperature": 1, "seed": 3, **LENGTH})) == expected
    assert tokens(generate(target, prompts, temperature=1, seed=3, **LENGTH)) == expected
    assert tokens(generate(target, prompts, sampling=SamplingParams(seed=3, **LENGTH), temperature=1)) == expected
    assert tokens(generate(target, prompts, sampling={"seed": 4, **LENGTH}, temperature=1, seed=3)) == expected
    mixed = [{"seed": 3, "max_new_tokens": 9}, SamplingParams(seed=3, temperature=1, max_new_tokens=2)]
    assert [len(each) for each in tokens(generate(target, prompts, sampling=mixed, ignore_eos=True))] == [9, 2]
    [event, *_] = stream(target, prompts[0], temperature=1, seed=3, **LENGTH)
    assert event.token_ids == expected[0][: len(event.token_ids)]


@pytest.mark.parametrize("given", ["max_tokens", "stop_strings", "do_sample", "num_return_sequences", "eos_token_id"])
def test_a_name_from_elsewhere_gets_the_one_from_here(target: Target, given: str) -> None:
    for options in ({given: 4}, {"sampling": {given: 4}}, {"sampling": [{given: 4}]}):
        with pytest.raises(TypeError, match=f"{given} is not a setting here: use {OTHER_NAMES[given]}"):
            generate(target, "the cat", **options)


def test_names_from_elsewhere_lead_to_settings() -> None:
    for given, here in OTHER_NAMES.items():
        assert given not in SETTINGS and (here.split(",")[0] in SETTINGS or "argument" in here)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temprature": 1}, "temprature is not a setting: use temperature"),
        ({"xyz": 1}, "xyz is not a setting: use one of max_new_tokens, min_new_tokens"),
        ({"temperature": -1}, "temperature=-1 is not allowed"),
        ({"sampling": 3}, "sampling=3 is not allowed"),
        ({"sampling": [3]}, "sampling=3 is not allowed"),
        ({"drafter": 3}, "int is not a drafter: pass a name such as 'ngram'"),
        ({"drafter": "nrgam"}, "drafter 'nrgam' is not known"),
        ({"drafter": "eagle"}, "no shipped eagle head fits"),
        ({"batch_size": 0}, "batch_size=0 is not allowed"),
        ({"batch_size": "2"}, "batch_size='2' is not allowed"),
        ({"top_logprobs": -1}, "top_logprobs=-1 is not allowed"),
        ({"top_logprobs": True}, "top_logprobs=True is not allowed"),
        ({"top_logprobs": 10**6}, "num_top_logprobs=1000000 is not allowed: use 0 to"),
    ],
)
def test_a_wrong_setting_is_told_before_the_first_token(target: Target, options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        generate(target, "the cat", **options)


def test_a_wrong_setting_is_told_at_the_call(target: Target) -> None:
    """Not when somebody asks for the first completion, which may be elsewhere."""
    with pytest.raises(TypeError, match="max_tokens"):
        generate_iter(target, "the cat", max_tokens=4)
    with pytest.raises(TypeError, match="max_tokens"):
        stream(target, "the cat", max_tokens=4)
    with pytest.raises(ValueError, match="n=2 is not allowed in a stream"):
        stream(target, "the cat", n=2)
    with pytest.raises(TypeError, match="sampling is a list"):
        stream(target, "the cat", sampling=[{}])  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["smollm2", None, tiny_model("llama")], ids=["name", "none", "model"])
def test_a_target_is_made_first(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"is not a Target: pass Target"):
        generate(wrong, "the cat")


def test_a_drafters_name_is_loaded_once_for_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    target, other = tiny_target(), tiny_target()
    loaded: list[tuple[str, Target]] = []

    def load(spec: str, target: Target) -> Any:
        loaded.append((spec, target))
        return load_drafter(spec, target)

    monkeypatch.setattr("selfspec.api.arguments.load_drafter", load)
    prompts = random_prompts(2, (4, 9))
    expected = tokens(generate(target, prompts, **LENGTH))
    threads = [threading.Thread(target=generate, args=(target, prompts), kwargs={"drafter": "ngram:3"}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokens(generate(target, prompts, drafter="ngram:3", use_cost_guard=False, **LENGTH)) == expected
    assert tokens(generate(target, prompts, drafter="none", **LENGTH)) == expected
    assert tokens(generate(other, prompts, drafter="ngram:3", **LENGTH)) == expected
    assert loaded == [("ngram:3", target), ("none", target), ("ngram:3", other)]


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_the_likeliest_tokens_can_be_asked_for(target: Target, call: str) -> None:
    options = {"top_logprobs": 3, **LENGTH}
    if call == "generate":
        [completion] = generate(target, "the cat", **options)
    else:
        events = list(stream(target, "the cat", **options))
        completion = events[-1].completion
        assert [top for event in events for top in event.top_logprobs] == completion.top_logprobs
        assert [each for event in events for each in event.logprobs] == completion.logprobs
    for token, logprob, top in zip(completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True):
        assert len(top) == 3 and top == sorted(top, key=lambda pair: -pair[1])
        assert top[0] == (token, pytest.approx(logprob)) and math.exp(logprob) <= 1
    assert generate(target, "the cat", **LENGTH)[0].top_logprobs is None


# Where text comes from.


def told(events: list[selfspec.StreamEvent]) -> tuple[selfspec.Completion, list[selfspec.Piece]]:
    """The completion and all pieces, after the invariants of a stream were checked."""
    *_, last = events
    completion, pieces = last.completion, [piece for event in events for piece in event.pieces]
    assert completion is not None and all(event.completion is None for event in events[:-1])
    for event in events:
        assert "".join(piece.text for piece in event.pieces) == event.text
        assert 0 <= event.num_accepted_tokens <= event.num_draft_tokens
        assert len(event.token_ids) in (event.num_accepted_tokens, event.num_accepted_tokens + 1)
    assert "".join(piece.text for piece in pieces) == completion.text
    assert sum(event.num_draft_tokens for event in events) == completion.num_draft_tokens
    assert sum(event.num_accepted_tokens for event in events) == completion.num_accepted_tokens
    assert len(events) == completion.num_target_passes
    return completion, pieces


@pytest.fixture(scope="module")
def oracle(target: Target) -> OracleTreeDrafter:
    prompt = tuple(target.encode("the cat"))
    [answer] = generate(target, list(prompt), max_new_tokens=60, ignore_eos=True)
    return OracleTreeDrafter({prompt: answer.token_ids}, hit=0.7)


def test_pieces_name_the_source_of_each_token(target: Target, oracle: OracleTreeDrafter) -> None:
    plain, pieces = told(list(stream(target, "the cat", max_new_tokens=40, ignore_eos=True)))
    assert {(piece.source, piece.depth) for piece in pieces} == {("target", 0)}
    options: dict[str, Any] = {"drafter": oracle, "use_cost_guard": False, "ignore_eos": True}
    events = list(stream(target, "the cat", max_new_tokens=40, **options))
    drafted, pieces = told(events)
    assert drafted.text == plain.text and drafted.num_target_passes < 30
    assert {"draft", "bonus"} <= {piece.source for piece in pieces}
    assert all((piece.depth > 0) == (piece.source == "draft") for piece in pieces)
    for event in events:
        if event.num_accepted_tokens and all(target.tokenizer.decode([token]).isascii() for token in event.token_ids):
            depths = [piece.depth for piece in event.pieces if piece.source == "draft"]
            assert depths[-event.num_accepted_tokens :] == list(range(1, event.num_accepted_tokens + 1))


def test_pieces_are_whole_where_text_is_held_back(target: Target, oracle: OracleTreeDrafter) -> None:
    """Stop strings hold text back, bytes of characters wait, and neither is lost or told twice."""
    options: dict[str, Any] = {"drafter": oracle, "use_cost_guard": False, "ignore_eos": True, "max_new_tokens": 60}
    [whole] = generate(target, "the cat", **options)
    for begin in range(0, len(whole.text) - 3, 8):
        for size in (1, 3, 9):
            stop = whole.text[begin : begin + size]
            if stop:
                completion, _ = told(list(stream(target, "the cat", stop=stop, **options)))
                assert completion.text == generate(target, "the cat", stop=stop, **options)[0].text
    for length in range(1, 12):
        told(list(stream(target, "the cat", **{**options, "max_new_tokens": length})))


def test_a_target_without_a_tokenizer_has_no_pieces() -> None:
    events = list(stream(tiny_target(), [5, 6, 5, 6], drafter="ngram", **LENGTH))
    assert all(not event.pieces and not event.text for event in events)


# What there is to see.


def test_the_package_shows_its_public_names() -> None:
    assert set(selfspec.__all__) <= set(dir(selfspec))
    assert not [name for name in dir(selfspec) if name not in selfspec.__all__ and not name.startswith("__")]
    assert selfspec.__all__ == sorted(selfspec.__all__)
    for name in selfspec.__all__:
        assert getattr(selfspec, name).__doc__, name
