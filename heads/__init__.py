"""Trainable draft heads, by the `head_type` that their config.json names."""

from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.heads.early_exit import DistilledDraft, EarlyExitHead
from selfspec.heads.medusa import MedusaHead

HEADS: dict[str, type[DraftHead]] = {
    cls.config_class.head_type: cls for cls in (MedusaHead, EagleHead, Eagle1Head, EarlyExitHead, DistilledDraft)
}
