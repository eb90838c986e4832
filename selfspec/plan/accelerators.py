"""Accelerators by name, with memory, bandwidth and peak as their vendors publish them (dense bfloat16, no sparsity)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

GB = 1e9
# What a layer's launches add to a pass that a CUDA graph replays, whatever the layer's size. On an H200, passes of
# SmolLM2-135M (30 layers) and of two 8B models (32 layers) took 27 to 32 µs a layer more than their weights' time.
LAYER_SECONDS = 30e-6


@dataclass(frozen=True)
class Card:
    """One accelerator.

    Attributes:
        memory: bytes.
        bandwidth: bytes per second that it reads.
        peak: bfloat16 FLOPs per second.
        layer_seconds: what launching the kernels of one layer adds to a pass.
    """

    name: str
    memory: float
    bandwidth: float
    peak: float = math.inf
    layer_seconds: float = 0.0


def _card(name: str, memory_gb: float, bandwidth_gbs: float, tflops: float) -> Card:
    return Card(name, memory_gb * GB, bandwidth_gbs * GB, tflops * 1e12, LAYER_SECONDS)


CARDS = {
    card.name: card
    for card in (
        _card("a10", 24, 600, 125),
        _card("a100-40gb", 40, 1555, 312),
        _card("a100-80gb", 80, 2039, 312),
        _card("b200", 180, 8000, 2250),
        _card("h100", 80, 3350, 989),
        _card("h100-pcie", 80, 2000, 756),
        _card("h200", 141, 4800, 989),
        _card("l4", 24, 300, 121),
        _card("l40s", 48, 864, 362),
        _card("mi300x", 192, 5300, 1307),
        _card("rtx3090", 24, 936, 71),
        _card("rtx4090", 24, 1008, 165),
    )
}


def card_named(name: str) -> Card:
    """Find a card in the table.

    Raises:
        ValueError: there is no such card; the message lists those in the table.
    """
    if (card := CARDS.get(name.lower())) is None:
        raise ValueError(f"gpu {name!r} is not in the table: use {', '.join(CARDS)}, or give its memory and bandwidth")
    return card


def card_of_device(device_name: str, memory: float) -> Card | None:
    """The card that CUDA calls `device_name`, with the memory of this device; None if the table has no such card."""
    words = set(re.split(r"[^a-z0-9]+", device_name.lower().replace("rtx ", "rtx")))
    # The card with the most words in the device's name; among cards that differ only in memory, the nearest.
    fitting = [card for card in CARDS.values() if words.issuperset(_words(card.name))]
    if not fitting:
        return None
    card = max(fitting, key=lambda card: (len(_words(card.name)), -abs(card.memory - memory)))
    return replace(card, memory=memory)


def _words(name: str) -> list[str]:
    """The words of a card's name without its memory size, which devices write in several ways."""
    return [word for word in name.split("-") if not word.endswith("gb")]
