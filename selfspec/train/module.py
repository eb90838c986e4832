"""What transformers' Trainer trains: a head beside its frozen target, from packed rows to a loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import EagleHead
from selfspec.heads.medusa import MedusaHead
from selfspec.target import FINAL, Target
from selfspec.train.losses import eagle_loss, medusa_loss


class HeadTraining(nn.Module):
    """Only the head is a submodule: the target is neither trained, saved, nor wrapped.

    Args:
        num_steps: drafted depths that are trained (EAGLE; Medusa trains all its heads).
        decay: weight of each depth relative to the one before.
    """

    def __init__(self, head: DraftHead, target: Target, *, num_steps: int = 6, decay: float = 0.8) -> None:
        super().__init__()
        self.head = head
        self.num_steps = num_steps
        self.decay = decay
        self.metrics: dict[str, torch.Tensor] = {}
        # Not as an attribute of a module, which would register its parameters.
        self.__dict__["target"] = target

    def forward(self, input_ids: torch.Tensor, loss_mask: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Any]:
        """Loss of a batch of packed rows, each [B, L]."""
        target: Target = self.__dict__["target"]
        names = (*self.head.features, FINAL)
        states = target.hidden_states(input_ids, position_ids, tuple(dict.fromkeys(names)))
        lm_head = target.model.get_output_embeddings()
        embed = target.model.get_input_embeddings()
        # The head trains in float32 (or under autocast), whatever the target's dtype.
        inputs = [states[name].float() for name in self.head.features]
        if isinstance(self.head, MedusaHead):
            loss, metrics = medusa_loss(self.head, inputs[0], lm_head, input_ids, loss_mask, position_ids, self.decay)
        else:
            assert isinstance(self.head, EagleHead)
            loss, metrics = eagle_loss(
                self.head,
                inputs,
                states[FINAL],
                lm_head,
                lambda tokens: embed(tokens).float(),
                input_ids,
                loss_mask,
                position_ids,
                self.num_steps,
                self.decay,
            )
        self.metrics = metrics
        return {"loss": loss}
