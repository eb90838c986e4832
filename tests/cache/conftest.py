"""Shared by the tests of the cache."""

from poison import poisoned_memory

__all__ = ["poisoned_memory"]
