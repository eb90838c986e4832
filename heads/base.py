"""What all trained heads share: a config that names the target, weights in safetensors, and strict loading.

A head is a small `nn.Module` that reads a frozen target's hidden states and proposes the target's next tokens. It imports no
engine code, so it trains and loads alone. Callers hand it the target's embedding and LM head, which are not saved with it.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import HfApi, snapshot_download
from safetensors.torch import load_file
from torch import nn

from selfspec.failures import first_line
from selfspec.files import check_is_there, check_readable, save_file

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"

# The scale of an int8 matrix is stored under the matrix's name with this suffix.
SCALE_SUFFIX = ".scale"

# A fingerprint is this many evenly spaced values of a weight. The tolerance allows for another dtype or int8 storage.
FINGERPRINT_SIZE = 32
FINGERPRINT_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """Which target a head was trained for, in enough detail to notice another target before the first token.

    Attributes:
        vocab_size: number of rows of the embedding, padding rows included.
        tokenizer: hash of the token -> id map; "" if there was no tokenizer.
        embedding, lm_head: fingerprints of the two weights.
        adapter, adapter_hash: name of the LoRA adapter that was merged into the target, and a hash of its weights; None and
            "" if there was none.
    """

    name: str
    revision: str | None
    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    tokenizer: str
    embedding: tuple[float, ...]
    lm_head: tuple[float, ...]
    adapter: str | None = None
    adapter_hash: str = ""

    @classmethod
    def of(cls, model: Any, tokenizer: Any, *, name: str, revision: str | None = None, **adapter: Any) -> TargetIdentity:
        """The identity of a transformers causal LM; `adapter` may set adapter and adapter_hash."""
        config = model.config.get_text_config()
        # One after the other, because a layer that was laid out for decoding makes its plain weight anew.
        vocab_size, embedding = _size_and_fingerprint(model.get_input_embeddings().weight)
        _, lm_head = _size_and_fingerprint(model.get_output_embeddings().weight)
        return cls(
            name=name,
            revision=revision,
            model_type=config.model_type,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            vocab_size=vocab_size,
            tokenizer="" if tokenizer is None else tokenizer_hash(tokenizer),
            embedding=embedding,
            lm_head=lm_head,
            **adapter,
        )

    @property
    def adaptation(self) -> str:
        """The adapter in words: "with adapter NAME", or "without an adapter"."""
        return "without an adapter" if self.adapter is None else f"with adapter {self.adapter}"

    def check(self, other: TargetIdentity) -> None:
        """Raise a ValueError that names both sides unless `other` is the target this head was trained for.

        Another adapter passes, because the head still fits: only fewer of its drafts may be accepted.
        """
        for name in ("hidden_size", "num_layers", "vocab_size"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise ValueError(
                    f"the head was trained for {self.name} with {name} {ours}; {other.name} has {theirs}: load the target "
                    "it was trained for, or train it again"
                )
        if self.tokenizer and other.tokenizer and self.tokenizer != other.tokenizer:
            raise ValueError(
                f"the head was trained with the tokenizer of {self.name} (hash {self.tokenizer}), but {other.name} has "
                f"another one ({other.tokenizer}): load the target it was trained for, or train it again"
            )
        for name in ("embedding", "lm_head"):
            gap = _relative_gap(getattr(self, name), getattr(other, name))
            if gap > FINGERPRINT_TOLERANCE:
                raise ValueError(
                    f"the head was trained for {self.name}, whose {name} weights differ from those of {other.name} "
                    f"(relative gap {gap:.2g}): load the target it was trained for, or train it again"
                )


def fingerprint(weight: torch.Tensor) -> tuple[float, ...]:
    """Evenly spaced values of a weight [...], rounded to what bfloat16 keeps."""
    flat = weight.detach().flatten()
    index = torch.linspace(0, len(flat) - 1, FINGERPRINT_SIZE, dtype=torch.float64).long()
    return tuple(float(f"{value:.3g}") for value in flat[index.to(flat.device)].float().tolist())


def _size_and_fingerprint(weight: torch.Tensor) -> tuple[int, tuple[float, ...]]:
    return len(weight), fingerprint(weight)


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of the token -> id map."""
    listing = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(listing.encode()).hexdigest()[:16]


