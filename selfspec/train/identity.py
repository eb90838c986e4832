"""What a run in an output folder trains, and with what, so that the same line again continues that run and no other.

A folder that was begun otherwise is refused: weights that were trained partly on other rows, or under settings that a
checkpoint overrules, would be nobody's, and their card would be wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from transformers import TrainingArguments

from selfspec.heads.base import HeadConfig
from selfspec.train.checkpoints import newest_first
from selfspec.train.evaluation import EvalPrompt
from selfspec.train.losses import LossSettings
from selfspec.train.rows import PackedRows
from selfspec.train.settings import DataArgs

HEAD_FOLDER = "head"
IDENTITY_NAME = "identity.json"
REMEDY = "choose another --output_dir, or remove it to begin anew"

# Settings of transformers' that decide the weights. How long a run is may change, so that it can go on for longer.
TRAINING = (
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "optim",
    "optim_args",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "seed",
    "data_seed",
)


@dataclass(frozen=True)
class RunIdentity:
    """What must be the same for a run to be continued.

    Attributes:
        head: the head's type, shape and target.
        data: hashes of what was read from files, each with what it depends on.
        settings: settings that decide the weights.
    """

    head: HeadConfig
    data: dict[str, str]
    settings: dict[str, Any]

    @classmethod
    def of(
        cls,
        head: HeadConfig,
        data: DataArgs,
        args: TrainingArguments,
        losses: LossSettings,
        rows: PackedRows,
        held_out: Sequence[EvalPrompt],
    ) -> RunIdentity:
        """The identity of a run with these settings and this data."""
        prompts = json.dumps([prompt.token_ids for prompt in held_out])
        settings = {
            "row_length": data.row_length,
            "target_dtype": data.target_dtype,
            "init_seed": data.init_seed,
            "init_head": data.init_head,
            "rows of a step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            **{name: getattr(args, name) for name in TRAINING},
            **asdict(losses),
        }
        hashes = {
            "training rows (train_file, its content or the chat template)": rows.digest(
                "input_ids", "position_ids", "loss_mask"
            ),
            "held-out prompts (held_out_file, its content or num_eval_prompts)": hashlib.sha256(
                prompts.encode()
            ).hexdigest(),
        }
        return cls(head, hashes, settings)

    def check(self, output_dir: Path, *, is_writer: bool) -> None:
        """Refuse an output folder that belongs to another run. A folder in which nothing is trained yet becomes this run's.

        Args:
            is_writer: whether this process marks a new folder.

        Raises:
            ValueError: the folder is another's; the sentence names the first difference.
        """
        file = output_dir / IDENTITY_NAME
        if newest_first(output_dir) or (output_dir / HEAD_FOLDER).exists():
            before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            if not before.keys() >= {"head", "data", "settings"}:
                raise ValueError(f"{output_dir} holds checkpoints of an unknown head (it has no {IDENTITY_NAME}): {REMEDY}")
            self._check_head(output_dir, before["head"])
            now = self._record()
            # Settings first, because one of them may be why the rows differ.
            _check_same(output_dir, before["settings"], now["settings"])
            for name, digest in self.data.items():
                if before["data"].get(name) != digest:
                    raise ValueError(f"{output_dir} was begun with other {name}: {REMEDY}")
        elif is_writer:
            output_dir.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(self._record(), indent=1) + "\n", encoding="utf-8")
            partial.replace(file)

    def _record(self) -> dict[str, dict[str, Any]]:
        record = {"head": self.head.to_dict(), "data": self.data, "settings": self.settings}
        # As it will be read again.
        return json.loads(json.dumps(record, default=str))

    def _check_head(self, output_dir: Path, before: dict[str, Any]) -> None:
        now = self._record()["head"]
        if before["head_type"] != now["head_type"]:
            raise ValueError(
                f"{output_dir} was begun for a {before['head_type']} head, not a {now['head_type']} head: {REMEDY}"
            )
        try:
            target = type(self.head).from_dict(before).target
            target.check(self.head.target)
        except ValueError as error:
            raise ValueError(f"{output_dir} was begun for another target ({error}): {REMEDY}") from error
        if target.adapter_hash != self.head.target.adapter_hash:
            raise ValueError(
                f"{output_dir} was begun {target.adaptation}, and this run is {self.head.target.adaptation}: {REMEDY}"
            )
        ignored = ("selfspec_version", "target")
        _check_same(output_dir, *({k: v for k, v in each.items() if k not in ignored} for each in (before, now)))


def _check_same(output_dir: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise a ValueError that names the first setting with another value."""
    for name, value in now.items():
        if before.get(name) != value:
            values = [shorten(json.dumps(each), 60) for each in (before.get(name), value)]
            raise ValueError(f"{output_dir} was begun with {name} {values[0]}, not {values[1]}: {REMEDY}")
