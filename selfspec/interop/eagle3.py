"""EAGLE-3 checkpoints, in both directions.

The original repository, SpecForge and SGLang call the decoder layer `midlayer`; ModelOpt and speculators call it `layers.0`.
The speculators format wraps the layer's config in one of its own. All other differences are in `selfspec.interop.facts`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from selfspec.heads.base import TargetIdentity
from selfspec.heads.eagle import EagleConfig, EagleHead
from selfspec.interop import facts as dialects
from selfspec.interop.commands import NUM_DRAFT_TOKENS, serve_command
from selfspec.interop.facts import EAGLE3
from selfspec.interop.files import Checkpoint, Export, fill, rename
from selfspec.interop.layer import read_layer, take_embedding, with_all_biases, without_zero_biases, write_layer
from selfspec.model.target import Target

LAYER = "midlayer."
# Patterns for the names of other tools, and our names.
ALIASES = {
    r"^model\.": "",
    r"^layers\.0\.": LAYER,
    r"^aux_norm_low\.": "fc_norm.0.",
    r"^aux_norm_mid\.": "fc_norm.1.",
    r"^aux_norm_high\.": "fc_norm.2.",
}


@dataclass(frozen=True)
class Conventions:
    """Settings about which a checkpoint can be unclear. None takes the checkpoint's own."""

    feature_layers: tuple[int, ...] | None = None
    norm_before_residual: bool | None = None


def is_eagle3(checkpoint: Checkpoint) -> bool:
    return any(rename(name, ALIASES) == f"{LAYER}hidden_norm.weight" for name in checkpoint.tensors)


def read_eagle3(checkpoint: Checkpoint, target: Target, identity: TargetIdentity, conventions: Conventions) -> EagleHead:
    """Read the head in a checkpoint of any EAGLE-3 dialect."""
    config = checkpoint.config
    is_wrapped = bool(config.get("speculators_model_type"))
    dialect = "speculators" if is_wrapped else "vllm" if config.get("eagle_aux_hidden_state_layer_ids") else "sglang"
    layer_config = {**config, **config.get("transformer_layer_config", {})} if is_wrapped else config
    checkpoint = without_zero_biases(checkpoint.renamed(ALIASES))
    state = checkpoint.tensors
    shape = read_layer(layer_config, LAYER, checkpoint, identity)
    take_embedding(state, checkpoint, target)
    eagle_config = config.get("eagle_config") or {}
    if eagle_config.get("use_aux_hidden_state") is False:
        raise checkpoint.refuse("eagle_config.use_aux_hidden_state is false: selfspec's EAGLE-3 heads fuse several layers")
    features = conventions.feature_layers or _features(checkpoint, dialect, identity)
    size = _draft_vocabulary(state, checkpoint, layer_config, target)
    has_lm_head = not _is_targets_lm_head(state, target)
    if not has_lm_head:
        del state["lm_head.weight"]
    head = EagleHead(
        EagleConfig(
            target=identity,
            feature_layers=features,
            draft_vocab_size=size,
            has_lm_head=has_lm_head,
            has_fc_norm="fc_norm.0.weight" in state,
            has_input_norm="input_norm.weight" in state,
            feeds_normed=bool(config.get("norm_output", False)),
            norm_before_residual=_norm_before_residual(checkpoint, dialect, conventions),
            **shape,
        )
    )
    _check_flags(checkpoint, head.config, eagle_config)
    fill(head, state, checkpoint)
    return head


