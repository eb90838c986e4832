"""How far a run is, in lines for where no one watches a bar: what it reads, what its checkpoints take, how long it needs."""

from __future__ import annotations

import logging
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import SaveStrategy

from selfspec.heads.base import DraftHead
from selfspec.train.loop import HeadTrainer

logger = logging.getLogger(__name__)

# Seconds between two lines.
EVERY = 30.0
# The time of a step is told after this many, of which the first does not count, because it compiles and allocates.
NUM_MEASURED = 6


def show_disk(head: DraftHead, args: TrainingArguments) -> None:
    """Log what the checkpoints will take, and warn if that is more than is free."""
    if args.save_strategy == SaveStrategy.NO:
        return
    # Weights and AdamW's two moments, in float32.
    trained = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
    # While one is written, those to keep are still there.
    num_kept = (args.save_total_limit or 1) + 1
    need = 3 * 4 * trained * num_kept
    free = shutil.disk_usage(_existing(Path(args.output_dir))).free
    limit = "no save_total_limit, so each one stays" if not args.save_total_limit else f"{num_kept} of them at most"
    logger.info(
        "a checkpoint takes %.2f GiB (%s); %.1f GiB are free in %s",
        *(need / num_kept / 2**30, limit, free / 2**30, args.output_dir),
    )
    if need > free:
        logger.warning(
            "%s has room for %.2f GiB, and checkpoints need %.2f GiB: make room, or choose another --output_dir or a "
            "smaller --save_total_limit",
            *(args.output_dir, free / 2**30, need / 2**30),
        )


class Progress(TrainerCallback):
    """Logs how much a run reads and, unless there is a bar, where it is, every so many seconds."""

    def __init__(self, trainer: HeadTrainer, num_rows: int) -> None:
        self.trainer = trainer
        self.num_rows = num_rows
        self.first_step = 0
        self.first_seconds = 0.0
        self.last_line = 0.0
        self.loss = ""

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.loss = f", loss {logs['loss']:.2f}"

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.first_step = state.global_step + 1
        self.last_line = time.monotonic()
        per_step = self.trainer.get_total_train_batch_size(args)
        num_read = state.max_steps * per_step
        read = f"every row {num_read / self.num_rows:.1f} times"
        if num_read < self.num_rows:
            read = f"{num_read} of the {self.num_rows} rows"
        logger.info("%d steps of %d rows read %s", state.max_steps, per_step, read)

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        step, now = state.global_step, time.monotonic()
        if step == self.first_step:
            self.first_seconds = self.trainer.clock()
        is_measured = step - self.first_step == NUM_MEASURED - 1
        if not args.disable_tqdm or step == self.first_step or not (is_measured or now - self.last_line >= EVERY):
            return
        self.last_line = now
        seconds = (self.trainer.clock() - self.first_seconds) / (step - self.first_step)
        left = timedelta(seconds=round(seconds * (state.max_steps - step)))
        logger.info(
            "step %d of %d%s, %.2f s a step, %s to go, evaluations not counted",
            *(step, state.max_steps, self.loss, seconds, left),
        )


class LossBar(ProgressCallback):
    """transformers' bar with the last loss and acceptance length at its end, instead of a line for each."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, str] = {}

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is None or not logs:
            return
        for name, shown in (("loss", "loss"), ("eval_acceptance_length", "tokens/pass")):
            if name in logs:
                self.figures[shown] = f"{logs[name]:.2f}"
        self.training_bar.set_postfix(self.figures)


def _existing(path: Path) -> Path:
    """The path, or its nearest folder that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
