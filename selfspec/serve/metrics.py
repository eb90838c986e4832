"""The metrics for Prometheus, under `selfspec:`. Names and meanings are vLLM's where vLLM has them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from selfspec.api import Completion
from selfspec.engine import Listener, StepCounts

logger = logging.getLogger(__name__)

# The time at which a series began is of no use here, and would double the number of series.
disable_created_metrics()

# In seconds, from one token on a fast GPU to a long answer on a slow CPU.
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
WINDOW_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)

P = ParamSpec("P")


def _never_raises(count: Callable[Concatenate[Metrics, P], None]) -> Callable[Concatenate[Metrics, P], None]:
    """A method that logs its own failure and returns: a metric that is wrong must not cost anyone an answer."""

    @functools.wraps(count)
    def guarded(self: Metrics, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            count(self, *args, **kwargs)
        except Exception:
            # Once for each method: what fails in one step is likely to fail in all.
            if count.__name__ not in self.failed_methods:
                self.failed_methods.add(count.__name__)
                logger.exception("metrics: %s failed; some figures are missing from now on", count.__name__)

    return guarded


class Metrics(Listener):
    """Counts what an engine does, and writes the figures down when asked. A listener's methods never raise.

    Args:
        model_name: the label that tells several servers apart.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.failed_methods: set[str] = set()

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"selfspec:{name}", help_text, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"selfspec:{name}", help_text, ["model_name"], buckets=buckets, registry=self.registry)
            return metric.labels(model_name)

        self._drafts = counter("spec_decode_num_drafts", "drafts verified", "drafter")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "draft tokens verified", "drafter")
        self._accepted = counter("spec_decode_num_accepted_tokens", "draft tokens emitted", "drafter")
        self._accepted_per_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos", "draft tokens emitted, by depth from 0", "drafter", "position"
        )
        self._passes = counter("verify_passes", "target passes", "drafter")
        self._plain_passes = counter("verify_passes_without_drafts", "target passes that verified no draft", "drafter")
        self._rows = counter("verify_rows", "sequences of target passes, summed over passes", "drafter")
        self._drafter_failures = counter("drafter_failures", "times that a drafter failed and was left out", "drafter")
        self._window = histogram("spec_decode_window", "draft nodes of a pass's tree", WINDOW_BUCKETS)
        self._prompt_tokens = counter("prompt_tokens", "prompt tokens of answered requests").labels(model_name)
        self._reused_tokens = counter("prefix_cache_hits", "prompt tokens that were in the cache already").labels(model_name)
        self._tokens = counter("generation_tokens", "emitted tokens").labels(model_name)
        self._successes = counter("request_success", "answers, by the reason for which they ended", "finished_reason")
        self._failures = counter("request_failure", "requests that ended without an answer", "reason")
        self._preemptions = counter("num_preemptions", "requests preempted because the cache was full").labels(model_name)
        self._first = histogram("time_to_first_token_seconds", "time from a request to its first tokens", REQUEST_BUCKETS)
        self._between = histogram(
            "inter_token_latency_seconds", "time between tokens, averaged over the tokens of a pass", TOKEN_BUCKETS
        )
        self._total = histogram("e2e_request_latency_seconds", "time from a request to its last token", REQUEST_BUCKETS)
        self._queue = histogram("request_queue_time_seconds", "time from a request to its prefill", REQUEST_BUCKETS)
        self._prefill = histogram("request_prefill_time_seconds", "time of a request's prefill", REQUEST_BUCKETS)
        self._decode = histogram("request_decode_time_seconds", "time of a request after its prefill", REQUEST_BUCKETS)

    def watch(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Add a gauge, which is read when Prometheus asks."""
        gauge = Gauge(f"selfspec:{name}", help_text, ["model_name"], registry=self.registry)
        gauge.labels(self._model_name).set_function(read)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    @_never_raises
    def stepped(self, step: StepCounts) -> None:
        labels = (self._model_name, step.name)
        drafted, accepted = step.num_drafted, step.num_accepted
        self._passes.labels(*labels).inc()
        self._rows.labels(*labels).inc(len(drafted))
        self._window.observe(step.num_nodes - 1)
        if not any(drafted):
            self._plain_passes.labels(*labels).inc()
            return
        self._drafts.labels(*labels).inc(sum(count > 0 for count in drafted))
        self._draft_tokens.labels(*labels).inc(sum(drafted))
        self._accepted.labels(*labels).inc(sum(accepted))
        for depth in range(max(accepted)):
            num_accepted = sum(count > depth for count in accepted)
            self._accepted_per_pos.labels(*labels, str(depth)).inc(num_accepted)

    @_never_raises
    def emitted(self, pieces: Sequence[tuple[int, float, bool]]) -> None:
        for num_tokens, seconds, is_first in pieces:
            self._tokens.inc(num_tokens)
            if is_first:
                self._first.observe(seconds)
                continue
            # The tokens of one pass come together. Each gets its share, so the sum is the time that passed.
            for _ in range(num_tokens):
                self._between.observe(seconds / num_tokens)

    @_never_raises
    def finished(self, completion: Completion, seconds: float) -> None:
        self._prompt_tokens.inc(completion.num_prompt_tokens)
        self._reused_tokens.inc(completion.num_reused_tokens)
        self._successes.labels(self._model_name, completion.finish_reason).inc()
        self._total.observe(seconds)
        self._queue.observe(completion.queue_seconds)
        self._prefill.observe(completion.prefill_seconds)
        self._decode.observe(completion.seconds - completion.prefill_seconds)

    @_never_raises
    def failed(self, *, is_cancelled: bool) -> None:
        self._failures.labels(self._model_name, "cancelled" if is_cancelled else "error").inc()

    @_never_raises
    def preempted(self) -> None:
        self._preemptions.inc()

    def drafter_failed(self, name: str) -> None:
        self._drafter_failures.labels(self._model_name, name).inc()