def write_eagle3(head: EagleHead, target: Target, dialect: str, directory: str) -> Export:
    """Write the head for the dialect's engine."""
    facts, config = EAGLE3[dialect], head.config
    _check_expressible(config, dialect)
    model_type, num_layers = config.target.model_type, config.target.num_layers
    try:
        ids = dialects.layer_ids_of(config.feature_layers, facts, model_type, num_layers)
    except ValueError as error:
        raise ValueError(f"{dialect} cannot express this head: {error}") from error
    state = head.state_dict()
    offsets = state.pop("d2t")
    # Engines expect an LM head in the file.
    output: Any = head.output_layer(target.model.get_output_embeddings())
    if getattr(output, "bias", None) is not None:
        raise ValueError(f"{dialect} cannot express this head: the LM head that it shares with the target has a bias")
    state["lm_head.weight"] = output.weight.detach().to("cpu", head.fc.weight.dtype)
    state = with_all_biases(state, LAYER)
    tensors = {re.sub(f"^{re.escape(LAYER)}", facts.layer, name): value for name, value in state.items()}
    if config.draft_vocab_size < config.target.vocab_size:
        can_draft = torch.zeros(config.target.vocab_size, dtype=torch.bool)
        can_draft[head.draft_ids] = True
        tensors |= {"d2t": offsets, "t2d": can_draft}
    elif bool(offsets.any()):
        # A head that drafts all tokens has no map in vLLM, which refuses a file with one.
        raise ValueError(f"{dialect} cannot express this head: d2t reorders a full vocabulary")
    if facts.needs_embedding:
        embedding = target.model.get_input_embeddings().weight.detach()
        tensors["embed_tokens.weight"] = embedding.to(head.fc.weight.dtype)
    architecture = facts.qk_norm_architecture if config.has_qk_norm else facts.architecture
    layer = write_layer(config, target, head.fc.weight.dtype) | {"num_aux_hidden_states": len(ids)}
    record: dict[str, Any] = {
        "architectures": [architecture],
        "draft_vocab_size": config.draft_vocab_size,
        # Always write all of them, because readers have different defaults.
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.has_input_norm,
        "fc_norm": config.has_fc_norm,
        "norm_output": config.feeds_normed,
    }
    if dialect == "speculators":
        record |= {
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": NUM_DRAFT_TOKENS}],
                "verifier": {"name_or_path": target.name, "architectures": target.model.config.architectures or []},
            },
            "transformer_layer_config": layer,
            "eagle_aux_hidden_state_layer_ids": ids,
            "target_hidden_size": None,
        }
    elif facts.counts_outputs:
        record |= layer | {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}}
    else:
        record |= layer | {"eagle_aux_hidden_state_layer_ids": ids}
    return Export(record, tensors, [serve_command(dialect, "eagle3", target.name, directory)])


