"""Shared by the tests of the loop."""

from poison import poisoned_memory

__all__ = ["poisoned_memory"]
