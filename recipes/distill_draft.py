"""Distil a draft model of a few layers from a frozen target, whose embedding and LM head it shares.

    accelerate launch recipes/distill_draft.py recipes/configs/draft_smollm2.yaml

or, without a checkout:

    accelerate launch -m selfspec.recipes.distill_draft draft_smollm2.yaml

Every setting is also a flag, as in `--train_file train.jsonl --output_dir runs/draft --blocks 0 1 2 3`, and so are
transformers' training arguments. The target is the one that `selfspec fetch` makes, unless `--target PATH_OR_ID` names
another. The same command again continues from the last checkpoint. The layers are written to OUTPUT_DIR/head: `selfspec
generate --drafter draft_model:OUTPUT_DIR/head`. `--save_model true` also writes a whole model, for any engine, to
OUTPUT_DIR/model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from selfspec.drafters import drafter_of
from selfspec.drafters.shipped import identity
from selfspec.failures import reported_failures
from selfspec.files import share
from selfspec.heads.early_exit import DistilledDraft
from selfspec.train.trainer import run, set_up


@dataclass
class DraftArgs:
    """The draft's shape, and whether it is also written as a model."""

    blocks: list[int] = field(
        default_factory=lambda: [0, 1, 2, 3], metadata={"help": "layers of the target that the draft's layers start from"}
    )
    save_model: bool = field(default=False, metadata={"help": "also write it as a transformers model, embedding included"})


def main(arguments: list[str] | None = None) -> dict[str, float]:
    setup = set_up(DraftArgs, arguments)
    target, shape = setup.target, setup.shape
    head = DistilledDraft.for_target(identity(target), target.model, blocks=tuple(shape.blocks))
    result = run(
        head,
        setup,
        make_drafter=lambda twin: drafter_of(twin, target, num_draft_tokens=5, num_nodes=24, width=4),
    )
    if shape.save_model and setup.args.should_save:
        directory = Path(setup.args.output_dir) / "model"
        head.to(target.dtype).student(target.model).save_pretrained(directory)
        target.tokenizer.save_pretrained(directory)
        share(directory)
    return result


if __name__ == "__main__":
    with reported_failures():
        main()
