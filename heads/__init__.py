"""Trainable draft heads, by the `head_type` that their config.json names."""

from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import EagleHead
from selfspec.heads.medusa import MedusaHead

HEADS: dict[str, type[DraftHead]] = {"medusa": MedusaHead, "eagle": EagleHead}
