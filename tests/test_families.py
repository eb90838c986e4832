"""The sweep over transformers' families calls a model served, refused or wrong, and survives one that dies or hangs."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import families
import pytest
from families import CRASH, EQUAL, REFUSED, UNTRIED, WRONG, Case, judge, judge_apart


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "NUM_TOKENS", 5)


@pytest.mark.parametrize(
    ("case", "verdict", "note"),
    [
        (Case("qwen3"), EQUAL, ""),
        # A drafter may be refused where the model is served.
        (
            Case("gemma3n_text", "own states", {"num_kv_shared_layers": 0}),
            EQUAL,
            "truncated:1 is refused: gemma3n_text computes",
        ),
        (Case("mamba"), REFUSED, "only full and sliding attention are served"),
        (Case("falcon"), REFUSED, "does not follow transformers' attention interface"),
        (Case("gemma3_text", "odd", {"num_attention_heads": 3}), UNTRIED, ""),
    ],
)
def test_a_family_is_served_or_refused(case: Case, verdict: str, note: str) -> None:
    result = judge(case)
    assert result.verdict == verdict and note in result.note


def test_one_wrong_token_of_one_drafter_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = families.generate

    def bent(*args: object, drafter: object, **options: object) -> list[object]:
        answers = generate(*args, drafter=drafter, **options)  # type: ignore[arg-type]
        return answers if drafter is None else [replace(a, token_ids=[*a.token_ids[:-1], 60]) for a in answers]

    monkeypatch.setattr(families, "generate", bent)
    result = judge(Case("llama"))
    assert result.verdict == WRONG and result.note.startswith("ngram in batches of 1, after a prompt of 7 tokens: [")


def test_a_model_that_dies_or_hangs_is_a_fault_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "judge", lambda case: os._exit(3))
    assert judge_apart(Case("llama")).note == "the process died with exit code 3"
    monkeypatch.setattr(families, "judge", lambda case: time.sleep(60))
    result = judge_apart(Case("llama"), limit=0.2)
    assert (result.verdict, result.note) == (CRASH, "no answer in 0 seconds")
