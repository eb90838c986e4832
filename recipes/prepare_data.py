"""From raw logs to the data that heads are trained on, in one run:

    python recipes/prepare_data.py logs/ --output-dir data/chat --target PATH_OR_ID --max-new-tokens 512 --batch-size 32

`selfspec data prepare` is the same without a checkout.

It reads the logs (in any form that `selfspec data inspect` shows), lets the target write more prompts if asked to
(`--self-prompts 5000`), leaves out near-duplicates and evaluation prompts, redacts personal data if asked to (`--redact`),
holds out a part, and has the target write every answer anew. The output directory then has `train.jsonl`, `heldout.jsonl`,
and `report.json`, which says what was left out. The same command continues a run that was interrupted, and adds what the
logs have gained; rows that have left the logs stay. `--overwrite` begins anew.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.failures import reported_failures
from selfspec.traffic.preparation import Preparation, PrepareOptions
from selfspec.traffic.prepare import CleanOptions, WritingOptions
from selfspec.train.settings import parse

logger = logging.getLogger("selfspec.recipes")


@dataclass(frozen=True, kw_only=True)
class PrepareArgs(PrepareOptions):
    """The options, and where the data goes."""

    output_dir: Path = field(metadata={"help": "directory to make, or to continue in"})


@dataclass(frozen=True, kw_only=True)
class CleanArgs(CleanOptions):
    """`exclude` as argparse has it: several files after one flag, or the flag several times."""

    exclude: list[str] = field(
        default_factory=list, metadata={"help": "prompts never to train on, besides the benchmarks", "action": "extend"}
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = HfArgumentParser((PrepareArgs, TargetOptions, WritingOptions, DraftOptions, SamplingParams, CleanArgs))
    parser.add_argument("sources", nargs="+", help="data files, directories of them, Hub dataset ids")
    options, target, writing, draft, sampling, cleaning, given = parse(parser, arguments)
    preparation = Preparation(
        sources=given.sources,
        output_dir=options.output_dir,
        target=target,
        writing=writing,
        sampling=sampling,
        cleaning=cleaning,
        options=options,
    )
    prepared = preparation.run(lambda: writing.load(target, draft), logger.info)
    logger.info("%s", prepared)
    if prepared.redacted is not None:
        logger.info("%s", prepared.redacted)
    for name, report in prepared.reports.items():
        for reason, count in report.skipped.most_common():
            logger.info("%s: %d skipped, %s, such as %s", name, count, reason, report.examples[reason][0])


if __name__ == "__main__":
    with reported_failures():
        main()
