"""What transformers' Trainer trains: a head beside its frozen target, from packed rows to a loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import EagleHead
from selfspec.heads.early_exit import EarlyExitHead
from selfspec.model.target import FINAL, Target
from selfspec.train.batch import TargetEnds, TrainBatch
from selfspec.train.losses import LOSSES, LossSettings, TargetStates


class HeadTraining(nn.Module):
    """A module whose only submodule is the head: the target is neither trained, saved, nor wrapped.

    Args:
        is_compiled: compile an EAGLE-3 head, whose many small operations keep the host busier than the GPU.

    Raises:
        ValueError: the target's logits cannot be computed outside its model (see `Target.logit_shape`).
    """

    def __init__(
        self, head: DraftHead, target: Target, settings: LossSettings | None = None, *, is_compiled: bool = False
    ) -> None:
        super().__init__()
        self.head = head
        self.settings = settings or LossSettings()
        self.metrics: dict[str, torch.Tensor] = {}
        if is_compiled and isinstance(head, EagleHead):
            head.compile()
        # Put into `__dict__`, because assigning a module would register its parameters.
        self.__dict__["target"] = target
        self.__dict__["ends"] = TargetEnds.of(target)
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
            states: [B, F, L, E] the F hidden states of `feature_names`, where they were computed before.
            num_pairs: [] what to divide by instead of the batch's own `num_pairs`, where several batches make a step.
        """
        if states is None:
            taken = self.__dict__["target"].hidden_states(input_ids, position_ids, self.feature_names)
        else:
            taken = dict(zip(self.feature_names, states.unbind(1), strict=True))
        # The head trains in float32 (or under autocast), whatever the target's dtype; FSDP gives it lower precision.
        dtype = next(self.head.parameters()).dtype
        loss_sum, self.metrics = LOSSES[self.head.config.head_type](
            self.__dict__["student"] or self.head,
            TargetStates([taken[name].to(dtype) for name in self.head.features], taken[FINAL]),
            self.__dict__["ends"].embedding_as(dtype),
            TrainBatch(input_ids, loss_mask, position_ids),
            self.settings,
        )
        return {"loss": loss_sum / (self.num_pairs(loss_mask) if num_pairs is None else num_pairs).clamp(min=1)}

    @staticmethod
    def num_pairs(loss_mask: torch.Tensor, **others: Any) -> torch.Tensor:
        """[] how many tokens of a batch [B, L] are taught: what the summed loss of every depth is divided by."""
        return loss_mask.sum()
