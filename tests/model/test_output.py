"""From the final hidden state to logits: the model's own way, in every family."""

import pytest
import torch
from support import FAMILIES, VOCAB_SIZE, tiny_model, tiny_target

from selfspec.model.output import LogitShape


# OPT does not show its last hidden state, so that no head reads it.
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "opt"])
def test_logits_from_the_final_state_are_the_models_own(family):
    target = tiny_target(family)
    tokens = torch.randint(3, VOCAB_SIZE, (2, 19))
    finals = []
    handle = target.model.base_model.register_forward_hook(
        lambda module, args, output: finals.append(output.last_hidden_state)
    )
    with torch.no_grad():
        logits = target.model(input_ids=tokens, use_cache=False).logits
    handle.remove()
    assert (target.logits_of(finals[0]).softmax(-1) - logits.softmax(-1)).abs().max() < 1e-5
    torch.testing.assert_close(target.logits_of(finals[0]), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes", "shape"),
    [
        ("llama", {}, LogitShape()),
        ("granite", {"logits_scaling": 8.0}, LogitShape(scale=0.125)),
        ("cohere", {"logit_scale": 0.0625}, LogitShape(scale=0.0625)),
        ("gemma2", {"final_logit_softcapping": 12.0}, LogitShape(cap=12.0)),
        ("gemma2", {"final_logit_softcapping": None}, LogitShape()),
    ],
)
def test_the_shape_is_the_configurations(family, changes, shape):
    assert LogitShape.of(tiny_model(family, **changes)) == shape


@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(0.3), LogitShape(cap=5.0), LogitShape(0.5, 7.0)])
def test_the_slope_is_the_derivative(shape):
    products = torch.linspace(-9, 9, 37, dtype=torch.float64, requires_grad=True)
    logits = shape(products)
    (derivative,) = torch.autograd.grad(logits.sum(), products)
    slope = torch.as_tensor(shape.slope(logits), dtype=torch.float64)
    torch.testing.assert_close(slope.expand_as(derivative), derivative)


def test_a_model_with_another_way_is_refused_by_name():
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, products: products)
    forward = model.forward

    def squared(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits.abs().sqrt()
        return output

    model.forward = squared
    with pytest.raises(ValueError, match="llama turns its LM head's products into logits in a way"):
        LogitShape.of(model)
