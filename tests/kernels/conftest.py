"""Shared by the tests of kernels."""

from poison import poisoned_memory

__all__ = ["poisoned_memory"]
