"""Figures of a load are those of its answers: nothing is dropped, and tokens count when they came."""

import pytest

from selfspec.bench.serve_client import Answer, acceptance_length, read_counters
from selfspec.bench.serve_figures import Spread, most_at_once, summarise, tokens_until


def answer(due: float, times: list[float], ended: float, num_tokens: int, failure: str | None = None, **more) -> Answer:
    return Answer(due, times, ended, num_tokens, failure=failure, **more)


# Two streams: one gives two answers, the other one.
ANSWERS = [
    answer(0.0, [1.0, 2.0], 2.0, 8, num_prompt_tokens=10),
    answer(2.0, [3.0, 4.0, 6.0, 10.0], 10.0, 8, num_prompt_tokens=30),
    answer(0.0, [2.0, 4.0], 4.0, 4),
]


def test_rates_are_over_the_whole_run_and_while_all_streams_are_busy() -> None:
    figures = summarise(ANSWERS, 2)
    assert (figures.num_done, figures.num_tokens, figures.seconds) == (3, 20, 10.0)
    assert (figures.tokens_per_second, figures.requests_per_second) == (2.0, 0.3)
    # Until 4.0 s, by when half of the long answer's chunks had come.
    assert (figures.busy_seconds, figures.busy_tokens_per_second) == (4.0, (8 + 4 + 4) / 4)
    assert (figures.most_at_once, figures.prompt_tokens, figures.is_counted) == (2, 20.0, True)


def test_arrivals_and_too_few_requests_are_never_all_busy() -> None:
    assert summarise(ANSWERS, None).busy_tokens_per_second is None
    assert summarise(ANSWERS, 4).busy_tokens_per_second is None
    assert summarise(ANSWERS, 3).busy_seconds == 2.0


def test_latencies_are_those_of_whole_answers() -> None:
    failed = answer(0.0, [9.0], 9.5, 1, "refuses (429): full")
    figures = summarise([*ANSWERS, failed, failed], 2)
    assert figures.first_token == Spread(1.0, pytest.approx(1.98))
    assert figures.between_chunks == Spread(2.0, pytest.approx(3.92))
    # 1 s for 7 tokens, 2 s for 3, and 7 s for 7.
    assert figures.per_token is not None and figures.per_token.p50 == pytest.approx(2 / 3)
    assert figures.whole == Spread(4.0, pytest.approx(7.92))
    assert (figures.failures, figures.num_failed, figures.num_done) == ({"refuses (429): full": 2}, 2, 3)
    assert figures.num_tokens == 20, "what a failed answer brought is no output"


def test_nothing_but_failures_has_no_latencies() -> None:
    figures = summarise([answer(0.0, [], 1.0, 0, "gone")], 1)
    assert (figures.num_done, figures.tokens_per_second, figures.first_token, figures.whole) == (0, 0.0, None, None)


def test_an_answer_of_one_token_without_text() -> None:
    only = answer(1.0, [], 3.0, 1)
    assert (only.first_seconds, only.seconds_per_token) == (2.0, None)
    assert tokens_until([only], 2.9) == 0 and tokens_until([only], 3.0) == 1


def test_an_answer_that_follows_another_is_not_beside_it() -> None:
    assert most_at_once([answer(0.0, [], 1.0, 1), answer(1.0, [], 2.0, 1)]) == 1


def test_chunks_are_said_to_be_counted() -> None:
    assert not summarise([*ANSWERS, answer(0.0, [1.0], 1.0, 1, is_counted=False)], 2).is_counted


OURS = """# HELP selfspec:generation_tokens_total tokens
# TYPE selfspec:generation_tokens_total counter
selfspec:generation_tokens_total{model_name="a b {c}"} 120.0
selfspec:verify_rows_total{drafter="eagle",model_name="m"} 30.0
selfspec:verify_rows_total{drafter="none",model_name="m"} 1e1
selfspec:kv_cache_usage_perc NaN
Nothing was found, though 2 pages were asked
"""
VLLM = """vllm:spec_decode_num_drafts_total{engine="0"} 50.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 75.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 40.0
"""


def test_acceptance_is_what_the_counters_have_grown_by() -> None:
    ours, vllm = read_counters(OURS), read_counters(VLLM)
    assert set(ours) == {"selfspec:generation_tokens_total", "selfspec:verify_rows_total"}
    assert (ours["selfspec:generation_tokens_total"], ours["selfspec:verify_rows_total"]) == (120.0, 40.0)
    before = {"selfspec:generation_tokens_total": 20.0, "selfspec:verify_rows_total": 20.0}
    assert acceptance_length(before, ours) == 5.0
    assert acceptance_length({}, vllm) == 2.5
    assert acceptance_length(vllm, vllm) is None and acceptance_length({}, {}) is None
