"""How many threads torch uses on a CPU for a model that is laid out for decoding.

More are not always faster: virtual processors may be two halves of one core, and other work may hold some. Invariant: what
the user has chosen stays, by an environment variable or by `torch.set_num_threads`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import torch

logger = logging.getLogger(__name__)

# With these a user chooses the number of threads.
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Fewer threads must be so many times faster, because a measurement has noise.
LEAST_GAIN = 1.1
NUM_ROUNDS = 2


def are_free() -> bool:
    """Whether the number of threads is torch's own choice: all processors of this process, or one of every two."""
    if any(os.environ.get(name) for name in VARIABLES):
        return False
    has_affinity = hasattr(os, "sched_getaffinity")
    num_processors = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return 1 < torch.get_num_threads() in (num_processors, num_processors // 2)


def settle(measure: Callable[[], float]) -> None:
    """Set the number of threads with which `measure` gives the fewest seconds, if the number is torch's own choice."""
    if not are_free():
        return
    most = torch.get_num_threads()
    counts = [most >> halvings for halvings in range(most.bit_length())]
    seconds: dict[int, float] = {}
    for _ in range(NUM_ROUNDS):
        for count in counts:
            torch.set_num_threads(count)
            took = measure()
            seconds[count] = min(took, seconds.get(count, took))
    chosen = best(seconds)
    torch.set_num_threads(chosen)
    if chosen != most:
        logger.info("%d threads are faster here than %d: set OMP_NUM_THREADS to choose yourself", chosen, most)


def best(seconds: Mapping[int, float]) -> int:
    """The fastest number of threads; the largest one unless another gains enough."""
    fastest, most = min(seconds, key=lambda count: seconds[count]), max(seconds)
    return fastest if seconds[most] > LEAST_GAIN * seconds[fastest] else most
