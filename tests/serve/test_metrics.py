"""Metrics count what they are told, and never raise: an odd step costs figures, and no answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from selfspec.engine import StepCounts
from selfspec.serve.metrics import Metrics

Call = Callable[[Metrics], None]


def step(**changes: Any) -> StepCounts:
    """A step of one sequence with two drafts, of which one was accepted."""
    return replace(StepCounts("ngram", num_nodes=3, num_drafted=[2], num_accepted=[1]), **changes)


ODD: dict[str, Call] = {
    "a step without sequences": lambda m: m.stepped(step(num_drafted=[], num_accepted=[])),
    "a step of nothing": lambda m: m.stepped(None),  # type: ignore[arg-type]
    "a step without a tree": lambda m: m.stepped(step(num_nodes=None)),
    "a drafter without a name": lambda m: m.stepped(step(name=None)),
    "fewer than no drafts": lambda m: m.stepped(step(num_drafted=[-1], num_accepted=[0])),
    "fewer than none accepted": lambda m: m.stepped(step(num_drafted=[2], num_accepted=[-3])),
    "counts that are no numbers": lambda m: m.stepped(step(num_drafted=["2"], num_accepted=[None])),
    "no tokens": lambda m: m.emitted([(0, 0.1, False)]),
    "fewer than no tokens": lambda m: m.emitted([(-1, 0.1, True)]),
    "seconds that are no number": lambda m: m.emitted([(1, "soon", True)]),  # type: ignore[arg-type]
    "a completion of nothing": lambda m: m.finished(None, 1.0),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", ODD)
def test_odd_news_does_not_raise_and_the_next_is_counted(name: str) -> None:
    metrics = Metrics("tiny")
    ODD[name](metrics)
    before = sample(metrics, "spec_decode_num_accepted_tokens_total")
    metrics.stepped(step())
    metrics.emitted([(2, 0.1, True)])
    metrics.failed(is_cancelled=True)
    metrics.preempted()
    assert sample(metrics, "spec_decode_num_accepted_tokens_total") == before + 1
    assert sample(metrics, "request_failure_total") == sample(metrics, "num_preemptions_total") == 1


def sample(metrics: Metrics, name: str) -> float:
    return sum(s.value for family in metrics.registry.collect() for s in family.samples if s.name == f"selfspec:{name}")


def test_a_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("tiny")
    for _ in range(3):
        metrics.stepped(step(num_nodes=None))
    assert [record.getMessage() for record in caplog.records] == [
        "metrics: stepped failed; some figures are missing from now on"
    ]


def test_a_metric_that_fails_ends_no_answer(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    body = {"model": "tiny", "prompt": "the cat sat on the mat and the cat sat", "temperature": 0}

    def answer() -> str:
        whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
        assert whole.status_code == 200, whole.text
        return whole.json()["choices"][0]["text"]

    expected = answer()

    # Every step counts its drafts here.
    monkeypatch.setattr(server.service.metrics, "_rows", None)
    assert answer() == expected
    assert server.service.metrics.failed_methods == {"stepped"}
