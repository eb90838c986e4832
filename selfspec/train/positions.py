"""Which position may learn which token, in rows that several conversations share."""

from __future__ import annotations

import torch


def future_mask(loss_mask: torch.Tensor, position_ids: torch.Tensor, ahead: int) -> torch.Tensor:
    """[B, L] true where position t may learn token t + ahead: it lies in the same conversation and is masked in.

    Args:
        loss_mask, position_ids: [B, L] bool and int64; positions start over with each conversation.
    """
    B, L = loss_mask.shape
    out = torch.zeros_like(loss_mask)
    if ahead < L:
        is_same_text = position_ids[:, ahead:] == position_ids[:, : L - ahead] + ahead
        out[:, : L - ahead] = loss_mask[:, ahead:] & is_same_text
    return out
