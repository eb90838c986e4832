"""A server's live figures: rates between readings, and percentiles that lie where the entries lay."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("prometheus_client", reason="a server's metrics need prometheus-client: pip install 'selfspec[serve]'")

from selfspec.app.server_figures import Reading, between, difference, quantile
from selfspec.app.server_tab import live
from selfspec.engine import StepCounts
from selfspec.serve.metrics import Metrics

BOUNDS = [0.1, 0.5, 1.0, 5.0, float("inf")]


def test_readings_are_of_the_server_s_own_metrics():
    metrics = Metrics("tiny")
    metrics.watch("num_requests_running", "", lambda: 3)
    metrics.watch("kv_cache_usage_perc", "", lambda: 0.25)
    metrics.emitted([(1, 9.0, True)])
    before = Reading.of(metrics.text().decode(), 10.0)
    metrics.emitted([(1, 0.2, True), (20, 1.0, False)])
    metrics.stepped(StepCounts("eagle", num_nodes=9, num_drafted=[8], num_accepted=[2]))
    figures = between(before, Reading.of(metrics.text().decode(), 12.0))
    assert figures.tokens_per_second == pytest.approx(21 / 2)
    assert (figures.running, figures.waiting, figures.cache_use) == (3, 0, 0.25)
    assert figures.acceptance_length == 21 and figures.acceptance_rate == 0.25
    # The entry of the first reading is not one of these.
    assert figures.latencies["time_to_first_token_seconds"][99] <= 0.25
    assert 0.025 <= figures.latencies["inter_token_latency_seconds"][50] <= 0.05
    assert "e2e_request_latency_seconds" not in figures.latencies


@given(st.lists(st.floats(0, 20), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_lies_in_the_bucket_of_its_entry(values, share):
    counts = [(bound, float(sum(value <= bound for value in values))) for bound in BOUNDS]
    found = quantile(counts, share)
    entry = next(value for number, value in enumerate(sorted(values), start=1) if number >= share * len(values))
    at = bisect_left(BOUNDS, entry)
    low, high = [0.0, *BOUNDS][at], min(BOUNDS[at], 5.0)
    assert low <= found <= high
    assert quantile(counts, 0.5) <= quantile(counts, 0.9) <= quantile(counts, 0.99)


def test_a_difference_counts_each_bound_by_itself():
    assert difference([(0.1, 1), (1.0, 4)], [(0.1, 2), (1.0, 9)]) == [(0.1, 1), (1.0, 5)]
    assert difference((), [(0.1, 2)]) == [(0.1, 2)]


def test_the_tab_waits_for_two_readings_and_then_draws():
    metrics = Metrics("tiny")
    readings = [Reading.of(metrics.text().decode(), at) for at in (1.0, 3.0)]
    assert "Reading the server" in live(readings[:1])
    assert "<svg" in live(readings) and "Nobody has asked" in live(readings)
    # Who opens the tab after the work sees what the server has done.
    metrics.emitted([(1, 0.2, True)])
    idle = [Reading.of(metrics.text().decode(), at) for at in (5.0, 7.0)]
    assert "first token" in live(idle) and "since the server’s start" in live(idle)
    assert "of the last minutes" in live([*readings, *idle])
