"""Which of transformers' causal language models selfspec serves: each of them, tiny and random, against `generate`.

    python tests/families.py [KIND …] [--json FILE] [--no-variants]

Every model type of the installed transformers is built with hidden states of 32, 4 layers and, where there is one, a window
of 8, in float32. Then three prompts of 7 to 36 tokens are answered with 32 tokens, by every drafter that needs no training,
one at a time and together, and each answer must be the one that `generate` gives. A model may also be refused in one
sentence. Variants have their window switched on, a rotary table that changes within the text, or another setting that
decides whether they are served. Prints a table; exit code 1 if an answer was wrong, a process died or an error was not a
sentence.
"""

from __future__ import annotations

import copy
import json
import logging
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from selfspec import SamplingParams, Target, generate, load_drafter
from selfspec.loop.drafter import Drafter
from selfspec.model.load import check_family

HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS, WINDOW = 32, 4, 4, 8
PROMPT_LENGTHS, NUM_TOKENS = (7, 20, 36), 32
DRAFTERS = ("none", "ngram", "truncated:1")
# Where a rotary table changes: within the longest prompts' answers.
SWITCH = 40
# A tiny model takes seconds; a hundred times as much is a fault.
TIME_LIMIT = 240.0

# Configurations name their sizes in many ways. What is not here keeps its default.
SIZES: tuple[tuple[int, str], ...] = (
    (61, "vocab_size n_vocab unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_target_positions"),
    (
        HIDDEN_SIZE,
        """hidden_size n_embd d_model embedding_size embedding_dim emb_dim dim output_hidden_size lru_width
        attention_hidden_size backbone_hidden_size input_embedding_size output_embedding_size word_embed_proj_dim
        router_hidden_size projection_dim text_hidden_size out_hidden_size hidden_size_per_layer_input""",
    ),
    (
        48,
        """intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dff dim_ff feed_forward_size d_inner
        n_inner shared_intermediate_size shared_expert_intermediate_size intermediate_size_mlp dense_intermediate_size
        shared_experts_intermediate_size moe_shared_expert_intermediate_size""",
    ),
    (24, "moe_intermediate_size expert_ffn_hidden_size moe_shared_intermediate_size"),
    (
        NUM_LAYERS,
        """num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks
        encoder_layers num_encoder_layers""",
    ),
    (
        NUM_HEADS,
        """num_attention_heads n_head n_heads num_heads decoder_attention_heads num_decoder_attention_heads
        attention_heads num_local_experts num_experts n_routed_experts moe_num_experts mamba_num_heads mamba_n_heads
        n_mamba_heads linear_num_key_heads linear_num_value_heads swa_num_attention_heads index_n_heads linear_num_heads
        encoder_attention_heads num_encoder_attention_heads""",
    ),
    (
        2,
        """num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k n_group num_expert_group
        swa_num_key_value_heads n_groups mamba_n_groups mamba_ngroups num_kv_heads num_query_groups num_mem_blocks
        number_of_conv_states""",
    ),
    (1, "first_k_dense_replace topk_group n_shared_experts num_shared_experts moe_num_shared_experts num_dense_layers"),
    (
        8,
        """head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_channels d_head global_head_dim swa_head_dim
        linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim attention_head_dim attention_head_size
        sliding_window window_size sliding_window_size attention_window_size local_attention query_pre_attn_scalar rotary_dim
        mamba_d_state ssm_state_size state_size image_size dim_head laurel_rank index_topk mamba_chunk_size chunk_size
        embed_dim_per_head""",
    ),
    (
        16,
        """q_lora_rank kv_lora_rank o_lora_rank mamba_dt_rank time_step_rank adapter_rank d_rel rel_extent mamba_head_dim
        mamba_d_head mamba_headdim""",
    ),
    (64, "mamba_d_ssm"),
)
# Sizes that a configuration may leave to others, which are too large then.
NEVER_UNSAID = ("head_dim", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok")
SIZE_OF = {name: size for size, names in SIZES for name in names.split()}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

# What a tiny one needs beyond that: the sizes of some depend on each other.
NEEDED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dots1": {"n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}

