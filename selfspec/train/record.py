"""What a finished run leaves for people: its record in run.json, the head's card, and the line that serves the head."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
import transformers

from selfspec import __version__
from selfspec.drafters.names import kind_of_head
from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import EagleHead
from selfspec.train.card import CardFacts, public_command, without_token, write_card
from selfspec.train.evaluation import AcceptanceReport
from selfspec.train.loop import EVAL_PREFIX, HeadTrainer
from selfspec.train.rows import PackedRows
from selfspec.train.runs import RECORD_NAME, Run, picture

if TYPE_CHECKING:
    from selfspec.train.trainer import Setup

logger = logging.getLogger(__name__)

CURVES_NAME = "curves.svg"


def write_record(
    directory: Path,
    head: DraftHead,
    setup: Setup,
    trainer: HeadTrainer,
    metrics: dict[str, float],
    final: AcceptanceReport | None,
) -> None:
    """Write the run's record beside the folder of its saved head, and the card into it.

    Args:
        directory: the head's folder.
        metrics: the training's own, from the Trainer.
        final: the last evaluation.
    """
    record = {
        "command": " ".join(without_token(sys.argv)),
        "versions": _versions(),
        "settings": {"data": asdict(setup.data), "head": asdict(setup.shape)},
        "training": setup.args.to_dict(),
        "num_rows": len(setup.rows),
        "num_tokens": setup.rows.num_tokens,
        "left_out": setup.left_out.counts | _not_drafted(head, setup.rows),
        "metrics": metrics,
        "losses": _losses(trainer.state.log_history),
        "evaluation_seconds": trainer.seconds_paused,
        "history": _history(trainer.state.log_history),
        "final": {} if final is None else final.record(),
    }
    (directory.parent / RECORD_NAME).write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    (directory / CURVES_NAME).write_text(picture([Run(head.config.head_type, record)]), encoding="utf-8")
    write_card(directory, _card_facts(head, setup, trainer, final))
    flags = [f"--{name} {value}" for name in ("target", "adapter") if (value := getattr(setup.data, name))]
    kind = kind_of_head(head.config.head_type).name
    logger.info("serve it: %s …", " ".join(["selfspec generate", *flags, f"--drafter {kind}:{directory}"]))


def _not_drafted(head: DraftHead, rows: PackedRows) -> dict[str, dict[str, int]]:
    """How many tokens of the answers the head cannot draft, where its vocabulary is a part of the target's."""
    if not isinstance(head, EagleHead):
        return {}
    answers = rows.input_ids[rows.loss_mask]
    num_missed = int((~torch.isin(answers, head.draft_ids.cpu())).sum())
    return {"draft vocabulary": {"answer tokens that it lacks": num_missed}} if num_missed else {}


def _versions() -> dict[str, str]:
    return {"selfspec": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def _losses(log_history: list[dict[str, float]]) -> list[dict[str, float]]:
    """The training's own figures so far, including those before a restart."""
    names = ("step", "loss", "learning_rate", "tokens_per_second", "peak_memory_gib")
    return [{name: entry[name] for name in names if name in entry} for entry in log_history if "loss" in entry]


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
        target=_public_name(target.name),
        adapter=None if target.adapter is None else _public_name(target.adapter),
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
        curves=CURVES_NAME,
        command=public_command(sys.argv),
        versions=_versions(),
    )


def _public_name(source: str) -> str:
    """A Hub id as it is, and of a folder its own name."""
    return Path(source).name if Path(source).exists() else source
