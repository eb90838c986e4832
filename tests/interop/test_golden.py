"""Tiny checkpoints under the names that other tools publish, against a forward written out here in plain torch.

The reference reads the files by their own names, and takes the target's features from transformers' `hidden_states`. A wrong
layer, map, norm or order of the halves therefore shows as other logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from selfspec import Target
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.heads.medusa import MedusaHead
from selfspec.interop import import_head
from selfspec.model.target import FINAL
from selfspec.train.unrolled import unrolled_attention

E, V, DRAFT_V, H, G, D, F_ = 32, 61, 20, 4, 2, 8, 40
LAYER_CONFIG = {
    "model_type": "llama",
    "hidden_size": E,
    "intermediate_size": F_,
    "num_hidden_layers": 1,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": V,
    "tie_word_embeddings": False,
}
IDS = torch.arange(4, 24)[None]

Tensors = dict[str, torch.Tensor]


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 7 * seed)
    return torch.randn(shape, generator=generator) * 0.3


def norm(size: int, seed: int = 0) -> torch.Tensor:
    return 1 + weight(size, seed=seed)


def decoder_layer(prefix: str, width: int) -> Tensors:
    """The published names of a Llama layer whose attention reads `width` channels."""
    return {
        f"{prefix}self_attn.q_proj.weight": weight(H * D, width),
        f"{prefix}self_attn.k_proj.weight": weight(G * D, width),
        f"{prefix}self_attn.v_proj.weight": weight(G * D, width, seed=1),
        f"{prefix}self_attn.o_proj.weight": weight(E, H * D),
        f"{prefix}mlp.gate_proj.weight": weight(F_, E),
        f"{prefix}mlp.up_proj.weight": weight(F_, E, seed=1),
        f"{prefix}mlp.down_proj.weight": weight(E, F_),
        f"{prefix}post_attention_layernorm.weight": norm(E),
    }


def eagle3_tensors(prefix: str, num_features: int = 3) -> Tensors:
    ids = torch.arange(DRAFT_V) * 3
    can_draft = torch.zeros(V, dtype=torch.bool)
    can_draft[ids] = True
    return {
        **decoder_layer(prefix, 2 * E),
        f"{prefix}hidden_norm.weight": norm(E, 1),
        f"{prefix}input_layernorm.weight": norm(E, 2),
        "norm.weight": norm(E, 3),
        "fc.weight": weight(E, num_features * E),
        "lm_head.weight": weight(DRAFT_V, E),
        "d2t": ids - torch.arange(DRAFT_V),
        "t2d": can_draft,
    }


def write(folder: Path, config: dict[str, Any], tensors: Tensors, name: str = "model.safetensors") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    return str(folder)


def rms(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [L, heads, D] at positions 0 … L - 1, pair (i, i + D / 2) turned by position * theta ** (-2 i / D)."""
    out = torch.empty_like(x)
    for i in range(D // 2):
        angle = (torch.arange(x.shape[0]) * theta ** (-2 * i / D))[:, None]
        a, b = x[:, :, i], x[:, :, i + D // 2]
        out[:, :, i] = a * angle.cos() - b * angle.sin()
        out[:, :, i + D // 2] = b * angle.cos() + a * angle.sin()
    return out


def attention(x: torch.Tensor, t: Tensors, prefix: str, theta: float) -> torch.Tensor:
    """x [L, width] -> [L, E], causal."""
    L = x.shape[0]
    project = lambda name: F.linear(x, t[f"{prefix}{name}.weight"], t.get(f"{prefix}{name}.bias"))  # noqa: E731
    q, k, v = project("q_proj").view(L, H, D), project("k_proj").view(L, G, D), project("v_proj").view(L, G, D)
    if f"{prefix}q_norm.weight" in t:
        q, k = rms(q, t[f"{prefix}q_norm.weight"]), rms(k, t[f"{prefix}k_norm.weight"])
    q, k = rotated(q, theta), rotated(k, theta)
    out = torch.empty(L, H, D)
    for head in range(H):
        own = head // (H // G)
        for row in range(L):
            probs = (q[row, head] @ k[: row + 1, own].T / D**0.5).softmax(-1)
            out[row, head] = probs @ v[: row + 1, own]
    return F.linear(out.reshape(L, H * D), t[f"{prefix}o_proj.weight"], t.get(f"{prefix}o_proj.bias"))


def mlp(x: torch.Tensor, t: Tensors, prefix: str) -> torch.Tensor:
    gate, up, down = (t[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def hidden_states(target: Target) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return target.model(IDS, output_hidden_states=True).hidden_states


def eagle3_reference(
    t: Tensors, prefix: str, target: Target, layers: tuple[int, ...], *, theta: float, residual_is_normed: bool = False
) -> torch.Tensor:
    """Logits [L, V] of the first draft from every position, -inf for tokens that are never drafted."""
    states = hidden_states(target)
    features = [states[k][0] for k in layers]
    for i in range(3):
        for name in (f"fc_norm.{i}.weight", ("aux_norm_low", "aux_norm_mid", "aux_norm_high")[i] + ".weight"):
            if name in t:
                features[i] = rms(features[i], t[name])
    joined = torch.cat(features, -1)
    if "input_norm.weight" in t:
        joined = rms(joined, t["input_norm.weight"])
    hidden = joined @ t["fc.weight"].T
    embedded = target.model.get_input_embeddings().weight[IDS[0].roll(-1)]
    normed = rms(hidden, t[f"{prefix}hidden_norm.weight"])
    x = torch.cat([rms(embedded, t[f"{prefix}input_layernorm.weight"]), normed], -1)
    hidden = (normed if residual_is_normed else hidden) + attention(x, t, f"{prefix}self_attn.", theta)
    hidden = hidden + mlp(rms(hidden, t[f"{prefix}post_attention_layernorm.weight"]), t, prefix)
    logits = torch.full((IDS.shape[1], V), -torch.inf)
    for row, offset in enumerate(t["d2t"].tolist()):
        logits[:, row + offset] = rms(hidden, t["norm.weight"]) @ t["lm_head.weight"][row]
    return logits


def first_drafts(head: EagleHead | Eagle1Head, target: Target) -> torch.Tensor:
    """The imported head's logits [L, V]."""
    positions = torch.arange(IDS.shape[1])[None]
    states = target.hidden_states(IDS, positions, head.features)
    embed, lm_head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    attend = unrolled_attention(positions, head.config.head_dim**-0.5, 1)
    fused = head.fuse([states[k] for k in head.features])
    normed, _ = head(fused, embed(IDS.roll(-1, 1)), positions, attend)
    logits = torch.full((IDS.shape[1], V), -torch.inf)
    logits[:, head.draft_ids] = head.output_layer(lm_head)(normed)[0].detach()
    return logits


# Dialect -> what the config adds, prefix of the layer, further tensors, the hidden states meant, theta, file.
EAGLE3_FILES: dict[str, tuple[dict[str, Any], str, Tensors, tuple[int, ...], float, str]] = {
    # No layers, no theta: 2, n // 2, n - 3 and 10000; a pickle.
    "original": ({"architectures": ["LlamaForCausalLM"]}, "midlayer.", {}, (2, 4, 5), 1e4, "pytorch_model.bin"),
    "specforge": (
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "rope_theta": 5e5,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
            "fc_norm": True,
            "norm_output": True,
        },
        "midlayer.",
        {f"fc_norm.{i}.weight": norm(E, 4 + i) for i in range(3)},
        (2, 4, 5),
        5e5,
        "model.safetensors",
    ),
    "sglang-legacy": (
        {"architectures": ["LlamaForCausalLMEagle3"], "use_aux_norm": True, "rope_theta": 5e5},
        "midlayer.",
        {f"aux_norm_{name}.weight": norm(E, 4 + i) for i, name in enumerate(("low", "mid", "high"))},
        (2, 4, 5),
        5e5,
        "model.safetensors",
    ),
    "modelopt": (
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "rope_theta": 1e4,
            "rope_parameters": {"rope_theta": 2e4, "rope_type": "default"},
            "head_dim": D,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6], "use_aux_hidden_state": True},
        },
        "layers.0.",
        {},
        (1, 3, 7),
        2e4,
        "model.safetensors",
    ),
    "gpt-oss": (
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "norm_before_fc": True},
        },
        "layers.0.",
        {"input_norm.weight": norm(3 * E)},
        (2, 4, 5),
        1e4,
        "model.safetensors",
    ),
    "vllm": (
        {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [1, 3, 7]},
        "midlayer.",
        {},
        (1, 3, 7),
        1e4,
        "model.safetensors",
    ),
}


