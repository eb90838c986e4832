"""Random numbers as a function of (key, position, stream): there is no state to seed, to store or to get out of step.

Two decoding runs that reach the same position of the same request draw the same number there, whether the token is one of
eight siblings, the last of a draft, or decoded alone. The generator is SplitMix64 in counter mode
(https://doi.org/10.1145/2660193.2660195) in plain int64 tensor operations, so CPU and GPU agree bit for bit.
"""

from __future__ import annotations

from enum import IntEnum

import torch


class Stream(IntEnum):
    """The independent sequences of numbers at one position. The accept draw and the residual draw must never share one."""

    TARGET = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 [...]."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function, element by element: a bijection of int64 [...] that passes BigCrush over a counter."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def sample_key(seed: int, sample_index: int) -> int:
    """The noise key of one of a request's samples. Sample 0 draws what a request for one sample with that seed draws."""
    mixed = splitmix64(torch.tensor(seed) + torch.tensor(sample_index) * _GOLDEN)
    return int(splitmix64(mixed ^ _MIX_2))


def uniform(keys: torch.Tensor, positions: torch.Tensor, stream: Stream, size: int) -> torch.Tensor:
    """Uniform float32 numbers in (0, 1), of full relative precision near 0.

    Args:
        keys, positions: [...] int64.
        size: how many numbers each pair gets.

    Returns:
        [..., size].
    """
    state = splitmix64(splitmix64(keys + _GOLDEN) ^ splitmix64(positions * len(Stream) + int(stream) + 1))
    counter = torch.arange(1, size + 1, device=keys.device) * _GOLDEN
    bits = _shift_right(splitmix64(state[..., None] + counter), 11)
    return ((bits.to(torch.float32) + 0.5) * 2.0**-53).clamp_(max=1 - 2.0**-24)


def gumbel(keys: torch.Tensor, positions: torch.Tensor, stream: Stream, size: int) -> torch.Tensor:
    """Standard Gumbel numbers [..., size] for keys and positions [...]: `argmax(log_probs + gumbel)` is a draw from `probs`.

    Each is minus the log of an exponential number, -log1p(-u). That keeps full precision for small exponentials, which are
    the ones that win.
    """
    return -torch.log(-torch.log1p(-uniform(keys, positions, stream, size)))
