"""Trainable draft heads: a config, a module, save and load. `selfspec.drafters.names` knows which drafter serves which."""

from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.heads.early_exit import DistilledDraft, EarlyExitHead
from selfspec.heads.medusa import MedusaHead

__all__ = ["DistilledDraft", "DraftHead", "Eagle1Head", "EagleHead", "EarlyExitHead", "MedusaHead"]
