"""The stage "draft a candidate tree": one file for each drafter, and a table of their names."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selfspec.drafters.draft_model import DraftModelDrafter
    from selfspec.drafters.eagle import EagleDrafter
    from selfspec.drafters.early_exit import EarlyExitDrafter
    from selfspec.drafters.load import drafter_of, load_drafter
    from selfspec.drafters.medusa import MedusaDrafter
    from selfspec.drafters.names import KINDS
    from selfspec.drafters.ngram import NgramDrafter
    from selfspec.loop.drafter import Drafter, NoDrafter

# Loaded at first use, because commands read the names in `specs` before they import torch.
_HOMES = {
    "KINDS": "selfspec.drafters.names",
    "DraftModelDrafter": "selfspec.drafters.draft_model",
    "Drafter": "selfspec.loop.drafter",
    "EagleDrafter": "selfspec.drafters.eagle",
    "EarlyExitDrafter": "selfspec.drafters.early_exit",
    "MedusaDrafter": "selfspec.drafters.medusa",
    "NgramDrafter": "selfspec.drafters.ngram",
    "NoDrafter": "selfspec.loop.drafter",
    "drafter_of": "selfspec.drafters.load",
    "load_drafter": "selfspec.drafters.load",
}

__all__ = [
    "KINDS",
    "DraftModelDrafter",
    "Drafter",
    "EagleDrafter",
    "EarlyExitDrafter",
    "MedusaDrafter",
    "NgramDrafter",
    "NoDrafter",
    "drafter_of",
    "load_drafter",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'selfspec.drafters' has no attribute {name!r}")
