"""What the machine can do: it is named, its bandwidth is plausible, and the words follow the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfspec import Target
from selfspec.bench import machine
from selfspec.bench.machine import Ceiling, Machine, cheap_nodes, levers, measure, pass_times, read_bandwidth, verdict
from selfspec.bench.steps import weight_bytes

GB = 1e9


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir, device="cpu")


def test_this_machine_has_a_name_and_threads():
    found = machine.this_machine()
    assert found.cpu and found.instruction_set
    assert 1 <= found.num_cores and 1 <= found.num_threads


@pytest.mark.parametrize(
    ("flags", "capability", "named"),
    [
        ("sse avx2", "AVX2", "AVX2"),
        ("avx2 avx512f avx512_bf16", "AVX512", "AVX512, AVX512-BF16"),
        # Torch was told to leave AVX-512 alone, or cannot use it.
        ("avx2 avx512f avx_vnni", "AVX2", "AVX2, AVX-VNNI"),
    ],
)
def test_the_instruction_set_is_what_torch_uses(monkeypatch, flags, capability, named):
    monkeypatch.setattr(machine, "_cpuinfo", lambda: {"model name": "A processor", "flags": flags})
    monkeypatch.setattr(machine.torch.backends.cpu, "get_cpu_capability", lambda: capability)
    found = machine.this_machine()
    assert (found.cpu, found.instruction_set) == ("A processor", named)


def test_bandwidth_is_bytes_per_second(monkeypatch):
    monkeypatch.setattr(machine, "_cache_bytes", lambda: 0)
    monkeypatch.setattr(machine, "LEAST_BYTES", 1 << 24)
    # From a memory card to the fastest cache.
    assert 0.1 * GB < read_bandwidth() < 5000 * GB


def test_the_ceiling_is_the_faster_bandwidth_over_weights(target, monkeypatch):
    speeds = iter([10 * GB, 12 * GB, 9 * GB, 8 * GB])
    monkeypatch.setattr(machine, "read_bandwidth", lambda device: next(speeds))
    monkeypatch.setattr(machine, "pass_times", lambda target: {1: 0.5})
    for bandwidth in (12 * GB, 9 * GB):
        measured = measure(target)
        ceiling = measured.ceiling
        assert ceiling.bytes_per_token == weight_bytes(target.model)
        assert ceiling.tokens_per_second * ceiling.bytes_per_token == pytest.approx(bandwidth)
        assert ceiling.seconds == pytest.approx(1 / ceiling.tokens_per_second)
        assert measured.times == {1: 0.5}


def test_every_size_of_pass_is_timed_and_nothing_is_kept(target):
    times = pass_times(target, nodes=(1, 3, 8))
    assert list(times) == [1, 3, 8] and all(0 < seconds < 5 for seconds in times.values())
    assert target.lock.acquire(blocking=False)
    target.lock.release()


def test_passes_are_cheap_as_long_as_they_cost_little_more():
    assert cheap_nodes({1: 1.0, 2: 1.0, 8: 1.2, 16: 1.3}) == 8
    assert cheap_nodes({1: 1.0, 2: 1.3}) == 1
    # A slow spell in the middle does not end the curve.
    assert cheap_nodes({1: 1.0, 2: 1.4, 8: 1.1, 16: 2.0}) == 8


def test_the_verdict_follows_the_figures():
    ceiling = Ceiling(10 * GB, 1_000_000_000)
    assert verdict(ceiling, 5.0, None).endswith("Run a race under Compare to see where the drafters stand.")
    assert "gives 5.0 of the 10.0 tokens/s that this memory allows (50%)" in verdict(ceiling, 5.0, None)
    assert "EAGLE gives 20.0: 2.00 times what plain decoding could ever give" in verdict(ceiling, 5.0, ("EAGLE", 20.0))
    assert "EAGLE gives 8.0: 1.60 times plain decoding, and 80% of its ceiling" in verdict(ceiling, 5.0, ("EAGLE", 8.0))


def test_levers_name_what_is_left():
    ceiling = Ceiling(10 * GB, 1_000_000_000)
    idle = Machine("A", "AVX2", num_threads=1, num_cores=8)
    busy = Machine("A", "AVX2", num_threads=8, num_cores=8)
    flat, steep = {1: 0.12, 8: 0.13}, {1: 0.5, 8: 4.0}
    assert "OMP_NUM_THREADS=8" in next(levers(idle, ceiling, flat, dtype="float32", is_cuda=False))
    assert "bfloat16 reads half as much" in next(levers(busy, ceiling, flat, dtype="float32", is_cuda=False))
    assert "8 nodes" in next(levers(busy, ceiling, flat, dtype="bfloat16", is_cuda=False))
    told = list(levers(busy, ceiling, steep, dtype="float32", is_cuda=False))
    assert "5.0 times as long as reading" in told[0] and "only short drafts" in told[1]
    assert not any("OMP" in lever for lever in levers(idle, ceiling, flat, dtype="float32", is_cuda=True))
