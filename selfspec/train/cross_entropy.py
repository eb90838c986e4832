"""Cross entropy of an output layer against the target's own distribution, without ever holding all logits in float32.

The gradient with respect to logits is known as soon as they are: softmax(logits) - softmax(teacher), times the slope of the
logits where they are scaled or capped products of the output layer. So the forward pass goes through the rows in chunks,
turns each chunk's logits into loss and gradient at once, and keeps only what goes on to the layer before. (The idea is
Liger's, https://arxiv.org/abs/2410.10989; its kernel takes hard labels only.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from selfspec.model.output import LogitShape
from selfspec.train.batch import TargetEnds, TrainBatch

# Most logits that a chunk may hold.
CHUNK_LOGITS = 1 << 27

PLAIN = LogitShape()


@dataclass(frozen=True)
class Teacher:
    """The target's logits at every position that chose a token to learn.

    Attributes:
        logits: [R, V'] over the draft vocabulary.
        index: [B, L] the row of `logits` that chose token u, -1 where u is not taught.
    """

    logits: torch.Tensor
    index: torch.Tensor

    @classmethod
    def of(cls, final: torch.Tensor, ends: TargetEnds, batch: TrainBatch, draft_ids: torch.Tensor | None = None) -> Teacher:
        """Labels for the masked tokens.

        Args:
            final: [B, L, E] hidden states after the target's final norm.
            draft_ids: [V'] the part of the vocabulary that can be drafted; all of it by default.
        """
        weight, bias = output_weights(ends.lm_head)
        if draft_ids is not None:
            weight = weight[draft_ids]
            bias = None if bias is None else bias[draft_ids]
        rows = batch.may_learn(1).nonzero(as_tuple=True)
        with torch.no_grad():
            products = torch.nn.functional.linear(final[rows].to(weight.dtype), weight, bias)
            logits = ends.logit_shape(products)
        index = torch.full(batch.input_ids.shape, -1, dtype=torch.int64, device=final.device)
        index[rows[0], rows[1] + 1] = torch.arange(len(rows[0]), device=final.device)
        return cls(logits, index)

    def rows(self, batch: TrainBatch, ahead: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The positions t [R'], as batch and time index, that may learn token t + `ahead`, and their rows of `logits`."""
        row, time = batch.may_learn(ahead).nonzero(as_tuple=True)
        return row, time, self.index[row, time + ahead]


def output_weights(output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [V, E] and bias [V] of a linear output layer."""
    return output.weight, getattr(output, "bias", None)


def cross_entropy(
    hidden: torch.Tensor,
    output: Any,
    teacher_logits: torch.Tensor,
    teacher_rows: torch.Tensor,
    logit_shape: LogitShape = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over rows of the cross entropy against the teacher, and how many rows agree on the likeliest token.

    Args:
        hidden: [R', E] what goes into the output layer.
        output: linear layer from E to V.
        teacher_logits: [R, V].
        teacher_rows: [R'] the row of `teacher_logits` that each row learns.
        logit_shape: from the output layer's products to logits.
    """
    weight, bias = output_weights(output)
    return _CrossEntropy.apply(hidden, weight, bias, teacher_logits, teacher_rows, logit_shape)


class _CrossEntropy(torch.autograd.Function):
    """Gradients are computed in the forward pass; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        teacher_logits: torch.Tensor,
        teacher_rows: torch.Tensor,
        logit_shape: LogitShape,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        states, matrix = hidden.to(dtype), weight.to(dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        num_hits = hidden.new_zeros((), dtype=torch.float32)
        hidden_grad = torch.empty_like(states)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        step = _loss_and_gradient(kind, logit_shape)
        size = max(1, CHUNK_LOGITS // weight.shape[0])
        with torch.autocast(kind, enabled=False):
            for first in range(0, len(states), size):
                chunk = slice(first, first + size)
                products = torch.nn.functional.linear(states[chunk], matrix, None if bias is None else bias.to(dtype))
                loss, hits, gradient = step(products, teacher_logits[teacher_rows[chunk]])
                total += loss
                num_hits += hits
                hidden_grad[chunk] = gradient @ matrix
                if weight_grad is not None:
                    weight_grad += gradient.t() @ states[chunk]
                if bias_grad is not None:
                    bias_grad += gradient.sum(0)
        ctx.save_for_backward(
            hidden_grad.to(hidden.dtype),
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None or bias is None else bias_grad.to(bias.dtype),
        )
        ctx.mark_non_differentiable(num_hits)
        return total, num_hits

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = gradients[0]
        hidden, weight, bias = (None if each is None else each * scale.to(each.dtype) for each in ctx.saved_tensors)
        return hidden, weight, bias, None, None, None


def _step(
    products: torch.Tensor, teacher_logits: torch.Tensor, logit_shape: LogitShape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A chunk's loss, hits, and gradient with respect to the output layer's products [R, V]."""
    student, teacher = logit_shape(products.float()), teacher_logits.float()
    target_probs = teacher.softmax(-1)
    log_norm = student.logsumexp(-1, keepdim=True)
    loss = (log_norm[:, 0] - (target_probs * student).sum(-1)).sum()
    hits = (student.argmax(-1) == teacher.argmax(-1)).sum().float()
    gradient = (student - log_norm).exp() - target_probs
    if not logit_shape.is_plain:
        gradient = gradient * logit_shape.slope(student)
    return loss, hits, gradient.to(products.dtype)


@cache
def _loss_and_gradient(device_type: str, logit_shape: LogitShape) -> Any:
    """`_step` for one logit shape; on a GPU compiled into a few passes over the logits."""

    def step(products: torch.Tensor, teacher_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return _step(products, teacher_logits, logit_shape)

    return torch.compile(step, dynamic=True) if device_type == "cuda" else step
