"""Draft models: ordinary causal LMs, which every engine loads unchanged."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from selfspec.drafters.draft_model import check_same_tokenizer
from selfspec.files import share
from selfspec.heads.early_exit import DistilledDraft
from selfspec.interop.commands import serve_command
from selfspec.interop.files import Checkpoint
from selfspec.model.target import Target


def is_draft_model(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is a whole model: it has an embedding and all decoder layers that its config counts."""
    num_layers = checkpoint.config.get("num_hidden_layers", checkpoint.config.get("n_layer", 0))
    has_embedding = any("embed" in name or name.endswith("wte.weight") for name in checkpoint.tensors)
    has_layers = any(f".{num_layers - 1}." in name for name in checkpoint.tensors)
    return has_embedding and has_layers and "fc.weight" not in checkpoint.tensors


def check_draft_model(source: str, target: Target) -> None:
    """Raise a ValueError unless the model has the target's tokenizer."""
    check_same_tokenizer(target.tokenizer, AutoTokenizer.from_pretrained(source))


def write_draft_model(head: DistilledDraft, target: Target, engine: str, directory: Path) -> list[str]:
    """Save the draft as a whole model with the target's embedding, LM head and tokenizer. Returns how to serve it."""
    if engine not in ("vllm", "sglang"):
        raise ValueError(f"{engine} has no draft models: export to vllm or sglang")
    dtype = next(head.norm.parameters()).dtype
    student = head.student(target.model)
    student.config.dtype = dtype
    # Convert copies, because the target shares some of these tensors and must keep its dtype.
    state = {name: value.to("cpu", dtype) for name, value in student.state_dict().items()}
    student.save_pretrained(directory, state_dict=state)
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(directory)
    share(directory)
    return [serve_command(engine, "draft_model", target.name, str(directory))]