def _relative_gap(ours: tuple[float, ...], theirs: tuple[float, ...]) -> float:
    a, b = torch.tensor(ours), torch.tensor(theirs)
    return float((a - b).norm() / a.norm().clamp(min=1e-12))


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The part of the config that all heads share. Subclasses add their shapes and check them.

    Attributes:
        chat_template_kwargs: the arguments that the chat template had in training; None where it had none.
    """

    head_type: ClassVar[str]
    target: TargetIdentity
    chat_template_kwargs: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON object that `from_dict` reads."""
        return {"head_type": self.head_type, "selfspec_version": installed_version(), **asdict(self)}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        """Read the config from a JSON object.

        Raises:
            ValueError: names unknown and missing keys, and the version that wrote unknown keys if it is newer than this one.
        """
        written_by = str(record.get("selfspec_version", ""))
        record = {key: value for key, value in record.items() if key not in ("head_type", "selfspec_version")}
        _check_keys(cls, record, f"{CONFIG_NAME} of a head of type {cls.head_type}", written_by)
        _check_keys(TargetIdentity, record["target"], f"the target in {CONFIG_NAME}", written_by)
        target: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.pop("target").items()}
        values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}
        return cls(target=TargetIdentity(**target), **values)


def installed_version() -> str:
    """This package's version, "unknown" where a checkout is used without being installed."""
    try:
        return version("selfspec")
    except PackageNotFoundError:
        return "unknown"


def _check_keys(cls: type, record: dict[str, Any], what: str, written_by: str) -> None:
    if unknown := sorted(set(record) - {f.name for f in fields(cls)}):
        message = f"{what} has unknown keys: {', '.join(unknown)}"
        ours = installed_version()
        if _release(written_by) > _release(ours):
            message += f"; selfspec {written_by} wrote it and this is version {ours}, so update selfspec"
        raise ValueError(message)
    # A field that a later version added has a default, which stands for what older heads did.
    needed = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    if missing := sorted(needed - set(record)):
        raise ValueError(f"{what} lacks keys: {', '.join(missing)}")


def _release(name: str) -> tuple[int, ...]:
    """(0, 1, 0) from "0.1.0", and () from a name without numbers."""
    return tuple(int(part) for part in re.findall(r"\d+", name)[:3])


