"""Shared by the tests of drafters."""

from poison import poisoned_memory

__all__ = ["poisoned_memory"]
