"""selfspec: several tokens per forward pass from a frozen Hugging Face language model, without changing what it says."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selfspec.api import Completion, StreamEvent, generate, generate_iter, stream
    from selfspec.config import SamplingParams
    from selfspec.drafters import Drafter, load_drafter
    from selfspec.model.target import Target

__version__ = "0.1.0"

# Loaded at first use, because torch and transformers take seconds and `selfspec --help` needs neither.
_HOMES = {
    "SamplingParams": "selfspec.config",
    "Drafter": "selfspec.drafters",
    "load_drafter": "selfspec.drafters",
    "Completion": "selfspec.api",
    "StreamEvent": "selfspec.api",
    "generate": "selfspec.api",
    "generate_iter": "selfspec.api",
    "stream": "selfspec.api",
    "Target": "selfspec.model.target",
}

__all__ = [
    "Completion",
    "Drafter",
    "SamplingParams",
    "StreamEvent",
    "Target",
    "generate",
    "generate_iter",
    "load_drafter",
    "stream",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'selfspec' has no attribute {name!r}")
