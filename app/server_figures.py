"""A running server's figures from readings of its `/metrics`: rates between two readings, and percentiles of latencies."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from selfspec.bench.serve_client import acceptance_length, read_counters

PREFIX = "selfspec:"
# Histograms of seconds, with their names for people.
LATENCIES = {
    "time_to_first_token_seconds": "first token",
    "inter_token_latency_seconds": "between tokens",
    "e2e_request_latency_seconds": "whole answer",
}
PERCENTILES = (50, 90, 99)
BUCKET = re.compile(rf'^{PREFIX}(\w+)_bucket\{{.*?le="([^"]+)".*?\}} +([\d.e+]+)', re.MULTILINE)

# (upper bound in seconds, how many were at most as long), ascending.
Buckets = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Reading:
    """What `/metrics` said at `at`, in seconds of this side's clock."""

    at: float
    counters: Mapping[str, float]
    buckets: Mapping[str, Buckets]

    @classmethod
    def of(cls, text: str, at: float) -> Reading:
        buckets: dict[str, list[tuple[float, float]]] = {}
        for name, bound, count in BUCKET.findall(text):
            if name in LATENCIES:
                buckets.setdefault(name, []).append((float(bound), float(count)))
        counters = {name: value for name, value in read_counters(text).items() if not name.endswith("_bucket")}
        return cls(at, counters, buckets)

    def value(self, name: str) -> float:
        return self.counters.get(PREFIX + name, 0.0)


# Of a server that has just started.
NOTHING_YET = Reading(0.0, {}, {})


@dataclass(frozen=True)
class Figures:
    """What happened between two readings. Rates are per second of the reader's clock.

    Attributes:
        latencies: for each histogram that got entries, seconds by percentile.
    """

    tokens_per_second: float
    acceptance_length: float | None
    acceptance_rate: float | None
    running: float
    waiting: float
    cache_use: float
    latencies: dict[str, dict[int, float]]


def between(before: Reading, after: Reading) -> Figures:
    """The figures of the time between two readings of one server."""
    seconds = max(after.at - before.at, 1e-9)

    def grown(name: str) -> float:
        return max(after.value(name) - before.value(name), 0.0)

    drafted = grown("spec_decode_num_draft_tokens_total")
    latencies = {}
    for name in LATENCIES:
        counts = difference(before.buckets.get(name, ()), after.buckets.get(name, ()))
        if counts and counts[-1][1] > 0:
            latencies[name] = {percent: quantile(counts, percent / 100) for percent in PERCENTILES}
    return Figures(
        tokens_per_second=grown("generation_tokens_total") / seconds,
        acceptance_length=acceptance_length(before.counters, after.counters),
        acceptance_rate=grown("spec_decode_num_accepted_tokens_total") / drafted if drafted else None,
        running=after.value("num_requests_running"),
        waiting=after.value("num_requests_waiting"),
        cache_use=after.value("kv_cache_usage_perc"),
        latencies=latencies,
    )


def difference(before: Buckets, after: Buckets) -> list[tuple[float, float]]:
    """The entries of a histogram that came between two readings."""
    known = dict(before)
    return [(bound, count - known.get(bound, 0.0)) for bound, count in after]


def quantile(buckets: Buckets, share: float) -> float:
    """The value below which `share` of the entries lie, taken to be even within a bucket; the last finite bound at most."""
    wanted = share * buckets[-1][1]
    low, passed = 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted and count > passed:
            # The smaller of both, because the sum may be rounded up.
            return low if math.isinf(bound) else min(low + (bound - low) * (wanted - passed) / (count - passed), bound)
        low, passed = (low if math.isinf(bound) else bound), count
    return low
