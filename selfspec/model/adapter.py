"""Merge a LoRA adapter into the target's weights at load. Invariant: what then prefills and verifies is an ordinary model.

The adapter has PEFT's format, and PEFT reads and merges it. A target with an adapter is another target. Heads trained
without the adapter still fit if it does not change embedding and LM head, but fewer of their drafts may be accepted.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file

from selfspec.failures import first_line
from selfspec.files import check_is_there, check_readable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def merge_adapter(model: PreTrainedModel, source: str | Path, *, target: str | Path) -> PreTrainedModel:
    """Add a LoRA adapter to the weights of a model as it was loaded, in place; returns the model.

    Args:
        source: folder or Hub id of the adapter.
        target: the model's path or Hub id, for messages.

    Raises:
        ValueError: PEFT is missing, or the adapter is missing, of another kind or for another model.
        PermissionError: this user may not read the adapter.
    """
    try:
        from peft import LoraConfig, PeftConfig, PeftModel, set_peft_model_state_dict
        from peft.utils import CONFIG_NAME
        from peft.utils import SAFETENSORS_WEIGHTS_NAME as WEIGHTS_NAME
    except ImportError as error:
        raise ValueError("an adapter needs peft: pip install 'selfspec[lora]'") from error
    check_is_there(source)
    check_readable(Path(source).glob("adapter_*"))
    try:
        folder = Path(source)
        if not folder.is_dir():
            folder = Path(snapshot_download(str(source), allow_patterns=[CONFIG_NAME, WEIGHTS_NAME]))
        config = PeftConfig.from_pretrained(str(folder))
        if not (folder / WEIGHTS_NAME).exists():
            # PEFT would also read a pickle, which can run code.
            raise ValueError(f"it has no {WEIGHTS_NAME}, the one file that is read: load it with PEFT and save it again")
        weights = load_file(folder / WEIGHTS_NAME)
    except Exception as error:
        raise ValueError(f"adapter {source} cannot be read: {first_line(error)}") from error
    if not isinstance(config, LoraConfig):
        raise ValueError(f"adapter {source} is of PEFT's kind {config.peft_type}: only LoRA can be merged")
    if rows := _other_vocabulary(weights, model):
        raise ValueError(
            f"adapter {source} was trained on a vocabulary of {rows} tokens, but {target} has "
            f"{model.get_input_embeddings().weight.shape[0]}: name the model whose vocabulary was resized as the target"
        )
    base = config.base_model_name_or_path or "a model that it does not name"
    is_same = Path(base).name.lower() == Path(target).name.lower()
    try:
        with warnings.catch_warnings():
            # PEFT would only warn; the keys are checked below.
            warnings.simplefilter("ignore")
            adapted = PeftModel(model, config)
            loaded: Any = set_peft_model_state_dict(adapted, weights)
            missing = [name for name in loaded.missing_keys if "lora_" in name]
            if odd := [*missing, *loaded.unexpected_keys]:
                raise ValueError(f"{odd[0]} is on one side only")
            merged: Any = adapted.merge_and_unload()
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        advice = "get the version that it was made for" if is_same else "name the target it was made for"
        raise ValueError(
            f"adapter {source} was made for {base}, and does not fit {target} ({first_line(error)}): {advice}"
        ) from error
    if not is_same:
        logger.warning("adapter %s was made for %s; its weights fit %s, and are used", source, base, target)
    return merged


def _other_vocabulary(weights: dict[str, torch.Tensor], model: PreTrainedModel) -> int | None:
    """The rows of an embedding or LM head that the adapter brings along, if they are not as many as the model's."""
    layers = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    own = {f".{name}.weight": module.weight for name, module in model.named_modules() if id(module) in layers}
    for name, weight in weights.items():
        for ending, mine in own.items():
            if name.endswith(ending) and len(weight) != len(mine):
                return len(weight)
    return None


@cache
def adapter_hash(source: str) -> str:
    """A hash of the weights of an adapter that could be merged, by which a head knows it under any name."""
    from peft import load_peft_weights

    digest = hashlib.sha256()
    for name, weight in sorted(load_peft_weights(source, device="cpu").items()):
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.float().numpy().tobytes())
    return digest.hexdigest()[:16]
