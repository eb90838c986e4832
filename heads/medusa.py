"""Medusa heads: one small network per future position, all reading the target's last hidden state.

Head i (from 0) at position t predicts token t + 2 + i, because the LM head itself predicts t + 1
(https://arxiv.org/abs/2401.10774, section 2.1). Each head has L residual blocks x + silu(W x + b) with weights of its own,
and then an output layer: the target's LM head, shared and frozen (the default), or a private one.

When the heads draft, token t + 1 is known already, because it is the tree's root. With `has_root_input`, every head also
reads its embedding, added to the feature. The public checkpoints don't. (Sequentially dependent heads,
https://arxiv.org/abs/2402.05109, go further and read every drafted token.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from selfspec.heads.base import DraftHead, HeadConfig


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """Args:
    num_heads: M, the depth of the deepest token that can be drafted.
    num_blocks: number of residual blocks in each head.
    has_output_layer: private output layers instead of the target's LM head.
    has_root_input: the heads also read the embedding of the token after the feature's.
    """

    head_type: ClassVar[str] = "medusa"
    num_heads: int = 4
    num_blocks: int = 1
    has_output_layer: bool = False
    has_root_input: bool = False

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_blocks < 1:
            raise ValueError(f"num_heads={self.num_heads}, num_blocks={self.num_blocks}: both must be at least 1")


class ResidualBlock(nn.Module):
    """x + silu(W x + b). It starts as the identity, so a new head starts as a copy of the LM head."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., E] from x [..., E]."""
        return x + F.silu(self.linear(x))


class MedusaHead(DraftHead):
    """M heads over the hidden state after the final norm."""

    config_class = MedusaConfig
    features = (-1,)
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        E, V = config.target.hidden_size, config.target.vocab_size
        self.root_norm = nn.RMSNorm(E) if config.has_root_input else None
        self.root_proj = nn.Linear(E, E, bias=False) if config.has_root_input else None
        if self.root_proj is not None:
            nn.init.zeros_(self.root_proj.weight)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(E) for _ in range(config.num_blocks))) for _ in range(config.num_heads)
        )
        self.outputs = nn.ModuleList(
            nn.Linear(E, V, bias=False) for _ in range(config.num_heads if config.has_output_layer else 0)
        )

    def initialise(self, model: Any) -> None:
        """Copy the target's LM head into private output layers, so every head starts by repeating it."""
        weight = model.get_output_embeddings().weight.detach()
        for output in self.outputs:
            output.get_parameter("weight").data.copy_(weight)

    def inputs(self, features: torch.Tensor, root_embeddings: torch.Tensor) -> torch.Tensor:
        """What the heads read, [..., E].

        Args:
            features: [..., E], of tokens t.
            root_embeddings: [..., E], of tokens t + 1; added if the heads have `has_root_input`.
        """
        if self.root_proj is None or self.root_norm is None:
            return features
        return features + self.root_proj(self.root_norm(root_embeddings))

    def forward(
        self,
        features: torch.Tensor,
        root_embeddings: torch.Tensor,
        lm_head: Callable[[torch.Tensor], torch.Tensor] | None,
        num_heads: int,
    ) -> torch.Tensor:
        """Logits [..., K, V] for the tokens 2 … K + 1 positions after each feature's.

        Args:
            features: [..., E].
            root_embeddings: [..., E], the target's embedding of the token after each feature's.
            lm_head: from states [..., K, E] to the target's logits [..., K, V]; not used by heads with output layers.
            num_heads: K, the number of heads to use, from the first.
        """
        inputs = self.inputs(features, root_embeddings)
        hidden = [head(inputs) for head in self.heads[:num_heads]]
        if self.outputs:
            return torch.stack([output(each) for output, each in zip(self.outputs, hidden, strict=False)], dim=-2)
        assert lm_head is not None
        return lm_head(torch.stack(hidden, dim=-2))
