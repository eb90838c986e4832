"""What the recipes share: settings and data in, a trained head with its card out.

transformers' Trainer does the work (accelerate, schedules, clipping, mixed precision, checkpoints, resuming, trackers), and
`selfspec.train.loop` adds what it lacks. Only the head is trained, saved and pushed.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser, TrainingArguments, set_seed
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import IntervalStrategy

from selfspec.config import TargetOptions
from selfspec.drafters import Drafter
from selfspec.heads.base import DraftHead
from selfspec.model.chat import parse_arguments
from selfspec.model.default_target import source_of
from selfspec.model.target import Target
from selfspec.traffic.masking import check_chat_target, read_template, use_chat_template
from selfspec.train.checkpoints import PARTIAL, last_checkpoint
from selfspec.train.data import LeftOut, load_data
from selfspec.train.evaluation import EvalPrompts, Evaluator, snapshot
from selfspec.train.features import FeatureRows, dump_features
from selfspec.train.identity import HEAD_FOLDER, RunIdentity
from selfspec.train.loop import EvaluationCallback, HeadTrainer
from selfspec.train.losses import LossSettings
from selfspec.train.module import HeadTraining
from selfspec.train.progress import LossBar, Progress, show_disk
from selfspec.train.record import write_record
from selfspec.train.rows import PackedRows
from selfspec.train.settings import DataArgs, RecipeArguments, check_files, check_training, parse
from selfspec.train.sharding import load_sharded
from selfspec.train.start import start_from

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """What a recipe starts from.

    Attributes:
        shape: the recipe's own settings, an instance of the class given to `set_up`.
        left_out: what of the files is neither trained on nor evaluated with.
        hub_token: kept apart from `args`, which checkpoints and trackers get.
    """

    data: DataArgs
    shape: Any
    args: TrainingArguments
    target: Target
    rows: PackedRows
    eval_prompts: EvalPrompts
    left_out: LeftOut
    hub_token: str | None


def set_up(shape_class: type, arguments: Sequence[str] | None = None) -> Setup:
    """Read the settings, from the command line by default, load the frozen target and the data, and seed the head.

    Raises:
        ValueError: a setting, the target or the data cannot be used; nothing has been written by then.
    """
    data, shape, args = parse(HfArgumentParser((DataArgs, shape_class, RecipeArguments)), arguments)
    hub_token, args.hub_token = args.hub_token, None
    check_files(data)
    check_training(args)
    target = load_target(data, args)
    found = load_data(data, target)
    torch.manual_seed(data.init_seed)
    return Setup(data, shape, args, target, found.rows, found.eval_prompts, found.left_out, hub_token)


def load_target(data: DataArgs, args: TrainingArguments) -> Target:
    """The frozen target on this process's device. Its layers stay unpacked, because losses need gradients through them."""
    template = read_template(None if data.chat_template is None else Path(data.chat_template))
    source = source_of(TargetOptions(target=data.target))
    # Reading the weights may take minutes.
    check_chat_target(source, template)
    options: dict[str, Any] = {"dtype": data.target_dtype, "device": args.device, "adapter": data.adapter}
    if data.shard_target:
        target = load_sharded(source, num_processes=args.world_size, **options)
    else:
        target = Target.from_pretrained(source, use_packing=False, **options)
    use_chat_template(target.tokenizer, template)
    target.set_chat_template_kwargs(parse_arguments(data.chat_template_kwargs or "{}"))
    return target


