"""What the recipes share: settings and data in, a trained head with its card out.

transformers' Trainer does the work (accelerate, schedules, clipping, mixed precision, checkpoints, resuming, trackers);
`selfspec.train.loop` has what it lacks. The head alone is trained, saved and pushed.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
import yaml
from transformers import AutoTokenizer, HfArgumentParser, TrainingArguments, set_seed

from selfspec import __version__
from selfspec.drafters import Drafter
from selfspec.drafters.shipped import drafter_for
from selfspec.heads.base import DraftHead
from selfspec.model.target import Target
from selfspec.traffic.conversations import Report
from selfspec.traffic.masking import read_template, tokenize_all, use_chat_template
from selfspec.traffic.prompt_files import read_prompts
from selfspec.traffic.sources import SUFFIXES, read_conversations
from selfspec.train.card import CardFacts, public_command, without_token, write_card
from selfspec.train.checkpoints import PARTIAL, check_identity, last_checkpoint
from selfspec.train.evaluation import AcceptanceReport, EvalPrompt, EvalPrompts, Evaluator, snapshot
from selfspec.train.features import FeatureRows, dump_features
from selfspec.train.loop import EVAL_PREFIX, EvaluationCallback, HeadTrainer
from selfspec.train.losses import LossSettings
from selfspec.train.module import HeadTraining
from selfspec.train.rows import PackedRows, pack
from selfspec.train.sharding import load_sharded

logger = logging.getLogger(__name__)

HEAD_FOLDER = "head"


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
        default=None, metadata={"help": "folder for the target's hidden states, computed once and not in every epoch"}
    )
    shard_target: bool = field(default=False, metadata={"help": "spread the target's layers over the processes"})
    chat_template: str | None = field(default=None, metadata={"help": "Jinja file, for a target without a template"})
    init_seed: int = field(default=0, metadata={"help": "seed of the head's weights (seed: of the data's order)"})
    compile_head: bool = field(default=False, metadata={"help": "compile an EAGLE-3 head: faster steps after a slow start"})
    num_eval_prompts: int = field(default=32, metadata={"help": "held-out prompts decoded at every evaluation"})
    num_eval_tokens: int = field(default=64, metadata={"help": "tokens decoded for each of them"})


@dataclass(frozen=True)
class Setup:
    """What a recipe starts from.

    Attributes:
        shape: the recipe's own settings, an instance of the class that `set_up` was given.
    """

    data: DataArgs
    shape: Any
    args: TrainingArguments
    target: Target
    rows: PackedRows
    eval_prompts: EvalPrompts


def set_up(shape_class: type, arguments: Sequence[str] | None = None) -> Setup:
    """Read the settings, from the command line by default, load the frozen target and the data, and seed the head."""
    parser = HfArgumentParser((DataArgs, shape_class, TrainingArguments))
    data, shape, args = parse(parser, sys.argv[1:] if arguments is None else arguments)
    target = load_target(data, args)
    rows, eval_prompts = load_rows(data, target)
    torch.manual_seed(data.init_seed)
    return Setup(data, shape, args, target, rows, eval_prompts)


def parse(parser: HfArgumentParser, arguments: Sequence[str]) -> tuple[Any, ...]:
    """Settings from flags, or from one YAML file and flags that override it."""
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        settings = yaml.safe_load(Path(arguments[0]).read_text())
        flags = [f"--{key}={value}" for key, value in settings.items() if not isinstance(value, list)]
        for key, value in settings.items():
            if isinstance(value, list):
                flags += [f"--{key}", *map(str, value)]
        arguments = [*flags, *arguments[1:]]
    parsed = parser.parse_args_into_dataclasses(list(arguments))
    # A recipe is a program: what the library has to say is for its user, once.
    is_main = all(part.process_index == 0 for part in parsed if isinstance(part, TrainingArguments))
    logging.basicConfig(format="%(message)s")
    logging.getLogger("selfspec").setLevel(logging.INFO if is_main else logging.ERROR)
    return parsed


def load_target(data: DataArgs, args: TrainingArguments) -> Target:
    """The frozen target on this process's device, its linear layers unpacked: losses differentiate through the LM head."""
    for name in ("train_file", "held_out_file", "final_eval_file", "chat_template"):
        file = getattr(data, name)
        # Conversations may come from the Hub, too; its names do not look like files.
        may_be_id = name in ("train_file", "held_out_file") and Path(file or "").suffix not in SUFFIXES
        if file is not None and not may_be_id and not Path(file).exists():
            raise ValueError(f"{name}={file} does not exist: check the spelling")
    template = read_template(None if data.chat_template is None else Path(data.chat_template))
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to one process: start the recipe with accelerate launch, which gives each its "
            "own, or choose one with CUDA_VISIBLE_DEVICES"
        )
    if Path(data.target).is_dir():
        # Before its weights are read: they may take minutes. (What else may be wrong with it is `load_model`'s to say.)
        use_chat_template(AutoTokenizer.from_pretrained(data.target), template)
    if data.shard_target:
        num_processes = args.world_size
        target = load_sharded(data.target, dtype=data.target_dtype, device=args.device, num_processes=num_processes)
    else:
        target = Target.from_pretrained(data.target, dtype=data.target_dtype, device=args.device, use_packing=False)
    use_chat_template(target.tokenizer, template)
    return target


def load_rows(data: DataArgs, target: Target) -> tuple[PackedRows, EvalPrompts]:
    """Packed training rows, and the prompts to decode at evaluations."""
    report = Report()
    samples = tokenize_all(read_conversations([data.train_file], report), target.tokenizer, report)
    rows = pack(samples, data.row_length)
    logger.info("%d rows of %d tokens, %.1f %% full", len(rows), data.row_length, 100 * rows.fill_rate)
    held_out: list[EvalPrompt] = []
    if data.held_out_file is not None:
        for conversation in read_conversations([data.held_out_file], Report()):
            first = [m for m in conversation.messages[:2] if m["role"] in ("system", "user")]
            held_out.append(EvalPrompt(target.encode(first), conversation.category))
    held_out = _fitting(held_out, data, target)
    step = max(1, len(held_out) // max(1, data.num_eval_prompts))
    held_out = held_out[::step][: data.num_eval_prompts]
    final = held_out
    if data.final_eval_file is not None:
        prompts = read_prompts(Path(data.final_eval_file))
        final = _fitting([EvalPrompt(target.encode(row.prompt), row.category) for row in prompts], data, target)
    return rows, EvalPrompts(held_out, final)


def _fitting(prompts: list[EvalPrompt], data: DataArgs, target: Target) -> list[EvalPrompt]:
    return [prompt for prompt in prompts if len(prompt.token_ids) + data.num_eval_tokens < target.context_length]


def frequent_tokens(rows: PackedRows, size: int, vocab_size: int) -> torch.Tensor:
    """[size] ascending ids of the tokens that answers use most, the unused ones last by id."""
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
    # Rows are mappings of tensors already, and none of their columns may be dropped.
    args.remove_unused_columns = False
    args.label_names = []
    # Steps of one size, because an epoch must have as many of them on any number of processes.
    args.dataloader_drop_last = True
    # The loop's own check of losses does not wait for the device.
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
        drafter_for(head.config.head_type),
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
    """The evaluations so far, those before a restart included."""
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
        kind=drafter_for(head.config.head_type),
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
