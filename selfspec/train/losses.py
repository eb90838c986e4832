"""Training losses of the heads, with the pairing of positions that serving uses.

Rows of a batch are packed conversations: `position_ids` start over with each. `loss_mask[b, u]` says that token u is the
assistant's. A position t may learn token t + k only if both lie in one conversation, and only if that token is masked in.
All losses are means over the (row, depth) pairs they cover; zero, with gradients, where there is none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from selfspec.heads.eagle import EagleHead
from selfspec.heads.medusa import MedusaHead


def future_mask(loss_mask: torch.Tensor, position_ids: torch.Tensor, ahead: int) -> torch.Tensor:
    """[B, L] true where position t may learn token t + ahead.

    Args:
        loss_mask, position_ids: [B, L] bool and int64.
    """
    B, L = loss_mask.shape
    out = torch.zeros_like(loss_mask)
    if ahead < L:
        is_same_text = position_ids[:, ahead:] == position_ids[:, : L - ahead] + ahead
        out[:, : L - ahead] = loss_mask[:, ahead:] & is_same_text
    return out


def medusa_loss(
    head: MedusaHead,
    features: torch.Tensor,
    lm_head: nn.Module,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor,
    decay: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross entropy of head i at position t against token t + 2 + i, weighted by decay**i.

    Args:
        features: [B, L, E], the target's hidden states after the final norm.

    Returns:
        The loss and each depth's top-1 accuracy.
    """
    total = features.new_zeros((), dtype=torch.float32)
    lm_head_dtype = lm_head.weight.dtype
    metrics = {}
    for i, block in enumerate(head.heads):
        mask = future_mask(loss_mask, position_ids, 2 + i)
        rows = mask.nonzero(as_tuple=True)
        hidden = block(features[rows])
        logits = head.outputs[i](hidden) if len(head.outputs) else lm_head(hidden.to(lm_head_dtype))
        labels = input_ids[rows[0], rows[1] + 2 + i]
        total = total + decay**i * _mean_cross_entropy(logits, labels)
        metrics[f"accuracy_{i + 1}"] = _accuracy(logits, labels)
    return total, metrics


def eagle_loss(
    head: EagleHead,
    features: list[torch.Tensor],
    final: torch.Tensor,
    lm_head: nn.Module,
    embed: Callable[[torch.Tensor], torch.Tensor],
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor,
    num_steps: int,
    decay: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Training-time test (https://arxiv.org/abs/2503.01840, section 3.2): `num_steps` drafts from every position.

    At step s, row t stands for entry t + s of a draft that left the target's features at t: its hidden input is the
    fused feature (s = 0) or row t's output of the step before, its token is t + 1 + s, and it predicts token t + 2 + s. It
    attends to the features' entries up to t and to its own draft's entries t + 1 … t + s.

    The label is the target's distribution over the draft vocabulary at position t + 1 + s; rows whose true token the head
    cannot draft are left out.

    Args:
        features: the feature layers' hidden states, each [B, L, E].
        final: [B, L, E] after the target's final norm, for the labels.

    Returns:
        The loss, weighted by decay**s, and each step's top-1 agreement with the target.
    """
    B, L = input_ids.shape
    draft_ids = head.draft_ids
    can_draft = torch.zeros(head.config.target.vocab_size, dtype=torch.bool, device=input_ids.device)
    can_draft[draft_ids] = True
    teach_mask = loss_mask & can_draft[input_ids]
    # Labels once per taught token u, at the position u - 1 that chooses it.
    teacher_rows = future_mask(teach_mask, position_ids, 1).nonzero(as_tuple=True)
    with torch.no_grad():
        teacher_logits = lm_head(final[teacher_rows])[:, draft_ids]  # [R, draft vocabulary]
    teacher_index = torch.full((B, L), -1, dtype=torch.int64, device=input_ids.device)
    teacher_index[teacher_rows] = torch.arange(len(teacher_rows[0]), device=input_ids.device)

    # A token's number of texts before it in its row tells texts apart.
    texts = (position_ids == 0).cumsum(1)
    visible = (texts[:, :, None] == texts[:, None]) & torch.ones(L, L, dtype=torch.bool, device=input_ids.device).tril()
    attend = _UnrolledAttention(visible, head.config.head_dim**-0.5)
    hidden = head.fuse(features)
    total = hidden.new_zeros((), dtype=torch.float32)
    metrics = {}
    for step in range(num_steps):
        tokens = F.pad(input_ids[:, 1 + step :], (0, min(1 + step, L)))[:, :L]
        normed, hidden = head(hidden, embed(tokens), position_ids + step, attend)
        rows = future_mask(teach_mask, position_ids, 2 + step).nonzero(as_tuple=True)
        logits = head.lm_head(normed[rows])
        labels = teacher_logits[teacher_index[rows[0], rows[1] + 1 + step]]
        total = total + decay**step * _mean_cross_entropy(logits, labels.float().softmax(-1))
        metrics[f"accuracy_{step + 1}"] = _accuracy(logits, labels.argmax(-1))
    return total, metrics


class _UnrolledAttention:
    """Attention of step s: all rows see the first step's keys under `visible`, and their own row's keys of later steps."""

    def __init__(self, visible: torch.Tensor, scaling: float) -> None:
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


def _mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over rows in float32; no rows give a zero that still has a gradient."""
    if not len(logits):
        return logits.float().sum() * 0.0
    return F.cross_entropy(logits.float(), labels)


def _accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    hits = (logits.detach().argmax(-1) == labels).float()
    return hits.mean() if len(hits) else hits.new_tensor(0.0)
