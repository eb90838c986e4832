"""What a loss reads: packed rows, and the parts of the target at both ends of a head.

Several conversations share a row; positions start over with each. A position t may learn token t + k only if both lie in one
conversation and the loss mask lets that token in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from selfspec.model.output import LogitShape
from selfspec.model.target import Target


@dataclass(frozen=True)
class TrainBatch:
    """A batch of packed rows.

    Attributes:
        input_ids: int64 [B, L].
        loss_mask: bool [B, L], true where the token is one to learn.
        position_ids: int64 [B, L], starting over with each conversation.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor

    def may_learn(self, ahead: int) -> torch.Tensor:
        """[B, L] true where position t may learn token t + `ahead`."""
        B, L = self.loss_mask.shape
        out = torch.zeros_like(self.loss_mask)
        if ahead < L:
            is_same_text = self.position_ids[:, ahead:] == self.position_ids[:, : L - ahead] + ahead
            out[:, : L - ahead] = self.loss_mask[:, ahead:] & is_same_text
        return out

    def tokens_ahead(self, ahead: int) -> torch.Tensor:
        """[B, L] token t + `ahead` at position t; token 0, which nothing learns, past the end of the row."""
        L = self.input_ids.shape[1]
        return F.pad(self.input_ids[:, ahead:], (0, min(ahead, L)))[:, :L]

    def learning_only(self, is_learnable: torch.Tensor) -> TrainBatch:
        """The batch with a loss mask that also leaves out every token u whose `is_learnable [V]` is false."""
        return replace(self, loss_mask=self.loss_mask & is_learnable[self.input_ids])


@dataclass(frozen=True)
class TargetEnds:
    """The parts of the target that heads share with it.

    Attributes:
        lm_head: linear layer from hidden states [..., E] to products [..., V].
        logit_shape: from these products to the target's logits.
        embed: from token ids [...] to embeddings [..., E].
    """

    lm_head: nn.Module
    logit_shape: LogitShape
    embed: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, target: Target) -> TargetEnds:
        """Those of a target.

        Raises:
            ValueError: its logits cannot be computed outside its model (see `Target.logit_shape`).
        """
        return cls(target.model.get_output_embeddings(), target.logit_shape, target.model.get_input_embeddings())

    def embedding_as(self, dtype: torch.dtype) -> TargetEnds:
        """The same, with embeddings converted to `dtype`."""
        return replace(self, embed=lambda tokens: self.embed(tokens).to(dtype))
