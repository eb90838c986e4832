"""Training losses of the heads, with the pairing of positions that serving uses.

The label of a token is the target's own distribution where it chose the token, over the draft vocabulary. Losses are sums
over (row, depth) pairs, because processes and accumulated batches divide them by one common count of tokens. Without a pair
to learn the sum is zero, and it still has gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.heads.medusa import MedusaHead
from selfspec.model.attention import text_options
from selfspec.model.layers import Resume, decoder_layers
from selfspec.train.batch import TargetEnds, TrainBatch
from selfspec.train.cross_entropy import PLAIN, Teacher, cross_entropy
from selfspec.train.unrolled import unrolled_attention

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class LossSettings:
    """How a loss is put together; each head reads what concerns it.

    Attributes:
        num_steps: EAGLE-3: drafted depths that are trained. (Medusa trains all its heads, the others one depth.)
        decay: EAGLE-3 and Medusa: weight of each depth relative to the one before.
        noise: EAGLE-1: features are disturbed by uniform noise of up to this much.
        token_weight: EAGLE-1: weight of the cross entropy relative to the regression.
    """

    num_steps: int = 6
    decay: float = 0.8
    noise: float = 0.1
    token_weight: float = 0.1

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps} is not allowed: use at least 1")
        if not self.decay > 0:
            raise ValueError(f"decay={self.decay} is not allowed: use a number above 0")
        for name in ("noise", "token_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: use 0 or more")


@dataclass(frozen=True)
class TargetStates:
    """The target's hidden states of a batch.

    Attributes:
        features: those that the head reads, each [B, L, E], in the head's dtype.
        final: [B, L, E] after the target's final norm, for the labels.
    """

    features: list[torch.Tensor]
    final: torch.Tensor


def medusa_loss(head: MedusaHead, states: TargetStates, ends: TargetEnds, batch: TrainBatch, settings: LossSettings) -> Loss:
    """Cross entropy of head i at position t for token t + 2 + i, weighted by decay**i.

    Returns:
        The summed loss, and how often each depth agrees with the target.
    """
    [features] = states.features
    teacher = Teacher.of(features, ends, batch)
    total = features.new_zeros((), dtype=torch.float32)
    metrics = {}
    inputs = head.inputs(features, ends.embed(batch.tokens_ahead(1)))
    for i, block in enumerate(head.heads):
        row, time, labels = teacher.rows(batch, 2 + i)
        output, shape = (head.outputs[i], PLAIN) if len(head.outputs) else (ends.lm_head, ends.logit_shape)
        loss, num_hits = cross_entropy(block(inputs[row, time]), output, teacher.logits, labels, shape)
        total = total + settings.decay**i * loss
        metrics[f"accuracy_{i + 1}"] = num_hits / max(1, len(labels))
    return total, metrics


def eagle_loss(head: EagleHead, states: TargetStates, ends: TargetEnds, batch: TrainBatch, settings: LossSettings) -> Loss:
    """Training-time test (https://arxiv.org/abs/2503.01840, section 3.2): `num_steps` drafts from every position.

    At step s, row t stands for entry t + s of a draft that left the target's features at t: its hidden input is the
    fused feature (s = 0) or row t's output of the step before, its token is t + 1 + s, and it predicts token t + 2 + s. It
    attends to the features' entries up to t and to its own draft's entries t + 1 … t + s.

    Rows whose true token the head cannot draft are left out.

    Returns:
        The summed loss, weighted by decay**s, and how often each step agrees with the target.
    """
    draft_ids = head.draft_ids
    can_draft = torch.zeros(head.config.target.vocab_size, dtype=torch.bool, device=batch.input_ids.device)
    can_draft[draft_ids] = True
    taught = batch.learning_only(can_draft)
    teacher = Teacher.of(states.final, ends, taught, draft_ids)
    attend = unrolled_attention(batch.position_ids, head.config.head_dim**-0.5, settings.num_steps)
    hidden = head.fuse(states.features)
    output, shape = head.output_layer(ends.lm_head), PLAIN if head.config.has_lm_head else ends.logit_shape
    total = hidden.new_zeros((), dtype=torch.float32)
    metrics = {}
    for step in range(settings.num_steps):
        normed, hidden = head(hidden, ends.embed(batch.tokens_ahead(1 + step)), batch.position_ids + step, attend)
        row, time, labels = teacher.rows(taught, 2 + step)
        loss, num_hits = cross_entropy(normed[row, time], output, teacher.logits, labels, shape)
        total = total + settings.decay**step * loss
        metrics[f"accuracy_{step + 1}"] = num_hits / max(1, len(labels))
    return total, metrics


def eagle1_loss(head: Eagle1Head, states: TargetStates, ends: TargetEnds, batch: TrainBatch, settings: LossSettings) -> Loss:
    """Smooth L1 regression of the next feature plus `token_weight` times its cross entropy (section 4.2 of EAGLE-1).

    Row t reads feature t and token t + 1, and estimates feature t + 1, which chooses token t + 2. The noise on the feature
    prepares the head for reading its own estimates, as it does in serving.
    """
    [features] = states.features
    teacher = Teacher.of(features, ends, batch)
    attend = unrolled_attention(batch.position_ids, head.config.head_dim**-0.5, 1)
    disturbed = features + settings.noise * (2 * torch.rand_like(features) - 1)
    out, _ = head(disturbed, ends.embed(batch.tokens_ahead(1)), batch.position_ids, attend)
    row, time, labels = teacher.rows(batch, 2)
    estimate = out[row, time]
    token_loss, num_hits = cross_entropy(estimate, ends.lm_head, teacher.logits, labels, ends.logit_shape)
    regression = F.smooth_l1_loss(estimate.float(), features[row, time + 1].float(), reduction="sum")
    total = regression / features.shape[-1] + settings.token_weight * token_loss
    return total, {"accuracy_1": num_hits / max(1, len(labels))}


def distillation_loss(
    student: PreTrainedModel, states: TargetStates, ends: TargetEnds, batch: TrainBatch, settings: LossSettings
) -> Loss:
    """Cross entropy of a student's final hidden states at t for token t + 1, through the target's LM head.

    Args:
        student: what an early-exit head makes of the target (see `EarlyExitHead.student`).
    """
    # A student that shares the target's first layers goes on from what they gave.
    resumes = isinstance(decoder_layers(student)[1][0], Resume)
    options: dict[str, Any] = {"resume_from": states.features[0]} if resumes else {}
    options |= text_options(batch.position_ids)
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    output = student.base_model(**inputs, use_cache=False, **options)
    teacher = Teacher.of(states.final, ends, batch)
    row, time, labels = teacher.rows(batch, 1)
    hidden = output.last_hidden_state[row, time]
    loss, num_hits = cross_entropy(hidden, ends.lm_head, teacher.logits, labels, ends.logit_shape)
    return loss, {"accuracy_1": num_hits / max(1, len(labels))}


# The loss of each head type. Its first argument is the head or, for the two that continue the target, its student model.
LOSSES: dict[str, Callable[[Any, TargetStates, TargetEnds, TrainBatch, LossSettings], Loss]] = {
    "medusa": medusa_loss,
    "eagle": eagle_loss,
    "eagle1": eagle1_loss,
    "early_exit": distillation_loss,
    "draft_model": distillation_loss,
}
