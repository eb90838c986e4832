"""What transformers' Trainer trains: a head beside its frozen target, from packed rows to a loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.heads.early_exit import EarlyExitHead
from selfspec.heads.medusa import MedusaHead
from selfspec.model.layers import Resume, decoder_layers
from selfspec.model.target import FINAL, Target
from selfspec.train.losses import Loss, distillation_loss, eagle1_loss, eagle_loss, medusa_loss


class HeadTraining(nn.Module):
    """Only the head is a submodule: the target is neither trained, saved, nor wrapped.

    Args:
        num_steps: drafted depths that are trained (EAGLE-3; Medusa trains all its heads, the others one).
        decay: weight of each depth relative to the one before.
        noise: how far EAGLE-1's features are disturbed.
        is_compiled: compile an EAGLE-3 head, whose many small operations keep the host busier than the GPU.
    """

    def __init__(
        self,
        head: DraftHead,
        target: Target,
        *,
        num_steps: int = 6,
        decay: float = 0.8,
        noise: float = 0.1,
        is_compiled: bool = False,
    ) -> None:
        super().__init__()
        self.head = head
        self.num_steps = num_steps
        self.decay = decay
        self.noise = noise
        self.metrics: dict[str, torch.Tensor] = {}
        # Not as an attribute of a module, which would register their parameters.
        self.__dict__["target"] = target
        if is_compiled and isinstance(head, EagleHead):
            head.compile()
        self.__dict__["student"] = head.student(target.model) if isinstance(head, EarlyExitHead) else None

    @property
    def feature_names(self) -> tuple[int, ...]:
        """The target's hidden states that a step needs: the head's, and the final one for the labels."""
        return tuple(dict.fromkeys((*self.head.features, FINAL)))

    def forward(
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        position_ids: torch.Tensor,
        states: torch.Tensor | None = None,
        num_pairs: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """`loss` of a batch of packed rows, each [B, L]: the summed losses over the number of answer tokens.

        Args:
            states: [B, number of feature_names, L, E], where they were computed before.
            num_pairs: what to divide by instead of the batch's own `num_pairs`, where several batches make a step.
        """
        target: Target = self.__dict__["target"]
        if states is None:
            taken = target.hidden_states(input_ids, position_ids, self.feature_names)
        else:
            taken = dict(zip(self.feature_names, states.unbind(1), strict=True))
        loss_sum, self.metrics = self._loss(target, taken, input_ids, loss_mask, position_ids)
        return {"loss": loss_sum / (self.num_pairs(loss_mask) if num_pairs is None else num_pairs).clamp(min=1)}

    @staticmethod
    def num_pairs(loss_mask: torch.Tensor, **others: Any) -> torch.Tensor:
        """How many tokens of a batch are taught: the count that every depth's summed loss is divided by."""
        return loss_mask.sum()

    def _loss(
        self,
        target: Target,
        states: dict[int, torch.Tensor],
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        position_ids: torch.Tensor,
    ) -> Loss:
        head, rows = self.head, (input_ids, loss_mask, position_ids)
        lm_head = target.model.get_output_embeddings()
        embedding = target.model.get_input_embeddings()
        # The head trains in float32 (or under autocast), whatever the target's dtype; FSDP gives it lower precision.
        dtype = next(head.parameters()).dtype
        features = [states[name].to(dtype) for name in head.features]

        def embed(tokens: torch.Tensor) -> torch.Tensor:
            return embedding(tokens).to(dtype)

        if isinstance(head, MedusaHead):
            return medusa_loss(head, features[0], lm_head, embed, *rows, self.decay)
        if isinstance(head, EagleHead):
            return eagle_loss(head, features, states[FINAL], lm_head, embed, *rows, self.num_steps, self.decay)
        if isinstance(head, Eagle1Head):
            return eagle1_loss(head, features[0], lm_head, embed, *rows, self.noise)
        assert isinstance(head, EarlyExitHead)
        student = self.__dict__["student"]
        options = {"resume_from": features[0]} if isinstance(decoder_layers(student)[1][0], Resume) else {}
        output = student.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **options)
        hidden = output.last_hidden_state
        return distillation_loss(hidden, states[FINAL], lm_head, loss_mask, position_ids)
