"""The differences between the dialects of EAGLE checkpoints, in one table for both directions.

Each field is a fact that an engine assumes without checking. A checkpoint that violates it loads and answers every request,
but few of its drafts are accepted. The facts are from the code of vLLM 0.32, SGLang 0.5.23 and speculators 0.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Eagle3Facts:
    """One dialect.

    Attributes:
        architecture, qk_norm_architecture: the class that loads it, without and with norms of queries and keys.
        layer: the prefix of the names of the decoder layer's tensors.
        counts_outputs: the config numbers layer outputs (i is the hidden state entering layer i + 1). Otherwise it numbers
            the hidden states that enter layers, as we do.
        can_read_ends: the first layer's input and the last layer's output can be features.
        needs_embedding: it must contain a copy of the target's embedding; without one the engine uses uninitialised memory.
        default_norm_before_residual: the meaning of a config that does not say; None if readers disagree.
        can_norm_before_residual, can_have_attention_bias: what its decoder layer supports.
    """

    architecture: str
    qk_norm_architecture: str | None
    layer: str
    counts_outputs: bool
    can_read_ends: bool
    needs_embedding: bool
    default_norm_before_residual: bool | None
    can_norm_before_residual: bool
    can_have_attention_bias: bool


EAGLE3 = {
    # vLLM also reads the original repository's own checkpoints this way.
    "vllm": Eagle3Facts(
        architecture="LlamaForCausalLMEagle3",
        qk_norm_architecture="Eagle3Qwen3ForCausalLM",
        layer="midlayer.",
        counts_outputs=False,
        can_read_ends=True,
        needs_embedding=False,
        default_norm_before_residual=False,
        can_norm_before_residual=True,
        can_have_attention_bias=True,
    ),
    # The original repository, SpecForge and ModelOpt write what SGLang reads; ModelOpt calls the layer `layers.0.`.
    "sglang": Eagle3Facts(
        architecture="LlamaForCausalLMEagle3",
        qk_norm_architecture=None,
        layer="midlayer.",
        counts_outputs=True,
        can_read_ends=False,
        needs_embedding=False,
        default_norm_before_residual=False,
        # SGLang's layer always adds to the hidden state before the norm. Its query, key and value projections have no bias.
        can_norm_before_residual=False,
        can_have_attention_bias=False,
    ),
    "speculators": Eagle3Facts(
        architecture="Eagle3DraftModel",
        qk_norm_architecture="Eagle3DraftModel",
        layer="layers.0.",
        counts_outputs=False,
        can_read_ends=True,
        needs_embedding=True,
        # The speculators package assumes False, vLLM True.
        default_norm_before_residual=None,
        can_norm_before_residual=True,
        can_have_attention_bias=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Eagle1Facts:
    """One dialect of EAGLE-1 and EAGLE-2, whose weights are the same.

    Attributes:
        architecture: the class that loads it.
        reads_fc_bias: it adds a bias, uninitialised memory if the file has none. Otherwise it silently drops a bias.
    """

    architecture: str
    reads_fc_bias: bool


# No config may say `"bias": true`, the original key for the bias of fc, because both engines allocate attention biases then.
EAGLE1 = {
    "vllm": Eagle1Facts(architecture="EagleLlamaForCausalLM", reads_fc_bias=False),
    "sglang": Eagle1Facts(architecture="LlamaForCausalLMEagle", reads_fc_bias=True),
}

# Targets for which SGLang counts as we do, unless the first number is 1.
SGLANG_COUNTS_INPUTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


def default_features(num_layers: int) -> tuple[int, ...]:
    """The hidden states that every engine reads if the config names no layers, by the layer they enter."""
    return (2, num_layers // 2, num_layers - 3)


def features_of(ids: Sequence[int], facts: Eagle3Facts, model_type: str, num_layers: int) -> tuple[int, ...]:
    """Translate the layer ids in a config to our numbering."""
    if not facts.counts_outputs:
        return tuple(ids)
    if model_type in SGLANG_COUNTS_INPUTS and ids[0] != 1:
        return tuple(ids)
    if model_type == "gpt_oss" and max(ids) == num_layers:
        return tuple(ids)
    return tuple(i + 1 for i in ids)


def layer_ids_of(features: Sequence[int], facts: Eagle3Facts, model_type: str, num_layers: int) -> list[int]:
    """The layer ids to write into a config, from which `features_of` gives these features.

    Raises:
        ValueError: no ids give these features; the message says why.
    """
    given = f"feature_layers={tuple(features)}"
    if list(features) != sorted(features):
        raise ValueError(f"{given} do not ascend, and engines hand them over in that order")
    candidates = [[k - 1 for k in features], list(features)] if facts.counts_outputs else [list(features)]
    ids = next((c for c in candidates if features_of(c, facts, model_type, num_layers) == tuple(features)), None)
    if ids is None:
        raise ValueError(f"{given} cannot be told to it for a {model_type} target")
    # SGLang knows the last layer's output for gpt-oss only.
    last = num_layers - (model_type != "gpt_oss")
    if not facts.can_read_ends and not 1 <= min(features) <= max(features) <= last:
        raise ValueError(f"{given} reach beyond those it can read, 1 to {last}")
    return ids
