"""Attention of EAGLE's unrolled training steps: each row sees the first step's keys and its own draft's later keys.

At step s, row t may see step 0's keys up to t within its conversation, and only its own keys of steps 1 … s. Two forms
compute the same. The plain one's scores take memory quadratic in the row length. The other, on a GPU, is PyTorch's flex
attention, which skips the blocks in which nothing is visible; most blocks of the later steps are such.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from selfspec.heads.eagle import Attend

# Flex attention's tile.
BLOCK = 128


def unrolled_attention(position_ids: torch.Tensor, scaling: float, num_steps: int) -> Attend:
    """Attention to call once for each of `num_steps` steps, in order, with the step's queries, keys and values.

    Args:
        position_ids: [B, L], starting over with each conversation.
        scaling: factor of the scores.
    """
    if position_ids.device.type == "cuda" and position_ids.shape[1] % BLOCK == 0:
        return _FlexAttention(position_ids, scaling, num_steps)
    return _PlainAttention(position_ids, scaling)


class _PlainAttention:
    def __init__(self, position_ids: torch.Tensor, scaling: float) -> None:
        texts = (position_ids == 0).cumsum(1)
        L = texts.shape[1]
        visible = (texts[:, :, None] == texts[:, None]) & torch.ones(L, L, dtype=torch.bool, device=texts.device).tril()
        self.bias = torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, -torch.inf)[:, None]
        self.scaling = scaling
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        self.keys.append(key.repeat_interleave(groups, dim=1))
        self.values.append(value.repeat_interleave(groups, dim=1))
        L = query.shape[2]
        scores = [query @ self.keys[0].transpose(2, 3) * self.scaling + self.bias.to(query.dtype)]
        scores += [(query * own).sum(-1, keepdim=True) * self.scaling for own in self.keys[1:]]
        probs = torch.cat(scores, dim=-1).softmax(-1)  # [B, H, L, L + s]
        out = probs[..., :L] @ self.values[0]
        for s, own in enumerate(self.values[1:]):
            out = out + probs[..., L + s, None] * own
        return out.transpose(1, 2)


class _FlexAttention:
    """Keys of all steps side by side. Those to come are zeros that nothing sees, because one shape is compiled once."""

    def __init__(self, position_ids: torch.Tensor, scaling: float, num_steps: int) -> None:
        self.position_ids = position_ids
        self.texts = (position_ids == 0).cumsum(1)
        self.scaling = scaling
        self.num_steps = num_steps
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    # Not part of a compiled head: each step has one more entry to attend to, and would be compiled anew.
    @torch.compiler.disable
    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.keys.append(key)
        self.values.append(value)
        to_come = [torch.zeros_like(key)] * (self.num_steps - len(self.keys))
        out = _flex()(
            query,
            torch.cat([*self.keys, *to_come], dim=2),
            torch.cat([*self.values, *to_come], dim=2),
            block_mask=self._block_mask(len(self.keys)),
            scale=self.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2)

    def _block_mask(self, num_entered: int) -> Any:
        """Tiles with something visible: in step 0 from the text's beginning to the diagonal, in later steps the diagonal."""
        from torch.nn.attention.flex_attention import BlockMask

        B, L = self.position_ids.shape
        tiles = L // BLOCK
        texts, device = self.texts, self.texts.device
        rows = torch.arange(tiles, device=device)
        # Of a tile's tokens, the first belongs to the text that begins earliest.
        first = (rows * BLOCK - self.position_ids[:, ::BLOCK]).clamp(min=0) // BLOCK  # [B, tiles]
        num_base = (rows - first + 1)[:, None, :, None]  # [B, 1, tiles, 1]
        column = torch.arange(tiles * self.num_steps, device=device)
        own = (column - num_base + 1) * tiles + rows[:, None]
        num_visible = num_base + num_entered - 1
        indices = torch.where(column < num_base, first[:, None, :, None] + column, own)
        indices = torch.where(column < num_visible, indices, 0)

        # A tensor, because a number would be compiled anew in each step.
        num_keys = torch.tensor(num_entered * L, device=device)

        def is_visible(b: torch.Tensor, h: torch.Tensor, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            of = s % L
            return torch.where(s < L, (texts[b, t] == texts[b, of]) & (of <= t), (of == t) & (s < num_keys))

        return BlockMask.from_kv_blocks(
            num_visible[..., 0].to(torch.int32), indices.to(torch.int32), BLOCK_SIZE=BLOCK, mask_mod=is_visible
        )


@cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
