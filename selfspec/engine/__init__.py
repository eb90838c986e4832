"""Decoding for many callers at once: one thread, an inbox, and a stream of events for each request."""

from selfspec.engine.asynchronous import AsyncEngine
from selfspec.engine.engine import Handle, SpecEngine
from selfspec.engine.events import EngineClosed, EngineFull, Event, Listener, StepCounts
from selfspec.engine.intake import Intake

__all__ = [
    "AsyncEngine",
    "EngineClosed",
    "EngineFull",
    "Event",
    "Handle",
    "Intake",
    "Listener",
    "SpecEngine",
    "StepCounts",
]
