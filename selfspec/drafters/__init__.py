"""The stage "draft a candidate tree": one file for each drafter, and a table of their names."""

from selfspec.drafters.draft_model import DraftModelDrafter
from selfspec.drafters.eagle import EagleDrafter
from selfspec.drafters.early_exit import EarlyExitDrafter
from selfspec.drafters.load import drafter_of, load_drafter
from selfspec.drafters.medusa import MedusaDrafter
from selfspec.drafters.names import KINDS
from selfspec.drafters.ngram import NgramDrafter
from selfspec.loop.drafter import Drafter, NoDrafter

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
