"""What the recipes share: packed rows and a head in, a trained head with its card out.

transformers' Trainer does the work (accelerate, schedules, clipping, mixed precision, checkpoints, resuming, trackers).
Added here: the head alone is trained and saved, a loss that is not finite stops the run with its batch on disk, and every
evaluation decodes held-out prompts for real and reports the acceptance length.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from selfspec import SamplingParams, __version__, generate
from selfspec.drafters import Drafter
from selfspec.heads.base import DraftHead
from selfspec.target import Target
from selfspec.train.conversations import Report
from selfspec.train.masking import tokenize_all, use_chat_template
from selfspec.train.module import HeadTraining
from selfspec.train.rows import PackedRows, pack
from selfspec.train.sources import read_conversations

logger = logging.getLogger(__name__)


@dataclass
class DataArgs:
    """Where the target and its answers are."""

    target: str = field(metadata={"help": "folder or Hub id of the frozen target"})
    train_file: str = field(metadata={"help": "conversations with the target's own answers, JSON lines"})
    held_out_file: str | None = field(default=None, metadata={"help": "conversations for evaluation"})
    row_length: int = field(default=1024, metadata={"help": "tokens of a packed row"})
    target_dtype: str = field(default="auto", metadata={"help": "dtype of the frozen target"})
    chat_template: str | None = field(default=None, metadata={"help": "Jinja file, for a target without a template"})
    init_seed: int = field(default=0, metadata={"help": "seed of the head's weights (seed: of the data's order)"})
    num_eval_prompts: int = field(default=32, metadata={"help": "held-out prompts decoded at every evaluation"})
    num_eval_tokens: int = field(default=64, metadata={"help": "tokens decoded for each of them"})


def parse(parser: HfArgumentParser, arguments: Sequence[str]) -> tuple[Any, ...]:
    """Settings from flags, or from one YAML file and flags that override it."""
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        settings = yaml.safe_load(Path(arguments[0]).read_text())
        flags = [f"--{key}={value}" for key, value in settings.items() if not isinstance(value, list)]
        for key, value in settings.items():
            if isinstance(value, list):
                flags += [f"--{key}", *map(str, value)]
        arguments = [*flags, *arguments[1:]]
    return parser.parse_args_into_dataclasses(list(arguments))


def load_target(data: DataArgs, args: TrainingArguments) -> Target:
    """The frozen target on this process's device, its linear layers unpacked: losses differentiate through the LM head."""
    target = Target.from_pretrained(data.target, dtype=data.target_dtype, device=args.device, use_packing=False)
    use_chat_template(target.tokenizer, None if data.chat_template is None else Path(data.chat_template))
    return target


