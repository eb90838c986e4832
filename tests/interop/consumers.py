"""Exports against the packages that load them: `python tests/interop/consumers.py speculators`, or `vllm`.

This is a script and not a test, because the pins of these packages differ from ours. docs/interop.md says how to make the
environment. Loading alone proves nothing, because loaders ignore what is missing. So every parameter must come from the
file, none may be NaN, and what can be computed without a GPU must equal ours: the logits of three drafted depths from
speculators, the fused features and Medusa's hidden states from vLLM.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec import Target
from selfspec.drafters.shipped import identity
from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import Eagle1Config, Eagle1Head, EagleConfig, EagleHead
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.interop import export_head
from selfspec.train.unrolled import unrolled_attention

NUM_STEPS = 3
# The speculators package takes multiples of this.
LENGTH = 128
SHAPE: dict[str, Any] = {"intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "3.1": {},
    "3.0": {"has_fc_norm": False, "feeds_normed": False},
    "input norm": {"has_fc_norm": False, "has_input_norm": True},
    "norm before residual": {"norm_before_residual": True},
    "query and key norms": {"has_qk_norm": True},
    "biases": {"has_qkv_bias": True},
    "the target's LM head": {"has_lm_head": False},
    "all tokens": {"draft_vocab_size": 61},
    "two features": {"feature_layers": (1, 6)},
    "llama3 rope": {"rope_scaling": LLAMA3, "rope_theta": 5e5},
}


def make_target(directory: Path) -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.save_pretrained(directory)
    return Target(model, name=str(directory))


def make_head(target: Target, **changes: Any) -> EagleHead:
    torch.manual_seed(1)
    settings = {"feature_layers": (2, 4, 5), "draft_vocab_size": 20, **SHAPE, **changes}
    head = randomised(EagleHead(EagleConfig(target=identity(target), **settings)))
    assert isinstance(head, EagleHead)
    if settings["draft_vocab_size"] < target.vocab_size:
        head.d2t.copy_(torch.arange(settings["draft_vocab_size"]) * 2)
    return head


def randomised(head: DraftHead) -> DraftHead:
    for name, parameter in head.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return head.eval().requires_grad_(False)


def our_logits(head: EagleHead, target: Target, ids: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
    positions = torch.arange(ids.shape[1])[None]
    embed = target.model.get_input_embeddings()
    attend = unrolled_attention(positions, head.config.head_dim**-0.5, NUM_STEPS)
    hidden, logits = head.fuse(states), []
    for step in range(NUM_STEPS):
        normed, hidden = head(hidden, embed(ids.roll(-1 - step, 1)), positions + step, attend)
        logits.append(head.output_layer(target.model.get_output_embeddings())(normed))
    return logits


def check_speculators(head: EagleHead, target: Target, directory: Path) -> float:
    """The greatest gap between their logits and ours."""
    from speculators import SpeculatorModel

    model: Any = SpeculatorModel.from_pretrained(str(directory)).eval()
    written = load_file(directory / "model.safetensors")
    for name, value in model.state_dict().items():
        assert name.startswith("verifier_") or torch.equal(value, written[name]), f"{name} is not what was written"
        assert not value.is_floating_point() or bool(value.isfinite().all()), f"{name} was never filled"
    ids = torch.randint(3, 61, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    states = target.hidden_states(ids, torch.arange(LENGTH)[None], head.features)
    features = [states[k] for k in head.features]
    theirs: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: theirs.append(output))
    with torch.no_grad():
        document = torch.zeros(1, LENGTH, dtype=torch.int64)
        model(torch.cat(features, -1), ids.roll(-1, 1), document, ttt_steps=NUM_STEPS)
    hook.remove()
    gaps = []
    for step, (a, b) in enumerate(zip(theirs, our_logits(head, target, ids, features), strict=True)):
        # The last rows' tokens lie beyond the text: theirs are zeros, ours the first ones.
        rows = slice(None, LENGTH - 1 - step)
        gaps.append(float((a[0, rows] - b[0, rows]).abs().max()))
    return max(gaps)


def check_vllm(head: DraftHead, target: Target, directory: Path, method: str) -> float:
    """The greatest gap between what vLLM's draft class computes before attention, and ours."""
    from vllm.config import DeviceConfig, ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    model_config = ModelConfig(model=target.name, dtype="float32", skip_tokenizer_init=True)
    speculative = SpeculativeConfig(
        method=method,
        model=str(directory),
        num_speculative_tokens=NUM_STEPS,
        target_model_config=model_config,
        target_parallel_config=ParallelConfig(),
    )
    config = VllmConfig(model_config=model_config, speculative_config=speculative, device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(config):
        model: Any = get_model(vllm_config=config, model_config=speculative.draft_model_config)
    # vLLM puts the target's embedding in its place later.
    shared = {"model.embed_tokens.weight"}
    untouched = {name for name, value in model.named_parameters() if is_poisoned(value)}
    assert untouched <= shared, f"not in the file: {untouched - shared}"
    read = speculative.draft_model_config.hf_config
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        if isinstance(head, MedusaHead):
            return max(float((a - b(x)).abs().max()) for a, b in zip(model(x), head.heads, strict=True))
        if isinstance(head, EagleHead):
            settings = head.config
            assert tuple(read.eagle_aux_hidden_state_layer_ids) == settings.feature_layers
            assert read.norm_output == settings.feeds_normed
            assert read.norm_before_residual == settings.norm_before_residual
            features = [x.roll(k, 0)[None] for k in range(len(settings.feature_layers))]
            return float((model.combine_hidden_states(torch.cat(features, -1)[0]) - head.fuse(features)[0]).abs().max())
        return float((model.model.fc(torch.cat([x, x], -1)) - head.fc(torch.cat([x, x], -1))).abs().max())  # type: ignore[operator]


POISON = -777


def is_poisoned(value: torch.Tensor) -> bool:
    return bool(value.isnan().any() if value.is_floating_point() else (value == POISON).any())


def prepare_vllm() -> None:
    """vLLM on a CPU, in one process, whose loader starts from poisoned parameters."""
    import vllm.platforms
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    torch.accelerator.empty_cache = lambda: None
    load_weights = DefaultModelLoader.load_weights

    def load_over_poison(self: Any, model: torch.nn.Module, model_config: Any) -> Any:
        for value in model.parameters():
            value.data.fill_(torch.nan if value.is_floating_point() else POISON)
        return load_weights(self, model, model_config)

    DefaultModelLoader.load_weights = load_over_poison
    with tempfile.NamedTemporaryFile() as store, set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        init_distributed_environment(1, 0, f"file://{store.name}-store", 0, "gloo")
        initialize_model_parallel(1, 1)


def heads_for(engine: str, target: Target) -> Iterator[tuple[str, DraftHead, str, str]]:
    """Name, head, format and vLLM's method."""
    formats = ("speculators",) if engine == "speculators" else ("vllm", "speculators")
    for kind in formats:
        for name, changes in CASES.items():
            yield f"{name} as {kind}", make_head(target, **changes), kind, "eagle3"
    if engine == "vllm":
        yield "EAGLE-1", randomised(Eagle1Head(Eagle1Config(target=identity(target), **SHAPE))), "vllm", "eagle"
        for shape in ({"num_heads": 3}, {"num_heads": 3, "num_blocks": 2, "has_output_layer": True}):
            medusa = MedusaHead(MedusaConfig(target=identity(target), **shape))
            yield f"Medusa {shape}", randomised(medusa), "medusa", "medusa"


def main(engine: str) -> int:
    is_wrong = False
    if engine == "vllm":
        prepare_vllm()
    with tempfile.TemporaryDirectory() as folder:
        target = make_target(Path(folder) / "target")
        for i, (name, head, kind, method) in enumerate(heads_for(engine, target)):
            place = Path(folder) / str(i)
            head.save_pretrained(place / "head")
            export_head(str(place / "head"), target, kind, place / "export")
            if engine == "vllm":
                gap = check_vllm(head, target, place / "export", method)
            else:
                assert isinstance(head, EagleHead)
                gap = check_speculators(head, target, place / "export")
            print(f"{name}: greatest gap {gap:.1e}")  # noqa: T201
            is_wrong |= not gap < 1e-3
    return int(is_wrong)


if __name__ == "__main__":
    if sys.argv[1:] not in (["speculators"], ["vllm"]):
        sys.exit("usage: consumers.py speculators|vllm")
    sys.exit(main(sys.argv[1]))
