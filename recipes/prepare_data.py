"""From raw logs to the data that heads are trained on, in one run:

    python recipes/prepare_data.py logs/ --output-dir data/chat --target PATH_OR_ID --max-new-tokens 512 --batch-size 32

It reads the logs (any form that `selfspec data inspect` shows), lets the target draw more prompts if asked to
(`--self-prompts 5000`), leaves out near-duplicates and evaluation prompts, redacts personal data if asked to (`--redact`),
holds out a part, and has the target write every answer anew. The output directory then has `train.jsonl`, `heldout.jsonl`,
and `report.json` on what was left out. The same line again continues where an interruption stopped it.
"""

import json
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from selfspec import SamplingParams
from selfspec.cli.data import (
    CleanOptions,
    SourcesArgument,
    WritingOptions,
    draw_prompts,
    prompt_writer,
    show_and_save,
    write,
)
from selfspec.cli.options import DraftOptions, TargetOptions, command
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.masking import tokenize_all
from selfspec.traffic.prompt_files import OutputWriter
from selfspec.traffic.regenerate import regenerate
from selfspec.traffic.sources import read_conversations

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@command(
    app, target=TargetOptions, draft=DraftOptions, sampling=SamplingParams, writing=WritingOptions, cleaning=CleanOptions
)
def main(
    *,
    sources: SourcesArgument,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="directory to make, or to go on with")],
    target: TargetOptions,
    writing: WritingOptions,
    draft: DraftOptions,
    sampling: SamplingParams,
    number_of_self_prompts: Annotated[int, typer.Option("--self-prompts", help="prompts for the target to draw", min=0)] = 0,
    cleaning: CleanOptions,
) -> None:
    """Prepare training data from logs, with the answers written by the target."""
    output_dir.mkdir(parents=True, exist_ok=True)
    settings = {
        "sources": sources,
        "target": target.source,
        "adapter": target.adapter,
        "self_prompts": number_of_self_prompts,
    }
    check_settings(output_dir / "config.json", {**settings, **asdict(cleaning), "sampling": asdict(sampling)})
    drawn = prompt_writer(output_dir / "self_prompts.jsonl", number_of_self_prompts, resume=True)
    reports = {name: Report() for name in ("drawing", "reading", "cleaning", "answering", "masking")}
    # Nothing is read yet: what stands in the way shows before the target is loaded.
    raw = chain(read_conversations(sources, reports["reading"]), read_conversations([drawn.path], reports["reading"]))
    redactor = cleaning.redactor()
    cleaned = cleaning.split(raw, reports["cleaning"], redactor)

    model, drafter = writing.load(target, draft)
    own_words = SamplingParams(temperature=1.0, seed=sampling.seed or 0)
    draw_prompts(
        model,
        drafter,
        drawn,
        number_of_self_prompts,
        reports["drawing"],
        sampling=own_words,
        batch_size=writing.batch_size,
    )
    parts: dict[str, list[Conversation]] = {"train": [], "heldout": []}
    for part, conversation in cleaned:
        parts[part].append(conversation)

    for name, conversations in parts.items():
        writer = OutputWriter(output_dir / f"{name}.jsonl", dict.fromkeys((c.id for c in conversations), 1), resume=True)
        pending = [conversation for conversation in conversations if conversation.id not in writer.finished]
        answered = regenerate(
            model, pending, reports["answering"], sampling=sampling, drafter=drafter, batch_size=writing.batch_size
        )
        write(writer, answered, f"answering {name}", len(pending))

    samples = tokenize_all(read_conversations([output_dir / "train.jsonl"], Report()), model.tokenizer, reports["masking"])
    num_trained = sum(sum(sample.loss_mask) for sample in samples)
    num_tokens = sum(len(sample.input_ids) for sample in samples)
    typer.echo(f"{output_dir}: {len(samples)} samples, {num_tokens} tokens, {num_trained} of them to train on")
    show_and_save(reports, output_dir, redactor)


def check_settings(file: Path, settings: dict[str, object]) -> None:
    """Rows of two settings in one file would be worse than none."""
    settings = json.loads(json.dumps(settings))
    if not file.exists():
        file.write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    elif (before := json.loads(file.read_text(encoding="utf-8"))) != settings:
        changed = ", ".join(name for name in settings if before.get(name) != settings[name])
        raise ValueError(f"{file.parent} was begun with another {changed}: choose another --output-dir, or remove it")


if __name__ == "__main__":
    app()
