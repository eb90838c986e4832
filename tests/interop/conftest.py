"""A target with enough layers to tell their numberings apart, and heads whose every weight is random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import tiny_target

from selfspec import Target
from selfspec.drafters.shipped import identity
from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import Eagle1Config, Eagle1Head, EagleConfig, EagleHead
from selfspec.heads.medusa import MedusaConfig, MedusaHead

NUM_LAYERS = 8
SHAPE = {"intermediate_size": 40, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5}


@pytest.fixture(scope="session")
def target() -> Target:
    return tiny_target("llama", num_hidden_layers=NUM_LAYERS, layer_types=None)


def randomised(head: DraftHead, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            # Norms near one, as trained ones are.
            parameter.copy_(1 + noise if "norm" in name else noise)
    return head.to(dtype).eval().requires_grad_(False)


@pytest.fixture
def make_eagle(target: Target) -> Callable[..., EagleHead]:
    def make(dtype: torch.dtype = torch.float32, **changes: Any) -> EagleHead:
        settings = {"feature_layers": (2, 4, 5), "draft_vocab_size": 20, **SHAPE, **changes}
        head = randomised(EagleHead(EagleConfig(target=identity(target), **settings)), dtype)
        size = settings["draft_vocab_size"]
        if size < target.vocab_size:
            head.d2t.copy_(torch.arange(size) * 2)
        return head

    return make


@pytest.fixture
def make_eagle1(target: Target) -> Callable[..., Eagle1Head]:
    def make(dtype: torch.dtype = torch.float32, **changes: Any) -> Eagle1Head:
        return randomised(Eagle1Head(Eagle1Config(target=identity(target), **{**SHAPE, **changes})), dtype)

    return make


@pytest.fixture
def make_medusa(target: Target) -> Callable[..., MedusaHead]:
    def make(dtype: torch.dtype = torch.float32, **changes: Any) -> MedusaHead:
        return randomised(MedusaHead(MedusaConfig(target=identity(target), **{"num_heads": 3, **changes})), dtype)

    return make
