"""Train an early-exit head for a frozen target: blocks on top of its first layers, optionally with LoRA on those.

    accelerate launch recipes/train_early_exit.py recipes/configs/early_exit_smollm2.yaml

or, without a checkout:

    accelerate launch -m selfspec.recipes.train_early_exit early_exit_smollm2.yaml

Every setting is also a flag, as in `--train_file train.jsonl --output_dir runs/early_exit --exit_layer 8`, and so are
transformers' training arguments. The target is the one that `selfspec fetch` makes, unless `--target PATH_OR_ID` names
another. The same command again continues from the last checkpoint. The head is written to OUTPUT_DIR/head: `selfspec
generate --drafter early_exit:OUTPUT_DIR/head`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.drafters import drafter_of
from selfspec.drafters.shipped import identity
from selfspec.failures import reported_failures
from selfspec.heads.early_exit import EarlyExitHead
from selfspec.train.trainer import run, set_up


@dataclass
class EarlyExitArgs:
    """The head's shape."""

    exit_layer: int = field(metadata={"help": "how many of the target's first layers draft"})
    blocks: list[int] | None = field(
        default=None, metadata={"help": "layers of the target that the blocks start from; its last by default"}
    )
    lora_rank: int = field(
        default=0,
        metadata={"help": "rank of LoRA on the first layers; 0 is none, and drafts then share their KV with verification"},
    )
    lora_alpha: float = field(default=32.0, metadata={"help": "LoRA's scale, before it is divided by the rank"})


def main(arguments: list[str] | None = None) -> dict[str, float]:
    setup = set_up(EarlyExitArgs, arguments)
    target, shape = setup.target, setup.shape
    head = EarlyExitHead.for_target(
        identity(target),
        target.model,
        exit_layer=shape.exit_layer,
        blocks=tuple([target.num_layers - 1] if shape.blocks is None else shape.blocks),
        lora_rank=shape.lora_rank,
        lora_alpha=shape.lora_alpha,
    )
    return run(
        head,
        setup,
        make_drafter=lambda twin: drafter_of(twin, target, num_draft_tokens=5, num_nodes=24, width=4),
    )


if __name__ == "__main__":
    with reported_failures():
        main()
