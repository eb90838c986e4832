"""From a model's final hidden state to its logits: the LM head, and what the model does to the LM head's products.

Granite divides the products, Cohere multiplies them, Gemma 2 caps them.

Invariant: logits that a head drafts with, or learns from, have the same form as those that verify computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Known numbers that replace the LM head's products to find out what the model does to them.
PROBES = (-1e4, -40.0, -3.0, -0.5, 0.0, 0.25, 1.0, 7.0, 90.0, 1e4)


@dataclass(frozen=True)
class LogitShape:
    """logits = cap * tanh(scale * products / cap), or scale * products where `cap` is None."""

    scale: float = 1.0
    cap: float | None = None

    @property
    def is_plain(self) -> bool:
        """True where the products are the logits."""
        return self.scale == 1.0 and self.cap is None

    def __call__(self, products: torch.Tensor) -> torch.Tensor:
        """Logits [...] from the LM head's products [...]."""
        if self.is_plain:
            return products
        logits = products if self.scale == 1.0 else products * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """The derivative [...] of logits [...] by their products; a number where it is the same for all."""
        return self.scale if self.cap is None else self.scale * (1 - (logits / self.cap) ** 2)

    @classmethod
    @torch.inference_mode()
    def of(cls, model: PreTrainedModel) -> LogitShape:
        """The shape of a model's logits, from a forward whose LM head's products are replaced by known numbers.

        Raises:
            ValueError: the model applies neither a factor nor a cap.
        """
        output = model.get_output_embeddings()
        probes = torch.tensor(PROBES, dtype=torch.float32, device=model.device)
        entering: list[torch.Tensor] = []
        finals: list[torch.Tensor] = []

        def answer(module: nn.Module, args: tuple[torch.Tensor, ...], products: torch.Tensor) -> torch.Tensor:
            entering.append(args[0])
            known = probes.to(products.dtype).repeat(-(-products.shape[-1] // len(probes)))[: products.shape[-1]]
            return known.expand_as(products)

        def note(module: nn.Module, args: Any, states: Any) -> None:
            finals.append(states.last_hidden_state)

        handles = [output.register_forward_hook(answer), model.base_model.register_forward_hook(note)]
        try:
            # Not token 0, because it is often padding, whose embedding is zero.
            tokens = torch.tensor([[1, 2, 3]], device=model.device)
            logits = model(input_ids=tokens, use_cache=False).logits[0, -1, : len(PROBES)].float()
        finally:
            for handle in handles:
                handle.remove()
        given = probes[: len(logits)].to(model.dtype).float()
        shape = cls(*_fit(given, logits))
        factor = _factor(finals[-1], entering[-1]) if finals and entering else 1.0
        # Low precision has fewer digits.
        is_known = torch.allclose(shape(given), logits, rtol=1e-5 if model.dtype == torch.float32 else 2e-2)
        if not is_known or (factor != 1.0 and getattr(output, "bias", None) is not None):
            raise ValueError(
                f"{model.config.model_type} turns its LM head's products into logits in a way that selfspec does not know "
                "(neither a factor nor a tanh cap), so no head can be trained or served for it"
            )
        # A factor on the LM head's input has the same effect as one on its output.
        return cls(shape.scale * factor, shape.cap)


def _fit(products: torch.Tensor, logits: torch.Tensor) -> tuple[float, float | None]:
    """Scale and cap from some products [P] and their logits [P]."""
    small = int(products.abs().masked_fill(products == 0, torch.inf).argmin())
    large = int(products.abs().argmax())
    slope, reached = float(logits[small] / products[small]), abs(float(logits[large]))
    if abs(reached - abs(float(products[large]) * slope)) <= 0.02 * reached:
        return _rounded(slope), None
    # The largest product reaches the cap itself, and the smallest then gives the slope at zero.
    cap = _rounded(reached)
    scale = cap * float(torch.atanh(torch.tensor(float(logits[small]) / cap, dtype=torch.float64))) / float(products[small])
    return _rounded(scale), cap


def _rounded(number: float) -> float:
    """Round off the last digits of float32, because the model's configuration does not have them either."""
    return float(f"{number:.6g}")


def _factor(final: torch.Tensor, entering: torch.Tensor) -> float:
    """The factor between the final state [1, T, E] and the state [1, T, E] that enters the LM head."""
    a, b = final[0, -1].double(), entering[0, -1].double()
    return _rounded(float((a @ b) / (a @ a))) if a.any() else 1.0
