"""Train an EAGLE head for a frozen target: EAGLE-3 with 3.1's norms, or EAGLE-1.

    accelerate launch recipes/train_eagle.py recipes/configs/eagle_smollm2.yaml

or, without a checkout:

    accelerate launch -m selfspec.recipes.train_eagle eagle_smollm2.yaml

Every setting is also a flag, as in `--train_file train.jsonl --output_dir runs/eagle`, and so are transformers' training
arguments. The target is the one that `selfspec fetch` makes, unless `--target PATH_OR_ID` names another. The same command
again continues from the last checkpoint. The head is written to OUTPUT_DIR/head: `selfspec generate --drafter
eagle:OUTPUT_DIR/head`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.drafters import drafter_of
from selfspec.drafters.shipped import identity
from selfspec.failures import reported_failures
from selfspec.heads.eagle import Eagle1Config, Eagle1Head, EagleConfig, EagleHead
from selfspec.train.data import frequent_tokens
from selfspec.train.losses import LossSettings
from selfspec.train.trainer import run, set_up


@dataclass
class EagleArgs:
    """The head's shape, and how it is trained."""

    version: int = field(default=3, metadata={"help": "3, or 1: one feature, the target's LM head, no unrolled steps"})
    feature_layers: list[int] | None = field(
        default=None, metadata={"help": "hidden states to fuse; 2, n // 2 and n - 3 by default"}
    )
    draft_vocab_size: int = field(
        default=12288, metadata={"help": "how many of the most frequent answer tokens it can draft"}
    )
    train_lm_head: bool = field(
        default=False, metadata={"help": "give it an LM head of its own; by default it uses the target's"}
    )
    num_steps: int = field(default=6, metadata={"help": "version 3: unrolled steps, the depth it learns to draft"})
    decay: float = field(default=0.9, metadata={"help": "version 3: weight of each step relative to the one before"})
    noise: float = field(default=0.1, metadata={"help": "version 1: features are disturbed by up to this much"})
    token_weight: float = field(default=0.1, metadata={"help": "version 1: weight of the cross entropy"})


def main(arguments: list[str] | None = None) -> dict[str, float]:
    setup = set_up(EagleArgs, arguments)
    target, shape = setup.target, setup.shape
    settings = LossSettings(shape.num_steps, shape.decay, shape.noise, shape.token_weight)
    layer = Eagle1Config.layer_shape(target.config)
    head: EagleHead | Eagle1Head
    if shape.version == 1:
        head = Eagle1Head(Eagle1Config(target=identity(target), **layer))
        head.initialise(target.model)
    elif shape.version == 3:
        features = tuple(shape.feature_layers or EagleConfig.default_feature_layers(target.num_layers))
        size = min(shape.draft_vocab_size, target.vocab_size)
        config = EagleConfig(
            target=identity(target),
            feature_layers=features,
            draft_vocab_size=size,
            has_lm_head=shape.train_lm_head,
            **layer,
        )
        head = EagleHead(config)
        head.initialise(target.model, frequent_tokens(setup.rows, size, target.vocab_size))
    else:
        raise ValueError(f"version={shape.version} is not known: use 3 or 1")
    return run(
        head,
        setup,
        make_drafter=lambda twin: drafter_of(twin, target, num_draft_tokens=shape.num_steps, num_nodes=24, width=6),
        settings=settings,
    )


if __name__ == "__main__":
    with reported_failures():
        main()