@pytest.mark.parametrize("dialect", EAGLE3_FILES)
def test_eagle3(dialect: str, target: Target, tmp_path: Path) -> None:
    changes, prefix, more, layers, theta, name = EAGLE3_FILES[dialect]
    tensors = {**eagle3_tensors(prefix), **more}
    config = {**LAYER_CONFIG, "draft_vocab_size": DRAFT_V, **changes}
    head = import_head(write(tmp_path / "c", config, tensors, name), target)
    assert isinstance(head, EagleHead)
    assert head.config.feeds_normed == bool(changes.get("norm_output"))
    expected = eagle3_reference(tensors, prefix, target, layers, theta=theta)
    torch.testing.assert_close(first_drafts(head, target), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("residual_is_normed", [False, True])
@pytest.mark.parametrize("is_qwen3", [False, True])
def test_speculators(residual_is_normed: bool, is_qwen3: bool, target: Target, tmp_path: Path) -> None:
    tensors = eagle3_tensors("layers.0.")
    # The package saves the embedding with the head.
    tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight.clone()
    layer = {**LAYER_CONFIG, "rope_parameters": {"rope_theta": 3e4, "rope_type": "default"}, "head_dim": D}
    if is_qwen3:
        layer["model_type"] = "qwen3"
        tensors |= {f"layers.0.self_attn.{part}_norm.weight": norm(D, seed) for seed, part in enumerate("qk")}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x", "architectures": []}},
        "transformer_layer_config": layer,
        "draft_vocab_size": DRAFT_V,
        "norm_before_residual": residual_is_normed,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 7],
        "target_hidden_size": None,
    }
    head = import_head(write(tmp_path / "c", config, tensors), target)
    assert isinstance(head, EagleHead)
    expected = eagle3_reference(tensors, "layers.0.", target, (2, 4, 7), theta=3e4, residual_is_normed=residual_is_normed)
    torch.testing.assert_close(first_drafts(head, target), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("has_bias", [False, True])
def test_eagle1(has_bias: bool, target: Target, tmp_path: Path) -> None:
    """[H7] the original repository's: an embedding of its own, and a bias on fc unless the config says otherwise."""
    tensors = {
        **decoder_layer("layers.0.", E),
        "fc.weight": weight(E, 2 * E),
        "embed_tokens.weight": target.model.get_input_embeddings().weight.clone(),
    }
    if has_bias:
        tensors["fc.bias"] = weight(E)
    config = {**LAYER_CONFIG, "architectures": ["LlamaForCausalLM"], **({} if has_bias else {"bias": False})}
    head = import_head(write(tmp_path / "c", config, tensors, "pytorch_model.bin"), target)
    assert isinstance(head, Eagle1Head)
    final = hidden_states(target)[-1][0]
    embedded = target.model.get_input_embeddings().weight[IDS[0].roll(-1)]
    x = F.linear(torch.cat([embedded, final], -1), tensors["fc.weight"], tensors.get("fc.bias"))
    x = x + attention(x, tensors, "layers.0.self_attn.", 1e4)
    x = x + mlp(rms(x, tensors["layers.0.post_attention_layernorm.weight"]), tensors, "layers.0.")
    expected = x @ target.model.get_output_embeddings().weight.T
    torch.testing.assert_close(first_drafts(head, target), expected, atol=1e-4, rtol=1e-4)


def medusa_reference(hidden: torch.Tensor, blocks: list[list[tuple[torch.Tensor, torch.Tensor | None]]]) -> torch.Tensor:
    outputs = []
    for head in blocks:
        x = hidden
        for w, b in head:
            x = x + F.silu(F.linear(x, w, b))
        outputs.append(x)
    return torch.stack(outputs, dim=-2)


# The names of head i's block j and of its output layer, where it has one; biases; the file.
MEDUSA_FILES: dict[str, tuple[str, str | None, bool, dict[str, Any], str]] = {
    "original-1": (
        "{i}.{j}.linear.",
        "{i}.2.weight",
        True,
        {"medusa_num_heads": 3, "medusa_num_layers": 2},
        "medusa_lm_head.pt",
    ),
    "original-1-counted-wrongly": (
        "{i}.{j}.linear.",
        "{i}.2.weight",
        True,
        {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "org/model"},
        "medusa_lm_head.pt",
    ),
    "original-2": ("{i}.{j}.linear.", None, True, {"medusa_num_heads": 3, "version": "2"}, "medusa_lm_head.pt"),
    "prefixed": ("medusa_heads.{i}.{j}.linear.", "medusa_heads.{i}.2.weight", True, {}, "model.safetensors"),
    "vllm": (
        "blocks.{i}.layers.{j}.",
        "lm_heads.{i}.weight",
        False,
        {"num_heads": 3, "num_hidden_layers": 2},
        "model.safetensors",
    ),
    "vllm-biased": ("blocks.{i}.layers.{j}.", "lm_heads.{i}.weight", True, {"medusa_fc_bias": True}, "model.safetensors"),
    "vllm-shared": ("blocks.{i}.layers.{j}.", "lm_head.weight", False, {"original_lm_head": True}, "model.safetensors"),
}


@pytest.mark.parametrize("dialect", MEDUSA_FILES)
def test_medusa(dialect: str, target: Target, tmp_path: Path) -> None:
    block, output, has_bias, config, name = MEDUSA_FILES[dialect]
    lm_head = target.model.get_output_embeddings().weight
    is_shared = output is None or "{i}" not in output
    tensors: Tensors = {}
    blocks: list[list[tuple[torch.Tensor, torch.Tensor | None]]] = []
    outputs = [lm_head if is_shared else weight(V, E, seed=i) for i in range(3)]
    for i in range(3):
        blocks.append([(weight(E, E, seed=2 * i + j), weight(E, seed=i + j) if has_bias else None) for j in range(2)])
        for j, (w, b) in enumerate(blocks[i]):
            tensors[block.format(i=i, j=j) + "weight"] = w
            if b is not None:
                tensors[block.format(i=i, j=j) + "bias"] = b
        if output is not None:
            tensors[output.format(i=i)] = outputs[i].clone()
    head = import_head(write(tmp_path / "c", config, tensors, name), target)
    assert isinstance(head, MedusaHead)
    assert head.config.has_output_layer != is_shared
    final = hidden_states(target)[-1][0]
    expected = torch.stack([x @ w.T for x, w in zip(medusa_reference(final, blocks).unbind(-2), outputs, strict=True)], -2)
    states = target.hidden_states(IDS, torch.arange(IDS.shape[1])[None], (FINAL,))[FINAL]
    embed = target.model.get_input_embeddings()
    got = head(states, embed(IDS), target.model.get_output_embeddings(), 3)[0]
    torch.testing.assert_close(got.detach(), expected, atol=1e-4, rtol=1e-4)


def test_the_weights_count_the_heads(target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first published Medusa checkpoint has five heads, and a config that says two."""
    tensors: Tensors = {f"{i}.0.linear.weight": weight(E, E, seed=i) for i in range(5)}
    tensors |= {f"{i}.0.linear.bias": weight(E, seed=i) for i in range(5)}
    tensors |= {f"{i}.1.weight": weight(V, E, seed=i) for i in range(5)}
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    head = import_head(write(tmp_path / "c", config, tensors, "medusa_lm_head.pt"), target)
    assert isinstance(head, MedusaHead) and (head.config.num_heads, head.config.has_output_layer) == (5, True)
    [record] = caplog.records
    assert "medusa_num_heads is 2 in the config, but there are the weights of 5, which are all read" in record.getMessage()