def _features(checkpoint: Checkpoint, dialect: str, target: TargetIdentity) -> tuple[int, ...]:
    config = checkpoint.config
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    ids = ids or (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids:
        return dialects.features_of(ids, EAGLE3[dialect], target.model_type, target.num_layers)
    features = dialects.default_features(target.num_layers)
    if min(features) < 0 or list(features) != sorted(set(features)):
        raise checkpoint.refuse(
            f"the config does not name the layers whose hidden states are fused, and the usual ones, {features}, are not "
            f"three layers of {target.name}, which has {target.num_layers}: pass --feature-layers"
        )
    return features


def _norm_before_residual(checkpoint: Checkpoint, dialect: str, conventions: Conventions) -> bool:
    for value in (
        conventions.norm_before_residual,
        checkpoint.config.get("norm_before_residual"),
        EAGLE3[dialect].default_norm_before_residual,
    ):
        if value is not None:
            return bool(value)
    raise checkpoint.refuse(
        "norm_before_residual is not in the config; vLLM then assumes true and the speculators package false: "
        "pass --norm-before-residual or --no-norm-before-residual"
    )


def _draft_vocabulary(
    state: dict[str, torch.Tensor], checkpoint: Checkpoint, layer_config: dict[str, Any], target: Target
) -> int:
    """The draft vocabulary's size V'. Leaves `lm_head.weight` [V', E] and `d2t` [V'] in `state`, and takes `t2d` out."""
    all_tokens = layer_config.get("vocab_size") or target.vocab_size
    size = checkpoint.config.get("draft_vocab_size")
    if "lm_head.weight" not in state:
        # Without one, engines use the target's.
        if layer_config.get("tie_word_embeddings"):
            shared = target.model.get_input_embeddings()
        elif size is None:
            shared = target.model.get_output_embeddings()
        else:
            raise checkpoint.refuse(f"lm_head.weight is missing, although draft_vocab_size is {size}")
        state["lm_head.weight"] = shared.weight.detach().to("cpu", state["norm.weight"].dtype).clone()
        all_tokens = size = target.vocab_size
    if size not in (None, len(state["lm_head.weight"])):
        raise checkpoint.refuse(f"draft_vocab_size is {size}, and lm_head.weight has {len(state['lm_head.weight'])} rows")
    size = len(state["lm_head.weight"])
    if size > target.vocab_size:
        raise checkpoint.refuse(f"it drafts {size} tokens, but {target.name} has {target.vocab_size}: name its own target")
    offsets, can_draft = state.pop("d2t", None), state.pop("t2d", None)
    if offsets is None:
        if size != all_tokens:
            raise checkpoint.refuse(f"d2t is missing: it says which {size} of {all_tokens} tokens are drafted")
        offsets = torch.zeros(size, dtype=torch.int64)
    state["d2t"] = offsets = offsets.long()
    if len(offsets) != size:
        raise checkpoint.refuse(f"d2t has {len(offsets)} entries and lm_head.weight {size} rows: they must match")
    ids = offsets + torch.arange(size)
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or len(ids.unique()) < size:
        raise checkpoint.refuse("d2t does not map to as many target tokens: it must hold target id minus draft id")
    if can_draft is not None and not torch.equal(can_draft.nonzero().flatten(), ids.sort().values):
        raise checkpoint.refuse("t2d and d2t name different tokens: one of them is of another checkpoint")
    return size


def _is_targets_lm_head(state: dict[str, torch.Tensor], target: Target) -> bool:
    """Whether the LM head equals the target's rows of the draft vocabulary, which then need not be stored."""
    output, weight = target.model.get_output_embeddings(), state["lm_head.weight"]
    rows = output.weight.detach().cpu()[state["d2t"] + torch.arange(len(weight))]
    return getattr(output, "bias", None) is None and torch.equal(rows.to(weight.dtype), weight)


def _check_flags(checkpoint: Checkpoint, config: EagleConfig, eagle_config: dict[str, Any]) -> None:
    """Refuse a checkpoint whose config and tensors disagree about a norm. We go by the tensors, engines by the config."""
    written = {**checkpoint.config, **eagle_config}
    for keys, name, is_there in (
        (("fc_norm", "use_aux_norm"), "fc_norm.0.weight", config.has_fc_norm),
        (("norm_before_fc",), "input_norm.weight", config.has_input_norm),
    ):
        flags = [written[key] for key in keys if written.get(key) is not None]
        if flags and any(flags) != is_there:
            raise checkpoint.refuse(
                f"{keys[0]} is {any(flags)} in the config, but {name} is {'there' if is_there else 'missing'}"
            )


def _check_expressible(config: EagleConfig, dialect: str) -> None:
    facts = EAGLE3[dialect]
    has_attention_bias = config.has_qkv_bias or config.has_o_bias
    cannot = {
        "has_fc_bias": config.has_fc_bias,
        "norm_before_residual": config.norm_before_residual and not facts.can_norm_before_residual,
        "has_qk_norm": config.has_qk_norm and facts.qk_norm_architecture is None,
        "biases in its attention": has_attention_bias and (not facts.can_have_attention_bias or config.has_qk_norm),
        "both has_fc_norm and has_input_norm": config.has_fc_norm and config.has_input_norm,
    }
    if wanted := [name for name, is_wanted in cannot.items() if is_wanted]:
        raise ValueError(f"{dialect} cannot express this head: it has {', '.join(wanted)}")