# Settings that decide whether, or how, a type is served; "published" is what its configuration says by default.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "bert": {"as an encoder": {"is_decoder": False}},
    "gemma3n_text": {"no shared states": {"num_kv_shared_layers": 0}},
    "gemma4_text": {"one size of head": {"global_head_dim": 8, "num_kv_shared_layers": 0}},
    "gpt2": {"scaled by layer": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}},
    "lfm2": {"with convolutions": {"layer_types": ["conv", "full_attention"] * 2}},
    "opt": {"norms last": {"do_layer_norm_before": False}},
}

PUBLISHED = "published"
# The tables that change with the length of the text.
ROTARY_TABLES: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 4.0},
    # A factor for each pair of dimensions that turn.
    "longrope": {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 3.0, 9.0, 20.0]},
}

EQUAL, REFUSED, UNTRIED, WRONG, CRASH = VERDICTS = ("equal", "refused", "not tried", "WRONG", "CRASH")
FAULTS = (WRONG, CRASH)


@dataclass(frozen=True)
class Case:
    """A model type, with what its configuration changes."""

    kind: str
    variant: str = PUBLISHED
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What became of a case, with the sentence or the first difference."""

    kind: str
    variant: str
    verdict: str
    note: str = ""


def tiny_config(kind: type[PretrainedConfig], changes: dict[str, Any]) -> PretrainedConfig:
    """A configuration in which every size, in configurations within it too, is small."""
    settings: dict[str, Any] = {}
    for name, value in vars(kind()).items():
        if isinstance(value, PretrainedConfig):
            settings[name] = tiny_config(type(value), {}).to_dict()
        elif name in ENDS:
            settings[name] = ENDS[name]
        elif name == "is_decoder":
            settings[name] = True
        elif name in SIZE_OF and (type(value) is int or name in NEVER_UNSAID):
            settings[name] = SIZE_OF[name]
    if "kv_lora_rank" in settings:
        # Latent attention has a key and value of its own for every head.
        settings["num_key_value_heads"] = NUM_HEADS
    return kind(**{**settings, **changes})


def config_of(case: Case) -> PretrainedConfig:
    return tiny_config(CONFIG_MAPPING[case.kind], {**NEEDED.get(case.kind, {}), **case.changes})


def build(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    # What a new model leaves at nought or one would hide what it does, and small weights would repeat one token for ever.
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.3 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 61, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def judge(case: Case) -> Result:
    """Build the case and try it. Whatever is raised becomes a verdict."""

    def result(verdict: str, note: object = "") -> Result:
        return Result(case.kind, case.variant, verdict, " ".join(str(note).split()))

    try:
        config = config_of(case)
    except Exception as error:
        return result(UNTRIED, f"{type(error).__name__}: {error}")
    try:
        # As `Target.from_pretrained` does before it loads a model.
        check_family(config)
    except ValueError as error:
        return result(REFUSED, error)
    try:
        own = build(config)
        own(torch.tensor(prompts()[:1]), use_cache=False)
    except Exception as error:
        return result(UNTRIED, f"{type(error).__name__}: {error}")
    try:
        target = Target(copy.deepcopy(own))
    except ValueError as error:
        return result(REFUSED, error)
    except Exception as error:
        return result(CRASH, f"{type(error).__name__}: {error}")
    try:
        expected = by_transformers(own)
    except Exception as error:
        return result(UNTRIED, f"its own generate fails: {type(error).__name__}: {error}")
    try:
        drafters, notes = load_drafters(target)
        difference = first_difference(target, expected, drafters)
        if difference and not first_difference(target, by_transformers(own, use_cache=False), drafters):
            difference = None
            notes.append("equal to the plain forward, from which transformers' own cached generate differs")
    except ValueError as error:
        return result(REFUSED, error)
    except Exception as error:
        return result(CRASH, f"{type(error).__name__}: {error}")
    return result(WRONG, difference) if difference else result(EQUAL, "; ".join(notes))


def load_drafters(target: Target) -> tuple[dict[str, Drafter | None], list[str]]:
    """The drafters by name, and the sentences of those that are refused although the target is not."""
    drafters, notes = {}, []
    for name in DRAFTERS:
        try:
            drafters[name] = load_drafter(name, target)
        except ValueError as error:
            notes.append(f"{name} is refused: {error}")
    return drafters, notes


def by_transformers(model: Any, *, use_cache: bool = True) -> list[list[int]]:
    """The answers to all prompts, with or without transformers' own cache."""
    answers = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=use_cache, **options)
        answers.append(tokens[0, len(prompt) :].tolist())
    return answers


