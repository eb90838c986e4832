"""The training loop: transformers' Trainer, with what heads need of it that it does not do.

The loss does not depend on how a step's rows are spread over processes and batches; a loss that is not finite stops all
processes, with its batch on disk; checkpoints are whole or absent; every evaluation decodes held-out prompts for real.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints

from selfspec.failures import first_line
from selfspec.train.checkpoints import PARTIAL, last_checkpoint
from selfspec.train.evaluation import EvalPrompt, Evaluator

logger = logging.getLogger(__name__)

# Trackers and the log tell an evaluation's numbers from the training's by it.
EVAL_PREFIX = "eval_"


class _Losses(NamedTuple):
    """A batch's loss of every process, on its way to the host, and the batch of this one."""

    values: torch.Tensor
    inputs: Any
    step: int
    event: Any


class HeadTrainer(Trainer):
    """A Trainer of heads.

    It logs each depth's accuracy, the speed and the peak memory, stops all processes at a loss that is not finite, and
    leaves whole checkpoints only.

    Args:
        row_length: tokens of a packed row.

    Attributes:
        seconds_paused: time spent on evaluation, which is not training time.
    """

    def __init__(self, *, row_length: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.row_length = row_length
        # The loss comes divided by the counts of the whole step, accumulated batches included: not to be divided again.
        self.model_accepts_loss_kwargs = True
        self.seconds_paused = 0.0
        # Step and time of the last log, or of the first batch.
        self._last_log: tuple[int, float] | None = None
        self._last_losses: _Losses | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the packed rows that one optimizer step covers, padding included."""
        return self.get_total_train_batch_size(self.args) * self.row_length

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """A step's batches on this process, and how many pairs the loss is a mean over in all of the step.

        Processes and accumulated batches hold unequal numbers of answer tokens: the mean of their means would weigh a token
        by the company it came in.
        """
        self._last_log = self._last_log or (self.state.global_step, self._clock())
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches or (num_batches == 1 and self.args.world_size == 1):
            # The batch's own counts are the step's.
            return batches, None
        model: Any = self.model
        counts = sum(model.num_pairs(**batch) for batch in batches).to(self.args.device)
        # Gradients are averaged over the processes, so that each divides by its share of the count.
        return batches, self.accelerator.reduce(counts, "sum") / self.args.world_size

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        self.check_losses()
        outputs = model(**inputs) if num_items_in_batch is None else model(**inputs, num_pairs=num_items_in_batch)
        loss = outputs["loss"]
        losses = self.accelerator.gather(loss.detach().reshape(1)).to("cpu", non_blocking=True)
        has_gpu = self.args.device.type == "cuda"
        self._last_losses = _Losses(losses, inputs, self.state.global_step, torch.cuda.Event() if has_gpu else None)
        if has_gpu:
            self._last_losses.event.record()
        else:
            self.check_losses()
        return (loss, outputs) if return_outputs else loss

    def check_losses(self) -> None:
        """Stop if a loss of the batch before is not finite: a GPU is never waited for, and no checkpoint holds its update.

        All processes stop with the same sentence; those whose loss it is keep their batch.
        """
        if self._last_losses is None:
            return
        losses, inputs, step, event = self._last_losses
        self._last_losses = None
        if event is not None:
            event.synchronize()
        if bool(losses.isfinite().all()):
            return
        folder = Path(self.args.output_dir)
        if not bool(losses[self.args.process_index].isfinite()):
            batch = {name: value.cpu() for name, value in inputs.items()}
            torch.save(batch, folder / f"bad_batch_{self.args.process_index}.pt")
        process = int((~losses.isfinite()).nonzero()[0])
        raise FloatingPointError(
            f"the loss is {float(losses[process])} at step {step}: its batch is in "
            f"{folder / f'bad_batch_{process}.pt'}; lower the learning rate, or look at those rows"
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        self.check_losses()
        return result

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs = {**logs, **self._training_figures()}
        super().log(logs, *args, **kwargs)

    def _training_figures(self) -> dict[str, float]:
        """The last batch's accuracy at each depth, and the speed since the last log."""
        model: Any = self.model
        metrics = dict(model.metrics)
        values = torch.stack([metrics[name].float() for name in metrics])
        figures = dict(zip(metrics, self.accelerator.reduce(values, "mean").tolist(), strict=True))
        assert self._last_log is not None
        (last_step, last_seconds), (step, seconds) = self._last_log, (self.state.global_step, self._clock())
        figures["tokens_per_second"] = (step - last_step) * self.tokens_per_step / (seconds - last_seconds)
        self._last_log = (step, seconds)
        if self.args.device.type == "cuda":
            figures["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return figures

    def _clock(self) -> float:
        return time.perf_counter() - self.seconds_paused

    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(self.args.output_dir) / PARTIAL)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Written elsewhere and moved to its name when all processes have written their part."""
        self.check_losses()
        name = f"checkpoint-{self.state.global_step}"
        folder = Path(self.args.output_dir)
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            # torch reports a write that failed as a RuntimeError of its zip writer.
            if type(error) is RuntimeError and "inline_container" not in str(error):
                raise
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)
            reason = getattr(error, "strerror", None) or first_line(error)
            last = last_checkpoint(folder)
            free = shutil.disk_usage(folder).free / 2**30
            raise OSError(
                f"{folder / name} could not be written ({reason}; {free:.1f} GiB free): make room and start the same line "
                f"again, which goes on from {last.name if last else 'the beginning'}"
            ) from error
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / PARTIAL / name).replace(folder / name)
            rotate_checkpoints(str(folder), save_total_limit=self.args.save_total_limit, use_mtime=True)


class EvaluationCallback(TrainerCallback):
    """Decodes held-out prompts with the head as it is, every `eval_steps` steps, and logs how much was accepted.

    On the main process only: the others wait for it in the next step. With a sharded target none can do without the others.
    """

    def __init__(self, trainer: HeadTrainer, evaluator: Evaluator, prompts: Sequence[EvalPrompt], *, on_all: bool) -> None:
        self.trainer = trainer
        self.evaluator = evaluator
        self.prompts = prompts
        self.on_all = on_all

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        # Below 1 it is a share of the run, as transformers has it.
        every = args.eval_steps or 0
        every = math.ceil(every * state.max_steps) if every < 1 else int(every)
        if not every or state.global_step % every:
            return
        self.trainer.check_losses()
        started = time.perf_counter()
        report = self.evaluator(self.prompts, is_decoding=self.on_all or state.is_world_process_zero)
        self.trainer.seconds_paused += time.perf_counter() - started
        if report is not None and state.is_world_process_zero:
            logger.info("step %d: acceptance length %.3f", state.global_step, report.length)
            # Logging answers a request to log: the one for this step's loss must stay.
            should_log = control.should_log
            self.trainer.log({EVAL_PREFIX + name: value for name, value in report.record().items()})
            control.should_log = should_log
