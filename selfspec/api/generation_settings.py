"""What transformers' `generate` has prepared for decoding, as settings of ours.

Invariant: every logits processor and every stopping criterion is either followed or refused by its name, so no output
differs from the one that `generate` would give. Values come from these objects, because callers may give their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode

from selfspec.config import SamplingParams

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# What `return_dict_in_generate` may have besides the sequences.
EXTRA_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# What `generate` hands to a decoding method for the model's forward pass, and has no say in what comes out.
WITHOUT_EFFECT = {"attention_mask", "position_ids", "cache_position", "logits_to_keep", "use_cache", "synced_gpus"}


def refuse(what: str) -> NoReturn:
    """Refuse what `generate` was asked for."""
    raise ValueError(f"{what} is not served by selfspec.custom_generate: leave it out, or leave out custom_generate")


def check_mode(config: GenerationConfig) -> None:
    """Refuse other modes than greedy decoding and sampling, and outputs that are not kept.

    Raises:
        ValueError: one sentence that names the mode or the output.
    """
    mode = config.get_generation_mode()
    if mode not in MODES:
        refuse(f"the generation mode {mode.value}")
    for name in EXTRA_OUTPUTS:
        if config.return_dict_in_generate and getattr(config, name, None):
            refuse(name)


def check_model_inputs(inputs: Mapping[str, Any]) -> None:
    """Refuse inputs of the model's forward pass that would be left out, such as images or a cache with a text in it.

    Raises:
        ValueError: one sentence that names the input.
    """
    for name, value in inputs.items():
        if name in WITHOUT_EFFECT or value is None:
            continue
        # An empty cache is the one that `generate` makes for its own methods.
        if not isinstance(value, Cache) or value.get_seq_length():
            refuse(f"the model input {name}")


def sampling_of(
    config: GenerationConfig,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    stop_strings: Sequence[str],
    num_prompt_columns: int,
) -> SamplingParams:
    """The settings of all rows.

    Args:
        num_prompt_columns: of the padded prompts, which `max_length` and `min_length` count.

    Raises:
        ValueError: one sentence that names what is not served.
    """
    settings: dict[str, Any] = {"min_new_tokens": 0, "temperature": 1.0}
    for processor in processors:
        _follow_processor(processor, settings, num_prompt_columns)
    longest, ends = config.max_length, set[int]()
    for criterion in criteria:
        if type(criterion) is stopping_criteria.MaxLengthCriteria:
            longest = min(longest, criterion.max_length)
        elif type(criterion) is stopping_criteria.EosTokenCriteria:
            ends.update(torch.as_tensor(criterion.eos_token_id).flatten().tolist())
        elif type(criterion) is stopping_criteria.StopStringCriteria:
            stop_strings = [*stop_strings, *criterion.stop_strings]
        else:
            refuse(f"the stopping criterion {type(criterion).__name__}")
    settings["max_new_tokens"] = longest - num_prompt_columns
    settings["min_new_tokens"] = min(settings["min_new_tokens"], settings["max_new_tokens"])
    if not config.do_sample:
        # Nothing of the rest moves the likeliest token.
        settings |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    else:
        # From torch's own state, so that `torch.manual_seed` and `set_seed` make answers repeatable.
        settings["seed"] = int(torch.randint(2**62, ()))
    settings |= {"stop": tuple(stop_strings), "stop_token_ids": tuple(sorted(ends)), "ignore_eos": True}
    # Stop strings may be special tokens.
    return SamplingParams(**settings, skip_special_tokens=False)


def _follow_processor(processor: Any, settings: dict[str, Any], num_prompt_columns: int) -> None:
    """Add what a logits processor asks for to the settings."""
    kind, num_tokens = type(processor), 0
    if kind is logits_process.TemperatureLogitsWarper:
        settings["temperature"] = processor.temperature
    elif kind is logits_process.TopKLogitsWarper:
        settings["top_k"] = processor.top_k
    elif kind is logits_process.TopPLogitsWarper:
        settings["top_p"] = processor.top_p
    elif kind is logits_process.MinPLogitsWarper:
        settings["min_p"] = processor.min_p
    elif kind is logits_process.RepetitionPenaltyLogitsProcessor:
        if isinstance(processor.prompt_ignore_length, int) and processor.prompt_ignore_length:
            refuse("a prompt_ignore_length")
        settings["repetition_penalty"] = processor.penalty
    elif kind is logits_process.MinLengthLogitsProcessor:
        num_tokens = processor.min_length - num_prompt_columns
    elif kind is logits_process.MinNewTokensLengthLogitsProcessor:
        num_tokens = processor.min_new_tokens
    elif kind is not logits_process.LogitNormalization:
        refuse(f"the logits processor {kind.__name__}")
    settings["min_new_tokens"] = max(settings["min_new_tokens"], num_tokens)