def load_rows(data: DataArgs, target: Target) -> tuple[PackedRows, list[list[int]]]:
    """Packed training rows, and the held-out prompts to decode at evaluation."""
    report = Report()
    samples = tokenize_all(read_conversations([data.train_file], report), target.tokenizer, report)
    rows = pack(samples, data.row_length)
    logger.info("%d rows of %d tokens, %.1f %% full", len(rows), data.row_length, 100 * rows.fill_rate)
    prompts: list[list[int]] = []
    if data.held_out_file is not None:
        for conversation in read_conversations([data.held_out_file], Report()):
            first = [m for m in conversation.messages[:2] if m["role"] in ("system", "user")]
            prompts.append(target.encode(first))
    prompts = [ids for ids in prompts if len(ids) + data.num_eval_tokens < target.context_length]
    step = max(1, len(prompts) // max(1, data.num_eval_prompts))
    return rows, prompts[::step][: data.num_eval_prompts]


def frequent_tokens(rows: PackedRows, size: int, vocab_size: int) -> torch.Tensor:
    """[size] ascending ids of the tokens that answers use most, the unused ones last by id."""
    counts = torch.bincount(rows.input_ids[rows.loss_mask], minlength=vocab_size)
    chosen = counts.sort(descending=True, stable=True).indices[:size]
    share = float(counts[chosen].sum() / counts.sum())
    logger.info("the draft vocabulary of %d tokens covers %.2f %% of the answers", size, 100 * share)
    return chosen.sort().values


class HeadTrainer(Trainer):
    """A Trainer that logs each depth's accuracy and stops at a loss that is not finite."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"]
        if not bool(torch.isfinite(loss)):
            path = Path(self.args.output_dir) / "bad_batch.pt"
            torch.save({name: value.cpu() for name, value in inputs.items()}, path)
            raise FloatingPointError(f"the loss is {float(loss)} at step {self.state.global_step}: its batch is in {path}")
        if self.state.global_step % self.args.logging_steps == 0 and self.model.training:
            metrics = self.accelerator.unwrap_model(model).metrics
            self._depth_metrics = {name: float(value) for name, value in metrics.items()}
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs = {**logs, **getattr(self, "_depth_metrics", {})}
        super().log(logs, *args, **kwargs)


class AcceptanceCallback(TrainerCallback):
    """Decodes held-out prompts with the head as it is, every `eval_steps` steps."""

    def __init__(self, evaluate: Callable[[], dict[str, float]]) -> None:
        self.evaluate = evaluate
        self.history: list[dict[str, float]] = []

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        every = args.eval_steps
        if every and state.is_world_process_zero and state.global_step % int(every) == 0:
            self.history.append({"step": state.global_step, **self.evaluate()})
            logger.info("step %d: acceptance length %.3f", state.global_step, self.history[-1]["acceptance_length"])


def acceptance(target: Target, drafter: Drafter, prompts: Sequence[list[int]], num_tokens: int) -> dict[str, float]:
    """Real decoding, greedy: tokens per target pass, and how often a draft of each depth held once it was reached."""
    completions = generate(
        target,
        prompts,
        drafter=drafter,
        sampling=SamplingParams(max_new_tokens=num_tokens),
        batch_size=16,
        use_cost_guard=False,
    )
    num_tokens_out = sum(len(c.token_ids) for c in completions)
    return {"acceptance_length": num_tokens_out / sum(c.num_target_passes for c in completions)}


def run(
    head: DraftHead,
    target: Target,
    rows: PackedRows,
    args: TrainingArguments,
    *,
    num_steps: int,
    decay: float,
    make_drafter: Callable[[DraftHead], Drafter],
    eval_prompts: Sequence[list[int]],
    num_eval_tokens: int,
    settings: dict[str, Any],
) -> dict[str, float]:
    """Train, evaluate, save; returns the last evaluation.

    Raises:
        ValueError: fewer rows than one batch, or an output folder that holds another run's checkpoint.
    """
    per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    if len(rows) < per_step:
        raise ValueError(
            f"{len(rows)} packed rows are fewer than the {per_step} of one step: use smaller batches or more data"
        )
    set_seed(args.seed)
    # Rows are mappings of tensors already, and none of their columns may be dropped.
    args.remove_unused_columns = False
    args.label_names = []
    evaluation = AcceptanceCallback(lambda: _evaluate(head, target, make_drafter, eval_prompts, num_eval_tokens))
    training = HeadTraining(head, target, num_steps=num_steps, decay=decay)
    trainer = HeadTrainer(model=training, args=args, train_dataset=rows, callbacks=[evaluation] if eval_prompts else [])
    last = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    result = trainer.train(resume_from_checkpoint=last)
    if not trainer.is_world_process_zero():
        return {}
    final = _evaluate(head, target, make_drafter, eval_prompts, num_eval_tokens) if eval_prompts else {}
    directory = Path(args.output_dir) / "head"
    head.save_pretrained(directory, dtype=torch.bfloat16)
    record = {
        "command": " ".join(sys.argv),
        "versions": {"selfspec": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "settings": settings,
        "training": args.to_dict(),
        "num_rows": len(rows),
        "num_tokens": rows.num_tokens,
        "metrics": result.metrics,
        "history": evaluation.history,
        "final": final,
    }
    (Path(args.output_dir) / "run.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    return final


def _evaluate(
    head: DraftHead,
    target: Target,
    make_drafter: Callable[[DraftHead], Drafter],
    prompts: Sequence[list[int]],
    num_tokens: int,
) -> dict[str, float]:
    """Serve a copy of the head as it stands; the one in training keeps its dtype and mode."""
    twin = type(head)(head.config)
    twin.load_state_dict(head.state_dict())
    drafter = make_drafter(twin.eval().requires_grad_(False))
    return acceptance(target, drafter, prompts, num_tokens)
