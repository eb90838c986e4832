"""Training losses of the heads, with the pairing of positions that serving uses.

Rows of a batch are packed conversations: `position_ids` start over with each. `loss_mask[b, u]` says that token u is the
assistant's. A position t may learn token t + k only if both lie in one conversation, and only if that token is masked in.
The label is the target's own distribution where it chose the token, over the draft vocabulary. Losses are sums over
(row, depth) pairs, so that any number of processes or accumulated batches can divide by one count of tokens; zero, with
gradients, where there is none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.heads.medusa import MedusaHead
from selfspec.train.cross_entropy import Teacher, cross_entropy
from selfspec.train.unrolled import unrolled_attention

Embed = Callable[[torch.Tensor], torch.Tensor]
Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


def medusa_loss(
    head: MedusaHead,
    features: torch.Tensor,
    lm_head: nn.Module,
    embed: Embed,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor,
    decay: float,
) -> Loss:
    """Cross entropy of head i at position t for token t + 2 + i, weighted by decay**i.

    Args:
        features: [B, L, E], the target's hidden states after the final norm.

    Returns:
        The summed loss and each depth's agreement with the target.
    """
    teacher = Teacher.of(features, lm_head, loss_mask, position_ids)
    total = features.new_zeros((), dtype=torch.float32)
    metrics = {}
    inputs = head.inputs(features, embed(_shifted(input_ids, 1)))
    for i, block in enumerate(head.heads):
        batch, time, labels = teacher.rows(loss_mask, position_ids, 2 + i)
        output = head.outputs[i] if len(head.outputs) else lm_head
        loss, num_hits = cross_entropy(block(inputs[batch, time]), output, teacher.logits, labels)
        total = total + decay**i * loss
        metrics[f"accuracy_{i + 1}"] = num_hits / max(1, len(labels))
    return total, metrics


def eagle_loss(
    head: EagleHead,
    features: list[torch.Tensor],
    final: torch.Tensor,
    lm_head: nn.Module,
    embed: Embed,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor,
    num_steps: int,
    decay: float,
) -> Loss:
    """Training-time test (https://arxiv.org/abs/2503.01840, section 3.2): `num_steps` drafts from every position.

    At step s, row t stands for entry t + s of a draft that left the target's features at t: its hidden input is the
    fused feature (s = 0) or row t's output of the step before, its token is t + 1 + s, and it predicts token t + 2 + s. It
    attends to the features' entries up to t and to its own draft's entries t + 1 … t + s.

    Rows whose true token the head cannot draft are left out.

    Args:
        features: the feature layers' hidden states, each [B, L, E].
        final: [B, L, E] after the target's final norm, for the labels.

    Returns:
        The summed loss, weighted by decay**s, and each step's agreement with the target.
    """
    draft_ids = head.draft_ids
    can_draft = torch.zeros(head.config.target.vocab_size, dtype=torch.bool, device=input_ids.device)
    can_draft[draft_ids] = True
    teach_mask = loss_mask & can_draft[input_ids]
    teacher = Teacher.of(final, lm_head, teach_mask, position_ids, draft_ids)
    attend = unrolled_attention(position_ids, head.config.head_dim**-0.5, num_steps)
    hidden = head.fuse(features)
    output = head.output_layer(lm_head)
    total = hidden.new_zeros((), dtype=torch.float32)
    metrics = {}
    for step in range(num_steps):
        normed, hidden = head(hidden, embed(_shifted(input_ids, 1 + step)), position_ids + step, attend)
        batch, time, labels = teacher.rows(teach_mask, position_ids, 2 + step)
        loss, num_hits = cross_entropy(normed[batch, time], output, teacher.logits, labels)
        total = total + decay**step * loss
        metrics[f"accuracy_{step + 1}"] = num_hits / max(1, len(labels))
    return total, metrics


def eagle1_loss(
    head: Eagle1Head,
    features: torch.Tensor,
    lm_head: nn.Module,
    embed: Embed,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor,
    noise: float,
    token_weight: float = 0.1,
) -> Loss:
    """Smooth L1 regression of the next feature plus `token_weight` times its cross entropy (section 4.2 of EAGLE-1).

    Row t reads feature t, disturbed by uniform noise of up to `noise` against the errors that serving feeds back, and token
    t + 1; it estimates feature t + 1, which chooses token t + 2.
    """
    teacher = Teacher.of(features, lm_head, loss_mask, position_ids)
    attend = unrolled_attention(position_ids, head.config.head_dim**-0.5, 1)
    disturbed = features + noise * (2 * torch.rand_like(features) - 1)
    out, _ = head(disturbed, embed(_shifted(input_ids, 1)), position_ids, attend)
    batch, time, labels = teacher.rows(loss_mask, position_ids, 2)
    estimate = out[batch, time]
    token_loss, num_hits = cross_entropy(estimate, lm_head, teacher.logits, labels)
    regression = F.smooth_l1_loss(estimate.float(), features[batch, time + 1].float(), reduction="sum")
    total = regression / features.shape[-1] + token_weight * token_loss
    return total, {"accuracy_1": num_hits / max(1, len(labels))}


def distillation_loss(
    hidden: torch.Tensor,
    final: torch.Tensor,
    lm_head: nn.Module,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor,
) -> Loss:
    """Cross entropy of a student's final hidden states [B, L, E] at t for token t + 1, through the target's LM head."""
    teacher = Teacher.of(final, lm_head, loss_mask, position_ids)
    batch, time, labels = teacher.rows(loss_mask, position_ids, 1)
    loss, num_hits = cross_entropy(hidden[batch, time], lm_head, teacher.logits, labels)
    return loss, {"accuracy_1": num_hits / max(1, len(labels))}


def _shifted(input_ids: torch.Tensor, ahead: int) -> torch.Tensor:
    """[B, L] token t + ahead at position t; past the row's end there is token 0, which no mask lets in."""
    L = input_ids.shape[1]
    return F.pad(input_ids[:, ahead:], (0, min(ahead, L)))[:, :L]
