"""Read a checkpoint's weights into a transformers model, one weight at a time.

transformers maps weight files into memory until all of a model is loaded, so a float32 model and its 16-bit files would be
resident together. Here a weight is read when it is placed, and nothing of its file stays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files


def read_model(
    source: str | Path, config: PretrainedConfig, *, revision: str | None, dtype: torch.dtype
) -> tuple[PreTrainedModel, list[str]]:
    """A causal LM in a folder or on the Hub, in evaluation mode on the CPU, and the names of weights that are missing.

    A quantised checkpoint is loaded by transformers as usual.

    Raises:
        OSError: there are no safetensors files; the message names the file.
    """
    files = [] if getattr(config, "quantization_config", None) else _weight_files(source, revision)
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    if not files:
        model, info = AutoModelForCausalLM.from_pretrained(source, revision=revision, use_safetensors=True, **options)
        return model, sorted(info["missing_keys"])
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))
    # Slices, because transformers reads those when their turn has come.
    handles = [safe_open(file, framework="pt", backend="pread") for file in files]
    weights = {name: handle.get_slice(name) for handle in handles for name in handle.keys()}  # noqa: SIM118
    generation_config = _generation_config(source, revision)
    model, info = kind.from_pretrained(
        None, config=config, state_dict=weights, generation_config=generation_config, **options
    )
    model.name_or_path = model.config.name_or_path = str(source)
    return model, sorted(info["missing_keys"])


def _weight_files(source: str | Path, revision: str | None) -> list[str]:
    """The checkpoint's safetensors files; none where it has another format."""
    try:
        return [cached_file(source, SAFE_WEIGHTS_NAME, revision=revision)]
    except OSError:
        pass
    try:
        index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, revision=revision)
    except OSError:
        return []
    return get_checkpoint_shard_files(source, index, revision=revision)[0]


def _generation_config(source: str | Path, revision: str | None) -> GenerationConfig | None:
    """What the folder says of generation, such as the tokens that end an answer; None where the model's config says it."""
    try:
        return GenerationConfig.from_pretrained(source, revision=revision)
    except OSError:
        return None