def first_difference(target: Target, expected: list[list[int]], drafters: dict[str, Drafter | None]) -> str | None:
    """Where the answers of every drafter and batch size leave the expected ones; None where they do not."""
    # A rotary table that changes with the length of the text limits the context.
    asked = [
        (prompt, answer) for prompt, answer in zip(prompts(), expected, strict=True) if len(prompt) < target.context_length
    ]
    for name, batch_size in product(drafters, (1, len(asked))):
        completions = generate(
            target,
            [prompt for prompt, _ in asked],
            drafter=drafters[name],
            sampling=SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True),
            batch_size=batch_size,
            use_cost_guard=False,
        )
        for (prompt, answer), completion in zip(asked, completions, strict=True):
            wanted = answer[: target.context_length - len(prompt)]
            if completion.token_ids != wanted:
                where = f"{name} in batches of {batch_size}, after a prompt of {len(prompt)} tokens"
                return f"{where}: {completion.token_ids}, not {wanted}"
    return None


def judge_apart(case: Case, limit: float = TIME_LIMIT) -> Result:
    """Judge a case in a process of its own, which may die or hang."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(judge(case)))
    process.start()
    sender.close()
    try:
        if receiver.poll(limit):
            return receiver.recv()
        return Result(case.kind, case.variant, CRASH, f"no answer in {limit:.0f} seconds")
    except EOFError:
        process.join()
        return Result(case.kind, case.variant, CRASH, f"the process died with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def variants(kind: str) -> Iterator[Case]:
    """A type with other settings: its window on, every rotary table as it changes within the text, and `VARIANTS`."""
    for variant, changes in VARIANTS.get(kind, {}).items():
        yield Case(kind, variant, changes)
    config = config_of(Case(kind))
    if "use_sliding_window" in vars(config) or vars(config).get("sliding_window", WINDOW) is None:
        window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
        yield Case(kind, "window on", {name: value for name, value in window.items() if name in vars(config)})
    published = getattr(config, "rope_parameters", None)
    if not published:
        return
    for name, settings in ROTARY_TABLES.items():

        def table(old: dict[str, Any], name: str = name, settings: dict[str, Any] = settings) -> dict[str, Any]:
            if "rope_type" not in old:
                return {key: table(value) if isinstance(value, dict) else value for key, value in old.items()}
            num_pairs = int(4 * old.get("partial_rotary_factor", 1.0))
            factors = {key: value[:num_pairs] if isinstance(value, list) else value for key, value in settings.items()}
            return {**old, "rope_type": name, "original_max_position_embeddings": SWITCH, **factors}

        limits = {"original_max_position_embeddings": SWITCH} if "original_max_position_embeddings" in vars(config) else {}
        yield Case(kind, f"{name} table", {"rope_parameters": table(published), **limits})


def main(
    kinds: Annotated[list[str] | None, typer.Argument(help="model types; all of them by default")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="file for the results")] = None,
    has_variants: Annotated[bool, typer.Option("--variants/--no-variants", help="try variants of the types served")] = True,
) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    results: list[Result] = []

    def add(case: Case) -> Result:
        result = judge_apart(case)
        typer.echo(f"{result.verdict:9s} {result.kind}, {result.variant}: {result.note}".rstrip(": "))
        results.append(result)
        if json_file is not None:
            json_file.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
        return result

    published = {kind: add(Case(kind)).verdict for kind in kinds or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    kinds = [kind for kind, verdict in published.items() if verdict == EQUAL or kind in VARIANTS]
    for case in chain.from_iterable(map(variants, kinds if has_variants else [])):
        # For a type that is refused, only the settings that may change this.
        if published[case.kind] == EQUAL or case.variant in VARIANTS.get(case.kind, {}):
            add(case)
    for name, of in (("published", True), ("variants", False)):
        counts = Counter(result.verdict for result in results if (result.variant == PUBLISHED) is of)
        typer.echo(f"{name}: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS))
    raise typer.Exit(int(any(result.verdict in FAULTS for result in results)))


if __name__ == "__main__":
    typer.run(main)
