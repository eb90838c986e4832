"""Train Medusa heads for a frozen target.

    accelerate launch recipes/train_medusa.py recipes/configs/medusa_smollm2.yaml

or, without a checkout:

    accelerate launch -m selfspec.recipes.train_medusa medusa_smollm2.yaml

Every setting is also a flag, as in `--train_file train.jsonl --output_dir runs/medusa`, and so are transformers' training
arguments. The target is the one that `selfspec fetch` makes, unless `--target PATH_OR_ID` names another. The same command
again continues from the last checkpoint. The head is written to OUTPUT_DIR/head: `selfspec generate --drafter
medusa:OUTPUT_DIR/head`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from selfspec.drafters import drafter_of
from selfspec.drafters.shipped import identity
from selfspec.failures import reported_failures
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.train.losses import LossSettings
from selfspec.train.trainer import run, set_up

logger = logging.getLogger("selfspec.recipes")


@dataclass
class MedusaArgs:
    """The heads' shape, and how they are trained."""

    num_heads: int = field(default=4, metadata={"help": "number of heads, which is the depth they draft"})
    num_blocks: int = field(default=1, metadata={"help": "residual blocks of each head"})
    has_output_layer: bool = field(
        default=False, metadata={"help": "give each head an output layer instead of the target's LM head"}
    )
    has_root_input: bool = field(
        default=True, metadata={"help": "heads also read the embedding of the tree's root, which public checkpoints do not"}
    )
    decay: float = field(default=0.8, metadata={"help": "weight of each head's loss relative to the one before"})


def main(arguments: list[str] | None = None) -> dict[str, float]:
    setup = set_up(MedusaArgs, arguments)
    target, shape = setup.target, setup.shape
    if shape.has_root_input:
        logger.warning(
            "these heads read the tree's root, so no other engine serves them: --has_root_input false is for export"
        )
    head = MedusaHead(
        MedusaConfig(
            target=identity(target),
            num_heads=shape.num_heads,
            num_blocks=shape.num_blocks,
            has_output_layer=shape.has_output_layer,
            has_root_input=shape.has_root_input,
        )
    )
    head.initialise(target.model)
    return run(
        head,
        setup,
        make_drafter=lambda twin: drafter_of(twin, target, num_nodes=24),
        settings=LossSettings(decay=shape.decay),
    )


if __name__ == "__main__":
    with reported_failures():
        main()
