"""Settings: every bad value is refused where it is made, by name, and equal settings are equal however written."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from selfspec.config import DTYPES, WEIGHT_DTYPES, DraftOptions, SamplingParams, TargetOptions

NAN, INF = math.nan, math.inf

BAD: list[tuple[str, Any, str]] = [
    ("max_new_tokens", 0, "a whole number of at least 1"),
    ("max_new_tokens", -3, "a whole number of at least 1"),
    ("max_new_tokens", 2.5, "a whole number of at least 1"),
    ("max_new_tokens", "8", "a whole number of at least 1"),
    ("min_new_tokens", -1, r"0 to max_new_tokens \(256\)"),
    ("min_new_tokens", 257, r"0 to max_new_tokens \(256\)"),
    ("min_new_tokens", 1.5, r"0 to max_new_tokens \(256\)"),
    ("temperature", -0.1, "0 or more"),
    ("temperature", NAN, "0 or more"),
    ("temperature", INF, "0 or more"),
    ("temperature", "hot", "0 or more"),
    ("temperature", None, "0 or more"),
    ("top_k", -1, r"0 \(off\) or a positive whole number below 2\*\*31"),
    ("top_k", 2.5, r"0 \(off\) or a positive whole number below 2\*\*31"),
    ("top_p", 0, r"a number in \(0, 1\]"),
    ("top_p", 1.01, r"a number in \(0, 1\]"),
    ("top_p", NAN, r"a number in \(0, 1\]"),
    ("min_p", -0.1, r"a number in \[0, 1\]"),
    ("min_p", 1.1, r"a number in \[0, 1\]"),
    ("min_p", NAN, r"a number in \[0, 1\]"),
    ("repetition_penalty", 0, r"a positive number \(1 is off\)"),
    ("repetition_penalty", -1.0, r"a positive number \(1 is off\)"),
    ("repetition_penalty", INF, r"a positive number \(1 is off\)"),
    ("repetition_penalty", NAN, r"a positive number \(1 is off\)"),
    ("repetition_penalty", 1e-11, r"1e-10 to 1e\+10, a positive number \(1 is off\)"),
    ("repetition_penalty", 1e11, r"1e-10 to 1e\+10, a positive number \(1 is off\)"),
    ("frequency_penalty", 1e39, r"-1e\+15 to 1e\+15, a finite number \(0 is off\)"),
    ("logit_bias", {3: -1e300}, r"-1e\+15 to 1e\+15, or -inf to ban a token: .*"),
    ("presence_penalty", NAN, r"a finite number \(0 is off\)"),
    ("presence_penalty", INF, r"a finite number \(0 is off\)"),
    ("frequency_penalty", -INF, r"a finite number \(0 is off\)"),
    ("frequency_penalty", "much", r"a finite number \(0 is off\)"),
    ("logit_bias", {-1: 1.0}, r"token ids of at least 0 with a number below \+inf"),
    ("logit_bias", {3: NAN}, r"token ids of at least 0 with a number below \+inf"),
    ("logit_bias", {3: INF}, r"token ids of at least 0 with a number below \+inf"),
    ("logit_bias", {"the": 1.0}, r"token ids of at least 0 with a number below \+inf"),
    ("seed", 2**63, "a 64-bit whole number"),
    ("seed", -(2**63) - 1, "a 64-bit whole number"),
    ("seed", 1.5, "a 64-bit whole number"),
    ("stop", "", "strings that are not empty"),
    ("stop", ["a", ""], "strings that are not empty"),
    ("stop", [5], "strings that are not empty"),
    ("stop_token_ids", [-1], "token ids of at least 0"),
    ("stop_token_ids", [2.5], "token ids of at least 0"),
    ("n", 0, "a whole number of at least 1"),
    ("n", 1.5, "a whole number of at least 1"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD, ids=[f"{name}={value}" for name, value, _ in BAD])
def test_a_bad_value_is_refused_by_name_with_what_is_allowed(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=.* is not allowed: use .*{allowed}$") as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    worst = next(iter(value)) if isinstance(value, (dict, list)) and len(value) == 1 else value
    assert str(worst) in str(caught.value) or repr(worst) in str(caught.value), "the message must show the value"


def test_every_checked_field_has_a_bad_example_here() -> None:
    """A field added later is checked later, or is one that takes any truth value."""
    assert {field.name for field in fields(SamplingParams)} - {name for name, _, _ in BAD} == {
        "ignore_eos",
        "logprobs",
        "skip_special_tokens",
    }


def test_every_field_says_what_it_does() -> None:
    assert all(field.metadata["help"] for field in fields(SamplingParams))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 4, "min_new_tokens": 4},
        {"temperature": 0},
        {"temperature": 1e-6},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 0, "top_k": 0},
        {"min_p": 1},
        {"logit_bias": {0: -INF}},
        {"logit_bias": {"7": 1}},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"stop": ()},
        {"stop_token_ids": range(3)},
        {"n": 100},
    ],
    ids=str,
)
def test_the_ends_of_what_is_allowed_are_allowed(settings: dict[str, Any]) -> None:
    SamplingParams(**settings)


def test_with_checks_again() -> None:
    params = SamplingParams(max_new_tokens=8, min_new_tokens=4)
    assert params.with_(temperature=0.5) == SamplingParams(max_new_tokens=8, min_new_tokens=4, temperature=0.5)
    with pytest.raises(ValueError, match="min_new_tokens=4"):
        params.with_(max_new_tokens=3)
    assert params.temperature == 0


def test_equal_settings_are_equal_however_they_were_written() -> None:
    """Lists or tuples, one string or a list of it, ids as JSON gives them; and they hash equal."""
    written = SamplingParams(stop="x", stop_token_ids=[1, 2], logit_bias={"5": 1, "3": 2}, temperature=1)  # type: ignore[dict-item]
    usual = SamplingParams(stop=("x",), stop_token_ids=(1, 2), logit_bias={3: 2.0, 5: 1.0}, temperature=1.0)
    assert written == usual
    assert hash(written) == hash(usual)
    assert written.law() == usual.law() and hash(written.law()) == hash(usual.law())
    assert written.stop == ("x",)


def test_settings_cannot_be_changed_from_outside() -> None:
    stop, bias = ["x"], {3: 1.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("y")
    bias[4] = 1.0
    assert params.stop == ("x",) and params.logit_bias == {3: 1.0}
    with pytest.raises(FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


LAWS: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {1: 2.0},
    "min_new_tokens": 2,
}
NOT_LAWS: dict[str, Any] = {
    "max_new_tokens": 7,
    "seed": 3,
    "stop": "x",
    "stop_token_ids": [4],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "logprobs": True,
    "n": 2,
}


def test_a_law_is_told_apart_by_what_decides_the_distribution_and_by_nothing_else() -> None:
    """Rows of equal laws are processed together: a field left out would give a row its neighbour's distribution."""
    usual = SamplingParams(temperature=1.0)
    assert {field.name for field in fields(SamplingParams)} == LAWS.keys() | NOT_LAWS.keys()
    for name, value in LAWS.items():
        assert usual.with_(**{name: value}).law() != usual.law(), name
    for name, value in NOT_LAWS.items():
        assert usual.with_(**{name: value}).law() == usual.law(), name
    # With a minimum length, what counts as an end decides which tokens cannot be chosen.
    minimum = usual.with_(min_new_tokens=2)
    for name in ("stop_token_ids", "ignore_eos"):
        assert minimum.with_(**{name: NOT_LAWS[name]}).law() != minimum.law(), name


