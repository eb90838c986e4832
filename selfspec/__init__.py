"""selfspec: several tokens per forward pass from a frozen Hugging Face language model, without changing what it says."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selfspec.api import Completion, Piece, StreamEvent, generate, generate_iter, stream
    from selfspec.api.plugin import custom_generate
    from selfspec.config import SamplingParams
    from selfspec.drafters import Drafter, load_drafter
    from selfspec.engine import AsyncEngine
    from selfspec.model.target import Target

__version__ = "0.1.0"

# Loaded at first use, because torch and transformers take seconds and `selfspec --help` needs neither.
_HOMES = {
    "AsyncEngine": "selfspec.engine",
    "Completion": "selfspec.api",
    "Drafter": "selfspec.drafters",
    "Piece": "selfspec.api",
    "SamplingParams": "selfspec.config",
    "StreamEvent": "selfspec.api",
    "Target": "selfspec.model.target",
    "custom_generate": "selfspec.api.plugin",
    "generate": "selfspec.api",
    "generate_iter": "selfspec.api",
    "load_drafter": "selfspec.drafters",
    "stream": "selfspec.api",
}

__all__ = [
    "AsyncEngine",
    "Completion",
    "Drafter",
    "Piece",
    "SamplingParams",
    "StreamEvent",
    "Target",
    "custom_generate",
    "generate",
    "generate_iter",
    "load_drafter",
    "stream",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'selfspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What there is to use. Modules are imported by their names, and would hide it."""
    return [*__all__, "__version__"]
