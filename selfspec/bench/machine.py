"""This machine as decoding sees it: processor, memory bandwidth, and how far above a plain pass's floor speculation runs.

A plain pass reads every weight once, so bandwidth over weights is the most that plain decoding can give: its ceiling. A
verify pass reads them once for several tokens, and so may exceed it. Describing the machine needs no model.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from selfspec.model.target import Target

# How many times the caches the buffer is, which is read for the bandwidth; and its least and its largest size.
CACHES, LEAST_BYTES, MOST_BYTES = 4, 1 << 28, 1 << 29
NUM_READS = 5
# The nodes of the passes in a cost curve.
NODES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
NUM_PASSES = 3
# Tokens before the tree of a pass that is timed.
PREFIX = 64
# A pass that costs at most so much more than one over a root alone is called cheap.
CHEAP = 1.25
# What torch calls a processor without any instruction set that it knows, and extensions that it uses besides.
NO_SET = ("DEFAULT", "NO AVX")
EXTENSIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx_vnni": "AVX-VNNI"}


@dataclass(frozen=True)
class Machine:
    """Processor, instruction set as torch uses it, and the threads that compute on so many cores."""

    cpu: str
    instruction_set: str
    num_threads: int
    num_cores: int


def this_machine() -> Machine:
    """What the system and torch say of this machine."""
    lines = _cpuinfo()
    name = lines.get("model name") or _apple_name() or platform.processor() or platform.machine()
    found = torch.backends.cpu.get_cpu_capability()
    flags = set(lines.get("flags", "").split())
    names = [] if found in NO_SET else [found]
    names += [name for flag, name in EXTENSIONS.items() if flag in flags and found.startswith("AVX")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(name, ", ".join(names) or platform.machine(), torch.get_num_threads(), cores)


def _cpuinfo() -> dict[str, str]:
    """The first processor of Linux's list; empty elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def _apple_name() -> str:
    if sys.platform != "darwin":
        return ""
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def read_bandwidth(device: torch.device | str = "cpu") -> float:
    """Bytes per second that the device reads from its memory, from the fastest of a few reads. It takes half a second."""
    device = torch.device(device)
    size = 1 << 30 if device.type == "cuda" else min(max(CACHES * _cache_bytes(), LEAST_BYTES), MOST_BYTES)
    buffer = torch.ones(size // 4, device=device)
    seconds = []
    for _ in range(NUM_READS + 1):
        start = time.perf_counter()
        # A sum reads all and writes nothing; its value waits for the device.
        float(buffer.sum())
        seconds.append(time.perf_counter() - start)
    # The first read is a warm-up.
    return size / min(seconds[1:])


def _cache_bytes() -> int:
    """Bytes of all last-level caches, each counted once; 0 where Linux does not say."""
    caches: dict[str, int] = {}
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        try:
            shared, size = ((folder / name).read_text().strip() for name in ("shared_cpu_list", "size"))
        except OSError:
            continue
        caches[shared] = int(size.removesuffix("K")) << 10
    return sum(caches.values())


@dataclass(frozen=True)
class Ceiling:
    """The most that plain decoding can give: `bandwidth` bytes per second over the bytes that a token reads."""

    bandwidth: float
    bytes_per_token: int

    @property
    def seconds(self) -> float:
        """The floor of a pass."""
        return self.bytes_per_token / self.bandwidth

    @property
    def tokens_per_second(self) -> float:
        return self.bandwidth / self.bytes_per_token


@dataclass(frozen=True)
class Measured:
    """The ceiling of a loaded target on its device, and seconds of a pass by its nodes."""

    ceiling: Ceiling
    times: dict[int, float]


def measure(target: Target) -> Measured:
    """Measure a target on its device; some seconds on a CPU.

    Bandwidth is measured before the passes and after them, and the faster counts, because other work slows a machine down at
    times, and never speeds it up.
    """
    # Not above, because doctor needs no transformers.
    from selfspec.bench.steps import weight_bytes

    before = read_bandwidth(target.device)
    times = pass_times(target)
    bandwidth = max(before, read_bandwidth(target.device))
    return Measured(Ceiling(bandwidth, weight_bytes(target.model)), times)


def pass_times(target: Target, nodes: Sequence[int] = NODES) -> dict[int, float]:
    """Seconds of the fastest pass over a random tree of each size. It takes some seconds on a CPU.

    All sizes are timed in turn, several times, so a slow spell of the machine meets none of them alone.
    """
    from selfspec.bench.steps import clock_of, random_tree

    now = clock_of(target.device)
    best: dict[int, float] = {}
    with target.lock:
        cache = target.new_cache()
        row = cache.open_row()
        prefix = torch.arange(PREFIX, device=target.device) % target.config.vocab_size
        target.prefill(prefix, row, cache)
    trees = {size: random_tree(target, size) for size in nodes}
    # The first round is a warm-up.
    for number in range(NUM_PASSES + 1):
        for size, tree in trees.items():
            with target.lock:
                start = now()
                target.verify(tree, [row], cache)
                seconds = now() - start
            if number:
                best[size] = min(seconds, best.get(size, seconds))
    cache.release(row)
    return best


def cheap_nodes(times: Mapping[int, float]) -> int:
    """The largest measured tree whose pass costs hardly more than one over the root alone."""
    return max(nodes for nodes, seconds in times.items() if seconds <= CHEAP * times[1])


def verdict(ceiling: Ceiling, plain: float, best: tuple[str, float] | None) -> str:
    """What the figures say, in words.

    Args:
        plain: tokens per second of plain decoding.
        best: the fastest drafter's label and tokens per second; None before a race.
    """
    top = ceiling.tokens_per_second
    words = f"Plain decoding gives {plain:.1f} of the {top:.1f} tokens/s that this memory allows ({plain / top:.0%})."
    if best is None:
        return f"{words} Run a race under Compare to see where the drafters stand."
    label, speed = best
    if speed > top:
        return f"{words} {label} gives {speed:.1f}: {speed / top:.2f} times what plain decoding could ever give here."
    relation = f"{speed / plain:.2f} times plain decoding, and {speed / top:.0%} of its ceiling"
    return f"{words} {label} gives {speed:.1f}: {relation}."


def levers(machine: Machine, ceiling: Ceiling, times: Mapping[int, float], *, dtype: str, is_cuda: bool) -> Iterator[str]:
    """What would make decoding faster here, the most promising first."""
    cheap = cheap_nodes(times)
    above_floor = times[1] / ceiling.seconds
    if not is_cuda and machine.num_threads < machine.num_cores:
        yield (
            f"{machine.num_threads} of {machine.num_cores} cores compute: set OMP_NUM_THREADS={machine.num_cores}, if "
            "nothing else needs the others."
        )
    if above_floor > 2:
        yield (
            f"A plain pass takes {above_floor:.1f} times as long as reading its weights, because computing and launching "
            "take the rest: a larger target would lose less."
        )
    elif dtype == "float32":
        yield "A pass takes little more than reading its weights: --dtype bfloat16 reads half as much."
    if cheap > 1:
        yield (
            f"A pass over {cheap} nodes takes at most {CHEAP:g} times as long as one over a single token: drafts of that "
            "size are all but free to verify, so a drafter that is right more often pays at once."
        )
    else:
        yield "Every further node costs: only short drafts that are nearly always right can pay here."
