"""The training loop: transformers' Trainer, and what heads need besides.

The loss does not depend on how a step's rows are spread over processes and batches. A loss that is not finite stops all
processes, and its batch is saved. Checkpoints are whole or absent. Every evaluation decodes held-out prompts as in serving.
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
from selfspec.files import share
from selfspec.train.checkpoints import PARTIAL, last_checkpoint
from selfspec.train.evaluation import EvalPrompt, Evaluator

logger = logging.getLogger(__name__)

# Marks an evaluation's numbers in trackers and in the log.
EVAL_PREFIX = "eval_"


class _Losses(NamedTuple):
    """Every process's loss of a batch, on its way to the host, and this process's batch."""

    values: torch.Tensor
    inputs: Any
    step: int
    event: Any


class HeadTrainer(Trainer):
    """A Trainer of heads, which also logs each depth's accuracy, the speed and the peak memory.

    Args:
        row_length: tokens of a packed row.

    Attributes:
        seconds_paused: time spent on evaluation, which does not count as training.
    """

    def __init__(self, *, row_length: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.row_length = row_length
        # Tells the Trainer not to divide the loss: it is already divided by the count of the whole step.
        self.model_accepts_loss_kwargs = True
        self.seconds_paused = 0.0
        # Step and time of the last log; of the first batch, before there is a log.
        self._last_log: tuple[int, float] | None = None
        self._last_losses: _Losses | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the packed rows in one optimizer step, padding included."""
        return self.get_total_train_batch_size(self.args) * self.row_length

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """A step's batches on this process, and the number of pairs that the whole step's loss is a mean over.

        Processes and accumulated batches hold unequal numbers of answer tokens, so a mean of their means would give tokens
        unequal weights.
        """
        self._last_log = self._last_log or (self.state.global_step, self.clock())
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches or (num_batches == 1 and self.args.world_size == 1):
            # The batch is the whole step, and counts for itself.
            return batches, None
        model: Any = self.model
        counts = sum(model.num_pairs(**batch) for batch in batches).to(self.args.device)
        # Gradients are averaged over the processes, so each process divides by its share of the count.
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
        """Stop if a loss of the batch before is not finite.

        Checking one batch late waits for no GPU, and no checkpoint is saved in between. All processes stop with the same
        sentence, and those whose loss is not finite save their batch.
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
        """The last batch's accuracy at each depth, the speed since the last log and, on a GPU, the peak memory."""
        model: Any = self.model
        metrics = dict(model.metrics)
        values = torch.stack([metrics[name].float() for name in metrics])
        figures = dict(zip(metrics, self.accelerator.reduce(values, "mean").tolist(), strict=True))
        assert self._last_log is not None
        (last_step, last_seconds), (step, seconds) = self._last_log, (self.state.global_step, self.clock())
        figures["tokens_per_second"] = (step - last_step) * self.tokens_per_step / (seconds - last_seconds)
        self._last_log = (step, seconds)
        if self.args.device.type == "cuda":
            figures["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return figures

    def clock(self) -> float:
        """Seconds, those of evaluations not counted."""
        return time.perf_counter() - self.seconds_paused

    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(self.args.output_dir) / PARTIAL)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write the checkpoint elsewhere, and move it to its name when all processes have written their parts."""
        self.check_losses()
        name = f"checkpoint-{self.state.global_step}"
        folder = Path(self.args.output_dir)
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            # torch reports a failed write as a RuntimeError of its zip writer.
            if type(error) is RuntimeError and "inline_container" not in str(error):
                raise
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)
            reason = getattr(error, "strerror", None) or first_line(error)
            last = last_checkpoint(folder)
            free = shutil.disk_usage(folder).free / 2**30
            raise OSError(
                f"{folder / name} could not be written ({reason}; {free:.1f} GiB free): make room and run the same command "
                f"again, which continues from {last.name if last else 'the beginning'}"
            ) from error
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            shutil.rmtree(folder / name, ignore_errors=True)
            share(folder / PARTIAL / name)
            (folder / PARTIAL / name).replace(folder / name)
            rotate_checkpoints(str(folder), save_total_limit=self.args.save_total_limit, use_mtime=False)


class EvaluationCallback(TrainerCallback):
    """Decodes held-out prompts with the head as it is, every `eval_steps` steps, and logs how much was accepted.

    The main process decodes, and the others wait for it in the next step.

    Args:
        on_all: all processes decode, because the target is sharded and needs every one of them.
    """

    def __init__(self, trainer: HeadTrainer, evaluator: Evaluator, prompts: Sequence[EvalPrompt], *, on_all: bool) -> None:
        self.trainer = trainer
        self.evaluator = evaluator
        self.prompts = prompts
        self.on_all = on_all

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        # As in transformers, a number below 1 is a share of the run.
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
            # Logging clears the request to log, and this step's loss has yet to be logged.
            should_log = control.should_log
            self.trainer.log({EVAL_PREFIX + name: value for name, value in report.record().items()})
            control.should_log = should_log
