"""Tiny random targets of every served family, heads for them, and drafters that only tests need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from selfspec.heads.base import TargetIdentity
from selfspec.heads.eagle import EagleConfig, EagleHead
from selfspec.heads.early_exit import DistilledDraft, EarlyExitHead
from selfspec.loop.batch import Batch
from selfspec.loop.drafter import Drafter, Proposal
from selfspec.model.target import Target
from selfspec.tree import from_parents

# (a name, what fills a folder) -> the folder; see the fixture `made_once`.
MadeOnce = Callable[[str, Callable[[Path], None]], Path]

VOCAB_SIZE = 61
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _config(cls: str, **changes: Any) -> Callable[[], PretrainedConfig]:
    return lambda: getattr(transformers, cls)(**{**COMMON, **changes})


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _config("LlamaConfig"),
    "llama-tied": _config("LlamaConfig", tie_word_embeddings=True),
    "mistral-window": _config("MistralConfig", sliding_window=9, head_dim=8),
    "qwen2": _config("Qwen2Config", tie_word_embeddings=True),
    "qwen2-window": _config("Qwen2Config", use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": _config("Qwen3Config", head_dim=16),
    "qwen3-moe": _config("Qwen3MoeConfig", head_dim=8, num_experts=4, **MOE),
    "gemma": _config("GemmaConfig", head_dim=8),
    "gemma2": _config("Gemma2Config", head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "gemma3": _config("Gemma3TextConfig", head_dim=8, sliding_window=6, query_pre_attn_scalar=8, sliding_window_pattern=2),
    "phi3": _config("Phi3Config"),
    "gpt-neox": _config("GPTNeoXConfig"),
    "olmo2": _config("Olmo2Config"),
    "mixtral": _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "granite": _config("GraniteConfig", logits_scaling=2.0, attention_multiplier=0.3),
    "starcoder2": _config("Starcoder2Config"),
    "gpt-oss": _config(
        "GptOssConfig", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, layer_types=None
    ),
    "smollm3": _config("SmolLM3Config"),
    "cohere": _config("CohereConfig", logit_scale=0.3),
    "gpt2": _config("GPT2Config", n_embd=32, n_layer=3, n_head=4, n_positions=256),
    "opt": _config("OPTConfig", ffn_dim=48, word_embed_proj_dim=32),
    "deepseek-v3": _config(
        "DeepseekV3Config",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        **MOE,
    ),
}

REFUSED: dict[str, Callable[[], PretrainedConfig]] = {
    "mamba": lambda: transformers.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2),
    "t5": lambda: transformers.T5Config(vocab_size=VOCAB_SIZE, d_model=32, num_layers=2, d_ff=48, d_kv=8, num_heads=4),
    "falcon": lambda: transformers.FalconConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    ),
    "bloom": lambda: transformers.BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4),
}


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random fp32 model whose greedy text varies (weights wide enough not to repeat one token for ever)."""
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    # Older transformers' sdpa leaves soft-caps out, so that eager attention is the reference everywhere.
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


def tiny_target(family: str = "llama", seed: int = 0, **changes: Any) -> Target:
    return Target(tiny_model(family, seed, **changes), name=family)


def identity(target: Target) -> TargetIdentity:
    return TargetIdentity.of(target.model, target.tokenizer, name=target.name)


def eagle_head(target: Target, **changes: object) -> EagleHead:
    torch.manual_seed(1)
    config = EagleConfig(
        target=identity(target),
        feature_layers=tuple(changes.pop("feature_layers", (0, 1))),  # type: ignore[call-overload]
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        draft_vocab_size=int(changes.pop("draft_vocab_size", target.vocab_size)),  # type: ignore[call-overload]
        **changes,  # type: ignore[arg-type]
    )
    return EagleHead(config)


def exit_head(target: Target, exit_layer: int, *blocks: int, lora_rank: int = 0) -> EarlyExitHead:
    head = EarlyExitHead.for_target(
        identity(target), target.model, exit_layer=exit_layer, blocks=blocks, lora_rank=lora_rank
    )
    return head.eval()


def draft_head(target: Target, *blocks: int) -> DistilledDraft:
    return DistilledDraft.for_target(identity(target), target.model, blocks=blocks).eval()


def random_prompts(count: int, lengths: tuple[int, int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    low, high = lengths
    sizes = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB_SIZE, (size,), generator=generator).tolist() for size in sizes]


class OracleTreeDrafter(Drafter):
    """Random trees in which the true continuation, where known, is hidden at scattered nodes.

    Args:
        answers: prompt (as a tuple) -> the tokens that plain decoding emits after it.
        hit: chance that a depth's true token is in the tree.
    """

    name = "oracle"

    def __init__(self, answers: dict[tuple[int, ...], list[int]], *, hit: float = 0.8, num_nodes: int = 9, seed: int = 0):
        self.answers = answers
        self.hit = hit
        self.num_nodes = num_nodes
        self.num_draft_tokens = num_nodes - 1
        self.generator = torch.Generator().manual_seed(seed)

    def _random(self, high: int) -> int:
        return int(torch.randint(high, (1,), generator=self.generator))

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        N = self.num_nodes
        tokens = torch.full((len(batch), N), -1)
        parents = torch.full((len(batch), N), -1)
        tokens[:, 0] = batch.roots
        for b, sequence in enumerate(batch.sequences):
            answer = self.answers[tuple(sequence.request.prompt_ids)][len(sequence.token_ids) :]
            true_node, true_depth = 0, 0
            # Some rows draft less than others: the rest is padding.
            for i in range(1, 1 + self._random(N)):
                is_true = self._random(100) < 100 * self.hit and true_depth < len(answer)
                parent = true_node if is_true else self._random(i)
                token = answer[true_depth] if is_true else self._random(batch.target.vocab_size)
                tokens[b, i], parents[b, i] = token, parent
                if is_true:
                    true_node, true_depth = i, true_depth + 1
        return Proposal(from_parents(tokens.to(batch.device), parents.to(batch.device)))