@pytest.mark.parametrize(
    ("settings", "is_plain"),
    [
        ({}, True),
        ({"temperature": 0.7}, True),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, True),
        ({"temperature": 0.7, "top_k": 5}, False),
        ({"temperature": 0.7, "top_p": 0.5}, False),
        ({"temperature": 0.7, "min_p": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"min_new_tokens": 1}, False),
        ({"stop": "x", "stop_token_ids": [3], "ignore_eos": True, "seed": 3, "logprobs": True}, True),
    ],
    ids=str,
)
def test_plain_settings_are_those_whose_choice_needs_neither_history_nor_filters(
    settings: dict[str, Any], is_plain: bool
) -> None:
    """Filters cannot change an argmax, so greedy settings stay plain under them."""
    params = SamplingParams(**settings)
    assert params.is_plain == is_plain
    assert params.is_pathless == params.with_(top_k=0, top_p=1.0, min_p=0.0).is_plain


@pytest.mark.parametrize("name", ["auto", *DTYPES, *WEIGHT_DTYPES])
def test_every_dtype_may_be_asked_for(name: str) -> None:
    assert TargetOptions(dtype=name).dtype == DraftOptions(draft_dtype=name).draft_dtype == name


@pytest.mark.parametrize("name", ["bf16", "float", "", "INT8"])
def test_a_misspelt_dtype_is_refused_before_torch_is_needed(name: str) -> None:
    for make in (lambda: TargetOptions(dtype=name), lambda: DraftOptions(draft_dtype=name)):
        with pytest.raises(ValueError, match=f"^dtype={name!r} is not known: use auto, float32, bfloat16, float16, int8"):
            make()


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:11", "mps", "xpu:1"])
def test_devices_have_names(name: str) -> None:
    assert TargetOptions(device=name).device == name


@pytest.mark.parametrize("name", ["gpu", "", "cuda:", "cuda:x", "auto:0", "cuda 0"])
def test_a_misspelt_device_is_refused_before_torch_is_needed(name: str) -> None:
    with pytest.raises(ValueError, match=f"^device={name!r} is not known: use auto, cpu, cuda or cuda:N$"):
        TargetOptions(device=name)