class DraftHead(nn.Module):
    """A trainable head.

    Attributes:
        features: the target's hidden states that the head reads, in transformers' numbering (k: entering layer k; -1:
            after the final norm).
    """

    config_class: ClassVar[type[HeadConfig]]
    features: tuple[int, ...]

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def initialise(self, model: Any) -> None:
        """Copy from the target what helps (its final norm, its LM head). Called once, before training."""

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def save_pretrained(self, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write `config.json` and `model.safetensors`.

        Args:
            dtype: type of the stored floating-point weights. `torch.int8` stores matrices in 8 bits with a scale for each
                output channel, and other weights in bfloat16.

        Raises:
            ValueError: weights are missing from the state dict because the layers were laid out for decoding.
        """
        weights = self.state_dict()
        # A new head may draw random weights, and saving must not change the random numbers of a training run.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            expected = type(self)(self.config).state_dict()
        if missing := sorted(set(expected) - set(weights)):
            raise ValueError(
                f"this head has no {missing[0]} to save ({len(missing)} of {len(expected)} weights are missing) because its "
                "layers were laid out for decoding: save a copy that no drafter has used, or load the head again"
            )
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        state: dict[str, torch.Tensor] = {}
        for name, value in weights.items():
            value = value.detach().cpu().contiguous()
            if dtype == torch.int8 and value.is_floating_point() and value.ndim == 2:
                state[name], state[name + SCALE_SUFFIX] = quantize(value)
            elif dtype is not None and value.is_floating_point():
                state[name] = value.to(torch.bfloat16 if dtype == torch.int8 else dtype)
            else:
                state[name] = value
        # Write the weights to a temporary name first. A folder that has a config.json is complete.
        partial = directory / (WEIGHTS_NAME + ".partial")
        save_file(state, partial)
        partial.replace(directory / WEIGHTS_NAME)
        (directory / CONFIG_NAME).write_text(json.dumps(self.config.to_dict(), indent=1) + "\n")

    @classmethod
    def from_pretrained(cls, source: str | Path, *, revision: str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Load a head from a folder or the Hub. The weights must be exactly those that the config asks for.

        Raises:
            ValueError: there is no head or one of another type; weights are missing, unexpected, misshapen or not finite.
            PermissionError: this user may not read the files.
        """
        directory = find_head(source, revision)
        record = read_config(directory, source)
        if record["head_type"] != cls.config_class.head_type:
            raise ValueError(f"{source} is a head of type {record['head_type']}, not {cls.config_class.head_type}")
        try:
            head = cls(cls.config_class.from_dict(record))
            state = load_file(directory / WEIGHTS_NAME)
            stored = torch.bfloat16 if any(name.endswith(SCALE_SUFFIX) for name in state) else None
            state = dequantize(state)
            head.load_state_dict(state, strict=True)
        except (ValueError, TypeError, KeyError, RuntimeError, OSError) as error:
            raise ValueError(f"{source}: {' '.join(str(error).split())}") from error
        for name, value in state.items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise ValueError(f"{source}: {name} holds values that are not finite: the file is damaged, so get it again")
        stored = stored or next(value.dtype for value in state.values() if value.is_floating_point())
        return head.to(dtype=dtype or stored).eval().requires_grad_(False)

    def push_to_hub(self, repo_id: str, *, directory: str | Path, token: str | None = None, private: bool = False) -> str:
        """Upload a saved head's folder (weights, config, card) as a model repository and return its address.

        Raises:
            ValueError: the Hub cannot be reached or does not allow writing there. The folder stays as it is.
        """
        api = HfApi(token=token)
        try:
            url = api.create_repo(repo_id, private=private, exist_ok=True)
            api.upload_folder(repo_id=url.repo_id, folder_path=str(directory))
        except Exception as error:
            raise ValueError(
                f"{repo_id} could not be uploaded to the Hugging Face Hub ({first_line(error)}): "
                f"check your token, its write access and your network; the head is in {directory}"
            ) from error
        return str(url)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Store a matrix [out, in] as int8 [out, in] and a float32 scale [out, 1], whose product is about the matrix."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (weight.float() / scale).round().to(torch.int8), scale


def dequantize(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stored weights, with every int8 matrix [out, in] multiplied by its scale [out, 1] in float32."""
    scales = {name: value for name, value in state.items() if name.endswith(SCALE_SUFFIX)}
    for name, value in state.items():
        if value.dtype == torch.int8 and name + SCALE_SUFFIX not in scales:
            raise ValueError(f"{name} is stored in 8 bits without its scale: the file is damaged, so get it again")
    return {
        name: value.float() * scales[name + SCALE_SUFFIX] if name + SCALE_SUFFIX in scales else value
        for name, value in state.items()
        if name not in scales
    }


def find_head(
    source: str | Path, revision: str | None = None, *, patterns: Sequence[str] = (CONFIG_NAME, WEIGHTS_NAME, "README.md")
) -> Path:
    """The folder of a local head, or of a head's copy from the Hub, from where only the files `patterns` are fetched.

    Raises:
        ValueError: there is no such folder, and the Hub gave no such head.
        PermissionError: this user may not read one of the files.
    """
    if Path(source).is_dir():
        check_readable(file for pattern in patterns for file in Path(source).glob(pattern))
        return Path(source)
    check_is_there(source)
    try:
        return Path(snapshot_download(str(source), revision=revision, allow_patterns=list(patterns)))
    except Exception as error:
        raise ValueError(
            f"{source}: no such folder, and the Hugging Face Hub gave no such head "
            f"({first_line(error)}): check the spelling and your network"
        ) from error


def read_config(directory: Path, source: str | Path | None = None) -> dict[str, Any]:
    """Read a head's config.json, which must be an object with a `head_type`.

    Args:
        source: how messages name the head; by its directory if None.
    """
    source = source or directory
    try:
        record = json.loads((directory / CONFIG_NAME).read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{source} holds no head, because {CONFIG_NAME} cannot be read ({reason})") from error
    if not isinstance(record, dict) or "head_type" not in record:
        raise ValueError(
            f"{source} holds no selfspec head, because {CONFIG_NAME} has no head_type: `selfspec import` reads other "
            "projects' heads"
        )
    return record
