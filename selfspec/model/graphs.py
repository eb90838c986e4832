"""CUDA graphs: the device work of a draft or verify pass, launched as a whole without host time for each kernel.

A function of tensors is captured once for each key and shape of its arguments, the second time that they come. Later calls
copy the arguments to where the graph reads them, and replay it. What cannot be captured (a modeling file that reads from the
device, memory that has run out) runs as it is, after one warning.

Invariant: a result that is not copied is valid only until another graph runs, because graphs share one pool of memory. They
never run at the same time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

Function = Callable[..., tuple[torch.Tensor, ...]]

# The most keys that are remembered. A forgotten one costs a run without a graph, or one more attempt to capture it.
MAX_KEYS = 4096


@dataclass
class _Entry:
    """A captured function: where its arguments go, and where its results are. A rehearsal calls the function itself."""

    function: Function | None
    graph: Any
    inputs: list[torch.Tensor]
    outputs: tuple[torch.Tensor, ...]
    num_bytes: int


class Graphs:
    """The graphs of one device.

    Args:
        max_bytes: the most memory that all graphs may hold; beyond it the graph unused for longest is dropped.
        is_rehearsal: for tests, on any device: capture nothing, but call the function that would have been captured, with
            copied arguments. A value that a graph would freeze is frozen here too.
    """

    def __init__(self, device: torch.device, *, max_bytes: int | None = None, is_rehearsal: bool = False) -> None:
        self.device = device
        self.is_rehearsal = is_rehearsal
        if max_bytes is None:
            max_bytes = 0 if is_rehearsal else torch.cuda.get_device_properties(device).total_memory // 10
        self.max_bytes = max_bytes
        # Calls that took long because they compiled kernels or captured a graph.
        self.num_set_up = 0
        self._pool: Any = None if is_rehearsal else torch.cuda.graph_pool_handle()
        self._stream: Any = None if is_rehearsal else torch.cuda.Stream(device)
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        # Keys that have come, and those whose function could not be captured.
        self._seen: dict[Hashable, None] = {}
        self.refused: dict[Hashable, None] = {}

    @property
    def num_bytes(self) -> int:
        """The memory that captured graphs hold."""
        return sum(entry.num_bytes for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __call__(
        self, key: Hashable, function: Function, inputs: Sequence[torch.Tensor], *, num_kept: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Run `function(*inputs)`, by a graph where there is one.

        Args:
            key: names the function and everything that it depends on besides `inputs`, such as numbers and addresses.
            function: only device work, which may be repeated; its results are tensors. Later calls with the same key and
                shapes replay the function that was captured, not this one.
            inputs: tensors of any shape on the device; small ones may be on the host.
            num_kept: the first `num_kept` results are copies for the caller, all by default. The others are valid only until
                another graph runs.
        """
        full_key = (key, *((tuple(each.shape), each.dtype) for each in inputs))
        entry = self._entries.get(full_key)
        if entry is None:
            if full_key not in self._seen or full_key in self.refused:
                # The first time without a graph, because kernels are compiled and a shape may never return.
                self.num_set_up += full_key not in self._seen
                _remember(self._seen, full_key)
                return function(*(each.to(self.device) for each in inputs))
            self.num_set_up += 1
            entry = self._capture(full_key, function, inputs)
            if entry is None:
                return function(*(each.to(self.device) for each in inputs))
        self._entries.move_to_end(full_key)
        for static, given in zip(entry.inputs, inputs, strict=True):
            if given.device != static.device:
                # From other memory the copy could wait for the device.
                given = given.pin_memory()
            static.copy_(given, non_blocking=True)
        if self.is_rehearsal:
            # Overwrite what other graphs left, as a real graph may.
            for other in self._entries.values():
                for result in other.outputs:
                    result.fill_(torch.nan if result.is_floating_point() else -7)
            assert entry.function is not None
            fresh = entry.function(*entry.inputs)
            if not entry.outputs:
                # A capture runs nothing, so this is the first time.
                entry.outputs = tuple(each.clone() for each in fresh)
            for static, result in zip(entry.outputs, fresh, strict=True):
                static.copy_(result)
        else:
            entry.graph.replay()
        num_kept = len(entry.outputs) if num_kept is None else num_kept
        return (*(each.clone() for each in entry.outputs[:num_kept]), *entry.outputs[num_kept:])

    def _capture(self, key: Hashable, function: Function, inputs: Sequence[torch.Tensor]) -> _Entry | None:
        static = [each.to(self.device, copy=True).contiguous() for each in inputs]
        if self.is_rehearsal:
            entry = _Entry(function, None, static, (), 0)
            self._entries[key] = entry
            return entry
        before = torch.cuda.memory_reserved(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize(self.device)
            outputs = self._record(graph, function, static)
        except (RuntimeError, ValueError, torch.OutOfMemoryError) as error:
            _remember(self.refused, key)
            reason = str(error).strip().partition("\n")[0]
            logger.warning("no CUDA graph of a pass could be made: it runs kernel by kernel, which is slower (%s)", reason)
            torch.cuda.synchronize(self.device)
            return None
        # Without the function, which would keep a drafter alive that is not served any more.
        entry = _Entry(None, graph, static, outputs, max(torch.cuda.memory_reserved(self.device) - before, 0))
        self._entries[key] = entry
        while self.num_bytes > self.max_bytes and len(self._entries) > 1:
            self._entries.popitem(last=False)
        return entry

    def _record(self, graph: Any, function: Function, static: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Capture a function. `torch.cuda.graph` would give the allocator's memory back first, which takes long."""
        with torch.cuda.stream(self._stream):
            # Thread-local, because other threads may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                return function(*static)
            finally:
                graph.capture_end()


def _remember(keys: dict[Hashable, None], key: Hashable) -> None:
    """Add a key, and forget the oldest where there are too many."""
    keys[key] = None
    if len(keys) > MAX_KEYS:
        del keys[next(iter(keys))]