def run(
    head: DraftHead,
    setup: Setup,
    *,
    make_drafter: Callable[[DraftHead], Drafter],
    settings: LossSettings | None = None,
) -> dict[str, float]:
    """Train, evaluate, save, and push if asked to; returns the last evaluation.

    Args:
        make_drafter: what serves a copy of the head at evaluations.

    Raises:
        ValueError: the target or the data cannot be trained on, the output folder belongs to another run, or the Hub does
            not take the head (which is then in the output folder).
        FloatingPointError: a loss is not finite.
    """
    data, target = setup.data, setup.target
    if data.init_head is not None:
        start_from(head, data.init_head)
    head.config = replace(head.config, chat_template_kwargs=target.chat_template_kwargs or None)
    head.to(target.device)
    training = HeadTraining(head, target, settings, is_compiled=data.compile_head)
    evaluator = Evaluator(head, target, make_drafter, data.num_eval_tokens)
    wants_push = setup.args.push_to_hub
    _check_rows(setup)
    _open_output(setup, head, training.settings)
    _prepare_arguments(setup.args)
    trainer = _make_trainer(setup, training, evaluator)
    last = last_checkpoint(Path(setup.args.output_dir))
    result = trainer.train(resume_from_checkpoint=None if last is None else str(last))

    is_main = trainer.is_world_process_zero()
    prompts = setup.eval_prompts.final
    final = evaluator(prompts, is_decoding=data.shard_target or is_main) if prompts else None
    # Where the head is sharded, every process takes part in the copy.
    trained = snapshot(head)
    if not is_main:
        return {}
    directory = Path(setup.args.output_dir) / HEAD_FOLDER
    trained.save_pretrained(directory, dtype=torch.bfloat16)
    write_record(directory, trained, setup, trainer, result.metrics, final)
    if wants_push:
        _push(trained, directory, setup)
    return {} if final is None else final.record()


def _check_rows(setup: Setup) -> None:
    args, num_rows = setup.args, len(setup.rows)
    per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    if num_rows < per_step:
        raise ValueError(
            f"{num_rows} packed rows are fewer than the {per_step} of one step: use smaller batches or more data"
        )


def _open_output(setup: Setup, head: DraftHead, settings: LossSettings) -> None:
    """Make the output folder this run's, and clear what an interrupted checkpoint left there."""
    output_dir = Path(setup.args.output_dir)
    identity = RunIdentity.of(head.config, setup.data, setup.args, settings, setup.rows, setup.eval_prompts.held_out)
    identity.check(output_dir, is_writer=setup.args.should_save)
    if setup.args.should_save:
        shutil.rmtree(output_dir / PARTIAL, ignore_errors=True)
    show_disk(head, setup.args)


def _prepare_arguments(args: TrainingArguments) -> None:
    """Set what the training of heads needs, whatever the user chose."""
    set_seed(args.seed)
    # Rows are mappings of tensors already, and all their columns are needed.
    args.remove_unused_columns = False
    args.label_names = []
    # All steps have one size, because an epoch must have as many steps on any number of processes.
    args.dataloader_drop_last = True
    # This check would wait for the device; `check_losses` does not.
    args.logging_nan_inf_filter = False
    # All weights of a head take part in every loss.
    args.ddp_find_unused_parameters = False
    # The head's folder goes to the Hub, not the Trainer's checkpoints.
    args.push_to_hub = False
    # Held-out prompts are decoded by a callback, not by the Trainer.
    args.eval_strategy = IntervalStrategy.NO


def _make_trainer(setup: Setup, training: HeadTraining, evaluator: Evaluator) -> HeadTrainer:
    """The trainer over the rows, with their features from disk where a folder is named."""
    data, rows = setup.data, setup.rows
    dataset: PackedRows | FeatureRows = rows
    if data.features_dir is not None:
        with setup.args.main_process_first(local=False, desc="features"):
            dataset = dump_features(rows, setup.target, training.feature_names, data.features_dir)
    trainer = HeadTrainer(model=training, args=setup.args, train_dataset=dataset, row_length=rows.input_ids.shape[1])
    trainer.add_callback(Progress(trainer, len(rows)))
    if not setup.args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(LossBar())
    if prompts := setup.eval_prompts.held_out:
        trainer.add_callback(EvaluationCallback(trainer, evaluator, prompts, on_all=data.shard_target))
    return trainer


def _push(head: DraftHead, directory: Path, setup: Setup) -> None:
    args = setup.args
    url = head.push_to_hub(
        args.hub_model_id or directory.resolve().parent.name,
        directory=directory,
        token=setup.hub_token,
        private=bool(args.hub_private_repo),
    )
    logger.info("the head is at %s", url)
