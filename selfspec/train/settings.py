"""A recipe's settings, from flags or a YAML file, checked before anything is loaded or written."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, TrainingArguments

from selfspec.traffic.sources import SUFFIXES

# The least that is allowed, where transformers takes less and then fails late or does something else.
LEAST = {
    "learning_rate": 0,
    "eval_steps": 0,
    "save_steps": 0,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
}


@dataclass
class DataArgs:
    """Where the target and its answers are."""

    target: str = field(metadata={"help": "folder or Hub id of the frozen target"})
    train_file: str = field(metadata={"help": "conversations with the target's own answers, JSON lines"})
    held_out_file: str | None = field(default=None, metadata={"help": "conversations for evaluation"})
    final_eval_file: str | None = field(default=None, metadata={"help": "prompt file for the last evaluation, for the card"})
    row_length: int = field(default=1024, metadata={"help": "tokens of a packed row"})
    target_dtype: str = field(default="auto", metadata={"help": "dtype of the frozen target"})
    features_dir: str | None = field(
        default=None, metadata={"help": "folder for the target's hidden states, computed once instead of in every epoch"}
    )
    shard_target: bool = field(default=False, metadata={"help": "spread the target's layers over the processes"})
    chat_template: str | None = field(default=None, metadata={"help": "Jinja file, for a target without a template"})
    init_seed: int = field(default=0, metadata={"help": "seed of the head's weights (seed: of the data's order)"})
    compile_head: bool = field(default=False, metadata={"help": "compile an EAGLE-3 head: faster steps after a slow start"})
    num_eval_prompts: int = field(default=32, metadata={"help": "held-out prompts decoded at every evaluation"})
    num_eval_tokens: int = field(default=64, metadata={"help": "tokens decoded for each of them"})

    def __post_init__(self) -> None:
        for name, least in {"row_length": 1, "num_eval_prompts": 0, "num_eval_tokens": 1}.items():
            _check_least(self, name, least)


def parse(parser: HfArgumentParser, arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Settings from flags, or from one YAML file and flags that override it; the command line's by default.

    Raises:
        ValueError: a setting that is not known or not allowed, or a YAML file that cannot be read.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0].endswith((".yaml", ".yml")):
        given[:1] = _flags_in(Path(given[0]))
    *parsed, unknown = parser.parse_args_into_dataclasses(given, return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        raise ValueError(f"{' '.join(unknown)} is not a setting of this recipe: see --help for those that are")
    # A recipe is a program: its user sees what the library logs, once.
    is_main = all(part.process_index == 0 for part in parsed if isinstance(part, TrainingArguments))
    logging.basicConfig(format="%(message)s")
    logging.getLogger("selfspec").setLevel(logging.INFO if is_main else logging.ERROR)
    return tuple(parsed)


def check_files(data: DataArgs) -> None:
    """Raise a ValueError that names a file that does not exist."""
    for name in ("train_file", "held_out_file", "final_eval_file", "chat_template"):
        file = getattr(data, name)
        # Conversations may come from the Hub, too; its names do not look like files.
        may_be_id = name in ("train_file", "held_out_file") and Path(file or "").suffix not in SUFFIXES
        if file is not None and not may_be_id and not Path(file).exists():
            raise ValueError(f"{name}={file} does not exist: check the spelling")


def check_training(args: TrainingArguments) -> None:
    """Raise a ValueError that names a setting of transformers' that cannot be trained with here."""
    for name, least in LEAST.items():
        _check_least(args, name, least)
    # Unless it is given, epochs decide.
    if args.max_steps != -1:
        _check_least(args, "max_steps", 1)
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to one process: start the recipe with accelerate launch, which gives each its "
            "own, or choose one with CUDA_VISIBLE_DEVICES"
        )
    if Path(args.output_dir).is_file():
        raise ValueError(f"{args.output_dir} is a file: choose another --output_dir")


def _check_least(settings: Any, name: str, least: int) -> None:
    value = getattr(settings, name)
    if value is not None and not value >= least:
        raise ValueError(f"{name}={value} is not allowed: use at least {least}")


def _flags_in(file: Path) -> list[str]:
    """A YAML file's settings as flags, because `parse_yaml_file` converts no types and lets no flag override a setting."""
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}): check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}: "
        raise ValueError(f"{file} is not YAML ({place}{getattr(error, 'problem', error)}): mend it") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} is no list of settings: write one `name: value` per line")
    flags: list[str] = []
    for name, value in settings.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            flags.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags
