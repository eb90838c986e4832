"""What the recipes share: settings and data in, a trained head with its card out.

transformers' Trainer does the work (accelerate, schedules, clipping, mixed precision, checkpoints, resuming, trackers), and
`selfspec.train.loop` adds what it lacks. Only the head is trained, saved and pushed.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from jinja2 import TemplateError
from transformers import HfArgumentParser, TrainingArguments, set_seed

from selfspec import __version__
from selfspec.drafters import Drafter
from selfspec.drafters.names import kind_of_head
from selfspec.heads.base import DraftHead
from selfspec.model.target import Target
from selfspec.traffic.conversations import Report
from selfspec.traffic.masking import check_chat_target, read_template, tokenize_all, use_chat_template
from selfspec.traffic.prepare import check_some_left
from selfspec.traffic.prompt_files import read_prompts
from selfspec.traffic.sources import read_conversations
from selfspec.train.card import CardFacts, public_command, without_token, write_card
from selfspec.train.checkpoints import PARTIAL, check_identity, last_checkpoint
from selfspec.train.evaluation import AcceptanceReport, EvalPrompt, EvalPrompts, Evaluator, snapshot
from selfspec.train.features import FeatureRows, dump_features
from selfspec.train.loop import EVAL_PREFIX, EvaluationCallback, HeadTrainer
from selfspec.train.losses import LossSettings
from selfspec.train.module import HeadTraining
from selfspec.train.rows import PackedRows, pack
from selfspec.train.settings import DataArgs, check_files, check_training, parse
from selfspec.train.sharding import load_sharded

logger = logging.getLogger(__name__)

HEAD_FOLDER = "head"


@dataclass(frozen=True)
class Setup:
    """What a recipe starts from.

    Attributes:
        shape: the recipe's own settings, an instance of the class given to `set_up`.
    """

    data: DataArgs
    shape: Any
    args: TrainingArguments
    target: Target
    rows: PackedRows
    eval_prompts: EvalPrompts


def set_up(shape_class: type, arguments: Sequence[str] | None = None) -> Setup:
    """Read the settings, from the command line by default, load the frozen target and the data, and seed the head.

    Raises:
        ValueError: a setting, the target or the data cannot be used; nothing has been written by then.
    """
    data, shape, args = parse(HfArgumentParser((DataArgs, shape_class, TrainingArguments)), arguments)
    check_files(data)
    check_training(args)
    target = load_target(data, args)
    rows = load_rows(data, target)
    eval_prompts = load_eval_prompts(data, target)
    torch.manual_seed(data.init_seed)
    return Setup(data, shape, args, target, rows, eval_prompts)


def load_target(data: DataArgs, args: TrainingArguments) -> Target:
    """The frozen target on this process's device. Its layers stay unpacked, because losses need gradients through them."""
    template = read_template(None if data.chat_template is None else Path(data.chat_template))
    # Reading the weights may take minutes.
    check_chat_target(data.target, template)
    if data.shard_target:
        num_processes = args.world_size
        target = load_sharded(data.target, dtype=data.target_dtype, device=args.device, num_processes=num_processes)
    else:
        target = Target.from_pretrained(data.target, dtype=data.target_dtype, device=args.device, use_packing=False)
    use_chat_template(target.tokenizer, template)
    return target


def load_rows(data: DataArgs, target: Target) -> PackedRows:
    """The packed training rows.

    Raises:
        ValueError: there is nothing to train on, or a conversation is longer than the target's context.
    """
    reading, masking = Report(), Report()
    conversations = list(read_conversations([data.train_file], reading))
    check_some_left(conversations, reading)
    samples = tokenize_all(conversations, target.tokenizer, masking)
    rows = pack(samples, data.row_length)
    for reason, count in (reading.skipped + masking.skipped).most_common():
        logger.warning("%s: %d conversations are left out: %s", data.train_file, count, reason)
    if not len(rows):
        raise ValueError(f"no answer begins within row_length={data.row_length} tokens: use longer rows")
    longest = int(rows.position_ids.max()) + 1
    if longest > target.context_length:
        raise ValueError(
            f"{data.train_file} has a conversation of {longest} tokens, longer than the target's context of "
            f"{target.context_length} tokens: use row_length={target.context_length}, which cuts it"
        )
    logger.info(
        "%d rows of %d tokens, %.1f %% full; %d tokens did not fit into a row",
        *(len(rows), data.row_length, 100 * rows.fill_rate, rows.num_lost_tokens),
    )
    return rows


def load_eval_prompts(data: DataArgs, target: Target) -> EvalPrompts:
    """The prompts to decode at evaluations.

    Raises:
        ValueError: a file is named and no prompt in it can be decoded.
    """
    held_out: list[EvalPrompt] = []
    if data.held_out_file is not None:
        conversations = read_conversations([data.held_out_file], Report())
        firsts = (([m for m in c.messages[:2] if m["role"] in ("system", "user")], c.category) for c in conversations)
        held_out = _eval_prompts(data.held_out_file, firsts, data, target)
    step = max(1, len(held_out) // max(1, data.num_eval_prompts))
    held_out = held_out[::step][: data.num_eval_prompts]
    final = held_out
    if data.final_eval_file is not None:
        rows = read_prompts(Path(data.final_eval_file))
        final = _eval_prompts(data.final_eval_file, ((row.prompt, row.category) for row in rows), data, target)
    return EvalPrompts(held_out, final)


def _eval_prompts(
    file: str, prompts: Iterable[tuple[str | list[dict[str, Any]], str | None]], data: DataArgs, target: Target
) -> list[EvalPrompt]:
    """Those of a file's prompts, each with its task, that can be decoded; how many cannot is logged."""
    usable, num_left_out = [], 0
    for prompt, category in prompts:
        try:
            token_ids = target.encode(prompt)
        except TemplateError:
            token_ids = []
        if token_ids and len(token_ids) + data.num_eval_tokens < target.context_length:
            usable.append(EvalPrompt(token_ids, category))
        else:
            num_left_out += 1
    if not usable:
        raise ValueError(
            f"{file} has no prompt to decode: each must leave room for num_eval_tokens={data.num_eval_tokens} in the "
            f"target's context of {target.context_length} tokens, and the chat template must take it"
        )
    if num_left_out:
        logger.warning("%s: %d prompts are left out: too long, or refused by the chat template", file, num_left_out)
    return usable


def frequent_tokens(rows: PackedRows, size: int, vocab_size: int) -> torch.Tensor:
    """[size] ascending ids of the tokens that answers use most; if too few are used, also the lowest unused ids."""
    counts = torch.bincount(rows.input_ids[rows.loss_mask], minlength=vocab_size)
    chosen = counts.sort(descending=True, stable=True).indices[:size]
    share = float(counts[chosen].sum() / counts.sum())
    logger.info("the draft vocabulary of %d tokens covers %.2f %% of the answers", size, 100 * share)
    return chosen.sort().values


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
        ValueError: the target or the data cannot be trained on, the output folder belongs to another head or target, or the
            Hub does not take the head (which is then in the output folder).
        FloatingPointError: a loss is not finite.
    """
    data, target = setup.data, setup.target
    head.to(target.device)
    training = HeadTraining(head, target, settings, is_compiled=data.compile_head)
    evaluator = Evaluator(head, target, make_drafter, data.num_eval_tokens)
    wants_push = setup.args.push_to_hub
    _check_rows(setup)
    _open_output(setup, head)
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
    _save(trained, setup, trainer, result.metrics, final)
    if wants_push:
        _push(trained, setup.args)
    return {} if final is None else final.record()


def _check_rows(setup: Setup) -> None:
    args, num_rows = setup.args, len(setup.rows)
    per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    if num_rows < per_step:
        raise ValueError(
            f"{num_rows} packed rows are fewer than the {per_step} of one step: use smaller batches or more data"
        )


def _open_output(setup: Setup, head: DraftHead) -> None:
    """Make the output folder this head's, and clear what an interrupted checkpoint left there."""
    output_dir = Path(setup.args.output_dir)
    check_identity(output_dir, head.config, is_writer=setup.args.should_save)
    if setup.args.should_save:
        shutil.rmtree(output_dir / PARTIAL, ignore_errors=True)


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


def _make_trainer(setup: Setup, training: HeadTraining, evaluator: Evaluator) -> HeadTrainer:
    """The trainer over the rows, with their features from disk where a folder is named."""
    data, rows = setup.data, setup.rows
    dataset: PackedRows | FeatureRows = rows
    if data.features_dir is not None:
        with setup.args.main_process_first(local=False, desc="features"):
            dataset = dump_features(rows, setup.target, training.feature_names, data.features_dir)
    trainer = HeadTrainer(model=training, args=setup.args, train_dataset=dataset, row_length=rows.input_ids.shape[1])
    if prompts := setup.eval_prompts.held_out:
        trainer.add_callback(EvaluationCallback(trainer, evaluator, prompts, on_all=data.shard_target))
    return trainer


def _save(
    head: DraftHead, setup: Setup, trainer: HeadTrainer, metrics: dict[str, float], final: AcceptanceReport | None
) -> None:
    """Write the head, its card, and a record of the run."""
    output_dir = Path(setup.args.output_dir)
    directory = output_dir / HEAD_FOLDER
    head.save_pretrained(directory, dtype=torch.bfloat16)
    record = {
        "command": " ".join(without_token(sys.argv)),
        "versions": _versions(),
        "settings": {"data": asdict(setup.data), "head": asdict(setup.shape)},
        "training": setup.args.to_dict(),
        "num_rows": len(setup.rows),
        "num_tokens": setup.rows.num_tokens,
        "metrics": metrics,
        "history": _history(trainer.state.log_history),
        "final": {} if final is None else final.record(),
    }
    (output_dir / "run.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    write_card(directory, _card_facts(head, setup, trainer, final))
    logger.info(
        "serve it: selfspec generate --target %s --drafter %s:%s …",
        setup.target.name,
        kind_of_head(head.config.head_type).name,
        directory,
    )


def _push(head: DraftHead, args: TrainingArguments) -> None:
    output_dir = Path(args.output_dir)
    url = head.push_to_hub(
        args.hub_model_id or output_dir.resolve().name,
        directory=output_dir / HEAD_FOLDER,
        token=args.hub_token,
        private=bool(args.hub_private_repo),
    )
    logger.info("the head is at %s", url)


def _versions() -> dict[str, str]:
    return {"selfspec": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def _history(log_history: list[dict[str, float]]) -> list[dict[str, float]]:
    """The evaluations so far, including those before a restart."""
    return [
        {"step": entry["step"]} | {k.removeprefix(EVAL_PREFIX): v for k, v in entry.items() if k.startswith(EVAL_PREFIX)}
        for entry in log_history
        if f"{EVAL_PREFIX}acceptance_length" in entry
    ]


def _card_facts(head: DraftHead, setup: Setup, trainer: HeadTrainer, final: AcceptanceReport | None) -> CardFacts:
    data, args, target, rows, state = setup.data, setup.args, setup.target, setup.rows, trainer.state
    num_devices = args.world_size
    device = torch.cuda.get_device_name() if args.device.type == "cuda" else "CPU"
    training = {
        "steps": f"{state.global_step:,} of {trainer.tokens_per_step:,} tokens",
        "device": f"{num_devices} × {device}",
    }
    speeds = [entry["tokens_per_second"] for entry in state.log_history if "tokens_per_second" in entry]
    peaks = [entry["peak_memory_gib"] for entry in state.log_history if "peak_memory_gib" in entry]
    if speeds:
        training["speed"] = f"{median(speeds):,.0f} tokens/s, evaluation not counted"
    if peaks:
        training["peak memory"] = f"{max(peaks):.1f} GiB, evaluation included"
    eval_file = data.final_eval_file or data.held_out_file
    return CardFacts(
        kind=kind_of_head(head.config.head_type).name,
        target=Path(target.name).name if Path(target.name).exists() else target.name,
        num_parameters=head.num_parameters,
        data={
            "file": Path(data.train_file).name,
            "rows": f"{len(rows):,} of {rows.input_ids.shape[1]:,} tokens",
            "tokens": f"{rows.num_tokens:,}, of them {int(rows.loss_mask.sum()):,} in answers",
        },
        training=training,
        acceptance=final,
        eval_file=None if eval_file is None else Path(eval_file).name,
        num_eval_tokens=data.num_eval_tokens,
        command=public_command(sys.argv),
        versions=_versions(),
    )
