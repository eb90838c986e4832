"""A recipe's settings, from flags or a YAML file, checked before anything is loaded or written."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.utils import is_torch_bf16_gpu_available

from selfspec.traffic.sources import SUFFIXES

# The recipes' own settings, which an installed package has too.
CONFIGS = Path(__file__).parents[1] / "recipes" / "configs"

# The least that is allowed, where transformers takes less and then fails late or does something else.
LEAST = {
    "learning_rate": 0,
    "eval_steps": 0,
    "save_steps": 0,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
}

# Settings of transformers' that would be taken and not followed, and what holds instead.
UNUSED = {
    "load_best_model_at_end": "the head of the last step is saved, and earlier ones are in the checkpoints",
    "resume_from_checkpoint": "a run continues from the newest checkpoint in its output_dir",
    "label_smoothing_factor": "the label is the target's own distribution",
    "neftune_noise_alpha": "heads have no embedding of their own",
    "activation_checkpointing": "only the head keeps activations, which are few",
    # The name of the same in older versions.
    "gradient_checkpointing": "only the head keeps activations, which are few",
}
# Trackers that have an extra of selfspec's.
EXTRAS = ("tensorboard", "trackio")


@dataclass
class DataArgs:
    """Where the target and its answers are."""

    train_file: str = field(metadata={"help": "conversations with the target's own answers, JSON lines"})
    target: str | None = field(
        default=None,
        metadata={"help": "folder or Hub id of the frozen target; by default the one that `selfspec fetch` makes"},
    )
    adapter: str | None = field(
        default=None, metadata={"help": "folder or Hub id of a LoRA adapter (PEFT) that is merged into the target"}
    )
    held_out_file: str | None = field(default=None, metadata={"help": "conversations for evaluation"})
    final_eval_file: str | None = field(default=None, metadata={"help": "prompt file for the last evaluation, for the card"})
    row_length: int = field(default=1024, metadata={"help": "tokens of a packed row"})
    target_dtype: str = field(default="auto", metadata={"help": "dtype of the frozen target"})
    features_dir: str | None = field(
        default=None, metadata={"help": "folder for the target's hidden states, computed once instead of in every epoch"}
    )
    shard_target: bool = field(default=False, metadata={"help": "spread the target's layers over the processes"})
    chat_template: str | None = field(default=None, metadata={"help": "Jinja file, for a target without a template"})
    chat_template_kwargs: str | None = field(
        default=None,
        metadata={
            "help": 'arguments of the chat template, as in {"enable_thinking": false}; by default those that all '
            "conversations have"
        },
    )
    init_head: str | None = field(
        default=None,
        metadata={"help": "trained head of the same kind and shape whose weights to start from: folder or Hub id"},
    )
    init_seed: int = field(default=0, metadata={"help": "seed of the head's weights (seed: of the data's order)"})
    compile_head: bool = field(default=False, metadata={"help": "compile an EAGLE-3 head: faster steps after a slow start"})
    num_eval_prompts: int = field(default=32, metadata={"help": "held-out prompts decoded at every evaluation"})
    num_eval_tokens: int = field(default=64, metadata={"help": "tokens decoded for each of them"})

    def __post_init__(self) -> None:
        for name, least in {"row_length": 1, "num_eval_prompts": 0, "num_eval_tokens": 1}.items():
            _check_least(self, name, least)


@dataclass
class RecipeArguments(TrainingArguments):
    """transformers' training arguments, with defaults that depend on where a recipe runs."""

    bf16: bool | None = field(
        default=None, metadata={"help": "compute in bfloat16; by default where the GPU does, unless fp16 is given"}
    )
    disable_tqdm: bool | None = field(
        default=None, metadata={"help": "lines of progress instead of a bar; by default where stderr is no terminal"}
    )
    save_total_limit: int | None = field(default=2, metadata={"help": "checkpoints to keep; older ones are deleted"})

    def __post_init__(self) -> None:
        on_cpu = self.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
        has_bf16 = not on_cpu and is_torch_bf16_gpu_available()
        if self.bf16 and not has_bf16 and not on_cpu:
            raise ValueError("bf16=True needs a GPU that computes in bfloat16: leave it out, and the device decides")
        if self.bf16 is None:
            self.bf16 = has_bf16 and not self.fp16
        if self.disable_tqdm is None:
            self.disable_tqdm = not sys.stderr.isatty()
        super().__post_init__()
        # Pinned memory needs a device, and torch would warn.
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False


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
    defaults = {setting.name: setting.default for setting in fields(TrainingArguments)}
    for name, instead in UNUSED.items():
        if getattr(args, name, None) and getattr(args, name) != defaults[name]:
            raise ValueError(f"{name} has no effect here, because {instead}: leave it out")
    if args.eval_strategy not in ("no", "steps"):
        raise ValueError(f"eval_strategy={args.eval_strategy.value} is not known here: use eval_steps, a number of steps")
    _check_trackers(args)
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


def _check_trackers(args: TrainingArguments) -> None:
    """Raise a ValueError that names a tracker that is not installed."""
    available = get_available_reporting_integrations()
    for name in args.report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ValueError(f"report_to={name} is not known: use none, all or {', '.join(sorted(INTEGRATION_TO_CALLBACK))}")
        if name not in available:
            package = f"'selfspec[{name}]'" if name in EXTRAS else name
            raise ValueError(
                f"report_to={name} cannot be used, because {name} is not installed: pip install {package}, or leave it out "
                f"(installed: {', '.join(available) or 'none'})"
            )


def _flags_in(file: Path) -> list[str]:
    """A YAML file's settings as flags, because `parse_yaml_file` converts no types and lets no flag override a setting.

    A name that is no file is looked up among the recipes' own configs, for those who have no checkout.
    """
    if not file.exists() and (CONFIGS / file).is_file():
        file = CONFIGS / file
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}): check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}: "
        raise ValueError(f"{file} is not YAML ({place}{getattr(error, 'problem', error)}): mend it") from error
    if settings is None:
        raise ValueError(f"{file} holds no settings: write one `name: value` per line")
    if not isinstance(settings, dict):
        raise ValueError(f"{file} is no list of settings: write one `name: value` per line")
    flags: list[str] = []
    for name, value in settings.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            flags.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags
