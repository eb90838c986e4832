"""From a path or Hub id to a frozen model and its tokenizer, ready to prefill and verify.

Invariant: what cannot be loaded or served is refused with one sentence that says why.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from torch import nn

from selfspec.config import DTYPES, check_dtype
from selfspec.failures import first_line
from selfspec.files import check_is_there, check_readable
from selfspec.model.adapter import merge_adapter
from selfspec.model.compact_embedding import compact_embeddings
from selfspec.model.devices import resolve_device
from selfspec.model.fuse import can_fuse, fuse
from selfspec.model.linear_layout import lay_out_linear_layers
from selfspec.model.shared_input import merge_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

# Weight-only quantisation by torchao: the name and arguments of its configuration.
QUANTIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("Int8WeightOnlyConfig", {}),
    "fp8": ("Float8WeightOnlyConfig", {}),
    "int4": ("Int4WeightOnlyConfig", {"group_size": 128, "int4_packing_format": "tile_packed_to_4d"}),
}
# A pickle (`pytorch_model.bin`) can run code while it is read.
NO_SAFETENSORS = (
    "there are no weights in safetensors, the one format that is read: load a pickled model that you trust with "
    "transformers' AutoModelForCausalLM and AutoTokenizer, and save both into a new folder with save_pretrained"
)


def resolve_dtype(dtype: str | torch.dtype, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype that a name means; `auto` is float32 on a CPU and the checkpoint's own elsewhere.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else (config.dtype or torch.bfloat16)
    check_dtype(dtype)
    assert dtype in DTYPES, "weights alone have another type than the numbers"
    return getattr(torch, dtype)


def load_model(
    source: str | Path,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device,
    revision: str | None = None,
    adapter: str | Path | None = None,
    use_packing: bool = True,
) -> tuple[PreTrainedModel, Any]:
    """Load, check, freeze and place a causal language model.

    Args:
        dtype: a torch dtype or its name, `auto`, or `int8`, `fp8`, `int4`: torchao then quantises the weights of linear
            layers, except the LM head, because heads share it.
        adapter: folder or Hub id of a LoRA adapter to merge into the weights.
        use_packing: lay the model's layers out for decoding (see `lay_out`).

    Returns:
        The model in evaluation mode, without gradients, and its tokenizer.

    Raises:
        ValueError: the source is unknown or damaged, or its family cannot be served; the sentence says which.
    """
    resolved_device = resolve_device(device)
    # After what can be told without transformers, which takes seconds to import.
    check_is_there(source)
    from transformers import AutoTokenizer
    from transformers.utils import SAFE_WEIGHTS_NAME

    from selfspec.model.checkpoint import read_model

    check_readable(file for name in ("*.json", "*.safetensors") for file in Path(source).glob(name))
    config = load_config(source, revision)
    check_family(config)
    quantized = dtype if dtype in QUANTIZED else None
    resolved_dtype = resolve_dtype("auto" if quantized else dtype, config, resolved_device)
    if quantized == "int4":
        if resolved_device.type != "cuda":
            raise ValueError("dtype='int4' needs a CUDA device: use int8 here")
        # The int4 kernels multiply only bfloat16.
        resolved_dtype = torch.bfloat16
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
        model, missing = read_model(source, config, revision=revision, dtype=resolved_dtype)
    except SafetensorError as error:
        raise ValueError(f"{source}: a weight file is damaged ({error}): download or copy the model again") from error
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        if isinstance(error, OSError) and SAFE_WEIGHTS_NAME in str(error):
            raise ValueError(f"{source}: {NO_SAFETENSORS}") from error
        raise ValueError(f"{source}: cannot load the model: {first_line(error)}") from error
    if missing:
        raise ValueError(
            f"{source}: the checkpoint lacks {len(missing)} weights ({missing[0]} first): download or copy the model again"
        )
    if adapter is not None:
        model = merge_adapter(model, adapter, target=source)
    model = model.to(resolved_device).eval().requires_grad_(False)
    if quantized:
        _quantize(model, str(quantized))
    elif use_packing:
        lay_out(model)
    return model, tokenizer


def lay_out(model: nn.Module, *, may_round: bool = False) -> None:
    """Lay a module's layers out for decoding, in place, after which they have no gradients.

    On a CPU this is `selfspec.model.linear_layout` and `selfspec.model.compact_embedding`, on CUDA `selfspec.model.fuse`.

    Args:
        may_round: on a CPU, weights may be rounded to 16 bits. This is for drafters alone.
    """
    if can_fuse(model):
        fuse(model)
        return
    # Only layers on a CPU, in float32, are replaced.
    merge_layers(model)
    counts = lay_out_linear_layers(model, compact_embeddings(model), may_round=may_round)
    logger.debug("linear layers by form: %s", dict(counts))


def check_family(config: PretrainedConfig) -> None:
    """Refuse a model family that the paged KV cache and tree attention cannot serve.

    This reads only the configuration; `selfspec.model.checks` then tries the model itself.

    Raises:
        ValueError: the sentence names the family.
    """
    name = config.model_type
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model: selfspec serves decoder-only language models")
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    odd = kinds - {"full_attention", "sliding_attention"}
    if odd:
        raise ValueError(f"{name} has layers of type {', '.join(sorted(odd))}: only full and sliding attention are served")
    if getattr(text, "num_kv_shared_layers", 0):
        raise ValueError(f"{name} shares key-value states between layers, which selfspec does not serve")
    if getattr(text, "attention_chunk_size", None):
        raise ValueError(f"{name} uses chunked attention, which selfspec does not serve")


def load_config(source: str | Path, revision: str | None) -> PretrainedConfig:
    """A model's configuration from a folder or the Hub.

    Raises:
        ValueError: there is none.
    """
    check_is_there(source)
    from transformers import AutoConfig

    is_local = Path(source).exists()
    try:
        return AutoConfig.from_pretrained(source, revision=revision)
    except (OSError, ValueError, KeyError, HFValidationError) as error:
        if is_local:
            raise ValueError(f"{source}: not a Hugging Face model folder: {first_line(error)}") from error
        raise ValueError(
            f"{source}: no such folder, and the Hugging Face Hub does not have it ({first_line(error)}): "
            "check the spelling, your network and your access token"
        ) from error


def _quantize(model: PreTrainedModel, dtype: str) -> None:
    name, arguments = QUANTIZED[dtype]
    try:
        from torchao import quantization
    except ImportError as error:
        raise ValueError(f"dtype={dtype!r} needs torchao: pip install 'selfspec[quant]'") from error
    output = model.get_output_embeddings()
    quantization.quantize_(
        model,
        getattr(quantization, name)(**arguments),
        filter_fn=lambda module, _: isinstance(module, nn.Linear) and module is not output,
    )
