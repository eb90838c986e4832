"""Settings of a training that fit the machine, the data and the time, for people who name none of them.

What a recipe's own file of settings says holds, unless it depends on one of the three.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from selfspec.heads.base import HeadConfig
from selfspec.train.runs import RECORD_NAME

# Steps of the measurement. The first allocates and compiles, so it does not count.
NUM_MEASURED = 3
# How often the data is read at most: more teaches the head these texts and no others. A head that starts from trained
# weights has less to learn.
MOST_EPOCHS, MOST_EPOCHS_ON = 20, 5
# For a head that starts from trained weights: smaller than the recipes', to keep what it knows.
LEARNING_RATE_ON = 5e-5
NUM_EVALUATIONS = 3
# Evaluations take at most this share of the time.
EVALUATION_SHARE = 0.3
NUM_CHECKPOINTS = 10
# Rows are multiples of it, as attention on a GPU likes them.
TILE = 128


@dataclass(frozen=True)
class HeadKind:
    """A kind of head that can be trained.

    Attributes:
        recipe: module in `selfspec.recipes`.
        config_file: file of its settings.
        head_type: as heads' configs name it.
        drafter: what serves the head, as in `--drafter NAME:PATH`.
        shape: of a trained head, which fields of its config are which settings of the recipe.
    """

    recipe: str
    config_file: str
    head_type: str
    drafter: str
    shape: Mapping[str, str]

    def shape_of(self, config: HeadConfig) -> dict[str, Any]:
        """The settings that give a new head a trained one's shape."""
        values = {setting: getattr(config, name) for name, setting in self.shape.items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


KINDS = {
    "eagle": HeadKind(
        "train_eagle",
        "eagle_smollm2.yaml",
        "eagle",
        "eagle",
        _same("feature_layers", "draft_vocab_size") | {"has_lm_head": "train_lm_head"},
    ),
    "medusa": HeadKind(
        "train_medusa",
        "medusa_smollm2.yaml",
        "medusa",
        "medusa",
        _same("num_heads", "num_blocks", "has_output_layer", "has_root_input"),
    ),
    "early_exit": HeadKind(
        "train_early_exit",
        "early_exit_smollm2.yaml",
        "early_exit",
        "early_exit",
        _same("exit_layer", "blocks", "lora_rank", "lora_alpha"),
    ),
    "draft": HeadKind("distill_draft", "draft_smollm2.yaml", "draft_model", "draft_model", _same("blocks")),
}


def kind_named(name: str) -> HeadKind:
    """The kind of head that people call so.

    Raises:
        ValueError: there is none.
    """
    if name not in KINDS:
        raise ValueError(f"head {name!r} cannot be trained: use {', '.join(KINDS)}")
    return KINDS[name]


@dataclass(frozen=True)
class Situation:
    """What the settings depend on.

    Attributes:
        num_tokens: of the prepared data, prompts included.
        longest: tokens of its longest sample.
        start: config of the head whose weights are started from; None for a new head.
    """

    has_gpu: bool
    num_layers: int
    context_length: int
    num_tokens: int
    longest: int
    start: HeadConfig | None

    def settings(self, head: str) -> dict[str, Any]:
        """The recipe's settings, but for how long it runs."""
        # Long enough for every sample, unless one is very long.
        least, most, at_once = (1024, 2048, 16 * 1024) if self.has_gpu else (512, 1024, 1024)
        row_length = min(max(least, TILE * math.ceil(self.longest / TILE)), most, self.context_length)
        num_rows = math.ceil(self.num_tokens / row_length)
        return {
            "row_length": row_length,
            # At least four steps to an epoch.
            "per_device_train_batch_size": max(1, min(at_once // row_length, num_rows // 4)),
            "num_eval_prompts": 32 if self.has_gpu else 6,
            "num_eval_tokens": 96 if self.has_gpu else 32,
            **self._start(head),
        }

    def _start(self, head: str) -> dict[str, Any]:
        """The head's shape and, where it starts from another, how fast it learns."""
        if self.start is not None:
            return {"learning_rate": LEARNING_RATE_ON, **KINDS[head].shape_of(self.start)}
        last = self.num_layers - 1
        shapes: dict[str, dict[str, Any]] = {
            # Each unrolled step and each token of the draft vocabulary costs time, which a CPU has not.
            "eagle": {} if self.has_gpu else {"num_steps": 4, "draft_vocab_size": 4096},
            "medusa": {},
            "early_exit": {"exit_layer": max(1, self.num_layers // 2), "blocks": [last]},
            "draft": {"blocks": list(range(min(3, self.num_layers)))},
        }
        return shapes[head]


@dataclass(frozen=True)
class Measured:
    """What a short run of the recipe took.

    Attributes:
        seconds, evaluation_seconds: of a step, and of an evaluation.
        memory_gib: the most memory in use: the device's, or the process's where there is no GPU.
    """

    seconds: float
    evaluation_seconds: float
    num_rows: int
    memory_gib: float

    @classmethod
    def of(cls, output_dir: Path, tokens_per_step: int, process_gib: float) -> Measured:
        """From the record of the short run."""
        record = json.loads((output_dir / RECORD_NAME).read_text(encoding="utf-8"))
        later = [entry for entry in record["losses"] if entry["step"] > 1]
        peaks = [entry["peak_memory_gib"] for entry in later if "peak_memory_gib" in entry]
        return cls(
            tokens_per_step / median(entry["tokens_per_second"] for entry in later),
            record["evaluation_seconds"],
            record["num_rows"],
            max(peaks, default=process_gib),
        )


@dataclass(frozen=True)
class Length:
    """How long a run is, and what it takes."""

    num_steps: int
    num_evaluations: int
    num_epochs: float
    seconds: float

    @classmethod
    def fitting(cls, measured: Measured, rows_per_step: int, minutes: float, *, goes_on: bool) -> Length:
        """The longest run within the minutes that does not read the data too often.

        Args:
            goes_on: the head starts from trained weights.
        """
        total = 60 * minutes
        each = max(measured.evaluation_seconds, 1e-9)
        num_evaluations = max(1, min(NUM_EVALUATIONS, int(EVALUATION_SHARE * total / each) - 1))
        epochs = MOST_EPOCHS_ON if goes_on else MOST_EPOCHS
        by_data = max(1, epochs * measured.num_rows // rows_per_step)
        # The finished head is evaluated once more.
        evaluating = (num_evaluations + 1) * measured.evaluation_seconds
        steps = min(by_data, max(1, int((total - evaluating) / measured.seconds)))
        num_evaluations = min(num_evaluations, steps)
        # The last evaluation of the curve is then that of the last step.
        steps -= steps % num_evaluations
        seconds = steps * measured.seconds + evaluating
        return cls(steps, num_evaluations, steps * rows_per_step / measured.num_rows, seconds)

    def settings(self) -> dict[str, Any]:
        """The recipe's settings for it."""
        return {
            "max_steps": self.num_steps,
            "warmup_steps": max(1, self.num_steps // 20),
            "logging_steps": max(1, self.num_steps // 50),
            "eval_steps": self.num_steps // self.num_evaluations,
            "save_steps": max(1, self.num_steps // NUM_CHECKPOINTS),
        }


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as a recipe's command line."""
    flags: list[str] = []
    for name, value in settings.items():
        if isinstance(value, list | tuple):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            flags.append(f"--{name}={value}")
    return flags
